"""Loads and unloads models, each in a thread of its own; unloading returns the memory to the system."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slipstream.errors import ConfigError, EngineFailedError
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.preparing import Preparation
from slipstream.types import Mode, Progress

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.memory_estimate import Footprint
    from slipstream.server.serving.worker import EngineWorker

log = logging.getLogger("slipstream.server.models")

T = TypeVar("T")
# How long unloading waits for a step that is still running. With a shorter wait, the memory of a slow engine would
# more often stay taken, because an engine is not closed while its step runs.
_STOP_S = 10.0


@dataclass(slots=True, eq=False)
class Resident:
    """A model in memory: its engine, the thread that owns the engine, and how many requests use it (leases)."""

    spec: ModelSpec
    llm: LLM
    running: EngineWorker | None  # None once unloaded, so that a reference to this object keeps no engine alive
    files: tuple[Path, ...]
    memory_bytes: int  # weights (the larger of measured and estimated) and the whole page pool
    preparation: Preparation = field(default_factory=Preparation)
    users: int = 0
    unloading: bool = False  # whether the model is being unloaded
    idle_since: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def worker(self) -> EngineWorker:
        if self.running is None:
            raise EngineFailedError(f"model '{self.name}' was unloaded", "ask for it again")
        return self.running

    def unload(self) -> None:
        """Ends the engine's thread and returns its memory.

        If a step still runs after `_STOP_S` seconds, the engine is not closed, and an error is logged.
        """
        worker, self.running = self.running, None
        if worker is not None:
            if worker.stop(_STOP_S):
                self.llm.close()
            else:  # closing it would free weights that the step still reads
                log.error("model '%s' is still in a step after %.0f s; its memory is not returned", self.name, _STOP_S)
            del worker
        give_memory_back()


def plan_load(spec: ModelSpec, budget: int | None, progress: Progress) -> tuple[ModelSpec, Footprint]:
    """Finds or downloads the files and estimates their memory; a page pool without a fixed size is fitted to a budget.

    With a budget, the spec that is returned has the size of the pool.
    """
    from slipstream.engine.memory_estimate import footprint

    needs = footprint(spec.target, spec.draft, spec.engine, progress)
    if budget is None:
        return spec, needs
    if not spec.engine.cache_tokens:
        needs = needs.within(budget)
    if needs.total > budget:
        raise ConfigError(
            f"it needs {in_mib(needs.total)}, but the memory budget is {in_mib(budget)}",
            "raise memory_budget or lower the model's cache_tokens or max_context",
        )
    return replace(spec, engine=replace(spec.engine, cache_tokens=needs.cache_tokens)), needs


def load(spec: ModelSpec, needs: Footprint, no_other_works: Callable[[], bool], progress: Progress) -> Resident:
    """Builds the engine, measures the costs of its steps and starts its thread.

    Memory is measured only while no other model works, because growth of another model's pool would be counted too.
    """
    from slipstream.engine.llm import LLM
    from slipstream.server.serving.worker import EngineWorker

    quiet = no_other_works()
    if quiet:
        give_memory_back()
    before = private_bytes()
    llm = LLM(spec.target, spec.draft, draft_lora=spec.draft_lora, config=spec.engine, progress=progress)
    try:
        mode = Mode.parse(spec.mode_with(llm.speculates))
        if not llm.has_draft and mode.kind != "plain" and not (mode.reads_text and llm.speculates):
            raise ConfigError(
                f"mode '{mode}' needs a drafter, and there is none for this target",
                "name a draft, or leave the mode out",
            )
        if llm.speculates:
            llm.measure_costs()
        llm.describe()  # measures the memory bandwidth once, now, because later it would delay the steps of requests
        llm.prepare_batches()
        llm.tokenizer.prepare_long_texts()
        give_memory_back()
        grown = max(0, private_bytes() - before) if quiet and no_other_works() else 0
        memory = max(needs.weight_bytes, grown) + needs.cache_tokens * needs.token_bytes
        worker = EngineWorker(llm, spec.name)
        worker.start()
    except BaseException:
        llm.close()
        give_memory_back()
        raise
    return Resident(spec, llm, worker, needs.files, memory)


def available_bytes() -> int | None:
    """Bytes that this process could still allocate; None if the system does not say."""
    from slipstream.engine.memory_estimate import available_bytes as available

    return available()


def private_bytes() -> int:
    """Bytes of this process that are not backed by a file; 0 if the system does not say."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    wanted = ("RssAnon:", "RssShmem:")
    return sum(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(wanted))


def give_memory_back() -> None:
    """Collects objects that only reference cycles keep, and returns the allocator's free memory to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc has no such function
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def in_mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Runs blocking work in a daemon thread of its own.

    While a download hangs, a pool's thread would keep the process from ending and would be missing for other work.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # the work goes on even if its caller is cancelled

    def run() -> None:
        try:
            result.set_result(work(*arguments))
        except Exception as error:
            # A future cannot carry StopIteration.
            result.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
        except BaseException as error:  # SystemExit would end the event loop instead of this work
            result.set_exception(RuntimeError(repr(error)))

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await asyncio.wrap_future(result)
