"""How matrix kernels are cut into programs.

What decides the order of a row's sum (`ShapePlan`) follows from the weight's shape alone; what only decides speed
(`Launch`) may depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.kernels.gpu.packing import TILE_ROWS, Kind

ROW_COUNTS = (16, 32, 64)  # rows of a decoding step, padded
_MOST_SPLITS = 16
_WANTED_BYTE_PROGRAMS = 256  # about two for each of 132 multiprocessors
_WANTED_NIBBLE_PROGRAMS = 384
_MULTIPROCESSORS = 132  # of an H200
_WANTED_DENSE_PROGRAMS = 96  # most of the multiprocessors; more would only add partial sums
_LEAST_INPUTS = 256  # of one program


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """`split` programs share the inputs of a tile of outputs; `depth` inputs (dense) or steps (blocks) are one turn."""

    split: int
    depth: int


@dataclass(frozen=True, slots=True)
class Launch:
    tile: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread at most, where a few less let one more program run


def quant_plan(kind: Kind, tiles: int, steps: int) -> ShapePlan:
    unroll = _unroll(kind, steps)
    wanted = _WANTED_BYTE_PROGRAMS if kind.bits == 8 else _WANTED_NIBBLE_PROGRAMS
    return ShapePlan(_split(tiles, steps * kind.step, wanted, steps // unroll), unroll)


def dense_plan(outputs: int, inputs: int) -> ShapePlan:
    depth = _depth(inputs)
    return ShapePlan(_split(-(-outputs // TILE_ROWS), inputs, _WANTED_DENSE_PROGRAMS, -(-inputs // depth)), depth)


def expert_depth(kind: Kind | None, inputs: int) -> int:
    """One turn of a product with experts; None: their weights are dense. No program shares its outputs' inputs."""
    if kind is None:
        return _EXPERT_DEPTH
    return 1 if _few_turns(kind, inputs) else _unroll(kind, -(-inputs // kind.step))


def _few_turns(kind: Kind, inputs: int) -> bool:
    """Whether nibbles are soon read: programs with more outputs and smaller turns then start less often."""
    return kind.bits == 4 and not kind.high and inputs <= _FEW_INPUTS


def _unroll(kind: Kind, steps: int) -> int:
    return next(unroll for unroll in (256 // kind.step, 2, 1) if steps % unroll == 0)


def _depth(inputs: int) -> int:
    return 128 if inputs % 128 == 0 else 64


def _split(tiles: int, inputs: int, wanted: int, turns: int) -> int:
    """A power of two, the smallest that gives enough programs as long as none is left without work."""
    split = 1
    while tiles * split < wanted and split < _MOST_SPLITS and inputs // (2 * split) >= _LEAST_INPUTS:
        split *= 2
    while split > 1 and (split - 1) * -(-turns // split) >= turns:
        split //= 2
    return split


# scripts/gpu/checks_matmul.py times these against others. Of blocks the first is for matrices that several programs
# share, the second for those with a program for every tile.
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
# Of experts: the instructions that multiply, and with them a row's bits, are the same for tiles of 64 outputs and of
# more. scripts/gpu/checks_experts.py times these against others.
_EXPERT_LAUNCHES = {"bytes": Launch(64, 4, 3), "nibbles": Launch(64, 4, 3), "high bits": Launch(64, 4, 3)}
_EXPERT_DEPTH = 64
_MOST_EXPERT_STAGES = 6
_FEW_INPUTS = 1024
# Of dense products the first is for those with a multiprocessor for every program, where each may have much on the way;
# of others two programs share one.
_DENSE_LAUNCHES = {
    16: (Launch(64, 4, 6), Launch(64, 4, 4)),
    32: (Launch(64, 4, 5), Launch(64, 4, 4)),
    64: (Launch(64, 4, 5), Launch(128, 8, 4)),
}


def quant_launch(kind: Kind, tiles: int, split: int, rows: int) -> Launch:
    launches = _HIGH_BIT_LAUNCHES if kind.high else _BYTE_LAUNCHES if kind.bits == 8 else _NIBBLE_LAUNCHES
    launch = launches[rows][split == 1]
    return launch if tiles % (launch.tile // TILE_ROWS) == 0 else Launch(TILE_ROWS, 4, launch.stages)


def expert_launch(kind: Kind | None, inputs: int, alone: bool) -> Launch:
    """`alone`: for a single row, whose experts have few programs."""
    if kind is None:
        return Launch(64, 4, max(2, min(_MOST_EXPERT_STAGES, inputs // (2 * _EXPERT_DEPTH))))
    if _few_turns(kind, inputs) and not alone:
        return Launch(128, 4, 3)
    return _EXPERT_LAUNCHES["high bits" if kind.high else "bytes" if kind.bits == 8 else "nibbles"]


def dense_launch(outputs: int, split: int, rows: int) -> Launch:
    return _DENSE_LAUNCHES[rows][-(-outputs // TILE_ROWS) * split > _MULTIPROCESSORS]
