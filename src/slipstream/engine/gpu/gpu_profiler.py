"""Where a device step's time goes: real steps give the whole and the host's part, replays give the phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Self

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from slipstream.engine.engine import Engine
from slipstream.engine.executor import BatchColumn, Wish
from slipstream.engine.gpu.decode_loop import Flight
from slipstream.engine.gpu.decode_step import DecodeStep
from slipstream.engine.gpu.gpu_costs import StepMaker
from slipstream.engine.gpu.gpu_executor import GpuExecutor
from slipstream.engine.profiler import DRAFTING, HOST, PHASES, PLAIN, ClockedStep, DeviceProfile, Profiler, StepProfile
from slipstream.engine.variants import DraftVariant
from slipstream.models.gpu.device_models import GpuDrafter

_ROUNDS = 8  # replays of each kind of step, of which the medians count
_COPIES = ("Memcpy", "Memset")  # the profiler's names of copies, which are not counted as kernels
Milliseconds = Callable[[], float]  # a measured time, which may be asked for once the device is done
Launch = Callable[
    [tuple[Hashable, ...], Callable[[], Sequence[BatchColumn]], Sequence[Wish], DraftVariant | None], Flight
]


@dataclass(frozen=True, slots=True)
class _Flown:
    """The last step of one kind, as it was launched."""

    step: DecodeStep
    drafter: GpuDrafter | None
    wishes: Sequence[Wish]


@dataclass(slots=True)
class _Seen:
    """The device times and launches of one kind of step."""

    busy_ms: list[float] = field(default_factory=list)
    phases_ms: dict[str, list[float]] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    context: int = 0


class GpuProfiler(Profiler):
    """Profiles device steps; steps that need the host are clocked as on a CPU, because their parts wait for results.

    When an answer has ended, the phases are replayed at the context where it ended. No other request may run then.
    """

    value_bytes = 2

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert isinstance(engine.executor, GpuExecutor)
        self._loop = engine.executor.device_steps
        self._device = engine.executor.device
        self._seen: dict[str, _Seen] = {}
        self._flown: dict[str, _Flown] = {}
        self._pending: list[tuple[str, Milliseconds]] = []
        self._latest: tuple[DecodeStep, Milliseconds]

    def __enter__(self) -> Self:
        super().__enter__()
        self._flown.clear()
        self._pending.clear()
        self._replace(self._loop, "step", self._clocked_runs)
        self._replace(self._loop, "launch", self._noted_launches)
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if any(exc):
            return
        self._device.wait()
        for kind, milliseconds in self._pending:
            self._seen.setdefault(kind, _Seen()).busy_ms.append(milliseconds())
        for kind, flown in self._flown.items():
            self._replay(flown, self._seen[kind])

    def _clocked_runs(self, make: StepMaker) -> StepMaker:
        """Clocks every run of a step. Steps also run to be timed for the policy, so a launch says which runs count."""

        def step(
            sequences: int, each: int, drafter: GpuDrafter | None, drafting: bool
        ) -> tuple[DecodeStep, Callable[[], None]]:
            made, run = make(sequences, each, drafter, drafting)

            def clocked() -> None:
                self._latest = made, timed(run, self._device.device)

            return made, clocked

        return step

    def _noted_launches(self, launch: Launch) -> Launch:
        """Notes the kind, the time and the wishes of every launched step."""

        def noted(
            batch: tuple[Hashable, ...],
            describe: Callable[[], Sequence[BatchColumn]],
            wishes: Sequence[Wish],
            variant: DraftVariant | None,
        ) -> Flight:
            flight = launch(batch, describe, wishes, variant)
            kind = DRAFTING if any(wish.nodes for wish in wishes) else PLAIN
            step, milliseconds = self._latest
            self._pending.append((kind, milliseconds))
            self._flown[kind] = _Flown(step, step.drafter, list(wishes))
            return flight

        return noted

    @torch.inference_mode()
    def _replay(self, flown: _Flown, seen: _Seen) -> None:
        """Runs the phases of a step several times from where the device stands, and restores its state every time."""
        state, graphs, device = self._loop.state, self._device.graphs, self._device.device
        kept = state.snapshot()
        state.clear()  # a capture runs what it captures, which would advance the loaded sequences
        runs = [
            (name, graphs.runner(("profile", name, flown.step, flown.drafter), phase))
            for name, phase in flown.step.phases
        ]
        state.restore(kept)
        state.wish(flown.wishes)
        seen.context = int(state.length[0])
        for _ in range(_ROUNDS):
            told = [(name, timed(run, device)) for name, run in runs]
            self._device.wait()
            for name, milliseconds in told:
                seen.phases_ms.setdefault(name, []).append(milliseconds())
            state.restore(kept)
        if not seen.launches:
            state.wish(flown.wishes)
            seen.launches = {name: count_launches(phase, device) for name, phase in flown.step.phases}
            state.restore(kept)

    def _profile(self, kind: str, steps: list[ClockedStep]) -> StepProfile:
        whole = super()._profile(kind, steps)
        seen = self._seen.get(kind)
        if seen is None:
            return whole
        busy = median(seen.busy_ms)
        phases = {name: median(seen.phases_ms[name]) if name in seen.phases_ms else 0.0 for name in PHASES}
        phases[HOST] = max(0.0, whole.step_ms - busy)
        counted = seen.launches if any(seen.launches.values()) else {}
        what = "kernels" if self._device.device.type == "cuda" else "torch operations"
        return replace(whole, phases_ms=phases, device=DeviceProfile(busy, seen.context, counted, what))


def timed(run: Callable[[], None], device: torch.device) -> Milliseconds:
    """Runs a call and returns a function that gives its device time; without a GPU the call's own time is taken."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        taken = (time.perf_counter() - began) * 1e3
        return lambda: taken
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    return partial(start.elapsed_time, end)


def count_launches(phase: Callable[[], None], device: torch.device) -> int:
    """Counts the kernels that torch's profiler sees in a phase without its graph; without a GPU, torch's operations."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        phase()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = seen.events() or ()
    if not on_gpu:
        return sum(event.cpu_parent is None for event in events)
    return sum(event.device_type == DeviceType.CUDA and not event.name.startswith(_COPIES) for event in events)
