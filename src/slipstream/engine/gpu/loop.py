"""Keeps the device busy: decoding steps are launched ahead of what the host has still to do for the last one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from slipstream.engine.gpu.graphs import Graphs
from slipstream.engine.gpu.landing import Landing, ReportCopy
from slipstream.engine.gpu.state import DecodeState, Decoding, Wish
from slipstream.engine.gpu.step import DecodeStep, bucket
from slipstream.models.gpu.device_models import GpuDrafter

_HOST_COPIES = 3
StepMaker = Callable[[int, int, GpuDrafter | None, bool], DecodeStep]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step on its way: for how many, and where its results will be."""

    sequences: int
    rows: int  # of each
    copy: ReportCopy
    captured: bool  # its graph was made for it: how long it takes says nothing


class DecodeLoop:
    """One batch at a time; its state stays on the device from step to step."""

    def __init__(self, state: DecodeState, make_step: StepMaker, graphs: Graphs, device: torch.device) -> None:
        self._state = state
        self._make_step = make_step
        self._graphs = graphs
        self._device = device
        self._steps: dict[tuple[Hashable, ...], DecodeStep] = {}
        self._copies: dict[tuple[int, int], cycle[ReportCopy]] = {}
        self._loaded: tuple[Hashable, ...] = ()
        self._holding: DecodeStep | None = None  # whose taps are not all written yet
        self._turns = 0  # that it has held

    def forget_batch(self) -> None:
        """What the device believes of its sequences is no longer true; the next launch loads them again."""
        self._loaded = ()

    def forget_drafter(self, drafter: GpuDrafter) -> None:
        """A variant goes, and with it the steps that hold its weights."""
        self.settle()
        self._graphs.forget(lambda key: isinstance(key, tuple) and len(key) > 3 and key[3] is drafter)
        self._steps = {key: step for key, step in self._steps.items() if key[3] is not drafter}

    def launch(
        self,
        batch: tuple[Hashable, ...],
        describe: Callable[[], Sequence[Decoding]],
        wishes: Sequence[Wish],
        drafter: GpuDrafter | None,
    ) -> Flight:
        """Starts a step for the batch; `describe` is asked only if the device does not know these sequences yet."""
        if self._loaded != batch:
            self.settle()
            self._state.load(describe())
            self._loaded = batch
        rows = 1 + max(wish.nodes for wish in wishes)
        known = len(self._steps)
        step, run = self.step(bucket(len(batch)), bucket(rows), drafter, rows > 1)
        if step is not self._holding:
            self.settle()
        self._state.wish(wishes)
        self._run(step, run)
        return Flight(len(batch), step.each, self._bring(step), len(self._steps) > known)

    def _run(self, step: DecodeStep, run: Callable[[], None]) -> None:
        if step.held is None:
            run()
            return
        if self._holding is None:
            step.hold_nothing()  # whoever ran this step for its own sake has left something there
            self._holding = step
        run()
        self._turns += 1
        if self._turns == step.held.turns:
            self.settle()

    @torch.inference_mode()
    def settle(self) -> None:
        """Writes the draft context that steps have held back.

        Asked for by whoever reads or writes draft context another way. A page that changes hands meanwhile needs
        nobody's care: its next owner's context is written after what is held for the last one.
        """
        step, self._holding, self._turns = self._holding, None, 0
        if step is not None:
            self._write_held(step)()

    def _write_held(self, step: DecodeStep) -> Callable[[], None]:
        return self._graphs.runner(("held", step, step.each, step.drafter), step.write_held)

    def has(self, sequences: int, each: int, drafter: GpuDrafter | None, drafting: bool) -> bool:
        """Whether a step of a shape can run without being captured first."""
        return ("decode", sequences, each, drafter, drafting) in self._steps

    def step(
        self, sequences: int, each: int, drafter: GpuDrafter | None, drafting: bool
    ) -> tuple[DecodeStep, Callable[[], None]]:
        """The step of a shape and what runs it, captured now if it has not been yet."""
        key = ("decode", sequences, each, drafter, drafting)
        step = self._steps.get(key)
        if step is not None:
            return step, self._graphs.runner(key, step.launch)
        step = self._steps[key] = self._make_step(sequences, each, drafter, drafting)
        # a capture runs the launches, which would move the sequences on
        kept = self._state.snapshot()
        self._state.clear()
        run = self._graphs.runner(key, step.launch)
        if step.held is not None:
            self._write_held(step)
        self._state.restore(kept)
        return step, run

    def _bring(self, step: DecodeStep) -> ReportCopy:
        """Has the step's report copied to the host once the step is done."""
        shape = step.sequences, step.each
        if shape not in self._copies:
            self._copies[shape] = cycle([ReportCopy(*shape, self._device) for _ in range(_HOST_COPIES)])
        copy = next(self._copies[shape])
        copy.begin(step.report)
        return copy

    @staticmethod
    def land(flight: Flight) -> Landing:
        """Waits for a step; the only place where the host does."""
        flight.copy.wait()
        return Landing(flight.copy, flight.sequences)
