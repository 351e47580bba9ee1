"""Triton kernels of the gated delta rule: one update per row in one order of operations, with the state in registers.

A row has the same bits if it is computed alone, in a chain, in a tree or in a replay, because all of them go through
`_follow` with the same tile of the state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.gpu.device_rows import MAX_DEPTH

_DEEP = tl.constexpr(MAX_DEPTH)
# A step of a walk through a tree is a number: its row in the lower bits, and flags for the state.
ROW = tl.constexpr(255)
LAST = tl.constexpr(256)  # no row continues this one, so the state need not be updated
KEEP = tl.constexpr(512)  # the state before this row is needed again and is kept on a shelf
BACK = tl.constexpr(1024)  # the step continues from a kept state
SHELF = tl.constexpr(2048)  # times the index of the shelf that KEEP and BACK use
# SHAPE, which `_tiles` of delta_net_launch.py makes, has ten sizes: 0 key heads, 1 value heads, 2 key dim, 3 value dim,
# 4 turns, 5 warps, 6 lanes, 7 columns of a warp, and the number of the window's channels that a program moves: 8 padded
# to a power of two, 9 not padded.


@triton.jit
def fresh(at, inside):  # type: ignore[no-untyped-def]
    """Reads what the kernel before wrote, past the first cache, which does not see other multiprocessors' writes."""
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def fresh_one(at):  # type: ignore[no-untyped-def]
    return tl.load(at, cache_modifier=".cg")


@triton.jit
def _numbers(SHAPE: tl.constexpr, block):  # type: ignore[no-untyped-def]
    """Returns the key and the column of every number that a program holds of a state: [columns, lanes, warps, turns,
    4].

    In this order the compiler gives a lane groups of four keys of one column at regular distances. A lane's own sums
    are then long, and few lanes have to exchange their sums.
    """
    column = tl.arange(0, SHAPE[7])[:, None, None, None, None]
    lane = tl.arange(0, SHAPE[6])[None, :, None, None, None]
    warp = tl.arange(0, SHAPE[5])[None, None, :, None, None]
    turn = tl.arange(0, SHAPE[4])[None, None, None, :, None]
    key = (turn * SHAPE[6] + lane) * 4 + tl.arange(0, 4)[None, None, None, None, :]
    return key, (block * SHAPE[5] + warp) * SHAPE[7] + column


