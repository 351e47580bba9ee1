"""How matrix kernels are divided into programs.

What determines the order of a row's sum (`ShapePlan`) follows from the weight's shape alone. What only determines speed
(`Launch`) may depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.kernels.gpu.packing import TILE_ROWS, BlockKind

ROW_COUNTS = (16, 32, 64)  # the padded row counts of a decoding step
_MOST_SPLITS = 16  # the most programs that share the inputs of a tile
_WANTED_BYTE_PROGRAMS = 256  # about two for each of 132 multiprocessors
_WANTED_NIBBLE_PROGRAMS = 384  # about three for each multiprocessor
_MULTIPROCESSORS = 132  # how many an H200 has; launches of dense products depend on it, which affects speed only
_WANTED_DENSE_PROGRAMS = 96  # enough for most of the multiprocessors; more would only add partial sums
_LEAST_INPUTS = 256  # the fewest inputs of one program


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """`split` programs share the inputs of a tile of outputs; a turn covers `depth` inputs (dense) or steps (blocks).
    """

    split: int
    depth: int


@dataclass(frozen=True, slots=True)
class Launch:
    tile: int
    warps: int
    stages: int
    registers: int | None = None  # the most per thread, set where a few fewer let one more program run


def quant_plan(kind: BlockKind, tiles: int, steps: int) -> ShapePlan:
    unroll = _unroll(kind, steps)
    wanted = _WANTED_BYTE_PROGRAMS if kind.bits == 8 else _WANTED_NIBBLE_PROGRAMS
    return ShapePlan(_split(tiles, steps * kind.step, wanted, steps // unroll), unroll)


def dense_plan(outputs: int, inputs: int) -> ShapePlan:
    depth = _depth(inputs)
    return ShapePlan(_split(-(-outputs // TILE_ROWS), inputs, _WANTED_DENSE_PROGRAMS, -(-inputs // depth)), depth)


def expert_depth(kind: BlockKind | None, inputs: int) -> int:
    """Returns the depth of one turn of a product with experts, which no programs share; a kind of None means dense."""
    if kind is None:
        return _EXPERT_DEPTH
    return 1 if _few_turns(kind, inputs) else _unroll(kind, -(-inputs // kind.step))


def _few_turns(kind: BlockKind, inputs: int) -> bool:
    """Whether a row of nibbles is read in few turns; programs with more outputs and smaller turns are then faster."""
    return kind.bits == 4 and not kind.high and inputs <= _FEW_INPUTS


def _unroll(kind: BlockKind, steps: int) -> int:
    return next(unroll for unroll in (256 // kind.step, 2, 1) if steps % unroll == 0)


def _depth(inputs: int) -> int:
    return 128 if inputs % 128 == 0 else 64


def _split(tiles: int, inputs: int, wanted: int, turns: int) -> int:
    """Returns the smallest power of two that gives enough programs, as long as every program has work."""
    split = 1
    while tiles * split < wanted and split < _MOST_SPLITS and inputs // (2 * split) >= _LEAST_INPUTS:
        split *= 2
    while split > 1 and (split - 1) * -(-turns // split) >= turns:
        split //= 2
    return split


# scripts/gpu/checks_matmul.py compares these launches with others. Of each pair for blocks, the first is for matrices
# whose inputs several programs share, the second for those with one program per tile.
_BYTE_LAUNCHES = {
    16: (Launch(64, 4, 3), Launch(64, 4, 3)),
    32: (Launch(64, 4, 3), Launch(128, 8, 2)),
    64: (Launch(128, 8, 3), Launch(128, 8, 2, registers=128)),
}
_NIBBLE_LAUNCHES = {
    16: (Launch(64, 4, 3), Launch(64, 4, 3)),
    32: (Launch(64, 4, 3), Launch(128, 8, 2)),
    64: (Launch(128, 4, 2), Launch(64, 4, 2)),
}
_HIGH_BIT_LAUNCHES = {16: (Launch(128, 4, 3),) * 2, 32: (Launch(128, 4, 3),) * 2, 64: (Launch(128, 4, 2),) * 2}
# The launches of experts. Tiles of 64 outputs and of more use the same multiplication instructions, so a row's bits do
# not depend on the tile. scripts/gpu/checks_experts.py compares these launches with others.
_EXPERT_LAUNCHES = {"bytes": Launch(64, 4, 3), "nibbles": Launch(64, 4, 3), "high bits": Launch(64, 4, 3)}
_EXPERT_DEPTH = 64
_MOST_EXPERT_STAGES = 6
_FEW_INPUTS = 1024
# Of each pair for dense products, the first is for those with a multiprocessor for every program, which may then have
# many loads in flight; in the second case two programs share a multiprocessor.
_DENSE_LAUNCHES = {
    16: (Launch(64, 4, 6), Launch(64, 4, 4)),
    32: (Launch(64, 4, 5), Launch(64, 4, 4)),
    64: (Launch(64, 4, 5), Launch(128, 8, 4)),
}


def quant_launch(kind: BlockKind, tiles: int, split: int, rows: int) -> Launch:
    launches = _HIGH_BIT_LAUNCHES if kind.high else _BYTE_LAUNCHES if kind.bits == 8 else _NIBBLE_LAUNCHES
    launch = launches[rows][split == 1]
    return launch if tiles % (launch.tile // TILE_ROWS) == 0 else Launch(TILE_ROWS, 4, launch.stages)


def expert_launch(kind: BlockKind | None, inputs: int, alone: bool) -> Launch:
    """Returns the launch of a product with experts; `alone` asks for that of a single row, which has few programs."""
    if kind is None:
        return Launch(64, 4, max(2, min(_MOST_EXPERT_STAGES, inputs // (2 * _EXPERT_DEPTH))))
    if _few_turns(kind, inputs) and not alone:
        return Launch(128, 4, 3)
    return _EXPERT_LAUNCHES["high bits" if kind.high else "bytes" if kind.bits == 8 else "nibbles"]


def dense_launch(outputs: int, split: int, rows: int) -> Launch:
    return _DENSE_LAUNCHES[rows][-(-outputs // TILE_ROWS) * split > _MULTIPROCESSORS]
