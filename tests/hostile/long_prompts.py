"""The longest prompts on every path that takes text, and what they cost the server and a neighbour's stream."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.serving import MODEL, Server

MIB = 1 << 20
TEXTS = {
    "words": "many short words of a text ", "one word": "a", "digits": "7", "spaces": " ", "kanji": "日",
    "rules": "=", "accents": "e\u0301",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What some requests have cost: `growth` of the peak of memory and `cpu_s` are the server's, `body` theirs."""

    name: str
    statuses: tuple[int, ...]
    body: int
    growth: int
    cpu_s: float
    silence_s: float
    said: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {set(self.statuses)}, {self.cpu_s:.2f} s of CPU, memory grew by {self.growth / MIB:.0f} MiB "
            f"({self.growth / self.body:.1f} x the bodies), longest silence {1e3 * self.silence_s:.0f} ms: {self.said}"
        )


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Path and body of about `size` bytes for every way to send a long text."""
    text = {name: piece * (size // len(piece.encode()) - 99 // len(piece.encode())) for name, piece in TEXTS.items()}
    words = text["words"]
    user = [{"role": "user", "content": words}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "some text "}] * (size // 40)}]
    turns = [{"role": "user", "content": "many words"}, {"role": "assistant", "content": "ok"}] * min(5000, size // 90)
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": user}),
        "chat, many turns": ("/v1/chat/completions", {"messages": turns}),
        "responses": ("/v1/responses", {"input": words}),
        "messages": ("/v1/messages", {"messages": user, "max_tokens": 8}),
        "messages, many blocks": ("/v1/messages", {"messages": parts, "max_tokens": 8}),
        "count_tokens": ("/v1/messages/count_tokens", {"messages": user}),
        "token ids": ("/v1/completions", {"prompt": [7] * (size // 2 - 99)}),
        "tokenize": ("/tokenize", {"content": words}),
        "tokenize, one word": ("/tokenize", {"content": text["one word"]}),
        "tokenize with pieces": ("/tokenize", {"content": words[: size // 4], "with_pieces": True}),
        "detokenize": ("/detokenize", {"tokens": [100] * min(1_000_000, size // 4 - 99)}),
        **{f"completions, {name}": ("/v1/completions", {"prompt": made}) for name, made in text.items()},
    }
    return {
        name: (path, json.dumps({"model": MODEL, **body}, ensure_ascii=False, separators=(",", ":")).encode())
        for name, (path, body) in asked.items()
    }


def cost(server: Server, name: str, path: str, body: bytes, at_once: int = 1) -> Cost:
    """Sends a body, or several at once, beside a neighbour's stream."""
    process = psutil.Process(server.process.pid)
    with Neighbour(server) as neighbour:
        before, memory = process.cpu_times(), reset_peak(server.process.pid)
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(lambda _: server.ask(path, body, timeout=300), range(at_once)))
        after = process.cpu_times()
        growth = peak(server.process.pid) - memory
    seconds = after.user + after.system - before.user - before.system
    statuses = tuple(status for status, _, _ in answers)
    return Cost(
        name, statuses, at_once * len(body), growth, seconds, neighbour.silence_s, answers[-1][2][:160].decode()
    )


def reset_peak(pid: int) -> int:
    """Makes the peak of a process's memory begin anew; returns what it takes now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


def peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class Neighbour:
    """A stream that runs meanwhile; `silence_s` is the longest time between two of its events."""

    def __init__(self, server: Server) -> None:
        self.silence_s = 0.0
        self._connection = http.client.HTTPConnection(*server.address, timeout=300)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Neighbour:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 6000, "ignore_eos": True, "stream": True}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self._response.readline()
        self._thread.start()
        return self

    def _read(self) -> None:
        last = time.monotonic()
        while not self._ended.is_set() and self._response.readline():
            now = time.monotonic()
            self.silence_s, last = max(self.silence_s, now - last), now

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)
        self._connection.close()


def check_long_prompts(server: Server, size: int, at_once: int = 8) -> list[Cost]:
    """What every long prompt costs, alone and several at once."""
    found = []
    for name, (path, body) in bodies(size).items():
        found += [cost(server, name, path, body), cost(server, f"{at_once} x {name}", path, body, at_once)]
    return found
