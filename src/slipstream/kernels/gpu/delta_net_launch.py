"""Gated delta nets on the device: rows continue their parents' states with one update per row, and any path can be
kept.

A pass does not change the state of any sequence. It writes new states into other slots (`saves`), or logs what its rows
contribute to the recurrence (`DeltaLog`); from the log `commit` advances a state along the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.kernels.cpu.delta_rule import DeltaRule, DeltaShape
from slipstream.kernels.gpu import delta_kernels, delta_walk
from slipstream.kernels.gpu.device_rows import LEAST_ROWS, DeviceRows
from slipstream.kernels.gpu.paged_attention import can_overlap

COLUMNS = 4  # columns of a state per warp; the number determines the order in which products with keys are summed
WARPS = 2  # of a program, which share a row's loads; 48 heads of 128 columns give a multiprocessor about six programs
MOST_SHELVES = 4  # states that a walk through a tree can keep in registers
EARLY_ROWS = 16  # with more rows, early programs of the next launch would take resources from those at work


@dataclass(frozen=True, slots=True)
class DeltaLog:
    """What rows contribute to the recurrence: of every layer if a commit needs it, otherwise of the last layer only."""

    every_layer: bool
    queries: Tensor  # fp32 [rows, key heads, key dim]
    products: Tensor  # fp32 [rows, key heads]: the product of a row's query and key
    reads: Tensor  # fp32 [rows, value heads, value dim]: what rows have read
    keys: Tensor  # fp32 [layers, rows, key heads, key dim]
    values: Tensor  # fp32 [layers, rows, value heads, value dim]
    write: Tensor  # fp32 [layers, rows, value heads]: how much of a row is written
    left: Tensor  # fp32 [layers, rows, value heads]: the factor by which a row fades the state
    inputs: Tensor  # bf16 [layers, rows, channels]: the inputs of the convolution

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
        """Returns keys, values, both gates and inputs of one layer's rows."""
        place = layer if self.every_layer else 0
        return self.keys[place], self.values[place], self.write[place], self.left[place], self.inputs[place]


@dataclass(frozen=True, slots=True)
class Walk:
    """The order in which the rows of each sequence are visited."""

    counts: Tensor  # int32 [sequences]: rows that are not padding
    steps: Tensor  # int32 [sequences, each], for trees: the row of each step, and flags for its state

    @classmethod
    def empty(cls, rows: DeviceRows) -> Walk:
        def numbers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=rows.tokens.device)

        return cls(numbers(rows.sequences), numbers(rows.sequences, rows.each))


@dataclass(frozen=True, slots=True)
class DeviceStates:
    """The recurrent part of one pass over rows."""

    shape: DeltaShape
    windows: Tensor  # bf16 [slots, layers, window, channels]
    memories: Tensor  # fp32 [slots, layers, value heads, value dim, key dim]
    source: Tensor  # int32 [sequences]: the slot whose state a sequence's rows continue
    log: DeltaLog
    walk: Walk
    scratch_place: int  # rows stored at this place or after it are padding
    saves: Tensor | None = None  # int32 [rows], for chains: the slot that gets the state after a row, or -1


@dataclass(frozen=True, slots=True)
class Replay:
    """The job of a commit: the sequences, the logged rows to follow, and the slots to read and write."""

    source: Tensor  # int32 [sequences]
    destination: Tensor  # int32 [sequences]; it may be the same slots
    path: Tensor  # int32 [sequences, MAX_DEPTH]: rows within their sequence
    taken: Tensor  # int32 [sequences]: how many rows to follow; 0 changes nothing
    each: int  # rows of a sequence in the log
    first: int = 0  # row of the log at which the first sequence begins


@dataclass(frozen=True, slots=True)
class DeltaKernels:
    """The launchers of all delta kernels, or their counterparts in plain torch."""

    plan: Callable[[DeviceRows, DeviceStates], None]
    mix: Callable[[Tensor, Tensor, DeviceRows, DeltaRule, DeviceStates, int], None]
    recur: Callable[[DeviceRows, DeviceStates, int], None]
    gate: Callable[[Tensor, Tensor, float, DeviceRows, DeviceStates, Tensor], None]
    commit: Callable[[DeviceStates, Replay], None]
    swap: Callable[[Tensor, Tensor, Tensor], None]


def is_line(rows: DeviceRows) -> bool:
    """Whether every row continues the one before it; the rows' paths are then not needed."""
    return rows.kind == "chain" or rows.each == 1


