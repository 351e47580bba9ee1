"""Finds the accepted path of a verified tree on the device, and moves everything that belongs to the path.

One launch finds the path, chooses the rows whose taps become draft context and their places, and advances the
sequences. Another launch moves the kept keys and values to consecutive slots in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.cpu.ranking import NO_BEST
from slipstream.kernels.gpu.device_rows import MAX_DEPTH, DeviceRows
from slipstream.kernels.gpu.tree_growth import Grown

_DEEP = tl.constexpr(MAX_DEPTH)
_NO_BEST = tl.constexpr(NO_BEST)
_PIECE = 16  # rows of a path that a program moves at a time
_TAPS_AT_ONCE = 2048  # numbers of a row's taps that a program copies


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What the host learns of a step; a sequence that failed, or that is only padding, has taken no rows."""

    path: Tensor  # int32 [sequences, MAX_DEPTH]: kept rows from the anchor on, then -1
    tokens: Tensor  # int32 [sequences, MAX_DEPTH]: the target's token after each kept row; the last one is the bonus
    taken: Tensor  # int32 [sequences]: how many rows are kept
    failed: Tensor  # int32 [sequences]: 1 if the logits after any row are not finite, since that may spoil other rows

    @classmethod
    def empty(cls, sequences: int, device: torch.device) -> CommitOutcome:
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(numbers(sequences, MAX_DEPTH), numbers(sequences, MAX_DEPTH), numbers(sequences), numbers(sequences))


@dataclass(frozen=True, slots=True)
class ContextRows:
    """The kept rows as draft context; every sequence has `block` places, enough for the longest path of a draft."""

    block: int
    gather: Tensor  # int32 [sequences * block]: the row of the step whose taps these are; else its sequence's row 0
    positions: Tensor  # int32
    places: Tensor  # int32; in the scratch page if there is none

    @classmethod
    def empty(cls, sequences: int, block: int, device: torch.device) -> ContextRows:
        def numbers() -> Tensor:
            return torch.zeros(sequences * block, dtype=torch.int32, device=device)

        return cls(block, numbers(), numbers(), numbers())


@dataclass(frozen=True, slots=True)
class HeldTaps:
    """The taps of the last `turns` steps with one row per sequence; they become draft context together, later."""

    turns: int
    taps: Tensor  # bf16 [turns * sequences, width]
    positions: Tensor  # int32 [turns * sequences]
    places: Tensor  # int32; in the scratch page if nothing is held

    @classmethod
    def empty(cls, sequences: int, turns: int, width: int, scratch_place: int, device: torch.device) -> HeldTaps:
        rows = turns * sequences
        taps = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
        places = torch.full((rows,), scratch_place, dtype=torch.int32, device=device)
        return cls(turns, taps, torch.zeros_like(places), places)


@triton.jit
def _accept_kernel(  # type: ignore[no-untyped-def]
    chosen, row_tokens, row_places, parents, counts, base, anchors, paths, new_tokens, takens, faileds,
    gather, positions, places, stored, block, scratch_place, ROWS: tl.constexpr,
):
    sequence = tl.program_id(0)
    first = sequence * ROWS
    row, depth = tl.arange(0, ROWS), tl.arange(0, _DEEP)
    count, start = tl.load(counts + sequence), tl.load(base + sequence)
    drafted = (row > 0) & (row <= count)
    parent = tl.load(parents + first + row, mask=drafted, other=-1)
    expected = tl.load(chosen + first + parent, mask=drafted, other=_NO_BEST)
    agrees = drafted & (tl.load(row_tokens + first + row) == expected)
    path = tl.where(depth == 0, 0, -1)
    last = tl.full((), 0, tl.int32)
    length = tl.full((), 1, tl.int32)
    child = tl.max(tl.where(agrees & (parent == 0), row, 0))
    while child > 0:
        path = tl.where(depth == length, child, path)
        last = child
        length += 1
        child = tl.max(tl.where(agrees & (parent == last), row, 0))
    own = tl.load(chosen + first + row)
    failed = tl.max(((own == _NO_BEST) & (row <= count)).to(tl.int32))
    taken = tl.where((failed != 0) | (count < 0), 0, length)
    kept = depth < taken
    tl.store(takens + sequence, taken)
    tl.store(faileds + sequence, failed)
    tl.store(paths + sequence * _DEEP + depth, tl.where(kept, path, -1))
    tokens = tl.load(chosen + first + path, mask=kept, other=_NO_BEST)
    tl.store(new_tokens + sequence * _DEEP + depth, tokens)
    # the path's row i moves to slot base + i, which is the slot of the step's row i
    place = tl.load(row_places + first + depth, mask=kept, other=0)
    tl.store(stored + place, tl.load(row_tokens + first + path, mask=kept, other=0), mask=kept)
    context, inside = sequence * block + depth, depth < block
    tl.store(gather + context, first + tl.where(kept, path, 0), mask=inside)
    tl.store(positions + context, start + tl.where(kept, depth, 0), mask=inside)
    tl.store(places + context, tl.where(kept, place, scratch_place), mask=inside)
    tl.store(base + sequence, start + taken)
    tl.store(anchors + sequence, tl.load(chosen + first + last), mask=taken > 0)


