"""Checks of the promises of a server with many clients, at any size: tests run a sample, the verification runs all."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from slipstream.bench.workloads import PUBLIC, read_prompts
from tests.e2e.serving import Server, serve

CHAT = "/v1/chat/completions"
GROWTH_BYTES = 20 * 2**20
# A page costs memory when it is first used. A small cache is full after the warm-up, so any growth after it is a leak.
SMALL_CACHE = """
[models.smollm2]
target = "smollm2"
preload = true
engine = {{ cache_tokens = 4096, max_waiting = {queue} }}
"""
_LINE_LIMIT = 2**20
_PATIENCE_S = 120.0
_MOST_WARM_UPS = 8


def mixed_bodies(count: int, model: str = "smollm2") -> list[dict[str, Any]]:
    """Requests of different lengths, seeds, temperatures and penalties; many prompts begin alike."""
    prompts = [conversation[0] for name in PUBLIC for conversation in read_prompts(name)]
    chance = random.Random(7)
    preamble = "You answer the questions of a curious reader. " * 12
    bodies = []
    for index in range(count):
        question = prompts[index * 31 % len(prompts)]
        text = f"{preamble}\n{question}" if index % 3 == 0 else question
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "seed": index,
            "max_tokens": chance.choice([8, 16, 24, 48]),
            "temperature": chance.choice([0, 0, 0.5, 0.8, 1.0]),
        }
        if index % 5 == 1:
            body |= {"top_p": 0.9, "frequency_penalty": 0.3}
        if index % 7 == 2:
            body |= {"stop": ["\n\n"]}
        bodies.append(body)
    return bodies


@dataclass(frozen=True, slots=True)
class Answered:
    text: str
    finish: str
    drafted: int
    accepted: int
    seconds: float


def answered(reply: dict[str, Any], seconds: float) -> Answered:
    choice, timings = reply["choices"][0], reply["timings"]
    return Answered(
        choice["message"]["content"], choice["finish_reason"], timings["draft_n"], timings["draft_n_accepted"], seconds
    )


def alone(server: Server, bodies: Sequence[dict[str, Any]], **changes: object) -> list[Answered]:
    found = []
    for body in bodies:
        began = time.perf_counter()
        found.append(answered(server.post(CHAT, {**body, **changes}, timeout=_PATIENCE_S), time.perf_counter() - began))
    return found


def together(server: Server, bodies: Sequence[dict[str, Any]], **changes: object) -> list[Answered]:
    """Sends all requests at once, each on its own connection."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: alone(server, [body], **changes)[0], bodies))


@dataclass(slots=True)
class Crowd:
    """Compares requests that ran together with the same requests run alone."""

    requests: int
    other_texts: int  # texts that differ from those of the same request alone in plain mode
    other_counts: int  # answers whose drafted or accepted tokens differ from those alone, in chain mode
    drafted: int
    accepted: int

    @property
    def ok(self) -> bool:
        return not self.other_texts and not self.other_counts and 0 < self.accepted < self.drafted

    def row(self) -> str:
        return (
            f"{self.requests} at once in mode auto and in mode chain: {self.other_texts} texts differ from the same "
            f"request alone and plain, {self.other_counts} differ in drafted or accepted tokens from the same request "
            f"alone in mode chain ({self.drafted} drafted, {self.accepted} accepted)"
        )


def crowd(server: Server, count: int) -> Crowd:
    """Runs many different requests at once, and each of them alone."""
    bodies = mixed_bodies(count)
    plain = alone(server, bodies, speculative={"mode": "plain"}, cache_prompt=False)
    chain = {"speculative": {"mode": "chain", "width": 8}}
    chained = alone(server, bodies, **chain)
    auto_crowd, chain_crowd = together(server, bodies), together(server, bodies, **chain)
    texts = sum(
        (seen.text, seen.finish) != (expected.text, expected.finish)
        for found in (auto_crowd, chain_crowd)
        for seen, expected in zip(found, plain, strict=True)
    )
    counts = sum(
        (seen.drafted, seen.accepted) != (expected.drafted, expected.accepted)
        for seen, expected in zip(chain_crowd, chained, strict=True)
    )
    return Crowd(
        count, texts, counts, sum(seen.drafted for seen in chain_crowd), sum(seen.accepted for seen in chain_crowd)
    )


def batch_speedup(server: Server, rounds: int = 3, width: int = 8, tokens: int = 96) -> float:
    """How many times as fast `width` requests run together as one after the other; the median of some rounds."""
    bodies = [{**body, "max_tokens": tokens, "temperature": 0} for body in mixed_bodies(width)]
    for body in bodies:
        body.pop("stop", None)
    ratios = []
    for _ in range(rounds):
        began = time.perf_counter()
        alone(server, bodies)
        between = time.perf_counter()
        together(server, bodies)
        ratios.append((between - began) / (time.perf_counter() - between))
    return statistics.median(ratios)


