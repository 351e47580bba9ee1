"""Keeps the device busy: decoding steps are launched ahead of what the host has still to do for the last one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.gpu.graphs import Graphs
from slipstream.engine.gpu.state import DecodeState, Decoding, Wish
from slipstream.engine.gpu.step import DecodeStep, bucket
from slipstream.models.gpu_models import GpuDrafter
from slipstream.types import Proposal

_HOST_BUFFERS = 3
StepMaker = Callable[[int, int, GpuDrafter | None, bool], DecodeStep]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step on its way: for whom, and where its results will be."""

    batch: tuple[Hashable, ...]
    output: Tensor
    each: int
    done: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class Landed:
    """What a step did for one sequence."""

    proposal: Proposal
    chosen: list[int]
    broken: bool  # the drafter's numbers are none


class DecodeLoop:
    """One batch at a time; its state stays on the device from step to step."""

    def __init__(self, state: DecodeState, make_step: StepMaker, graphs: Graphs, device: torch.device) -> None:
        self._state = state
        self._make_step = make_step
        self._graphs = graphs
        self._device = device
        self._steps: dict[tuple[Hashable, ...], DecodeStep] = {}
        self._buffers: dict[tuple[int, int], cycle[Tensor]] = {}
        self._loaded: tuple[Hashable, ...] = ()

    def forget_batch(self) -> None:
        """What the device believes of its sequences is no longer true; the next launch loads them again."""
        self._loaded = ()

    def forget_drafter(self, drafter: GpuDrafter) -> None:
        """A variant goes, and with it the steps that hold its weights."""
        self._graphs.forget(lambda key: isinstance(key, tuple) and len(key) > 3 and key[3] is drafter)
        self._steps = {key: step for key, step in self._steps.items() if key[3] is not drafter}

    def launch(
        self, batch: tuple[Hashable, ...], describe: Callable[[], Sequence[Decoding]], wishes: Sequence[Wish],
        drafter: GpuDrafter | None,
    ) -> Flight:
        """Starts a step for the batch; `describe` is asked only if the device does not know these sequences yet."""
        if self._loaded != batch:
            self._state.load(describe())
            self._loaded = batch
        sequences = bucket(len(batch))
        rows = 1 + max(wish.nodes for wish in wishes)
        each = bucket(rows)
        step, run = self.step(sequences, each, drafter, rows > 1)
        self._state.wish(wishes)
        run()
        return self._fly(batch, step)

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
        self._state.restore(kept)
        return step, run

    def _fly(self, batch: tuple[Hashable, ...], step: DecodeStep) -> Flight:
        shape = step.output.shape[0], step.output.shape[1]
        if shape not in self._buffers:
            pinned = self._device.type == "cuda"
            made = [torch.empty(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(_HOST_BUFFERS)]
            self._buffers[shape] = cycle(made)
        output = next(self._buffers[shape])
        output.copy_(step.output, non_blocking=True)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Flight(batch, output, step.each, done)

    @staticmethod
    def land(flight: Flight) -> list[Landed]:
        """Waits for a step; the only place where the host does."""
        if flight.done is not None:
            flight.done.synchronize()
        table: NDArray[np.int32] = flight.output.numpy()
        landed = []
        for line in table[: len(flight.batch)]:
            rows = 1 + int(line[0])
            tokens, parents, chances, chosen = line[2:].reshape(4, flight.each)[:, :rows]
            proposal = Proposal(
                tuple(tokens.tolist()), tuple(parents.tolist()), tuple(chances.view(np.float32).tolist())
            )
            landed.append(Landed(proposal, chosen.tolist(), bool(line[1])))
        return landed