@triton.jit
def _compact_kernel(  # type: ignore[no-untyped-def]
    keys, values, layer_stride, page_stride, head_stride, row_places, paths, takens, heads, page_tokens,
    ROWS: tl.constexpr, PIECE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    """Moves one head of one layer of one sequence; a piece is read completely before any of it is written."""
    sequence, layer, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    column = tl.arange(0, WIDTH)
    taken = tl.load(takens + sequence)
    pool = layer.to(tl.int64) * layer_stride + head * head_stride + column[None, :]
    # a path's row i is stored in slot i or after it, so a piece never overwrites what a later piece reads
    for start in range(0, taken, PIECE):
        depth = start + tl.arange(0, PIECE)
        path = tl.load(paths + sequence * _DEEP + depth)
        moves = (depth < taken) & (path != depth)
        if tl.max(moves.to(tl.int32)) > 0:
            source = tl.load(row_places + sequence * ROWS + path, mask=moves, other=0)
            target = tl.load(row_places + sequence * ROWS + depth, mask=moves, other=0)
            old = pool + ((source // page_tokens).to(tl.int64) * page_stride + source % page_tokens * DIM)[:, None]
            new = pool + ((target // page_tokens).to(tl.int64) * page_stride + target % page_tokens * DIM)[:, None]
            mask = moves[:, None] & (column < DIM)[None, :]
            key, value = tl.load(keys + old, mask=mask), tl.load(values + old, mask=mask)
            tl.debug_barrier()
            tl.store(keys + new, key, mask=mask)
            tl.store(values + new, value, mask=mask)


@triton.jit
def _hold_kernel(  # type: ignore[no-untyped-def]
    taps, gather, positions, places, block, held_taps, held_positions, held_places, scratch_place,
    WIDTH: tl.constexpr, TURNS: tl.constexpr, PIECE: tl.constexpr,
):
    piece, sequence = tl.program_id(0), tl.program_id(1)
    row, position = tl.load(gather + sequence * block), tl.load(positions + sequence * block)
    place = tl.load(places + sequence * block)
    slot = position % TURNS * tl.num_programs(1) + sequence
    column = piece * PIECE + tl.arange(0, PIECE)
    numbers = tl.load(taps + row.to(tl.int64) * WIDTH + column, mask=column < WIDTH)
    # Every slot becomes draft context later, also one that holds no kept row. Such a row may contain NaN or Inf, so
    # zeros are stored in its place.
    numbers = tl.where(place == scratch_place, 0.0, numbers.to(tl.float32)).to(tl.bfloat16)
    tl.store(held_taps + slot.to(tl.int64) * WIDTH + column, numbers, mask=column < WIDTH)
    if piece == 0:
        tl.store(held_positions + slot, position)
        tl.store(held_places + slot, place)


def hold(taps: Tensor, context: ContextRows, held: HeldTaps, scratch_place: int) -> None:
    """Keeps the taps [rows, width] of the first row of each sequence in `context`.

    The position of a row decides its slot, so that as many consecutive steps as there are turns use different slots.
    """
    width = taps.shape[1]
    sequences = len(context.gather) // context.block
    _hold_kernel[(triton.cdiv(width, _TAPS_AT_ONCE), sequences)](
        taps, context.gather, context.positions, context.places, context.block, held.taps, held.positions, held.places,
        scratch_place, WIDTH=width, TURNS=held.turns, PIECE=_TAPS_AT_ONCE, num_warps=4,
    )


def hold_reference(taps: Tensor, context: ContextRows, held: HeldTaps, scratch_place: int) -> None:
    """Does what `hold` does, in plain torch."""
    first = slice(None, None, context.block)
    rows, positions, places = context.gather[first].long(), context.positions[first], context.places[first]
    sequences = len(rows)
    kept = taps[rows].where((places != scratch_place)[:, None], 0.0)
    slots = positions.long() % held.turns * sequences + torch.arange(sequences, device=taps.device)
    held.taps[slots], held.positions[slots], held.places[slots] = kept, positions, places


def accept(
    chosen: Tensor, rows: DeviceRows, grown: Grown, anchors: Tensor, outcome: CommitOutcome, context: ContextRows,
    stored: Tensor, scratch_place: int,
) -> None:
    """Keeps the path along which the target's tokens (int32 [rows]) agree with the drafted ones.

    It fills `outcome` and `context`, writes the kept rows' tokens to their places in `stored`, and advances
    `rows.base` and `anchors` (int32 [sequences]) after the kept rows.
    The rows are those of a grown tree with `grown.counts` nodes; a count of -1 marks a padding sequence.
    """
    assert rows.each <= MAX_DEPTH and context.block <= MAX_DEPTH
    _accept_kernel[(rows.sequences,)](
        chosen, rows.tokens, rows.places, grown.parents, grown.counts, rows.base, anchors, outcome.path,
        outcome.tokens, outcome.taken, outcome.failed, context.gather, context.positions, context.places, stored,
        context.block, scratch_place, rows.each, num_warps=1,
    )


def compact(keys: Tensor, values: Tensor, rows: DeviceRows, outcome: CommitOutcome) -> None:
    """Moves kept rows of pools [layers, pages, heads, page tokens, dim] to consecutive slots, in all layers at once."""
    layers, _, heads, page_tokens, dim = keys.shape
    assert keys.stride() == values.stride() and keys.stride()[3:] == (dim, 1)
    _compact_kernel[(rows.sequences, layers * heads)](
        keys, values, keys.stride(0), keys.stride(1), keys.stride(2), rows.places, outcome.path, outcome.taken,
        heads, page_tokens, rows.each, min(rows.each, _PIECE), dim, triton.next_power_of_2(dim), num_warps=4,
    )


def accept_reference(
    chosen: Tensor, rows: DeviceRows, grown: Grown, anchors: Tensor, outcome: CommitOutcome, context: ContextRows,
    stored: Tensor, scratch_place: int,
) -> None:
    """Does what `accept` does, in plain Python."""
    outcome.path.fill_(-1)
    outcome.tokens.fill_(NO_BEST)
    context.places.fill_(scratch_place)
    for sequence in range(rows.sequences):
        first, count = sequence * rows.each, int(grown.counts[sequence])
        own = chosen[first : first + rows.each].tolist()
        path: list[int] = []
        failed = NO_BEST in own[: count + 1]
        if count >= 0 and not failed:
            children = {
                (int(grown.parents[first + row]), int(rows.tokens[first + row])): row for row in range(1, count + 1)
            }
            path = [0]
            while (child := children.get((path[-1], own[path[-1]]))) is not None:
                path.append(child)
        base, taken, at = int(rows.base[sequence]), len(path), sequence * context.block
        context.gather[at : at + context.block], context.positions[at : at + context.block] = first, base
        for depth, row in enumerate(path):
            outcome.path[sequence, depth], outcome.tokens[sequence, depth] = row, own[row]
            stored[int(rows.places[first + depth])] = rows.tokens[first + row]
            if depth < context.block:
                context.gather[at + depth], context.positions[at + depth] = first + row, base + depth
                context.places[at + depth] = rows.places[first + depth]
        outcome.taken[sequence], outcome.failed[sequence] = taken, int(failed)
        rows.base[sequence] += taken
        if path:
            anchors[sequence] = own[path[-1]]


def compact_reference(keys: Tensor, values: Tensor, rows: DeviceRows, outcome: CommitOutcome) -> None:
    """Does what `compact` does, in plain torch."""
    page_tokens = keys.shape[3]
    for sequence, taken in enumerate(outcome.taken.tolist()):
        first = sequence * rows.each
        kept = outcome.path[sequence, :taken].long()
        old, new = rows.places[first + kept].long(), rows.places[first : first + taken].long()
        for pool in (keys, values):
            moved = pool[:, old // page_tokens, :, old % page_tokens].clone()
            pool[:, new // page_tokens, :, new % page_tokens] = moved
