"""Several models behind one server: loaded when asked for, put to sleep when idle, evicted when memory is short.

All state belongs to the event loop's thread; only loading and unloading happen elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.errors import BusyError, ConfigError, SlipstreamError
from slipstream.server.serving.model_entries import (
    Entry,
    Lease,
    ModelFailedError,
    ModelInfo,
    NoMemoryNowError,
    NoResidentModelError,
    ReloadReport,
    RouterClosedError,
    State,
    UnknownModelError,
    describe_entry,
    failed_model,
    router_closed,
    unknown_model,
)
from slipstream.server.serving.model_files import ANY, ModelSpec, read_models
from slipstream.server.serving.residency import LoadPlan, Resident, available_bytes, in_mib, in_thread, load, plan_load

__all__ = [
    "Lease",
    "ModelFailedError",
    "ModelInfo",
    "NoMemoryNowError",
    "NoResidentModelError",
    "ReloadReport",
    "ModelRouter",
    "RouterClosedError",
    "UnknownModelError",
]

log = logging.getLogger("slipstream.server.models")

_ATTEMPTS = 3  # a model may be replaced or die while a request waits for it; a request does not wait for ever
_GOING_S = 1.0  # between two looks at a model that is on its way out
_ANY_ORDER: dict[State, int] = {"ready": 0, "loading": 1, "sleeping": 2}


class ModelRouter:
    """Names and the models behind them.

    `memory_budget` bounds weights and page pools of all resident models together (None: the machine's free memory
    decides), `idle_s` is how long a model stays without requests (0: for ever), `room_wait_s` how long a load waits
    for memory that working models hold, `retry_s` how long the reason of a failed load is repeated before another try.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        memory_budget: int | None = None,
        idle_s: float = 0.0,
        room_wait_s: float = 30.0,
        retry_s: float = 5.0,
        tick_s: float = 1.0,
        source: Path | None = None,
    ) -> None:
        self._entries: dict[str, Entry] = {}
        self._leaving: list[Resident] = []  # no name leads to them any more; they go when their last request ends
        self._budget = memory_budget
        self._idle_s = idle_s
        self._room_wait_s = room_wait_s
        self._retry_s = retry_s
        self._tick_s = tick_s
        self._source = source
        self._fixed: dict[str, float | int] = {}  # what options said; a file read again does not change it
        self._turns = itertools.count(1)
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._closing = False
        self.on_engine_failed: Callable[[str], None] = lambda name: None  # told the model's name
        for spec in specs:
            if spec.name in self._entries:
                raise ConfigError(f"two models are called '{spec.name}'", "give each its own name")
            self._entries[spec.name] = Entry(spec, int(time.time()))

    @classmethod
    def from_file(
        cls, path: Path, *, memory_budget: int | None = None, idle_s: float | None = None, **settings: float
    ) -> ModelRouter:
        """A router over a models file; what is given here goes before what the file says, also when it is reloaded."""
        file = read_models(path)
        router = cls(
            file.models,
            memory_budget=memory_budget or file.memory_budget,
            idle_s=idle_s if idle_s is not None else file.idle_s or 0.0,
            source=path,
            **settings,
        )
        given = {"memory_budget": memory_budget, "idle_s": idle_s}
        router._fixed = {name: value for name, value in given.items() if value is not None}
        return router

    async def start(self) -> None:
        """Begins to watch, and loads what is to be there from the start; one that fails is described as failed."""
        self._watch()
        wanted = [entry for entry in self._entries.values() if entry.spec.preload]
        await asyncio.gather(*(self._wait_for_load(entry) for entry in wanted))

    async def lease(self, name: str) -> Lease:
        """A hold on the named model, loaded first if need be; `any` is the one that was used last."""
        self._watch()
        entry = self.find(name)
        entry.waiting += 1
        try:
            for _ in range(_ATTEMPTS):
                self._check_open()
                resident = self._alive(entry)
                if resident is not None:
                    resident.users += 1
                    self._used(entry)
                    return Lease(entry, resident, self._give_back)
                failure = await self._wait_for_load(entry)
                if failure is not None:
                    raise failure.with_traceback(None)
                if self._entries.get(entry.spec.name) is not entry:
                    raise unknown_model(entry.spec.name, list(self._entries))
            raise ModelFailedError(f"model '{entry.spec.name}' does not stay: {entry.reason or 'it was replaced'}")
        finally:
            entry.waiting -= 1
            self._notify()

    def unload(self, name: str) -> None:
        """Puts a model away by hand once its running requests are over; the next request loads it again."""
        entry = self.find(name)
        if entry.loading is not None:
            raise BusyError(f"model '{entry.spec.name}' is being loaded", "unload it when it is there", self._retry_s)
        if entry.resident is not None or entry.state == "sleeping":
            self._put_away(entry, "unloaded")

    def describe(self) -> list[ModelInfo]:
        return [describe_entry(entry) for entry in self._entries.values()]

    def residents(self) -> list[Resident]:
        """Every model at work, those included that only finish what they have begun."""
        return [resident for resident in self._in_memory() if not resident.going]

    def _in_memory(self) -> list[Resident]:
        return [entry.resident for entry in self._entries.values() if entry.resident is not None] + self._leaving

    async def reload(self) -> ReloadReport:
        """Reads the models file again. Running requests finish on what they began with; a bad file changes nothing."""
        if self._source is None:
            raise ConfigError("this server has no models file to read again", "start it with one")
        file = await in_thread(read_models, self._source)
        self._check_open()
        self._budget = int(self._fixed["memory_budget"]) if "memory_budget" in self._fixed else file.memory_budget
        self._idle_s = self._fixed.get("idle_s", file.idle_s or 0.0)
        wanted = {spec.name: spec for spec in file.models}
        removed = [name for name in self._entries if name not in wanted]
        for name in removed:
            self._put_away(self._entries.pop(name), "unloaded")
        added = [name for name in wanted if name not in self._entries]
        changed = [name for name in wanted if name not in added and self._entries[name].spec != wanted[name]]
        for name in added:
            self._entries[name] = Entry(wanted[name], int(time.time()))
        for name in changed:
            self._change_spec(self._entries[name], wanted[name])
        # in the file's order, which is the order clients see
        self._entries = {name: self._entries[name] for name in wanted}
        for entry in self._entries.values():
            entry.retry_at = 0.0
            if entry.spec.preload and entry.spec.name in (*added, *changed):
                self._in_background(self._preload(entry))
        self._notify()
        report = ReloadReport(tuple(added), tuple(removed), tuple(changed))
        log.info(
            "models file read again", extra={"fields": {"added": list(added), "removed": removed, "changed": changed}}
        )
        return report

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuses newcomers, lets running requests finish for `grace_s` seconds, then puts every model away."""
        self._closing = True
        self._notify()
        deadline = time.monotonic() + grace_s
        while any(resident.users for resident in self.residents()) and time.monotonic() < deadline:
            await self._changed(deadline - time.monotonic())
        if self._watcher is not None:
            self._watcher.cancel()
        leaving = self._in_memory()
        for entry in self._entries.values():
            if entry.resident is not None:
                entry.resident, entry.state = None, "unloaded"
        self._leaving = list(leaving)
        await asyncio.gather(*filter(None, map(self._send_off, leaving)))
        loads = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        if loads:
            await asyncio.wait(loads, timeout=max(0.0, deadline - time.monotonic()))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(1.0, deadline - time.monotonic()))

    # names

    def find(self, name: str) -> Entry:
        """What a name stands for; `any` is the model that was used last."""
        if name == ANY:
            return self._last_used()
        if name not in self._entries:
            raise unknown_model(name, list(self._entries))
        return self._entries[name]

    def _last_used(self) -> Entry:
        resident = [entry for entry in self._entries.values() if entry.state in _ANY_ORDER]
        if not resident:
            raise NoResidentModelError(
                "no model is resident, so 'any' means none", f"name one of: {', '.join(self._entries)}"
            )
        return min(resident, key=lambda entry: (_ANY_ORDER[entry.state], -entry.last_turn))

    def _used(self, entry: Entry) -> None:
        entry.last_used_ms = int(time.time() * 1000)
        entry.last_turn = next(self._turns)

    def _alive(self, entry: Entry) -> Resident | None:
        """The engine behind a name; one whose thread has ended is marked as failed and gone."""
        resident = entry.resident
        if resident is None or resident.worker.alive:
            return resident
        reason = f"its engine ended: {resident.worker.failure or 'nobody knows why'}"
        self._put_away(entry, "failed")
        # the files were fine a moment ago: the next request may try at once
        entry.reason, entry.hint, entry.retry_at = reason, "", 0.0
        log.error("engine ended", extra={"fields": {"model": entry.spec.name, "reason": reason}})
        self.on_engine_failed(entry.spec.name)
        return None

    # coming

    async def _wait_for_load(self, entry: Entry) -> SlipstreamError | None:
        if entry.loading is None:
            if entry.state == "failed" and time.monotonic() < entry.retry_at:
                return failed_model(entry)
            entry.loading = asyncio.create_task(self._bring_in(entry))
        load_task = entry.loading
        # only waited for, never cancelled: a client that leaves must not take the load from the others
        while not load_task.done():
            if self._closing:
                return router_closed()
            await asyncio.wait({load_task}, timeout=self._tick_s)
        return load_task.result()

    async def _bring_in(self, entry: Entry) -> SlipstreamError | None:
        """Loads what the entry stands for; failures become its state and are returned, never raised."""
        spec, before, began = entry.spec, (entry.state, entry.reason), time.monotonic()
        entry.state, entry.reason, entry.progress = "loading", "", "looking for its files"

        def report(label: str, done: int, total: int) -> None:
            entry.progress = f"{label} {100 * done // total}%" if total else label

        try:
            wanted = replace(spec, draft_lora=tuple(entry.adapters.values()))
            plan = await in_thread(plan_load, wanted, self._budget, report)
            await self._make_room(entry, plan)
            resident = await in_thread(load, plan, lambda: self._quiet(entry), report)
        except BusyError as error:
            entry.state, entry.reason = before
            return error
        except Exception as error:
            if not entry.spec.loads_like(spec):
                entry.state = "unloaded"  # what failed is not what the name stands for any more
                return None
            return self._fail(entry, error)
        finally:
            entry.loading, entry.reserved, entry.progress = None, 0, ""
            self._notify()
        if self._closing or self._entries.get(spec.name) is not entry or not entry.spec.loads_like(spec):
            entry.state = "unloaded"
            self._dismiss(resident)
            return router_closed() if self._closing else None
        resident.spec, entry.resident, entry.state, entry.was_loaded = entry.spec, resident, "ready", True
        log.info(
            "model loaded",
            extra={
                "fields": {
                    "model": spec.name,
                    "draft": resident.llm.draft_label,
                    "seconds": round(time.monotonic() - began, 2),
                    "memory_mib": resident.memory_bytes >> 20,
                }
            },
        )
        return None

    def _fail(self, entry: Entry, error: Exception) -> SlipstreamError:
        if not isinstance(error, SlipstreamError):
            log.error("loading failed in a way nobody foresaw", exc_info=error)
        reason = error.message if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}"
        entry.state, entry.retry_at = "failed", time.monotonic() + self._retry_s
        entry.reason = f"could not be loaded{' again' if entry.was_loaded else ''}: {reason}"
        entry.hint = error.hint if isinstance(error, SlipstreamError) else "the server's log says more"
        log.error("model failed", extra={"fields": {"model": entry.spec.name, "reason": reason}})
        return failed_model(entry)

    async def _preload(self, entry: Entry) -> None:
        await self._wait_for_load(entry)

    async def _make_room(self, entry: Entry, plan: LoadPlan) -> None:
        """Reserves memory, evicting idle models, the least recently used first; waits for those that are at work."""
        needed, deadline = plan.footprint.total, time.monotonic() + self._room_wait_s
        while not self._fits(needed):
            self._check_open()
            idle = [other for other in self._entries.values() if other.resident is not None and not other.busy]
            if idle:
                victim = min(idle, key=lambda other: other.last_turn)
                log.info("evicting", extra={"fields": {"model": victim.spec.name, "for": entry.spec.name}})
                self._put_away(victim, "unloaded")
            elif not self._held():
                limit = self._budget if self._budget is not None else available_bytes() or 0
                raise ConfigError(f"it needs {in_mib(needed)}, there are {in_mib(limit)}", "lower its cache_tokens")
            entry.progress = "waiting for memory"
            remaining = deadline - time.monotonic()
            # what is on its way out takes the time it takes, and nobody is to blame for it
            if remaining <= 0 and not any(resident.going for resident in self._leaving):
                raise self._no_memory(entry, needed)
            await self._changed(max(remaining, _GOING_S))
        entry.reserved = needed

    def _fits(self, needed: int) -> bool:
        if self._budget is not None:
            return self._held() + needed <= self._budget
        free = available_bytes()
        return free is None or needed <= free

    def _held(self) -> int:
        """Memory of everything that is there, comes or goes."""
        loading = sum(entry.reserved for entry in self._entries.values())
        return loading + sum(resident.memory_bytes for resident in self._in_memory())

    def _no_memory(self, entry: Entry, needed: int) -> NoMemoryNowError:
        holders = [
            f"'{resident.name}' ({in_mib(resident.memory_bytes)}, {resident.users} running)"
            for resident in self.residents()
        ]
        holders += [f"'{e.spec.name}' ({in_mib(e.reserved)}, loading)" for e in self._entries.values() if e.reserved]
        limit = "" if self._budget is None else f" of a budget of {in_mib(self._budget)}"
        return NoMemoryNowError(
            f"model '{entry.spec.name}' needs {in_mib(needed)}{limit}, which {', '.join(holders)} hold",
            "try again when their requests are over",
            retry_after_s=self._retry_s,
        )

    def _quiet(self, entry: Entry) -> bool:
        """Whether nothing but this load changes this process's memory; asked from the thread that loads."""
        others = [other for other in list(self._entries.values()) if other is not entry]
        return not self._leaving and not any(other.busy or other.reserved for other in others)

    # going

    def _give_back(self, entry: Entry, resident: Resident) -> None:
        resident.users -= 1
        resident.idle_since = time.monotonic()
        self._used(entry)
        if not resident.users and resident in self._leaving:
            self._send_off(resident)
        self._notify()

    def _put_away(self, entry: Entry, state: State) -> None:
        resident, entry.resident = entry.resident, None
        if entry.loading is None:
            entry.state = state
        if resident is not None:
            self._dismiss(resident)

    def _dismiss(self, resident: Resident) -> None:
        """Nobody new gets it; it goes when its last request is over."""
        self._leaving.append(resident)
        if not resident.users:
            self._send_off(resident)

    def _send_off(self, resident: Resident) -> asyncio.Task[None] | None:
        if resident.going:
            return None
        resident.going = True
        return self._in_background(self._unload(resident))

    async def _unload(self, resident: Resident) -> None:
        try:
            await in_thread(resident.unload)
        except Exception as error:
            log.error("unloading failed", exc_info=error, extra={"fields": {"model": resident.name}})
        finally:
            if resident in self._leaving:
                self._leaving.remove(resident)
            self._notify()

    def _change_spec(self, entry: Entry, spec: ModelSpec) -> None:
        """New defaults hold from the next request on; another pair or engine needs another load."""
        same = entry.spec.loads_like(spec)
        entry.spec = spec
        if same:
            if entry.resident is not None:
                entry.resident.spec = spec
            return
        entry.was_loaded, entry.reason, entry.adapters = False, "", spec.adapters
        self._put_away(entry, "unloaded")

    # watching

    def _watch(self) -> None:
        if self._watcher is None and not self._closing:
            self._watcher = asyncio.create_task(self._watch_forever())

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                self._look_around()
            except Exception as error:
                log.error("watching the models failed", exc_info=error)

    def _look_around(self) -> None:
        """Notices engines that died and puts models to sleep that nobody has used for long enough."""
        for entry in list(self._entries.values()):
            resident = self._alive(entry)
            limit = entry.spec.idle_s if entry.spec.idle_s is not None else self._idle_s
            if resident is None or entry.busy or not limit or time.monotonic() - resident.idle_since < limit:
                continue
            log.info("model sleeps", extra={"fields": {"model": entry.spec.name, "idle_s": limit}})
            self._put_away(entry, "sleeping")

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _changed(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._change.wait(), timeout_s)
        except TimeoutError:
            return

    def _check_open(self) -> None:
        if self._closing:
            raise router_closed()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
