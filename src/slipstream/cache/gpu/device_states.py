"""The memory behind recurrent states on a GPU, with a scratch slot for padding sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.cache.cpu.state_tensors import SlotTensors
from slipstream.cache.recurrent import RecurrentState, StatePool, StatesInSlots
from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.delta_rule import DeltaShape
from slipstream.kernels.gpu.delta_net_launch import DeltaKernels, DeltaLog, DeviceStates, Replay, Walk
from slipstream.kernels.gpu.device_rows import LEAST_ROWS, MAX_DEPTH, DeviceRows

# A step reads one slot and writes the other, so that a launched step can be dropped without losing the state.
SLOTS_PER_SEQUENCE = 2


class Replayed:
    """The state after a path of rows that a pass has logged; it is computed from the log when it is needed."""

    def __init__(self, rows: LoggedRows, item: int, path: Sequence[int]) -> None:
        self._rows = rows
        self._item = item
        self._path = path

    def into(self, slot: int) -> None:
        self._rows.replay(self._item, self._path, slot)


class LoggedRows:
    """Rows of proposals that the host laid out. They stay in the log until the next pass of the same capacity."""

    def __init__(self, kernels: DeltaKernels, states: DeviceStates, each: int, slots: Sequence[int]) -> None:
        self._kernels = kernels
        self._states = states
        self._each = each
        self._slots = slots

    def after(self, item: int, path: Sequence[int]) -> Replayed:
        return Replayed(self, item, path)

    def replay(self, item: int, path: Sequence[int], slot: int) -> None:
        """Advances the state of a sequence along its path and writes the result into a slot."""
        line = [self._slots[item], slot, len(path), *path, *[0] * (MAX_DEPTH - len(path))]
        numbers = torch.tensor([line], dtype=torch.int32).to(self._states.source.device)
        self._kernels.commit(
            self._states,
            Replay(
                numbers[:, 0], numbers[:, 1], numbers[:, 3:].contiguous(), numbers[:, 2], self._each, item * self._each
            ),
        )


class GpuStateTensors(SlotTensors):
    """The convolutions' windows in bf16, the format of the rows, and the delta nets' memories in fp32, by slot."""

    def __init__(self, slots: int, shape: DeltaShape, device: torch.device) -> None:
        self.shape = shape
        self.scratch_slot = slots
        size = slots + 1, shape.layers
        self.windows = torch.zeros(*size, shape.window, shape.channels, dtype=torch.bfloat16, device=device)
        # the keys of a column are contiguous in memory, because one GPU lane sums over them
        self.memories = torch.zeros(*size, shape.value_heads, shape.value_dim, shape.key_dim, device=device)
        self._logs: dict[tuple[int, bool], DeltaLog] = {}

    def write(self, slot: int, states: Replayed) -> None:
        states.into(slot)

    def over(self, rows: DeviceRows, source: Tensor, scratch_place: int, saves: Tensor | None = None) -> DeviceStates:
        """Returns the recurrent part of a pass over these rows.

        The pass writes states into the slots that `saves` names; without `saves` they are committed from a log later.
        """
        log = self._log(rows.tokens.shape[0], saves is None)
        pools = self.windows, self.memories
        return DeviceStates(self.shape, *pools, source, log, Walk.empty(rows), scratch_place, saves)

    def _log(self, rows: int, every_layer: bool) -> DeltaLog:
        """Returns the log that all passes of this capacity share; each pass is committed before the next one begins."""
        capacity = max(LEAST_ROWS, 1 << (rows - 1).bit_length())
        key = capacity, every_layer
        if key not in self._logs:
            self._logs[key] = DeltaLog.empty(self.shape, capacity, every_layer, self.memories.device)
        return self._logs[key]


def gpu_state_pool(slots: int, shape: DeltaShape, stride: int, device: torch.device) -> StatePool:
    """Returns a pool of slots on a device, two for every sequence."""
    return StatePool(slots, GpuStateTensors(slots, shape, device), stride, SLOTS_PER_SEQUENCE)


def device_tensors(pool: StatePool | None) -> GpuStateTensors | None:
    """Returns the tensors behind a pool on a device, or None if the target keeps no states."""
    if pool is None:
        return None
    if not isinstance(pool.memory, GpuStateTensors):
        raise IntegrityError("recurrent states are not on the device on which the target runs")
    return pool.memory


def save_chunk(recurrent: RecurrentState, rows: int, wanted: Sequence[int]) -> dict[int, int]:
    """Chooses slots for the states after a chunk's last row and after the wanted rows; returns them by row.

    The pass over the chunk fills these slots.
    """
    pool = recurrent.pool
    saved = {row: slot for row in wanted if row < rows - 1 and (slot := pool.lend()) is not None}
    lent = list(saved.values())
    saved[rows - 1] = recurrent.spare_slot
    recurrent.try_rows(StatesInSlots({row + 1: slot for row, slot in saved.items()}), 0, lent)
    return saved
