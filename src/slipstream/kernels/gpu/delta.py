"""Gated delta nets on the device: rows continue their parents' states, one update per row, and any path can be kept.

A pass changes no state that anybody stands on: it writes into other slots (`saves`), or leaves what its rows bring to
the recurrence (`DeltaLog`), from which `commit` leads a state along the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.kernels.delta import DeltaRule, DeltaShape
from slipstream.kernels.gpu import delta_kernels
from slipstream.kernels.gpu.attention import can_overlap
from slipstream.kernels.gpu.rows import LEAST_ROWS, DeviceRows

COLUMNS = 8  # of a state that a program (one warp) holds: 48 heads of 128 columns give each multiprocessor about six
PARTS = 8  # programs that share the branches of a tree
MOST_PARTS = 32  # the same over all sequences of a step: more would only be started to find nothing to do


@dataclass(frozen=True, slots=True)
class DeltaLog:
    """What rows bring to the recurrence: of every layer where a commit will ask for it, else of the last one only."""

    every_layer: bool
    queries: Tensor  # fp32 [rows, key heads, key dim]
    products: Tensor  # fp32 [rows, key heads]: a row's query times its key
    reads: Tensor  # fp32 [rows, value heads, value dim]: what rows have read
    keys: Tensor  # fp32 [layers, rows, key heads, key dim]
    values: Tensor  # fp32 [layers, rows, value heads, value dim]
    write: Tensor  # fp32 [layers, rows, value heads]: how much of a row is written
    left: Tensor  # fp32 [layers, rows, value heads]: how much of the state it leaves
    inputs: Tensor  # bf16 [layers, rows, channels]: what the convolution read

    @classmethod
    def empty(cls, shape: DeltaShape, rows: int, every_layer: bool, device: torch.device) -> DeltaLog:
        rows, layers = max(rows, LEAST_ROWS), shape.layers if every_layer else 1

        def numbers(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        key, value = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
        return cls(
            every_layer, numbers(rows, *key), numbers(rows, shape.key_heads), numbers(rows, *value),
            numbers(layers, rows, *key), numbers(layers, rows, *value), numbers(layers, rows, shape.value_heads),
            numbers(layers, rows, shape.value_heads), numbers(layers, rows, shape.channels, dtype=torch.bfloat16),
        )

    def of(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, gates and inputs of one layer's rows."""
        place = layer if self.every_layer else 0
        return self.keys[place], self.values[place], self.write[place], self.left[place], self.inputs[place]


