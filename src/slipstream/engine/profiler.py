"""Where a decoding step's time goes: clocks the engine's own calls while a profiler is entered, and only then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Self

from slipstream.cache.sequence import SequenceState
from slipstream.engine import outcomes
from slipstream.engine.engine import Engine
from slipstream.models.decoder import Decoder
from slipstream.models.heads import DraftHeads, HeadPass
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.draft import BlockDrafter
from slipstream.types import GenEvent

HOST = "host"  # the phase of all time that belongs to no other phase
PHASES = ("draft", "heads", "tree", "verify", "accept", "context write", HOST)
PLAIN, DRAFTING = "plain", "drafting"  # the kinds of steps


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The part of a profile that exists only for steps that run as a whole on a device."""

    busy_ms: float  # how long the device worked in a real step
    replay_context: int  # tokens of context after which the phases were replayed one by one
    launches: dict[str, int]  # launches by phase; empty if the profiler saw none
    launch_kind: str


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The phases of one kind of step: means over the middle half of the steps, so that they add up to the whole."""

    steps: int
    rows: float
    context: float
    step_ms: float
    phases_ms: dict[str, float]
    read_bytes: float  # weights, and keys and values of the context, each once
    device: DeviceProfile | None = None

    def to_json(self) -> dict[str, object]:
        device = self.device
        return {
            "steps": self.steps,
            "rows": round(self.rows, 2),
            "context": round(self.context),
            "step_ms": round(self.step_ms, 4),
            "phases_ms": {k: round(ms, 4) for k, ms in self.phases_ms.items()},
            "read_bytes": round(self.read_bytes),
            "device": None
            if device is None
            else {
                "busy_ms": round(device.busy_ms, 4),
                "replay_context": device.replay_context,
                "launches": device.launches,
                "launch_kind": device.launch_kind,
            },
        }


class PhaseClock:
    """Seconds by phase; while a phase runs inside another, only the inner one is clocked."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open = [HOST]
        self._since = time.perf_counter()

    def stop(self) -> dict[str, float]:
        self._tick()
        return self._seconds

    def _tick(self) -> None:
        now, phase = time.perf_counter(), self._open[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._tick()
            self._open.append(phase)
            try:
                return call(*arguments, **named)
            finally:
                self._tick()
                self._open.pop()

        return timed


@dataclass(frozen=True, slots=True)
class ClockedStep:
    """One decoding step as it was clocked."""

    seconds: dict[str, float]
    rows: int
    context: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Profiler:
    """Clocks the decoding steps of requests that run alone while it is entered; it may be entered several times.

    Prompts are left out. If compiled code runs the drafter's heads, it does so while it grows the tree, and their time
    counts as the tree's.
    """

    value_bytes = 4  # bytes of one number in the keys and values

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._clock = PhaseClock()
        self._steps: dict[str, list[ClockedStep]] = {}
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        engine, executor, proposer = self.engine, self.engine.executor, self.engine.proposer
        parts: tuple[tuple[object, str, str], ...] = (
            (BlockDrafter, "draft", "draft"),
            (DraftHeads, "begin", "heads"),
            (HeadPass, "correct", "heads"),
            (HeadPass, "confidence", "heads"),
            (BlockDrafts, "grow", "tree"),
            (proposer, "_choose", "tree"),
            (executor, "forward", "verify"),
            (engine, "_sample", "verify"),
            (outcomes, "accept", "accept"),
            (SequenceState, "commit", "accept"),
            (engine.contexts, "write", "context write"),
            (engine.contexts, "write_waiting", "context write"),
            (engine.contexts, "hold", "context write"),
        )
        for owner, name, phase in parts:
            self._replace(owner, name, partial(self._clock.timed, phase))
        self._replace(engine, "step", self._whole_step)
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.close()

    def _replace(self, owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wraps a function of an object or class until the profiler is left."""
        own = vars(owner).get(name)  # None if the name is inherited, as an object's methods are from its class
        setattr(owner, name, wrap(getattr(owner, name)))
        undo = partial(delattr, owner, name) if own is None else partial(setattr, owner, name, own)
        self._patches.callback(undo)

    def _whole_step(self, step: Callable[[], list[GenEvent]]) -> Callable[[], list[GenEvent]]:
        def clocked() -> list[GenEvent]:
            self._clock.start()
            events = step()
            self._keep(events, self._clock.stop())
            return events

        return clocked

    def _keep(self, events: Sequence[GenEvent], seconds: dict[str, float]) -> None:
        records = [event.step for event in events if event.step is not None]
        if not records or len(records) < len(events):
            return  # a prompt was computed in this step, or a cancelled request ended
        drafted = "draft" in seconds or any(record.proposal.nodes for record in records)
        kind = DRAFTING if drafted else PLAIN
        rows, context = sum(len(record.proposal.tokens) for record in records), records[0].position
        self.add(kind, ClockedStep(seconds, rows, context))

    def add(self, kind: str, step: ClockedStep) -> None:
        """Counts a clocked step among those of its kind, plain or drafting."""
        self._steps.setdefault(kind, []).append(step)

    def profiles(self) -> dict[str, StepProfile]:
        """Returns what was clocked so far by kind of step, plain or drafting."""
        return {kind: self._profile(kind, steps) for kind, steps in sorted(self._steps.items())}

    def _profile(self, kind: str, steps: list[ClockedStep]) -> StepProfile:
        middle = _middle_half(steps)
        phases = {name: 1e3 * fmean(step.seconds.get(name, 0.0) for step in middle) for name in PHASES}
        context = fmean(step.context for step in middle)
        executor = self.engine.executor
        drafter = executor.variants.drafter if kind == DRAFTING else None
        read = read_bytes(executor.target, drafter, context, self.value_bytes)
        return StepProfile(len(steps), fmean(step.rows for step in middle), context, sum(phases.values()), phases, read)


def _middle_half(steps: list[ClockedStep]) -> list[ClockedStep]:
    """Leaves out the fastest and the slowest quarter, so that disturbances of the machine hardly count."""
    cut = len(steps) // 4
    return sorted(steps, key=lambda step: step.total)[cut : len(steps) - cut]


def read_bytes(target: Decoder, drafter: BlockDrafter | None, context: float, value_bytes: int) -> float:
    """Returns the least bytes that a step of one sequence reads: each matrix, and each visible key and value, once."""
    config = target.config
    windows = {config.pool(index): config.pattern(index).window for index in range(config.layers)}
    read = float(target.step_bytes)
    for pool, (heads, dim) in enumerate(config.kv_shapes):
        read += 2 * heads * dim * value_bytes * _seen(context, windows[pool])
    if drafter is not None:
        own = drafter.drafter
        read += own.step_bytes + (0 if own.head is not None else target.draft_head.nbytes)
        width = 2 * own.config.kv_heads * own.config.head_dim * value_bytes
        read += sum(width * _seen(context, drafter.window, pattern.window) for pattern in own.config.patterns)
    return read


def _seen(context: float, *windows: int) -> float:
    """Returns the tokens of a context that the windows leave in sight; 0 is no window."""
    return min([context, *[window for window in windows if window]])


def make_profiler(engine: Engine) -> Profiler:
    """The profiler for the device that the engine runs on."""
    if engine.executor.device_steps is None:
        return Profiler(engine)
    # Imported here, because nothing of it is needed without a GPU.
    from slipstream.engine.gpu.gpu_profiler import GpuProfiler

    return GpuProfiler(engine)
