"""The memory behind recurrent states: what every recurrent layer keeps of a sequence, in slots."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.cache.cpu.zeroed_memory import zeros
from slipstream.cache.recurrent import RecurrentState
from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.delta_rule import DeltaShape, DeltaStep, Parents

_ROW_STATE_BYTES = 32 << 20  # the states behind all rows of a step are kept if they take no more than this


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows one sequence has in a forward; `kept` are those behind which the state will be asked for in any case."""

    state: RecurrentState
    rows: int
    parents: Parents
    kept: Collection[int]


class SlotTensors:
    """What recurrent layers keep, slot by slot."""

    windows: Tensor  # of convolutions
    memories: Tensor  # of delta nets

    def copy(self, source: int, destination: int) -> None:
        self.windows[destination] = self.windows[source]
        self.memories[destination] = self.memories[source]

    def clear(self, slot: int) -> None:
        self.windows[slot] = 0.0
        self.memories[slot] = 0.0


class StateTensors(SlotTensors):
    """All layers of a slot together, in fp32."""

    def __init__(self, slots: int, shape: DeltaShape) -> None:
        self.windows = zeros(slots, shape.layers, shape.window, shape.channels)
        self.memories = zeros(slots, shape.layers, shape.value_heads, shape.key_dim, shape.value_dim)
        self.most_kept_rows = _ROW_STATE_BYTES // shape.state_bytes

    def write(self, slot: int, states: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Stores a window and a memory per layer; the next layer's are asked for when one's are written."""
        for layer, (window, memory) in enumerate(states):
            self.windows[slot, layer] = window
            self.memories[slot, layer] = memory

    def begin(self, stretches: Sequence[Stretch]) -> DeltaStep:
        """Leads the rows of several sequences through the recurrent layers.

        The state behind every row is kept where that is little; otherwise behind the last row of a chain (prefilled and
        plainly decoded rows nearly always stay) and where asked for, and other paths are run again from their inputs.
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
