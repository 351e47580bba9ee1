"""What the router knows about each model name, what it tells clients about it, and the errors it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from slipstream.errors import BusyError, SlipstreamError
from slipstream.formats.adapters import parse_source
from slipstream.formats.sources import SUFFIX
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.residency import Resident
from slipstream.types import BASE_VARIANT

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.server.serving.preparing import Preparation
    from slipstream.server.serving.worker import EngineWorker

State = Literal["unloaded", "loading", "ready", "sleeping", "failed"]


class UnknownModelError(SlipstreamError):
    """The request names a model that this server does not offer."""


class NoResidentModelError(SlipstreamError):
    """The request asks for `any`, and no model is in memory or on its way there."""


class ModelFailedError(SlipstreamError):
    """The model could not be loaded, or did not stay in memory; the message says why."""


class NoMemoryNowError(BusyError):
    """Models with running requests hold the memory that another model needs."""


class RouterClosedError(BusyError):
    """The server is shutting down and takes no new requests."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client may know about one model name."""

    name: str
    state: State
    target: str
    draft: str | None  # the drafter in effect, or `suffix` for the text alone; None means plain decoding
    mode: str  # the mode of requests that name none
    last_used_ms: int  # milliseconds since 1970; 0 if the model was never used
    created: int  # seconds since 1970, when this server first offered the name
    users: int
    memory_bytes: int  # 0 if the model is not in memory
    progress: str = ""  # what a load is doing; empty at other times
    reason: str = ""  # why the model failed; empty in other states
    warning: str = ""
    draft_variants: tuple[str, ...] = ()  # the names that requests may give as `draft_lora`
    adapters: Mapping[str, str] = field(default_factory=dict)  # the source of each adapter by the name of its variant


@dataclass(slots=True, eq=False)
class Entry:
    """One name: the spec it stands for now, and the state of the model behind it."""

    spec: ModelSpec
    created: int
    state: State = "unloaded"
    resident: Resident | None = None
    loading: asyncio.Task[SlipstreamError | None] | None = None
    reserved: int = 0  # bytes promised to a load that is under way
    waiting: int = 0  # requests that wait for the model to be loaded
    progress: str = ""
    reason: str = ""
    hint: str = ""
    retry_at: float = 0.0  # monotonic time until which the reason of a failed load is repeated
    last_used_ms: int = 0
    last_turn: int = 0  # rises with every use of any model, so that it orders the models by their last use
    was_loaded: bool = False
    adapters: dict[str, str] = field(init=False)  # those of the spec, changed by what clients added and removed since

    def __post_init__(self) -> None:
        self.adapters = self.spec.adapters

    @property
    def busy(self) -> bool:
        return self.waiting > 0 or (self.resident is not None and self.resident.users > 0)


class Lease(AbstractAsyncContextManager["Lease"]):
    """One request's hold on a model, which stays in memory until the lease is released."""

    def __init__(self, entry: Entry, resident: Resident, give_back: Callable[[Entry, Resident], None]) -> None:
        self.name = entry.spec.name
        self.spec = entry.spec
        self.adapters = entry.adapters  # the entry's own dict: a change to it also holds for later loads of this spec
        self._entry = entry
        self._resident = resident
        self._give_back = give_back
        self._held = True

    @property
    def llm(self) -> LLM:
        return self._resident.llm

    @property
    def worker(self) -> EngineWorker:
        return self._resident.worker

    @property
    def preparation(self) -> Preparation:
        return self._resident.preparation

    def release(self) -> None:
        """Releases the model; a second call does nothing. Only the event loop's thread may call it."""
        if self._held:
            self._held = False
            self._give_back(self._entry, self._resident)

    async def __aexit__(self, *_: object) -> None:
        self.release()


def describe_entry(entry: Entry) -> ModelInfo:
    resident, spec = entry.resident, entry.spec
    files = () if resident is None else (*resident.files, *(parse_source(s).path for s in entry.adapters.values()))
    gone = next((path for path in files if not path.exists()), None)
    draft = resident.llm.draft_label if resident is not None else spec.draft_in_effect
    to_come = [BASE_VARIANT, *entry.adapters] if draft not in (None, SUFFIX) else []
    return ModelInfo(
        name=spec.name,
        state=entry.state,
        target=spec.target,
        draft=draft,
        mode=spec.mode_with(draft is not None),
        last_used_ms=entry.last_used_ms,
        created=entry.created,
        users=resident.users if resident is not None else 0,
        memory_bytes=resident.memory_bytes if resident is not None else 0,
        progress=entry.progress,
        reason=(f"{entry.reason} ({entry.hint})" if entry.hint else entry.reason) if entry.state == "failed" else "",
        warning="" if gone is None else f"{gone} is gone: it serves from memory and cannot be loaded again",
        draft_variants=tuple(to_come if resident is None else resident.llm.draft_variants),
        adapters=dict(entry.adapters),
    )


def unknown_model(name: str, known: list[str]) -> UnknownModelError:
    return UnknownModelError(f"there is no model '{name[:100]}'", f"use one of: {', '.join(known)}")


def failed_model(entry: Entry) -> ModelFailedError:
    return ModelFailedError(f"model '{entry.spec.name}' {entry.reason}", entry.hint)


def router_closed() -> RouterClosedError:
    return RouterClosedError("the server is ending", "ask again when it is back", retry_after_s=5.0)
