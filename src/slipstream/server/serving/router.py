"""Several models behind one server: a request loads its model, and idleness or a lack of memory unloads it.

All state belongs to the event loop's thread; only loading and unloading happen in other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from slipstream.errors import BusyError, ConfigError, SlipstreamError
from slipstream.server.serving.catalogue import Catalogue
from slipstream.server.serving.model_entries import (
    Entry,
    Lease,
    ModelFailedError,
    ModelInfo,
    State,
    describe_entry,
    failed_model,
    router_closed,
    unknown_model,
)
from slipstream.server.serving.model_files import ModelsFile, ModelSpec, read_models
from slipstream.server.serving.residency import Resident, in_thread, load, plan_load

log = logging.getLogger("slipstream.server.models")

T = TypeVar("T")

# A model may be replaced or its engine may end while a request waits for it. After three loads the request is refused,
# because otherwise it could wait for ever.
_LOAD_ATTEMPTS = 3
# A load whose waiting time is over looks at least this often whether a model was unloaded. A longer time would only
# delay the load.
_UNLOADING_POLL_S = 1.0


class ModelRouter:
    """Names and the models behind them.

    `memory_budget` bounds weights and page pools of all resident models together (None: the machine's free memory
    decides). `idle_s` is how long a model stays in memory without requests (0: for ever). Both default to what the
    models file says. `room_wait_s` is how long a load waits for memory that working models hold, and `retry_s` how long
    the reason of a failed load is repeated before the router tries again. Every `tick_s` it looks for idle models and
    for engines that have ended. All times are in seconds.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        memory_budget: int | None = None,
        idle_s: float | None = None,
        room_wait_s: float = 30.0,
        retry_s: float = 5.0,
        tick_s: float = 1.0,
        source: Path | None = None,
        file: ModelsFile | None = None,
    ) -> None:
        self._catalogue = Catalogue(specs)
        self._options = (memory_budget, idle_s)  # a models file that is read again does not change these
        self._set_limits(file or ModelsFile(()))
        self._room_wait_s = room_wait_s
        self._retry_s = retry_s
        self._tick_s = tick_s
        self._source = source
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._closing = False
        self.on_engine_failed: Callable[[str], None] = lambda name: None  # called with the model's name

    @classmethod
    def from_file(cls, path: Path, **settings: Any) -> ModelRouter:
        """A router over a models file; `settings` take precedence over the file, also when it is read again."""
        file = read_models(path)
        return cls(file.models, source=path, file=file, **settings)

    def _set_limits(self, file: ModelsFile) -> None:
        memory_budget, idle_s = self._options
        self._catalogue.budget = file.memory_budget if memory_budget is None else memory_budget
        self._idle_s = (file.idle_s or 0.0) if idle_s is None else idle_s

    async def start(self) -> None:
        """Begins to watch the models and loads those with `preload`; one that cannot be loaded is marked as failed."""
        self._watch()
        wanted = [entry for entry in self._catalogue if entry.spec.preload]
        await asyncio.gather(*(self._wait_for_load(entry) for entry in wanted))

    async def lease(self, name: str) -> Lease:
        """A hold on the named model, which is loaded first if it is not in memory; `any` is the model used last."""
        self._watch()
        entry = self.find(name)
        entry.waiting += 1
        try:
            for _ in range(_LOAD_ATTEMPTS):
                self._check_open()
                resident = self._alive(entry)
                if resident is not None:
                    resident.users += 1
                    self._catalogue.note_use(entry)
                    return Lease(entry, resident, self._give_back)
                failure = await self._wait_for_load(entry)
                if failure is not None:
                    raise failure.with_traceback(None)
                if not self._catalogue.has(entry):
                    raise unknown_model(entry.spec.name, self._catalogue.names)
            raise ModelFailedError(f"model '{entry.spec.name}' does not stay: {entry.reason or 'it was replaced'}")
        finally:
            entry.waiting -= 1
            self._notify()

    def unload(self, name: str) -> None:
        """Unloads a model as soon as its running requests are over; the next request loads it again."""
        entry = self.find(name)
        if entry.loading is not None:
            raise BusyError(f"model '{entry.spec.name}' is being loaded", "unload it when it is there", self._retry_s)
        if entry.resident is not None or entry.state == "sleeping":
            self._put_away(entry, "unloaded")

    def describe(self) -> list[ModelInfo]:
        return [describe_entry(entry) for entry in self._catalogue]

    def residents(self) -> list[Resident]:
        """Every model in memory that is not being unloaded, also one without a name that only finishes its requests."""
        return self._catalogue.residents()

    def find(self, name: str) -> Entry:
        """What a name stands for; `any` is the model that was used last."""
        return self._catalogue.find(name)

    async def reload(self) -> dict[str, list[str]]:
        """Reads the models file again; a file with mistakes changes nothing.

        Running requests finish with the model and the settings they began with. The result has the names of the models
        that were added, removed and changed.
        """
        if self._source is None:
            raise ConfigError("this server has no models file to read again", "start it with one")
        file = await in_thread(read_models, self._source)
        self._check_open()
        self._set_limits(file)
        added, removed = self._catalogue.replace(file.models)
        wanted = {spec.name: spec for spec in file.models}
        changed = [entry for entry in self._catalogue if wanted[entry.spec.name] != entry.spec]
        for entry in removed:
            self._put_away(entry, "unloaded")
        for entry in changed:
            self._change_spec(entry, wanted[entry.spec.name])
        for entry in self._catalogue:
            entry.retry_at = 0.0
            if entry.spec.preload and entry in (*added, *changed):
                self._in_background(self._wait_for_load(entry))
        self._notify()
        kinds = {"added": added, "removed": removed, "changed": changed}
        names = {kind: [entry.spec.name for entry in entries] for kind, entries in kinds.items()}
        log.info("models file read again", extra={"fields": names})
        return names

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones finish for `grace_s` seconds, then unloads every model."""
        self._closing = True
        self._notify()
        deadline = time.monotonic() + grace_s
        while any(resident.users for resident in self.residents()) and time.monotonic() < deadline:
            await self._changed(deadline - time.monotonic())
        if self._watcher is not None:
            self._watcher.cancel()
        leaving = self._catalogue.in_memory()
        for entry in self._catalogue:
            if entry.resident is not None:
                entry.resident, entry.state = None, "unloaded"
        self._catalogue.leaving = list(leaving)
        await asyncio.gather(*filter(None, map(self._send_off, leaving)))
        loads = [entry.loading for entry in self._catalogue if entry.loading is not None]
        if loads:
            await asyncio.wait(loads, timeout=max(0.0, deadline - time.monotonic()))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(1.0, deadline - time.monotonic()))

    def _alive(self, entry: Entry) -> Resident | None:
        """The model behind a name, if it is in memory; an entry whose engine has ended is marked as failed."""
        resident = entry.resident
        if resident is None or resident.worker.alive:
            return resident
        reason = f"its engine ended: {resident.worker.failure or 'the reason is unknown'}"
        self._put_away(entry, "failed")
        # The files could be read when the model was loaded, so the next request may load it again at once.
        entry.reason, entry.hint, entry.retry_at = reason, "", 0.0
        log.error("engine ended", extra={"fields": {"model": entry.spec.name, "reason": reason}})
        self.on_engine_failed(entry.spec.name)
        return None

    # Loading

    async def _wait_for_load(self, entry: Entry) -> SlipstreamError | None:
        if entry.loading is None:
            if entry.state == "failed" and time.monotonic() < entry.retry_at:
                return failed_model(entry)
            entry.loading = asyncio.create_task(self._bring_in(entry))
        load_task = entry.loading
        # The task is waited for and never cancelled, because other clients may wait for the same load.
        while not load_task.done():
            if self._closing:
                return router_closed()
            await asyncio.wait({load_task}, timeout=self._tick_s)
        return load_task.result()

    async def _bring_in(self, entry: Entry) -> SlipstreamError | None:
        """Loads the model of an entry; a failure becomes the entry's state and is returned, never raised."""
        spec, before, began = entry.spec, (entry.state, entry.reason), time.monotonic()
        entry.state, entry.reason, entry.progress = "loading", "", "looking for its files"

        def report(label: str, done: int, total: int) -> None:
            entry.progress = f"{label} {100 * done // total}%" if total else label

        try:
            wanted = replace(spec, draft_lora=tuple(entry.adapters.values()))
            wanted, needs = await in_thread(plan_load, wanted, self._catalogue.budget, report)
            await self._make_room(entry, needs.total)
            resident = await in_thread(load, wanted, needs, lambda: self._catalogue.quiet(entry), report)
        except BusyError as error:
            entry.state, entry.reason = before
            return error
        except Exception as error:
            if not entry.spec.loads_like(spec):
                entry.state = "unloaded"  # the spec has changed meanwhile, so the failure says nothing about it
                return None
            return self._fail(entry, error)
        finally:
            entry.loading, entry.reserved, entry.progress = None, 0, ""
            self._notify()
        if self._closing or not self._catalogue.has(entry) or not entry.spec.loads_like(spec):
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
            log.error("loading failed with an unexpected error", exc_info=error)
            error = SlipstreamError(f"{type(error).__name__}: {error}", "the server's log says more")
        entry.state, entry.retry_at = "failed", time.monotonic() + self._retry_s
        entry.reason = f"could not be loaded{' again' if entry.was_loaded else ''}: {error.message}"
        entry.hint = error.hint
        log.error("model failed", extra={"fields": {"model": entry.spec.name, "reason": error.message}})
        return failed_model(entry)

    async def _make_room(self, entry: Entry, needed: int) -> None:
        """Reserves memory for a load: unloads idle models, the least recently used first, then waits for busy ones."""
        deadline = time.monotonic() + self._room_wait_s
        while not self._catalogue.fits(needed):
            self._check_open()
            idle = self._catalogue.idle()
            if idle:
                victim = min(idle, key=lambda other: other.last_turn)
                log.info("evicting", extra={"fields": {"model": victim.spec.name, "for": entry.spec.name}})
                self._put_away(victim, "unloaded")
            elif not self._catalogue.held():
                raise self._catalogue.never_fits(needed)
            entry.progress = "waiting for memory"
            remaining = deadline - time.monotonic()
            # Unloading a model always ends, so the load waits for it even after the deadline.
            if remaining <= 0 and not any(resident.unloading for resident in self._catalogue.leaving):
                raise self._catalogue.no_memory(entry, needed, self._retry_s)
            await self._changed(max(remaining, _UNLOADING_POLL_S))
        entry.reserved = needed

    # Unloading

    def _give_back(self, entry: Entry, resident: Resident) -> None:
        resident.users -= 1
        resident.idle_since = time.monotonic()
        self._catalogue.note_use(entry)
        if not resident.users and resident in self._catalogue.leaving:
            self._send_off(resident)
        self._notify()

    def _put_away(self, entry: Entry, state: State) -> None:
        resident, entry.resident = entry.resident, None
        if entry.loading is None:
            entry.state = state
        if resident is not None:
            self._dismiss(resident)

    def _dismiss(self, resident: Resident) -> None:
        """Gives the model to no further request; it is unloaded when its last request is over."""
        self._catalogue.leaving.append(resident)
        if not resident.users:
            self._send_off(resident)

    def _send_off(self, resident: Resident) -> asyncio.Task[None] | None:
        if resident.unloading:
            return None
        resident.unloading = True
        return self._in_background(self._unload(resident))

    async def _unload(self, resident: Resident) -> None:
        try:
            await in_thread(resident.unload)
        except Exception as error:
            log.error("unloading failed", exc_info=error, extra={"fields": {"model": resident.name}})
        finally:
            if resident in self._catalogue.leaving:
                self._catalogue.leaving.remove(resident)
            self._notify()

    def _change_spec(self, entry: Entry, spec: ModelSpec) -> None:
        """Takes over a changed spec: new defaults hold from the next request on.

        If the spec needs another engine, the old model is given to no further request, and the next one loads the new.
        """
        same = entry.spec.loads_like(spec)
        entry.spec = spec
        if same:
            if entry.resident is not None:
                entry.resident.spec = spec
            return
        entry.was_loaded, entry.reason, entry.adapters = False, "", spec.adapters
        self._put_away(entry, "unloaded")

    # Watching

    def _watch(self) -> None:
        if self._watcher is None and not self._closing:
            self._watcher = asyncio.create_task(self._watch_forever())

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                self.look_around()
            except Exception as error:
                log.error("watching the models failed", exc_info=error)

    def look_around(self) -> None:
        """Notices engines that have ended, and unloads models that had no request for their idle time.

        The router does so by itself at every tick.
        """
        for entry in self._catalogue:
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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._change.wait(), timeout_s)

    def _check_open(self) -> None:
        if self._closing:
            raise router_closed()

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