def plan(rows: DeviceRows, states: DeviceStates) -> None:
    """Finds the order in which rows are visited, once for all layers."""
    walk, tree = states.walk, not is_line(rows)
    delta_kernels.plan_kernel[(rows.sequences,)](
        rows.positions, rows.places, rows.base, rows.paths, walk.counts, walk.steps, states.scratch_place,
        EACH=rows.each, PADDED=triton.next_power_of_2(rows.each), TREE=tree,
        num_warps=max(4, triton.next_power_of_2(rows.each) // 4) if tree else 4,
    )


def mix(
    inputs: Tensor, gates: Tensor, rows: DeviceRows, rule: DeltaRule, states: DeviceStates, layer: int
) -> None:
    """Computes a layer's convolution, norms and gates and writes them into the log.

    `inputs` are bf16 [rows, channels], `gates` are bf16 [rows, 2 * value heads]; their rows need not be contiguous.
    """
    shape, log = states.shape, states.log
    keys, values, write, left, kept = log.of(layer)
    overlap = can_overlap(inputs.device)
    delta_kernels.mix_kernel[(shape.key_heads + shape.value_heads, rows.rows)](
        inputs, inputs.stride(0), gates, gates.stride(0), rule.kernel, rule.rates, rule.shift, states.windows,
        states.source, layer, rows.positions, rows.places, rows.base, rows.paths, log.queries, keys, log.products,
        values, write, left, kept, states.scratch_place, shape.key_dim**-0.5,
        LAYERS=shape.layers, KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, BLOCK=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
        TAPS=shape.kernel, EACH=rows.each, TREE=not is_line(rows), OVERLAP=overlap, num_warps=1,
        enable_fp_fusion=False, launch_pdl=overlap and rows.rows <= EARLY_ROWS,
    )  # fmt: skip


def recur(rows: DeviceRows, states: DeviceStates, layer: int) -> None:
    """Computes what the rows of a layer read, into the log, and stores the states after rows that `saves` names."""
    shape, log, walk = states.shape, states.log, states.walk
    keys, values, write, left, kept = log.of(layer)
    tree, overlap = not is_line(rows), can_overlap(states.memories.device)
    assert states.saves is None or not tree, "states after the rows of a tree must be committed, not saved"
    shelves = most_shelves(rows.each) if tree else 0
    assert shelves <= MOST_SHELVES, "a tree has at most 64 rows"
    tiles, sizes = _tiles(shape)
    delta_walk.recur_kernel[(tiles, rows.sequences)](
        states.memories, states.windows, states.source, walk.counts if states.saves is None else states.saves,
        walk.counts, walk.steps, log.queries, keys, log.products, values, write, left, kept, log.reads, layer,
        **sizes, EACH=rows.each, TREE=tree, SHELVES=shelves, SAVES=states.saves is not None, OVERLAP=overlap,
        num_warps=WARPS, launch_pdl=overlap,
    )


def most_shelves(rows: int) -> int:
    """Returns how many states a walk through a tree of `rows` rows keeps at most, if the largest branch comes last.

    A state is kept for a branch of two rows or more that is not the last one. A later branch has at least as many rows,
    so both need twice the rows of the first. A branch in which another state is kept has its own first row and, after
    it, twice the rows of that inner branch.
    """
    shelves, least = 0, 2
    while 2 * least <= rows:
        shelves, least = shelves + 1, 2 * least + 1
    return shelves


def gate(
    gates: Tensor, weight: Tensor, eps: float, rows: DeviceRows, states: DeviceStates, out: Tensor
) -> None:
    """Norms what rows have read, per head, and multiplies it by silu(gates).

    out is bf16 [padded rows, value heads * value dim].
    """
    shape, overlap = states.shape, can_overlap(out.device)
    delta_kernels.gate_kernel[(shape.value_heads, out.shape[0])](
        states.log.reads, gates, gates.stride(0), weight, rows.places, out, eps, states.scratch_place,
        VALUE_HEADS=shape.value_heads, VALUE_DIM=shape.value_dim, BLOCK=triton.next_power_of_2(shape.value_dim),
        OVERLAP=overlap, num_warps=1, enable_fp_fusion=False, launch_pdl=overlap and rows.rows <= EARLY_ROWS,
    )


def commit(states: DeviceStates, replay: Replay) -> None:
    """Advances states along paths, in all layers at once."""
    shape, log = states.shape, states.log
    assert log.every_layer or shape.layers == 1, "a commit needs the logged rows of every layer"
    tiles, sizes = _tiles(shape)
    delta_walk.commit_kernel[(tiles, shape.layers, replay.taken.shape[0])](
        states.memories, states.windows, replay.source, replay.destination, replay.taken, replay.path, log.keys,
        log.values, log.write, log.left, log.inputs, log.reads.shape[0], replay.first, **sizes,
        EACH=replay.each, num_warps=WARPS,
    )


def swap(source: Tensor, destination: Tensor, taken: Tensor) -> None:
    """Exchanges the two slots of every sequence that has kept rows; all arguments are int32 [sequences]."""
    delta_kernels.swap_kernel[(taken.shape[0],)](source, destination, taken, num_warps=1)


def _tiles(shape: DeltaShape) -> tuple[int, dict[str, Any]]:
    """Returns how many programs share a layer's state, and the sizes with which they are compiled."""
    lanes = 32 // COLUMNS
    turns = triton.cdiv(triton.next_power_of_2(shape.key_dim), 4 * lanes)
    blocks = triton.cdiv(shape.value_dim, COLUMNS * WARPS)
    tiles = shape.value_heads * blocks
    channels = triton.cdiv(shape.channels, tiles)  # channels of the window that a program moves
    sizes = (
        shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, turns, WARPS, lanes, COLUMNS,
        triton.next_power_of_2(channels), channels,
    )
    return tiles, {"LAYERS": shape.layers, "SHAPE": sizes, "TAPS": shape.kernel, "BLOCKS": blocks, "TILED": shape.tiled}


TRITON = DeltaKernels(plan, mix, recur, gate, commit, swap)
