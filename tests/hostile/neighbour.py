"""Measures one stream beside a hostile request: its longest silence, and the memory that the request takes.

    python -m tests.hostile.neighbour [PART OF A NAME] [--size BYTES]

This runs every body of the table whose name contains that part beside a stream, and prints one line for each.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.serving import MODEL, Server, serve
from tests.hostile.bodies import Worst, table

SILENCE_LIMIT_MS = 250.0  # the longest silence of a neighbour's stream, beside one request or several at once
GROWTH_LIMIT = 20.0  # growth of the peak memory, in multiples of the body's size
_ANSWER_TOKENS = 2000
_ASK: dict[str, Any] = {
    "model": MODEL,
    "stream": True,
    "ignore_eos": True,
    "max_tokens": _ANSWER_TOKENS,
    "cache_prompt": False,
    "speculative": {"mode": "plain"},
    "messages": [{"role": "user", "content": "Tell a long story."}],
}


@dataclass(frozen=True, slots=True)
class Seen:
    """The effect of one body: its statuses, the neighbour's longest silence, and the growth of the peak memory."""

    label: str
    statuses: tuple[int, ...]
    silence_ms: float
    growth: float  # of the peak resident memory, in multiples of all bytes sent
    cpu_s: float  # processor time of the server, with the neighbour's own steps
    said: str  # the beginning of one of the answers

    @property
    def ok(self) -> bool:
        """Whether the limits hold; status 0 is a connection without an answer, and a 5xx is an error of the server."""
        answered = all(0 < status < 500 or status == 503 for status in self.statuses)
        return answered and self.silence_ms <= SILENCE_LIMIT_MS and self.growth <= GROWTH_LIMIT

    def row(self) -> str:
        said = ",".join(map(str, sorted(set(self.statuses))))
        return (
            f"{'ok  ' if self.ok else 'OVER'} {self.label:62} {said:>8} {self.silence_ms:7.0f} ms "
            f"{self.growth:6.1f} x {self.cpu_s:6.2f} s"
        )


class Neighbour:
    """A client that streams without end and notes when something came, by the clock that it is given."""

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._server = server
        self._times: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Neighbour:
        self._touch_pages()
        self._thread.start()
        self.wait_for(20)
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(30)

    def _touch_pages(self) -> None:
        """Lets a prompt as long as the answer write its keys, because memory counts as taken when it is first written.

        Without this, every token of the neighbour's first answer would count as growth by the request beside it.
        """
        prompt = {"model": MODEL, "prompt": "a " * (_ANSWER_TOKENS + 40), "max_tokens": 1, "cache_prompt": False}
        status, _, said = self._server.ask("/v1/completions", json.dumps(prompt).encode(), timeout=120)
        assert status == 200, said

    def wait_for(self, more: int, seconds: float = 120.0) -> None:
        """Waits until `more` further pieces have come."""
        wanted, deadline = len(self._times) + more, time.monotonic() + seconds
        while len(self._times) < wanted:
            assert self._server.process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the neighbour's stream is silent"
            time.sleep(0.005)

    def longest_silence_ms(self, since: float, until: float) -> float:
        """The longest time between two pieces that lies at least partly between the two moments."""
        times = list(self._times)
        gaps = [
            after - before
            for before, after in zip(times, times[1:], strict=False)
            if after >= since and before <= until
        ]
        return 1e3 * max(gaps, default=float("inf"))

    def _run(self) -> None:
        while not self._ended.is_set():
            with (
                contextlib.suppress(OSError),
                contextlib.closing(self._server.open_stream("/v1/chat/completions", _ASK)) as raw,
            ):
                while not self._ended.is_set():
                    piece = raw.recv(1 << 16)
                    if piece:
                        self._times.append(self.clock())
                    if not piece or b"[DONE]" in piece:
                        break


def memory_bytes(pid: int, field: str) -> int:
    """Memory of a process: `VmRSS` is the current, `VmHWM` the most since its peak was reset."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def reset_peak(pid: int) -> int:
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory_bytes(pid, "VmRSS")


def beside(server: Server, neighbour: Neighbour, worst: Worst, at_once: int = 1) -> Seen:
    """Sends a body, or the same several times at once, while the neighbour streams."""
    pid, body = server.process.pid, worst.body
    before = reset_peak(pid)
    neighbour.wait_for(3)
    began, spent = neighbour.clock(), server.cpu_seconds()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda _: _answer(server, worst, body), range(at_once)))
    ended, spent = neighbour.clock(), server.cpu_seconds() - spent
    neighbour.wait_for(3)
    growth = (memory_bytes(pid, "VmHWM") - before) / (at_once * len(body))
    statuses, said = tuple(status for status, _ in answers), answers[-1][1][:200].decode("utf-8", "replace")
    return Seen(worst.label, statuses, neighbour.longest_silence_ms(began, ended), growth, spent, said)


def _answer(server: Server, worst: Worst, body: bytes) -> tuple[int, bytes]:
    try:
        status, _, answer = server.ask(worst.path, body, method=worst.method, timeout=300)
    except (OSError, http.client.HTTPException):
        return 0, b""
    return status, answer


def measure(server: Server, bodies: Sequence[Worst], at_once: int = 1) -> Iterator[Seen]:
    """Sends each body beside one stream; the verification does this with the whole table at the size limit."""
    with Neighbour(server) as neighbour:
        for worst in bodies:
            yield beside(server, neighbour, worst, at_once)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("part", nargs="?", default="")
    options.add_argument("--size", type=int, default=4 << 20)
    options.add_argument("--at-once", type=int, default=1)
    said = options.parse_args()
    bodies = [worst for worst in table(said.size) if said.part in worst.label]
    with serve("--max-body", str(said.size)) as server:
        for seen in measure(server, bodies, said.at_once):
            print(seen.row(), flush=True)


if __name__ == "__main__":
    main()