@dataclass(frozen=True, slots=True)
class Lines:
    """The ways through the rows of each sequence: one per row that no other continues."""

    counts: Tensor  # int32 [sequences]
    ends: Tensor  # int32 [sequences, each]: the last row of each
    lengths: Tensor  # int32 [sequences, each]: rows of each, the last one included

    @classmethod
    def empty(cls, rows: DeviceRows) -> Lines:
        def numbers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=rows.tokens.device)

        return cls(numbers(rows.sequences), *(numbers(rows.sequences, rows.each) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class DeviceStates:
    """The recurrent side of one pass over rows."""

    shape: DeltaShape
    windows: Tensor  # bf16 [slots, layers, window, channels]
    memories: Tensor  # fp32 [slots, layers, value heads, key dim, value dim]
    source: Tensor  # int32 [sequences]: the slot whose state a sequence's rows continue
    log: DeltaLog
    lines: Lines
    scratch_place: int  # rows stored there or behind do not count
    saves: Tensor | None = None  # int32 [rows], of chains: the slot that gets the state behind a row, -1: none

    @classmethod
    def over(
        cls, shape: DeltaShape, pools: tuple[Tensor, Tensor], source: Tensor, log: DeltaLog, rows: DeviceRows,
        scratch_place: int, saves: Tensor | None = None,
    ) -> DeviceStates:
        return cls(shape, *pools, source, log, Lines.empty(rows), scratch_place, saves)


@dataclass(frozen=True, slots=True)
class Replay:
    """A commit: of which sequences, along which of the rows that a pass has logged, from which slot into which."""

    source: Tensor  # int32 [sequences]
    destination: Tensor  # int32 [sequences]; may be the same slots
    path: Tensor  # int32 [sequences, MAX_DEPTH]: rows within their sequence
    taken: Tensor  # int32 [sequences]: how many of them; 0 touches nothing
    each: int  # rows of a sequence in the log
    first: int = 0  # row of the log where the first sequence begins


@dataclass(frozen=True, slots=True)
class DeltaKernels:
    """The launchers, or their torch twins."""

    plan: Callable[[DeviceRows, DeviceStates], None]
    mix: Callable[[Tensor, Tensor, DeviceRows, DeltaRule, DeviceStates, int], None]
    recur: Callable[[DeviceRows, DeviceStates, int], None]
    gate: Callable[[Tensor, Tensor, float, DeviceRows, DeviceStates, Tensor], None]
    commit: Callable[[DeviceStates, Replay], None]
    swap: Callable[[Tensor, Tensor, Tensor], None]


def is_line(rows: DeviceRows) -> bool:
    """Whether every row continues the one before it, whatever the paths say."""
    return rows.kind == "chain" or rows.each == 1


def plan(rows: DeviceRows, states: DeviceStates) -> None:
    """Finds the ways through the rows, once for all layers."""
    lines = states.lines
    delta_kernels.plan_kernel[(rows.sequences,)](
        rows.positions, rows.places, rows.base, rows.paths, lines.counts, lines.ends, lines.lengths,
        states.scratch_place, EACH=rows.each, PADDED=triton.next_power_of_2(rows.each), TREE=not is_line(rows),
        num_warps=4,
    )


def mix(
    inputs: Tensor, gates: Tensor, rows: DeviceRows, rule: DeltaRule, states: DeviceStates, layer: int
) -> None:
    """A layer's convolution, norms and gates, into the log.

    inputs bf16 [rows, channels] and gates bf16 [rows, 2 * value heads]; their rows may lie apart.
    """
    shape, log = states.shape, states.log
    keys, values, write, left, kept = log.of(layer)
    delta_kernels.mix_kernel[(shape.key_heads + shape.value_heads, rows.rows)](
        inputs, inputs.stride(0), gates, gates.stride(0), rule.kernel, rule.rates, rule.shift, states.windows,
        states.source, layer, rows.positions, rows.places, rows.base, rows.paths, log.queries, keys, log.products,
        values, write, left, kept, states.scratch_place, shape.key_dim**-0.5,
        LAYERS=shape.layers, KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, BLOCK=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
        TAPS=shape.kernel, EACH=rows.each, TREE=not is_line(rows), OVERLAP=can_overlap(inputs.device),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def recur(rows: DeviceRows, states: DeviceStates, layer: int) -> None:
    """What the rows of a layer read, in the log; states behind some of them where `saves` wants them."""
    shape, log, lines = states.shape, states.log, states.lines
    keys, values, write, left, kept = log.of(layer)
    tree, overlap = not is_line(rows), can_overlap(states.memories.device)
    assert states.saves is None or not tree, "states behind the rows of a tree are committed"
    parts = max(1, min(PARTS, rows.each // 4, MOST_PARTS // rows.sequences)) if tree else 1
    tiles, sizes = _tiles(shape)
    delta_kernels.recur_kernel[(tiles, parts, rows.sequences)](
        states.memories, states.windows, states.source, lines.counts if states.saves is None else states.saves,
        lines.counts, lines.ends, lines.lengths, rows.paths, log.queries, keys, log.products, values, write, left,
        kept, log.reads, layer, **sizes, EACH=rows.each, PARTS=parts, TREE=tree, SAVES=states.saves is not None,
        OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )


def gate(
    gates: Tensor, weight: Tensor, eps: float, rows: DeviceRows, states: DeviceStates, out: Tensor
) -> None:
    """out bf16 [padded rows, value heads * value dim]: what rows have read, normed by head, times silu(gates)."""
    shape = states.shape
    delta_kernels.gate_kernel[(shape.value_heads, out.shape[0])](
        states.log.reads, gates, gates.stride(0), weight, rows.places, out, eps, states.scratch_place,
        VALUE_HEADS=shape.value_heads, VALUE_DIM=shape.value_dim, BLOCK=triton.next_power_of_2(shape.value_dim),
        num_warps=1, enable_fp_fusion=False,
    )


def commit(states: DeviceStates, replay: Replay) -> None:
    """Leads states along paths, in all layers at once."""
    shape, log = states.shape, states.log
    assert log.every_layer or shape.layers == 1, "a commit needs what the rows of every layer left"
    tiles, sizes = _tiles(shape)
    delta_kernels.commit_kernel[(tiles, shape.layers, replay.taken.shape[0])](
        states.memories, states.windows, replay.source, replay.destination, replay.taken, replay.path, log.keys,
        log.values, log.write, log.left, log.inputs, log.reads.shape[0], replay.first, **sizes, EACH=replay.each,
        num_warps=1,
    )


def swap(source: Tensor, destination: Tensor, taken: Tensor) -> None:
    """Exchanges the two slots of every sequence that has moved on; int32 [sequences] each."""
    delta_kernels.swap_kernel[(taken.shape[0],)](source, destination, taken, num_warps=1)


def _tiles(shape: DeltaShape) -> tuple[int, dict[str, Any]]:
    """How many programs share a layer's state, and the sizes they know."""
    columns = min(COLUMNS, triton.next_power_of_2(shape.value_dim))
    blocks = triton.cdiv(shape.value_dim, columns)
    tiles = shape.value_heads * blocks
    channels = triton.cdiv(shape.channels, tiles)  # of the window, that a program moves
    sizes = (
        shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, triton.next_power_of_2(shape.key_dim),
        columns, triton.next_power_of_2(channels), channels,
    )
    return tiles, {"LAYERS": shape.layers, "SHAPE": sizes, "TAPS": shape.kernel, "BLOCKS": blocks, "TILED": shape.tiled}


TRITON = DeltaKernels(plan, mix, recur, gate, commit, swap)
