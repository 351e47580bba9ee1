"""Routers over tiny models, and ways to use them from an event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.server.serving.model_entries import Lease
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.router import ModelRouter
from slipstream.types import Gate, GenEvent, Mode, Request

POOL_TOKENS = 1 << 22  # a pool of one GiB that is never used; beside it a model's other memory hardly matters
ONE = 3 << 29  # memory with room for one such model
TWO = 5 << 29
REQUESTS = itertools.count()
Body = Callable[[ModelRouter], Coroutine[Any, Any, None]]


def spec(folder: Path, name: str, draft: str = "none", cache_tokens: int = 24 * 64, **rest: Any) -> ModelSpec:
    config = EngineConfig(
        weight_format="fp32", max_context=512, max_sequences=4, prefill_chunk=64, threads=1, cache_tokens=cache_tokens
    )
    return ModelSpec(name, str(folder / "target"), draft, config, **rest)


def specs(folder: Path, *names: str, **rest: Any) -> list[ModelSpec]:
    return [spec(folder, name, **rest) for name in names]


def run(router: ModelRouter, body: Body) -> None:
    async def whole() -> None:
        try:
            await asyncio.wait_for(body(router), 60)
        finally:
            await router.close()

    asyncio.run(whole())


def states(router: ModelRouter) -> dict[str, str]:
    return {info.name: info.state for info in router.describe()}


async def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits until `holds` is true; the first looks are close together, so that a short state is not missed."""
    deadline, looks = time.monotonic() + seconds, itertools.count()
    while not holds():
        assert time.monotonic() < deadline, "the condition never became true"
        await asyncio.sleep(0 if next(looks) < 10 else 0.01)


def start(lease: Lease, tokens: int = 8, name: str = "r") -> asyncio.Future[list[GenEvent]]:
    """Generates on a lease's engine; the future holds all events after the last one has come."""
    loop, events = asyncio.get_running_loop(), list[GenEvent]()
    done: asyncio.Future[list[GenEvent]] = loop.create_future()

    def sink(event: GenEvent) -> None:
        events.append(event)
        if event.finish_reason is not None:
            loop.call_soon_threadsafe(done.set_result, events)

    request = Request(name, (65, 66, 67), mode=Mode("plain"), gate=Gate("off"), max_tokens=tokens)
    lease.worker.submit(request, sink)
    return done


async def answer(router: ModelRouter, name: str) -> str:
    async with await router.lease(name) as lease:
        events = await start(lease, name=f"r{next(REQUESTS)}")
        assert events[-1].finish_reason in ("stop", "length")
        return lease.name