@triton.jit
def _tile(pool, slot, layer, head, block, LAYERS: tl.constexpr, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the addresses of a head's block of columns in the memory of a slot, and which of its numbers exist."""
    VALUE_HEADS: tl.constexpr = SHAPE[1]
    KEY_DIM: tl.constexpr = SHAPE[2]
    VALUE_DIM: tl.constexpr = SHAPE[3]
    key, column = _numbers(SHAPE, block)
    start = ((slot.to(tl.int64) * LAYERS + layer) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    return pool + start + (column * KEY_DIM + key), (key < KEY_DIM) & (column < VALUE_DIM)


@triton.jit
def _spread(keys, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reshapes one number per key to the layout of a state."""
    quads = tl.permute(tl.reshape(keys, (SHAPE[4], SHAPE[6], 4)), (1, 0, 2))
    return quads[None, :, None, :, :]


@triton.jit
def _summed(products):  # type: ignore[no-untyped-def]
    """Sums over keys to [columns, warps]; each lane first adds up its own."""
    return tl.sum(tl.sum(tl.sum(products, 4), 3), 1)


@triton.jit
def _fetched(  # type: ignore[no-untyped-def]
    entry, first, brought, head, key_head, block, SHAPE: tl.constexpr, LISTED: tl.constexpr, READS: tl.constexpr,
    SAVES: tl.constexpr,
):
    """Loads what a step needs: its entry, its row, the row's contribution, and the slot that gets the state after it.
    """
    keys, values, write, left, queries, products, saves = brought
    d = tl.arange(0, SHAPE[4] * SHAPE[6] * 4)
    column = _columns(block, SHAPE)
    has_key = d < SHAPE[2]
    row = first + (entry & ROW if LISTED else entry)
    shared, own = row * SHAPE[0] + key_head, row * SHAPE[1] + head
    key = fresh(keys + shared * SHAPE[2] + d, has_key)
    value = fresh(values + own * SHAPE[3] + column, column < SHAPE[3])
    written, rest = fresh_one(write + own), fresh_one(left + own)
    query, product = key, written
    if READS:
        query = fresh(queries + shared * SHAPE[2] + d, has_key)
        product = fresh_one(products + shared)
    wanted = tl.load(saves + row) if SAVES else -1
    return entry, row, key, value, written, rest, query, product, wanted


@triton.jit
def _columns(block, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a program's columns in the layout that sums over keys have."""
    warp = block * SHAPE[5] + tl.arange(0, SHAPE[5])[None, :]
    return warp * SHAPE[7] + tl.arange(0, SHAPE[7])[:, None]


@triton.jit
def _stepped(  # type: ignore[no-untyped-def]
    state, shelves, fetched, reads, head, block, SHAPE: tl.constexpr, SHELVES: tl.constexpr, READS: tl.constexpr
):
    """Advances a tile of a state by one row: the row reads, then writes; with SHELVES, states are kept and restored."""
    entry, row, key, value, written, rest, query, product, _ = fetched
    if SHELVES > 0:
        state, shelves = _shelved(state, shelves, entry, SHELVES)
    wide_key = _spread(key, SHAPE)
    foreseen = _summed(state * wide_key)
    learnt = tl.fma(foreseen, tl.broadcast_to(-rest, foreseen.shape), value) * written
    if READS:
        column = _columns(block, SHAPE)
        recalled = _summed(state * _spread(query, SHAPE)) * rest
        read = tl.fma(learnt, tl.broadcast_to(product, learnt.shape), recalled)
        tl.store(reads + (row * SHAPE[1] + head) * SHAPE[3] + column, read, mask=column < SHAPE[3])
    if SHELVES == 0 or (entry & LAST) == 0:
        state = _learned(state, wide_key, learnt, rest)
    return state, shelves


@triton.jit
def _shelved(state, shelves, entry, SHELVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the state that a step of a tree continues; it is kept on a shelf if other rows continue it too."""
    shelf = entry // SHELF
    shelf0, shelf1, shelf2, shelf3 = shelves
    if entry & BACK:
        state = shelf0
        if SHELVES > 1:
            state = tl.where(shelf == 1, shelf1, state)
        if SHELVES > 2:
            state = tl.where(shelf == 2, shelf2, state)
        if SHELVES > 3:
            state = tl.where(shelf == 3, shelf3, state)
    if entry & KEEP:
        shelf0 = tl.where(shelf == 0, state, shelf0)
        if SHELVES > 1:
            shelf1 = tl.where(shelf == 1, state, shelf1)
        if SHELVES > 2:
            shelf2 = tl.where(shelf == 2, state, shelf2)
        if SHELVES > 3:
            shelf3 = tl.where(shelf == 3, state, shelf3)
    return state, (shelf0, shelf1, shelf2, shelf3)


@triton.jit
def _follow(  # type: ignore[no-untyped-def]
    state, count, first, steps, brought, reads, memories, windows, kept, source, layer, head, key_head, block,
    LAYERS: tl.constexpr, SHAPE: tl.constexpr, TAPS: tl.constexpr, LISTED: tl.constexpr, SHELVES: tl.constexpr,
    READS: tl.constexpr, SAVES: tl.constexpr,
):
    """Advances a tile of a state along `count` rows from row `first` on, one by one.

    If rows are LISTED, `steps` names them; with SHELVES it also says which of them continue from a kept state.
    """
    shelves = state, state, state, state
    last = count - 1
    entry = tl.load(steps) if LISTED else 0
    fetched = _fetched(entry, first, brought, head, key_head, block, SHAPE, LISTED, READS, SAVES)
    entry = tl.load(steps + tl.minimum(1, last)) if LISTED else tl.minimum(1, last)
    for step in range(count):
        # the data of the next row is loaded while this row is computed
        coming = _fetched(entry, first, brought, head, key_head, block, SHAPE, LISTED, READS, SAVES)
        entry = tl.load(steps + tl.minimum(step + 2, last)) if LISTED else tl.minimum(step + 2, last)
        state, shelves = _stepped(state, shelves, fetched, reads, head, block, SHAPE, SHELVES, READS)
        if SAVES:
            wanted = fetched[8]
            if wanted >= 0:
                at, inside = _tile(memories, wanted, layer, head, block, LAYERS, SHAPE)
                tl.store(at, state, mask=inside)
                _keep_window(windows, kept, source, wanted, layer, first, steps, step, LAYERS, SHAPE, TAPS, LISTED)
        fetched = coming
    return state


@triton.jit
def _learned(state, key, learnt, rest):  # type: ignore[no-untyped-def]
    """Updates a state by a row.

    The operations are explicit, so that the compiler cannot choose which product rounds.
    """
    learnt = learnt[:, None, :, None, None]
    return tl.fma(tl.broadcast_to(key, state.shape), tl.broadcast_to(learnt, state.shape), state * rest)


@triton.jit
def _keep_window(  # type: ignore[no-untyped-def]
    windows, kept, source, wanted, layer, first, steps, step, LAYERS: tl.constexpr, SHAPE: tl.constexpr,
    TAPS: tl.constexpr, LISTED: tl.constexpr,
):
    """Stores the inputs that a convolution after step `step` looks back to; each program moves its own channels."""
    WINDOW: tl.constexpr = TAPS - 1
    CHANNELS: tl.constexpr = 2 * SHAPE[0] * SHAPE[2] + SHAPE[1] * SHAPE[3]
    share = tl.arange(0, SHAPE[8])
    channel = tl.program_id(0) * SHAPE[9] + share
    inside = (share < SHAPE[9]) & (channel < CHANNELS)
    old = windows + (source.to(tl.int64) * LAYERS + layer) * (WINDOW * CHANNELS) + channel
    new = windows + (wanted.to(tl.int64) * LAYERS + layer) * (WINDOW * CHANNELS) + channel
    # oldest first: if a window is shifted in place, every number is read before it is overwritten
    for tap in tl.static_range(WINDOW):
        at = step + 1 - WINDOW + tap
        row = tl.load(steps + at, mask=at >= 0, other=0) if LISTED else at
        behind = channel * 0 + at >= 0
        own = tl.load(kept + (first + row).to(tl.int64) * CHANNELS + channel, mask=inside & behind, other=0.0)
        before = tl.load(old + (WINDOW + at) * CHANNELS, mask=inside & ~behind, other=0.0)
        tl.store(new + tap * CHANNELS, tl.where(behind, own, before), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def recur_kernel(  # type: ignore[no-untyped-def]
    memories, windows, source, saves, counts, steps, queries, keys, products, values, write, left, kept, reads, layer,
    LAYERS: tl.constexpr, SHAPE: tl.constexpr, TAPS: tl.constexpr, BLOCKS: tl.constexpr, TILED: tl.constexpr,
    EACH: tl.constexpr, TREE: tl.constexpr, SHELVES: tl.constexpr, SAVES: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Computes, for one sequence and a block of a value head's columns, what the rows read."""
    head, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    sequence = tl.program_id(1)
    key_head = head % SHAPE[0] if TILED else head // (SHAPE[1] // SHAPE[0])
    slot, count = tl.load(source + sequence), tl.load(counts + sequence)
    at, inside = _tile(memories, slot, layer, head, block, LAYERS, SHAPE)
    state = tl.load(at, mask=inside & (tl.zeros(at.shape, tl.int32) < count), other=0.0)
    first = sequence * EACH
    if OVERLAP:
        gdc_wait()  # the kernel that may still run writes none of what was loaded above
        gdc_launch_dependents()
    if count > 0:
        _follow(
            state, count, first, steps + first, (keys, values, write, left, queries, products, saves), reads,
            memories, windows, kept, slot, layer, head, key_head, block,
            LAYERS, SHAPE, TAPS, TREE, SHELVES, True, SAVES,
        )


@triton.jit(do_not_specialize=["rows", "first_row"])
def commit_kernel(  # type: ignore[no-untyped-def]
    memories, windows, source, destination, takens, paths, keys, values, write, left, kept, rows, first_row,
    LAYERS: tl.constexpr, SHAPE: tl.constexpr, TAPS: tl.constexpr, BLOCKS: tl.constexpr, TILED: tl.constexpr,
    EACH: tl.constexpr,
):
    """Advances a block of a value head's columns of one layer of one sequence along the rows of a path."""
    head, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    layer, sequence = tl.program_id(1), tl.program_id(2)
    key_head = head % SHAPE[0] if TILED else head // (SHAPE[1] // SHAPE[0])
    taken = tl.load(takens + sequence)
    if taken > 0:
        CHANNELS: tl.constexpr = 2 * SHAPE[0] * SHAPE[2] + SHAPE[1] * SHAPE[3]
        slot, wanted = tl.load(source + sequence), tl.load(destination + sequence)
        at, inside = _tile(memories, slot, layer, head, block, LAYERS, SHAPE)
        state = tl.load(at, mask=inside, other=0.0)
        earlier = layer.to(tl.int64) * rows  # rows of the log that belong to earlier layers
        first, path = first_row + sequence * EACH, paths + sequence * _DEEP
        brought = (
            keys + earlier * (SHAPE[0] * SHAPE[2]), values + earlier * (SHAPE[1] * SHAPE[3]),
            write + earlier * SHAPE[1], left + earlier * SHAPE[1], keys, keys, takens,
        )
        state = _follow(
            state, taken, first, path, brought, keys, memories, windows, kept, slot, layer, head, key_head, block,
            LAYERS, SHAPE, TAPS, True, 0, False, False,
        )
        at, inside = _tile(memories, wanted, layer, head, block, LAYERS, SHAPE)
        tl.store(at, state, mask=inside)
        _keep_window(
            windows, kept + earlier * CHANNELS, slot, wanted, layer, first, path, taken - 1, LAYERS, SHAPE, TAPS, True
        )
