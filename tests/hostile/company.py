"""Measures ordinary streams of a real server beside a hostile client: their speed, and their longest silence.

python -m tests.hostile.company [PART OF A NAME] [--streams N] [--tokens N] [--rounds N]
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.serving import MODEL, Server, serve

CHAT = "/v1/chat/completions"
# Each grammar makes masks expensive in another way: rows that grow with the text, too many ways to read a word, a lexer
# with too many states, and a grammar that is harmless until the server has begun to trust it.
SLOW_GRAMMARS = {
    "growing": 'start: s\ns: s s | s s s | "a"',
    "ambiguous": "start: s\ns: s s | s s s | s s s s | /[a-z ]/",
    "states": "start: ("
    + "|".join(f"T{i}" for i in range(30))
    + ")+\n"
    + "\n".join(f"T{i}: /[a-z ]*{chr(97 + i % 26)}[a-z ]{{{i + 3}}}/" for i in range(30)),
    "late": 'start: /[A-Z ]{40}/ s\ns: s s | s s s | s s s s | "a" | "b" | " "',
}


# A text may continue with the beginning of every stop string, so that much of it is held back and compared.
_STOPS = [f"{'the ' * 247}{number:012}" for number in range(64)]
_STORY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me a story of the sea."}],
    "max_tokens": 1000,
    "ignore_eos": True,
    "stream": True,
}
SLOWDOWN_LIMIT = 2.0
SILENCE_LIMIT_S = 0.25


def hostile_bodies() -> dict[str, dict[str, Any]]:
    """What a client may send to slow down its neighbours, and an ordinary request for comparison."""
    return {
        "an ordinary story": _STORY,
        **{f"a slow grammar ({name})": hostile_body(grammar) for name, grammar in SLOW_GRAMMARS.items()},
        "a quick grammar and a text that is easy to draft": hostile_body("start: /[a-z ]{4000}/"),
        "64 stops of 1,000 characters": {**_STORY, "stop": _STOPS},
        "2,048 biases": {**_STORY, "logit_bias": {str(token): 1.0 for token in range(1000, 3048)}},
        "penalties and 20 log-probabilities": {
            **_STORY,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            "temperature": 1.0,
            "logprobs": True,
            "top_logprobs": 20,
        },
        "priority 100": {**_STORY, "priority": 100},
        "prompts as long as the context": {
            **_STORY,
            "messages": [{"role": "user", "content": "word " * 7000}],
            "cache_prompt": False,
            "max_tokens": 1,
        },
    }


@dataclass(frozen=True, slots=True)
class Heard:
    """What one client received of its stream."""

    text: str
    pieces: int
    seconds: float  # from the first piece to the last
    silence_s: float  # the longest time between two pieces


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """Streams beside a hostile request, compared with the same streams without it."""

    slowdown: float
    silence_s: float
    same_texts: bool
    pieces: int  # pieces that the streams received beside the hostile requests
    hostile: Hostile


@dataclass(slots=True)
class Hostile:
    """What the hostile requests received."""

    pieces: int = 0
    errors: list[str] = field(default_factory=list)


def hostile_body(grammar: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write the letter a again and again: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}],
        "response_format": {"type": "grammar", "grammar": grammar},
        "max_tokens": 1000,
        "stream": True,
    }


def neighbourhood(
    server: Server, hostile: Mapping[str, Any], streams: int, tokens: int, clock: Callable[[], float] = time.monotonic
) -> Neighbourhood:
    """Runs the streams alone and then beside the hostile request, which is sent again whenever it ends."""
    alone = _streams(server, streams, tokens, clock)
    with _repeated(server, hostile) as told:
        beside = _streams(server, streams, tokens, clock)
    return Neighbourhood(
        max(heard.seconds for heard in beside) / max(heard.seconds for heard in alone),
        max(heard.silence_s for heard in beside),
        [h.text for h in alone] == [h.text for h in beside],
        sum(heard.pieces for heard in beside),
        told,
    )


@dataclass(frozen=True, slots=True)
class Rounds:
    """Several repetitions, because a machine's speed drifts; slowdowns and silences are judged by their median."""

    name: str
    seen: tuple[Neighbourhood, ...]

    @property
    def slowdown(self) -> float:
        return statistics.median(found.slowdown for found in self.seen)

    @property
    def silence_s(self) -> float:
        return statistics.median(found.silence_s for found in self.seen)

    @property
    def ok(self) -> bool:
        same = all(found.same_texts for found in self.seen)
        return same and self.slowdown <= SLOWDOWN_LIMIT and self.silence_s <= SILENCE_LIMIT_S

    def row(self) -> str:
        slowdowns = ", ".join(f"{found.slowdown:.2f}" for found in self.seen)
        silences = ", ".join(f"{1e3 * found.silence_s:.0f}" for found in self.seen)
        texts = "the same texts" if all(found.same_texts for found in self.seen) else "DIFFERENT TEXTS"
        return (
            f"{self.name}: others take {self.slowdown:.2f} times as long ({slowdowns}), longest silence "
            f"{1e3 * self.silence_s:.0f} ms ({silences}), {texts}"
        )


