"""Loading a model and unloading it again, in threads of their own; unloading returns the memory to the system."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.config import EngineConfig
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
# How long unloading waits for a step that is still running. With a shorter wait, the models of a slow engine would be
# dropped while its step reads them.
_STOP_S = 10.0


@dataclass(slots=True, eq=False)
class Resident:
    """A model in memory: its engine, the thread that owns the engine, and the number of leases on it."""

    spec: ModelSpec
    llm: LLM
    running: EngineWorker | None  # None once unloaded, so that a reference to this object keeps no engine alive
    files: tuple[Path, ...]
    memory_bytes: int  # weights (the larger of measured and estimated) and the whole page pool
    preparation: Preparation = field(default_factory=Preparation)
    users: int = 0
    going: bool = False  # whether the model is being unloaded
    idle_since: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def worker(self) -> EngineWorker:
        if self.running is None:
            raise EngineFailedError(f"model '{self.name}' was unloaded", "ask for it again")
        return self.running

    def missing_file(self) -> Path | None:
        """A file that the model was loaded from and that does not exist any more; None if all exist."""
        return next((path for path in self.files if not path.exists()), None)

    def unload(self) -> None:
        """Ends the engine's thread and returns all its memory; it waits up to `_STOP_S` for a step that is running."""
        worker, self.running = self.running, None
        if worker is not None:
            if worker.stop(_STOP_S):
                self.llm.close()
            else:  # closing it would take the weights away under the step
                log.error("model '%s' is still in a step after %.0f s; its memory is not returned", self.name, _STOP_S)
            del worker
        give_memory_back()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What will be loaded, with which settings, and how much memory it will take."""

    spec: ModelSpec
    config: EngineConfig
    footprint: Footprint


def plan_load(spec: ModelSpec, budget: int | None, progress: Progress) -> LoadPlan:
    """Finds or downloads the files and adds up their memory; a page pool of no fixed size is cut to fit a budget."""
    from slipstream.engine.memory_estimate import footprint

    needs = footprint(spec.target, spec.draft, spec.engine, progress)
    if budget is None:
        return LoadPlan(spec, spec.engine, needs)
    if not spec.engine.cache_tokens:
        needs = needs.within(budget)
    if needs.total > budget:
        raise ConfigError(
            f"it needs {in_mib(needs.total)}, the memory budget is {in_mib(budget)}",
            "raise memory_budget or lower the model's cache_tokens or max_context",
        )
    return LoadPlan(spec, replace(spec.engine, cache_tokens=needs.cache_tokens), needs)


def load(plan: LoadPlan, undisturbed: Callable[[], bool], progress: Progress) -> Resident:
    """Builds the engine, measures the costs of its steps and starts its thread.

    Memory is measured only while no other model works, because growth of another model's pool would be counted too.
    """
    from slipstream.engine.llm import LLM
    from slipstream.server.serving.worker import EngineWorker

    spec, needs = plan.spec, plan.footprint
    quiet = undisturbed()
    if quiet:
        give_memory_back()
    before = private_bytes()
    llm = LLM(spec.target, spec.draft, draft_lora=spec.draft_lora, config=plan.config, progress=progress)
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
        grown = max(0, private_bytes() - before) if quiet and undisturbed() else 0
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
    trim = _libc_function("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def _libc_function(name: str) -> Any:
    """A function of glibc; None with another C library."""
    try:
        return getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None


def in_mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Runs blocking work in a daemon thread of its own.

    A thread of a pool would keep the process from ending while a download hangs, and other work could not use it.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(settle: Callable[[Any], None], value: object) -> None:
        if not result.done():
            settle(value)

    def run() -> None:
        settle: Callable[[Any], None] = result.set_result
        try:
            value: object = work(*arguments)
        except BaseException as error:
            # A future cannot carry StopIteration, and SystemExit would end the event loop instead of this work.
            wrapped = RuntimeError(repr(error)) if not isinstance(error, Exception) else error
            value = RuntimeError(repr(error)) if isinstance(error, StopIteration) else wrapped
            settle = result.set_exception
        try:
            loop.call_soon_threadsafe(deliver, settle, value)
        except RuntimeError:
            log.debug("a thread finished after its event loop had ended")

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await result