@dataclass(slots=True)
class Load:
    """What many streaming clients received, and what they left behind in the server."""

    clients: int
    seconds: float
    complete: int = 0
    gone: int = 0  # clients that disconnected on purpose
    refused: int = 0  # refusals with 429, after which the client waited and tried again
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    growth_bytes: int = 0
    more_files: int = 0
    more_threads: int = 0
    pages_held: int = 0

    @property
    def ok(self) -> bool:
        clean = not self.errors and not self.pages_held and self.more_files <= 4 and self.more_threads <= 4
        return clean and self.complete > 0 and self.gone > 0 and self.growth_bytes < GROWTH_BYTES

    def row(self) -> str:
        wrong = ", ".join(f"{count} x {name}" for name, count in self.errors.most_common(5)) or "no error"
        return (
            f"{self.clients} streaming clients for {self.seconds:.0f} s: {self.complete} streams complete, {self.gone} "
            f"left in the middle, {self.refused} times 429 and tried again, {self.tokens} tokens, {wrong}; afterwards "
            f"{self.growth_bytes / 2**20:+.1f} MB (at most {GROWTH_BYTES / 2**20:.0f}), {self.more_files:+d} open "
            f"files, {self.more_threads:+d} threads, {self.pages_held} pages held although no request runs"
        )


@contextmanager
def small_server(queue: int) -> Iterator[Server]:
    """A server with a small cache and a queue of `queue` places."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models.toml"
        models.write_text(SMALL_CACHE.format(queue=queue))
        with serve("--models", str(models), model=None) as server:
            server.post("/models/smollm2/load", {})
            yield server


def load(server: Server, clients: int, tokens: int, seconds: float, warm_up: float) -> Load:
    """Streams, disconnects and retries for at least `seconds`; leftovers are counted when all clients are gone."""
    # A page that is used for the first time keeps its memory, so growth is counted only after a warm-up.
    used, before_that = 0, -1
    for _ in range(_MOST_WARM_UPS):
        if used <= before_that:
            break
        asyncio.run(_crowd_for(server, Load(clients, warm_up), tokens))
        server.wait_idle(60)
        used, before_that = sum(model["pages_used"] for model in server.get("/slots")["models"]), used
    before = _footprint(server)
    seen = Load(clients, seconds)
    asyncio.run(_crowd_for(server, seen, tokens))
    server.wait_idle(60)
    after = _footprint(server)
    seen.growth_bytes, seen.more_files, seen.more_threads = (b - a for a, b in zip(before, after, strict=True))
    seen.pages_held = _held_pages(server)
    return seen


def _footprint(server: Server) -> tuple[int, int, int]:
    time.sleep(1.0)
    process = psutil.Process(server.process.pid)
    return process.memory_info().rss, process.num_fds(), process.num_threads()


def _held_pages(server: Server) -> int:
    """Pages in use that belong to no cached prefix, although no request runs."""
    return sum(model["pages_used"] - model["pages_cached"] for model in server.get("/slots")["models"])


async def _crowd_for(server: Server, seen: Load, tokens: int) -> None:
    deadline = time.monotonic() + seen.seconds
    await asyncio.gather(*[_client(server, index, seen, tokens, deadline) for index in range(seen.clients)])


async def _client(server: Server, index: int, seen: Load, tokens: int, deadline: float) -> None:
    chance = random.Random(index)
    prompts = [conversation[0][:400] for conversation in read_prompts("mt-bench")]
    # A busy machine needs longer until a stream is complete and a client has left; then the crowd stays longer.
    while time.monotonic() < deadline or not (seen.errors or (seen.complete and seen.gone)):
        body = {
            "model": "smollm2",
            "stream": True,
            "max_tokens": tokens,
            "seed": chance.randrange(1000),
            "messages": [{"role": "user", "content": chance.choice(prompts)}],
            "temperature": chance.choice([0, 0.8]),
            "stream_options": {"include_usage": True},
        }
        leave_after = chance.randrange(1, tokens // 2) if chance.random() < 0.25 else None
        try:
            wait = await asyncio.wait_for(_one_stream(server, body, leave_after, seen), _PATIENCE_S)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            seen.errors[type(error).__name__] += 1
            wait = 0.5
        if wait:
            await asyncio.sleep(wait * (0.5 + chance.random()))


async def _one_stream(server: Server, body: dict[str, Any], leave_after: int | None, seen: Load) -> float:
    """Reads one stream to its end or disconnects in the middle; returns how long to wait if the server refused it."""
    reader, writer = await asyncio.open_connection(*server.address, limit=_LINE_LIMIT)
    try:
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        if status == 429:
            seen.refused += 1
            return float(headers["retry-after"])
        if status != 200:
            raise ValueError(f"status {status}")
        await _read_events(reader, leave_after, seen)
        return 0.0
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, leave_after: int | None, seen: Load) -> None:
    pieces, usage, finished = 0, None, False
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            if usage is None or not finished:
                raise ValueError("a stream ended before its answer did")
            seen.complete += 1
            seen.tokens += usage["completion_tokens"]
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(str(event["error"])[:80])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            pieces += bool(choice["delta"].get("content"))
            finished = finished or choice["finish_reason"] is not None
        if leave_after is not None and pieces >= leave_after:
            seen.gone += 1
            return
    raise ValueError("a stream was cut off")