def measure(names: Iterable[str], streams: int, tokens: int, rounds: int) -> Iterator[Rounds]:
    """Measures on one server that lets clients choose priorities, so that these are tested as well."""
    bodies = hostile_bodies()
    with serve("--allow-priority") as server:
        _streams(server, streams, tokens, time.monotonic)
        for name in names:
            found = [neighbourhood(server, bodies[name], streams, tokens) for _ in range(rounds)]
            server.wait_idle(60)
            yield Rounds(name, tuple(found))


def _streams(server: Server, count: int, tokens: int, clock: Callable[[], float]) -> list[Heard]:
    bodies = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Tell me a story of {number} ships."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        for number in range(count)
    ]
    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(lambda body: _listen(server, body, clock), bodies))


def _listen(server: Server, body: Mapping[str, Any], clock: Callable[[], float]) -> Heard:
    times, text = [], ""
    for event in _events(server, body):
        assert "error" not in event, event
        piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
        if piece:
            times.append(clock())
            text += piece
    return Heard(text, len(times), times[-1] - times[0], max(b - a for a, b in itertools.pairwise(times)))


def _events(server: Server, body: Mapping[str, Any], ended: threading.Event | None = None) -> Iterator[Any]:
    """The events of a stream as they come; leaving the iterator early closes the connection and cancels the request."""
    connection = http.client.HTTPConnection(*server.address, timeout=120)
    try:
        connection.request("POST", CHAT, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            yield json.loads(response.read())
            return
        while (line := response.readline()) and not (ended is not None and ended.is_set()):
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


@contextmanager
def _repeated(server: Server, body: Mapping[str, Any]) -> Iterator[Hostile]:
    """Sends a request repeatedly while the caller works; it begins when the first request has received something."""
    began, ended, told = threading.Event(), threading.Event(), Hostile()

    def send() -> None:
        while not ended.is_set():
            for event in _events(server, body, ended):
                began.set()
                if "error" in event:
                    told.errors.append(event["error"]["message"])
                elif event["choices"] and event["choices"][0]["delta"].get("content"):
                    told.pieces += 1

    sender = threading.Thread(target=send)
    sender.start()
    try:
        assert began.wait(60), "the hostile request received nothing"
        yield told
    finally:
        ended.set()
        sender.join()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("part", nargs="?", default="")
    options.add_argument("--streams", type=int, default=2)
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--rounds", type=int, default=3)
    said = options.parse_args()
    names = [name for name in hostile_bodies() if said.part in name]
    for seen in measure(names, said.streams, said.tokens, said.rounds):
        print("ok  " if seen.ok else "OVER", seen.row(), flush=True)


if __name__ == "__main__":
    main()
