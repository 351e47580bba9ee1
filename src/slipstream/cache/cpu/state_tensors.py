"""The memory behind recurrent states on the CPU: what every recurrent layer keeps of a sequence, in slots."""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.recurrent import RecurrentState
from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.delta_rule import DeltaShape, DeltaStep, Parents

# The states after all rows of a step are kept if they take at most this much memory. A larger value costs memory in
# every step; a smaller one makes more steps run the kept rows again.
_ROW_STATE_BYTES = 32 << 20


def zeros(*shape: int) -> Tensor:
    """Returns a zeroed tensor; a masked slot still enters a sum as 0 * value, and other memory may hold NaN.

    The memory consists of the operating system's zero pages. None of them is touched here, so a pool takes memory only
    as it fills. An allocator would hand out memory that an earlier pool left behind, and would have to write zeros into
    it.
    """
    size = math.prod(shape)
    if not size:
        return torch.zeros(shape)
    memory = mmap.mmap(-1, size * torch.float32.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The rows of one sequence in a forward; `kept` lists those of a chain after which the state is needed."""

    state: RecurrentState
    rows: int
    parents: Parents
    kept: Collection[int]


class SlotTensors:
    """The tensors of recurrent layers, indexed by slot."""

    windows: Tensor  # the last inputs of the convolutions
    memories: Tensor  # the matrices of the delta nets

    def copy(self, source: int, destination: int) -> None:
        self.windows[destination] = self.windows[source]
        self.memories[destination] = self.memories[source]

    def clear(self, slot: int) -> None:
        self.windows[slot] = 0.0
        self.memories[slot] = 0.0


class StateTensors(SlotTensors):
    """The states of all recurrent layers, one per slot, in fp32."""

    def __init__(self, slots: int, shape: DeltaShape) -> None:
        self.windows = zeros(slots, shape.layers, shape.window, shape.channels)
        self.memories = zeros(slots, shape.layers, shape.value_heads, shape.key_dim, shape.value_dim)
        self.most_kept_rows = _ROW_STATE_BYTES // shape.state_bytes

    def write(self, slot: int, states: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Stores a window and a memory per layer; `states` may compute each layer when its turn comes."""
        for layer, (window, memory) in enumerate(states):
            self.windows[slot, layer] = window
            self.memories[slot, layer] = memory

    def begin(self, stretches: Sequence[Stretch]) -> DeltaStep:
        """Prepares the recurrent layers for the rows of several sequences.

        The state after every row is kept if all of them fit into `_ROW_STATE_BYTES`. Otherwise the states after a
        chain's last row and after `kept` rows are stored, because prefilled and plainly decoded rows nearly always
        stay; the state after any other path is computed again from the rows' inputs.
        """
        every = sum(stretch.rows for stretch in stretches) <= self.most_kept_rows
        slots, kept = [], []
        for stretch in stretches:
            if stretch.state.slot is None:
                raise IntegrityError("a sequence runs before it was started")
            slots.append(stretch.state.slot)
            chain = {stretch.rows - 1, *stretch.kept} if stretch.parents is None else ()
            kept.append(range(stretch.rows) if every else chain)
        step = DeltaStep(
            self.windows, self.memories, slots, [(stretch.rows, stretch.parents) for stretch in stretches], kept
        )
        for item, stretch in enumerate(stretches):
            stretch.state.try_rows(step, item)
        return step
