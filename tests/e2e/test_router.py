"""The router with real models: two at once, eviction while one streams, memory that is returned, a missing file."""

from __future__ import annotations

import asyncio
import ctypes
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.formats.sources import resolve
from slipstream.server.serving.model_entries import Lease, ModelFailedError
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.residency import give_memory_back, private_bytes
from slipstream.server.serving.router import ModelRouter
from slipstream.types import GenEvent

pytestmark = pytest.mark.e2e
MIB = 1 << 20
PROMPT = "Explain in a few sentences how rivers shape the land they flow through."
LONG = "All the words of a long prompt fill pages of the cache. " * 30
ENGINE = EngineConfig(cache_tokens=4096, max_context=4096)  # 210 MiB of pool beside 100 to 130 MiB of weights
FAST = ModelSpec("fast", "smollm2", engine=ENGINE)
PLAIN = ModelSpec("plain", "smollm2", "none", ENGINE)
MODEL_BYTES = 110 * MIB  # what a loaded target takes at least; memory that the allocator keeps varies by 50 MiB
TURNS = 2


def run(router: ModelRouter, body: Callable[[ModelRouter], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        try:
            await asyncio.wait_for(body(router), 240)
        finally:
            await router.close()

    asyncio.run(whole())


def start(lease: Lease, prompt: str = PROMPT, tokens: int = 64) -> asyncio.Future[str]:
    """Chats on a lease's engine; the future holds the whole text after the last event has come."""
    loop, parts = asyncio.get_running_loop(), list[str]()
    done: asyncio.Future[str] = loop.create_future()

    def sink(event: GenEvent) -> None:
        parts.append(event.text)
        if event.finish_reason is not None:
            text = "".join(parts) if event.error is None else f"error: {event.error}"
            loop.call_soon_threadsafe(done.set_result, text)

    ids = lease.llm.prompt_ids(prompt, chat=True)
    lease.worker.submit(lease.llm.request(ids, max_tokens=tokens, temperature=0.0, ignore_eos=True), sink)
    return done


async def ask(router: ModelRouter, name: str, prompt: str = PROMPT, tokens: int = 64) -> str:
    async with await router.lease(name) as lease:
        return await start(lease, prompt, tokens)


async def turns(stop: asyncio.Event) -> int:
    """How often the event loop got to this task."""
    counted = 0
    while not stop.is_set():
        await asyncio.sleep(0.01)
        counted += 1
    return counted


def test_two_models_load_and_stream_at_once_without_holding_up_the_loop() -> None:
    async def body(router: ModelRouter) -> None:
        stop = asyncio.Event()
        watching = asyncio.create_task(turns(stop))
        leases = await asyncio.gather(router.lease("fast"), router.lease("plain"))
        stop.set()
        assert await watching > 10, "models that load on the event loop's own thread leave it two or three turns"
        # the same target: with and without drafts, alone or beside each other, the text is one
        texts = await asyncio.gather(*(start(lease) for lease in leases))
        assert texts[0] == texts[1] == await start(leases[0]) != ""
        fast, plain = router.describe()
        assert (fast.draft, fast.mode) == ("smollm2-135m-dspark.Q8_0.gguf", "auto")
        assert (plain.draft, plain.mode) == (None, "plain")
        for lease in leases:
            lease.release()

    run(ModelRouter([FAST, PLAIN]), body)


def test_eviction_while_the_other_streams_frees_its_memory_afterwards() -> None:
    async def body(router: ModelRouter) -> None:
        before = private_bytes()
        expected = await ask(router, "fast", tokens=200)
        async with await router.lease("fast") as lease:
            streaming = start(lease, tokens=200)
            other = asyncio.create_task(ask(router, "plain", LONG, tokens=8))
            while router.describe()[1].progress != "waiting for memory":
                await asyncio.sleep(0.01)
            assert await streaming == expected
            held = router.describe()[0].memory_bytes
        assert (await other).startswith("error") is False
        assert [info.state for info in router.describe()] == ["unloaded", "ready"]
        levels = {"plain": [private_bytes()], "fast": list[int]()}
        for name in ("fast", "plain") * TURNS:
            await ask(router, name, LONG, tokens=8)
            levels[name].append(private_bytes())
        # Only one model is loaded at a time; a copy kept at every turn would add TURNS times a model.
        assert max(levels["fast"]) - before < held + 100 * MIB
        assert levels["plain"][-1] - levels["plain"][0] < TURNS * MODEL_BYTES // 2
        await router.close()
        give_memory_back()
        assert levels["plain"][-1] - private_bytes() > MODEL_BYTES // 2

    give_memory_back()
    run(ModelRouter([FAST, PLAIN], memory_budget=500 * MIB), body)


def test_a_lost_file_and_a_killed_engine_harm_no_other_model(tmp_path: Path) -> None:
    copy = tmp_path / "target.gguf"
    shutil.copyfile(resolve("smollm2").path, copy)

    async def body(router: ModelRouter) -> None:
        expected = await ask(router, "plain")
        async with await router.lease("plain") as other:
            lease = await router.lease("lost")
            copy.unlink()
            assert await start(lease) == expected
            assert "is gone" in router.describe()[1].warning
            beside, dying = start(other, tokens=128), start(lease, tokens=400)
            ident = ctypes.c_ulong(lease.worker.thread.ident or 0)
            assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1
            assert "SystemExit" in await dying
            lease.release()
            with pytest.raises(ModelFailedError, match="could not be loaded again: there is no file"):
                await router.lease("lost")
            assert (await beside).startswith(expected)
            shutil.copyfile(resolve("smollm2").path, copy)
            await asyncio.sleep(0.3)
            assert await ask(router, "lost") == expected

    run(ModelRouter([PLAIN, replace(PLAIN, name="lost", target=str(copy))], retry_s=0.2), body)
