"""Decoding steps as launches on the device: a graph per shape, and draft context that several steps write together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from slipstream.engine.executor import BatchColumn, Wish, bucket
from slipstream.engine.gpu.decode_state import DecodeState
from slipstream.engine.gpu.decode_step import DecodeStep, drafted_widths
from slipstream.engine.gpu.graphs import Graphs
from slipstream.engine.gpu.landed_report import Landing, ReportCopy
from slipstream.engine.gpu.row_passes import GpuBlocks
from slipstream.engine.variants import DraftVariant
from slipstream.kernels.gpu.tree_growth import MOST_ROWS
from slipstream.models.gpu.device_models import GpuDrafter

_HOST_COPIES = 3  # copies of a report: the host reads one, the device writes one, one may wait; fewer would collide
StepMaker = Callable[[int, int, GpuDrafter | None, bool], DecodeStep]


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: the number of its sequences, and where its results will be."""

    sequences: int
    rows: int  # per sequence
    copy: ReportCopy
    captured: bool  # its graph was captured for this launch, so that its duration says nothing


class HeldContext:
    """Draft context that steps without drafts have held back, so that several steps write it with one launch."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._step: DecodeStep | None = None  # the step whose held taps are not written yet
        self._turns = 0  # steps that it has held

    def run(self, step: DecodeStep, run: Callable[[], None]) -> None:
        """Runs a step; what another step has held is written first."""
        if step is not self._step:
            self.settle()
        if step.held is None:
            run()
            return
        if self._step is None:
            step.hold_nothing()  # a run outside the loop (a capture) has left taps there
            self._step = step
        run()
        self._turns += 1
        if self._turns == step.held.turns:
            self.settle()

    @torch.inference_mode()
    def settle(self) -> None:
        """Writes what steps have held back.

        Everything else that reads or writes draft context calls this first. If a page goes to another sequence
        meanwhile, nothing is lost, because the context of that sequence is written after what is held.
        """
        step, self._step, self._turns = self._step, None, 0
        if step is not None:
            self.writer(step)()

    def writer(self, step: DecodeStep) -> Callable[[], None]:
        """The launches that write what a step has held, captured now if they have not been yet."""
        return self._graphs.runner(("held", step, step.each, step.drafter), step.write_held)


class DecodeLoop:
    """The device steps of one executor, for one batch at a time; its state stays on the device from step to step."""

    most_rows_each = MOST_ROWS

    def __init__(
        self, state: DecodeState, make_step: StepMaker, graphs: Graphs, held: HeldContext, most_rows: int
    ) -> None:
        self.state = state
        self.make_step = make_step
        self.most_rows = most_rows
        self._graphs = graphs
        self._held = held
        self.steps: dict[tuple[Hashable, ...], DecodeStep] = {}
        self._copies: dict[tuple[int, int], cycle[ReportCopy]] = {}
        self._loaded: tuple[Hashable, ...] = ()

    def serves(self, variant: DraftVariant) -> bool:
        drafter = device_drafter(variant)
        return drafter is not None and drafter.on_device

    def widths(self, sequences: int) -> list[int]:
        return drafted_widths(bucket(sequences), self.most_rows)

    def ready(self, sequences: int, rows: int, variant: DraftVariant | None) -> bool:
        return ("decode", bucket(sequences), rows, device_drafter(variant), True) in self.steps

    def forget_batch(self) -> None:
        self._loaded = ()

    def forget_drafter(self, drafter: GpuDrafter) -> None:
        """Drops the steps and graphs that use the weights of a removed variant."""
        self._held.settle()
        self._graphs.forget(lambda key: isinstance(key, tuple) and len(key) > 3 and key[3] is drafter)
        self.steps = {key: step for key, step in self.steps.items() if key[3] is not drafter}

    def launch(
        self,
        batch: tuple[Hashable, ...],
        describe: Callable[[], Sequence[BatchColumn]],
        wishes: Sequence[Wish],
        variant: DraftVariant | None,
    ) -> Flight:
        if self._loaded != batch:
            self._held.settle()
            self.state.load(describe())
            self._loaded = batch
        rows = 1 + max(wish.nodes for wish in wishes)
        known = len(self.steps)
        step, run = self.step(bucket(len(batch)), bucket(rows), device_drafter(variant), rows > 1)
        self.state.wish(wishes)
        self._held.run(step, run)
        return Flight(len(batch), step.each, self._bring(step), len(self.steps) > known)

    def step(
        self, sequences: int, each: int, drafter: GpuDrafter | None, drafting: bool
    ) -> tuple[DecodeStep, Callable[[], None]]:
        """The step of a shape and the call that runs it, captured now if it has not been yet."""
        key = ("decode", sequences, each, drafter, drafting)
        step = self.steps.get(key)
        if step is not None:
            return step, self._graphs.runner(key, step.launch)
        step = self.steps[key] = self.make_step(sequences, each, drafter, drafting)
        # A capture runs the launches, which would advance the loaded sequences.
        kept = self.state.snapshot()
        self.state.clear()
        run = self._graphs.runner(key, step.launch)
        if step.held is not None:
            self._held.writer(step)
        self.state.restore(kept)
        return step, run

    def _bring(self, step: DecodeStep) -> ReportCopy:
        """Has the step's report copied to the host once the step is done."""
        shape = step.sequences, step.each
        if shape not in self._copies:
            device = self.state.length.device
            self._copies[shape] = cycle([ReportCopy(*shape, device) for _ in range(_HOST_COPIES)])
        copy = next(self._copies[shape])
        copy.begin(step.report)
        return copy

    @staticmethod
    def land(flight: Flight) -> Landing:
        flight.copy.wait()
        return Landing(flight.copy, flight.sequences)


def device_drafter(variant: DraftVariant | None) -> GpuDrafter | None:
    """Returns the drafter of a variant as device steps use it; None if the variant is not on the device."""
    return variant.drafter.gpu if variant is not None and isinstance(variant.drafter, GpuBlocks) else None
