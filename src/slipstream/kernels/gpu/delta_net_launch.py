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

from slipstream.kernels.cpu.delta_rule import DeltaRule, DeltaShape
from slipstream.kernels.gpu import delta_kernels, delta_walk
from slipstream.kernels.gpu.device_rows import LEAST_ROWS, DeviceRows
from slipstream.kernels.gpu.paged_attention import can_overlap

COLUMNS = 4  # of a state that a warp holds; they decide in which order keys are summed up
WARPS = 2  # of a program, which share what they read of a row; 48 heads of 128 columns give a multiprocessor about six
MOST_SHELVES = 4  # states that a walk through a tree has registers to keep
EARLY_ROWS = 16  # of more rows, the many programs of the next launch would stand in the way of those at work


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
class Walk:
    """In which order states are led along the rows of each sequence."""

    counts: Tensor  # int32 [sequences]: rows that count
    steps: Tensor  # int32 [sequences, each], of trees: the row of each step, and what becomes of the state there

    @classmethod
    def empty(cls, rows: DeviceRows) -> Walk:
        def numbers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=rows.tokens.device)

        return cls(numbers(rows.sequences), numbers(rows.sequences, rows.each))


@dataclass(frozen=True, slots=True)
class DeviceStates:
    """The recurrent side of one pass over rows."""

    shape: DeltaShape
    windows: Tensor  # bf16 [slots, layers, window, channels]
    memories: Tensor  # fp32 [slots, layers, value heads, value dim, key dim]
    source: Tensor  # int32 [sequences]: the slot whose state a sequence's rows continue
    log: DeltaLog
    walk: Walk
    scratch_place: int  # rows stored there or behind do not count
    saves: Tensor | None = None  # int32 [rows], of chains: the slot that gets the state behind a row, -1: none

    @classmethod
    def over(
        cls, shape: DeltaShape, pools: tuple[Tensor, Tensor], source: Tensor, log: DeltaLog, rows: DeviceRows,
        scratch_place: int, saves: Tensor | None = None,
    ) -> DeviceStates:
        return cls(shape, *pools, source, log, Walk.empty(rows), scratch_place, saves)


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
    """Finds the way through the rows, once for all layers."""
    walk, tree = states.walk, not is_line(rows)
    delta_kernels.plan_kernel[(rows.sequences,)](
        rows.positions, rows.places, rows.base, rows.paths, walk.counts, walk.steps, states.scratch_place,
        EACH=rows.each, PADDED=triton.next_power_of_2(rows.each), TREE=tree,
        num_warps=max(4, triton.next_power_of_2(rows.each) // 4) if tree else 4,
    )


def mix(
    inputs: Tensor, gates: Tensor, rows: DeviceRows, rule: DeltaRule, states: DeviceStates, layer: int
) -> None:
    """A layer's convolution, norms and gates, into the log.

    inputs bf16 [rows, channels] and gates bf16 [rows, 2 * value heads]; their rows may lie apart.
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
    """What the rows of a layer read, in the log; states behind some of them where `saves` wants them."""
    shape, log, walk = states.shape, states.log, states.walk
    keys, values, write, left, kept = log.of(layer)
    tree, overlap = not is_line(rows), can_overlap(states.memories.device)
    assert states.saves is None or not tree, "states behind the rows of a tree are committed"
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
    """How many states a walk through a tree keeps at most, where the largest of all branches comes last.

    A branch that is not the last has at least two rows, and with a state kept within it at least one more than twice
    as many as that one needs; as many rows come behind it.
    """
    shelves, least = 0, 2
    while 2 * least <= rows:
        shelves, least = shelves + 1, 2 * least + 1
    return shelves


def gate(
    gates: Tensor, weight: Tensor, eps: float, rows: DeviceRows, states: DeviceStates, out: Tensor
) -> None:
    """out bf16 [padded rows, value heads * value dim]: what rows have read, normed by head, times silu(gates)."""
    shape, overlap = states.shape, can_overlap(out.device)
    delta_kernels.gate_kernel[(shape.value_heads, out.shape[0])](
        states.log.reads, gates, gates.stride(0), weight, rows.places, out, eps, states.scratch_place,
        VALUE_HEADS=shape.value_heads, VALUE_DIM=shape.value_dim, BLOCK=triton.next_power_of_2(shape.value_dim),
        OVERLAP=overlap, num_warps=1, enable_fp_fusion=False, launch_pdl=overlap and rows.rows <= EARLY_ROWS,
    )


def commit(states: DeviceStates, replay: Replay) -> None:
    """Leads states along paths, in all layers at once."""
    shape, log = states.shape, states.log
    assert log.every_layer or shape.layers == 1, "a commit needs what the rows of every layer left"
    tiles, sizes = _tiles(shape)
    delta_walk.commit_kernel[(tiles, shape.layers, replay.taken.shape[0])](
        states.memories, states.windows, replay.source, replay.destination, replay.taken, replay.path, log.keys,
        log.values, log.write, log.left, log.inputs, log.reads.shape[0], replay.first, **sizes,
        EACH=replay.each, num_warps=WARPS,
    )


def swap(source: Tensor, destination: Tensor, taken: Tensor) -> None:
    """Exchanges the two slots of every sequence that has moved on; int32 [sequences] each."""
    delta_kernels.swap_kernel[(taken.shape[0],)](source, destination, taken, num_warps=1)


def _tiles(shape: DeltaShape) -> tuple[int, dict[str, Any]]:
    """How many programs share a layer's state, and the sizes they know."""
    lanes = 32 // COLUMNS
    turns = triton.cdiv(triton.next_power_of_2(shape.key_dim), 4 * lanes)
    blocks = triton.cdiv(shape.value_dim, COLUMNS * WARPS)
    tiles = shape.value_heads * blocks
    channels = triton.cdiv(shape.channels, tiles)  # of the window, that a program moves
    sizes = (
        shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, turns, WARPS, lanes, COLUMNS,
        triton.next_power_of_2(channels), channels,
    )
    return tiles, {"LAYERS": shape.layers, "SHAPE": sizes, "TAPS": shape.kernel, "BLOCKS": blocks, "TILED": shape.tiled}


TRITON = DeltaKernels(plan, mix, recur, gate, commit, swap)
