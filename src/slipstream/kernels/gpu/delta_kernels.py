"""Triton kernels of the gated delta rule: one update per row, in one order of operations, the state in registers.

A row has the same bits whether it came alone, in a chain, in a tree or in a replay, because all of them go through
`_follow` with the same tile of the state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.gpu.rows import MAX_DEPTH

_DEEP = tl.constexpr(MAX_DEPTH)
_NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def plan_kernel(  # type: ignore[no-untyped-def]
    positions, places, base, paths, counts, ends, lengths, scratch_place,
    EACH: tl.constexpr, PADDED: tl.constexpr, TREE: tl.constexpr,
):
    """One sequence: the rows that no other continues, and how many rows lead to each of them."""
    sequence = tl.program_id(0)
    row = tl.arange(0, PADDED)
    at = sequence * EACH + row
    used = tl.load(places + at, mask=row < EACH, other=scratch_place) < scratch_place
    if TREE:
        depth = tl.where(used, tl.load(positions + at, mask=used, other=0) - tl.load(base + sequence), 0)
        parent = tl.load(paths + at * _DEEP + depth - 1, mask=used & (depth > 0), other=-1)
        continued = tl.max((parent[None, :] == row[:, None]).to(tl.int32), 1) > 0
        last = used & (continued == 0)
        place = sequence * EACH + tl.cumsum(last.to(tl.int32), 0) - 1
        tl.store(ends + place, row, mask=last)
        tl.store(lengths + place, depth + 1, mask=last)
        tl.store(counts + sequence, tl.sum(last.to(tl.int32), 0))
    else:
        total = tl.sum(used.to(tl.int32), 0)
        tl.store(ends + sequence * EACH, total - 1)
        tl.store(lengths + sequence * EACH, total)
        tl.store(counts + sequence, (total > 0).to(tl.int32))


@triton.jit
def _convolved(  # type: ignore[no-untyped-def]
    inputs, input_stride, window, kernel, kept, row, own, depth, paths, channel, inside,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, EACH: tl.constexpr, TREE: tl.constexpr,
):
    """Some channels of a row behind the convolution and its silu; the row's own inputs are kept for the commit."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        at = depth - (TAPS - 1 - tap)  # how far behind the sequence's last position; before it in the window
        ancestor = own - (TAPS - 1 - tap)
        if TREE and tap < TAPS - 1:
            ancestor = tl.load(paths + row * _DEEP + at, mask=at >= 0, other=0)
        found = (row - own + ancestor).to(tl.int64) * input_stride + channel
        behind = channel * 0 + at >= 0
        x = tl.load(inputs + found, mask=inside & behind, other=0.0)
        if tap < TAPS - 1:
            before = tl.load(window + (TAPS - 1 + at) * CHANNELS + channel, mask=inside & ~behind, other=0.0)
            x = tl.where(behind, x, before)
        else:
            tl.store(kept + row.to(tl.int64) * CHANNELS + channel, x, mask=inside)
        weight = tl.load(kernel + tap * CHANNELS + channel, mask=inside, other=0.0)
        total = tl.fma(x.to(tl.float32), weight, total)
    return total * tl.sigmoid(total)


@triton.jit(do_not_specialize=["layer"])
def mix_kernel(  # type: ignore[no-untyped-def]
    inputs, input_stride, gates, gate_stride, kernel, rates, shift, windows, source, layer,
    positions, places, base, paths, queries, keys, products, values, write, left, kept, scratch_place, query_scale,
    LAYERS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, EACH: tl.constexpr, TREE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: a key head's query and key with their norms, or a value head's values and gates."""
    if OVERLAP:
        gdc_launch_dependents()
    part, row = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    if tl.load(places + row) < scratch_place:
        sequence, own = row // EACH, row % EACH
        depth = tl.load(positions + row) - tl.load(base + sequence) if TREE else own
        slot = tl.load(source + sequence).to(tl.int64)
        window = windows + (slot * LAYERS + layer) * ((TAPS - 1) * CHANNELS)
        d = tl.arange(0, BLOCK)
        if part < KEY_HEADS:
            inside = d < KEY_DIM
            channel = part * KEY_DIM + d
            query = _convolved(
                inputs, input_stride, window, kernel, kept, row, own, depth, paths, channel, inside,
                CHANNELS, TAPS, EACH, TREE,
            )
            key = _convolved(
                inputs, input_stride, window, kernel, kept, row, own, depth, paths, KEY_HEADS * KEY_DIM + channel,
                inside, CHANNELS, TAPS, EACH, TREE,
            )
            query = query * (tl.rsqrt(tl.sum(query * query, 0) + _NORM_EPS) * query_scale)
            key = key * tl.rsqrt(tl.sum(key * key, 0) + _NORM_EPS)
            at = row * KEY_HEADS + part
            tl.store(queries + at * KEY_DIM + d, query, mask=inside)
            tl.store(keys + at * KEY_DIM + d, key, mask=inside)
            tl.store(products + at, tl.sum(query * key, 0))
        else:
            inside = d < VALUE_DIM
            head = part - KEY_HEADS
            value = _convolved(
                inputs, input_stride, window, kernel, kept, row, own, depth, paths,
                2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + d, inside, CHANNELS, TAPS, EACH, TREE,
            )
            at = row * VALUE_HEADS + head
            tl.store(values + at * VALUE_DIM + d, value, mask=inside)
            tl.store(write + at, tl.sigmoid(tl.load(gates + row * gate_stride + head).to(tl.float32)))
            forget = tl.load(gates + row * gate_stride + VALUE_HEADS + head).to(tl.float32) + tl.load(shift + head)
            softplus = tl.maximum(forget, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(forget)))
            tl.store(left + at, tl.exp(tl.load(rates + head) * softplus))


@triton.jit
def _tile(pool, slot, layer, head, block, LAYERS: tl.constexpr, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a head's block of columns lies in the memory of a slot, and which of its numbers exist."""
    VALUE_HEADS: tl.constexpr = SHAPE[1]
    KEY_DIM: tl.constexpr = SHAPE[2]
    VALUE_DIM: tl.constexpr = SHAPE[3]
    key = tl.arange(0, SHAPE[4])[:, None]
    column = block * SHAPE[5] + tl.arange(0, SHAPE[5])[None, :]
    start = ((slot.to(tl.int64) * LAYERS + layer) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    return pool + start + key * VALUE_DIM + column, (key < KEY_DIM) & (column < VALUE_DIM)


@triton.jit
def _fresh(at, inside):  # type: ignore[no-untyped-def]
    """What the kernel before has written, read past the first cache, which does not hear of other multiprocessors."""
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _one(at):  # type: ignore[no-untyped-def]
    return tl.load(at, cache_modifier=".cg")


@triton.jit
def _follow(  # type: ignore[no-untyped-def]
    state, length, first, path, queries, keys, products, values, write, left, reads, memories, windows, kept, source,
    saves, layer, head, key_head, block, LAYERS: tl.constexpr, SHAPE: tl.constexpr, TAPS: tl.constexpr,
    TREE: tl.constexpr, READS: tl.constexpr, SAVES: tl.constexpr,
):
    """Leads a tile of a state along `length` rows behind row `first`: they are read, then written, one by one."""
    KEY_HEADS: tl.constexpr = SHAPE[0]
    VALUE_HEADS: tl.constexpr = SHAPE[1]
    KEY_DIM: tl.constexpr = SHAPE[2]
    VALUE_DIM: tl.constexpr = SHAPE[3]
    d = tl.arange(0, SHAPE[4])
    column = block * SHAPE[5] + tl.arange(0, SHAPE[5])
    has_key, has_column = d < KEY_DIM, column < VALUE_DIM
    row = (first + tl.load(path)) if TREE else first
    next_row = first + (tl.load(path + tl.minimum(1, length - 1)) if TREE else tl.minimum(1, length - 1))
    key = _fresh(keys + (row * KEY_HEADS + key_head) * KEY_DIM + d, has_key)
    value = _fresh(values + (row * VALUE_HEADS + head) * VALUE_DIM + column, has_column)
    written, rest = _one(write + row * VALUE_HEADS + head), _one(left + row * VALUE_HEADS + head)
    if READS:
        query = _fresh(queries + (row * KEY_HEADS + key_head) * KEY_DIM + d, has_key)
        product = _one(products + row * KEY_HEADS + key_head)
    if SAVES:
        wanted = tl.load(saves + row)
    for step in range(length):
        # what the next row needs is on its way while this one is computed
        after = tl.minimum(step + 2, length - 1)
        row_after = (first + tl.load(path + after)) if TREE else first + after
        next_key = _fresh(keys + (next_row * KEY_HEADS + key_head) * KEY_DIM + d, has_key)
        next_value = _fresh(values + (next_row * VALUE_HEADS + head) * VALUE_DIM + column, has_column)
        next_written = _one(write + next_row * VALUE_HEADS + head)
        next_rest = _one(left + next_row * VALUE_HEADS + head)
        foreseen = tl.sum(state * key[:, None], 0)
        learnt = tl.fma(foreseen, tl.broadcast_to(-rest, foreseen.shape), value) * written
        if READS:
            next_query = _fresh(queries + (next_row * KEY_HEADS + key_head) * KEY_DIM + d, has_key)
            next_product = _one(products + next_row * KEY_HEADS + key_head)
            recalled = tl.sum(state * query[:, None], 0) * rest
            read = tl.fma(learnt, tl.broadcast_to(product, learnt.shape), recalled)
            tl.store(reads + (row * VALUE_HEADS + head) * VALUE_DIM + column, read, mask=has_column)
            query, product = next_query, next_product
        # spelt out: the compiler must not choose which product rounds
        state = tl.fma(
            tl.broadcast_to(key[:, None], state.shape), tl.broadcast_to(learnt[None, :], state.shape), state * rest
        )
        if SAVES:
            next_wanted = tl.load(saves + next_row)
            if wanted >= 0:
                at, inside = _tile(memories, wanted, layer, head, block, LAYERS, SHAPE)
                tl.store(at, state, mask=inside)
                _keep_window(windows, kept, source, wanted, layer, first, path, step, LAYERS, SHAPE, TAPS, TREE)
            wanted = next_wanted
        key, value, written, rest = next_key, next_value, next_written, next_rest
        row, next_row = next_row, row_after
    return state


@triton.jit
def _keep_window(  # type: ignore[no-untyped-def]
    windows, kept, source, wanted, layer, first, path, step, LAYERS: tl.constexpr, SHAPE: tl.constexpr,
    TAPS: tl.constexpr, TREE: tl.constexpr,
):
    """The inputs that a convolution behind row `step` of a line will look back to; every program has its channels."""
    WINDOW: tl.constexpr = TAPS - 1
    CHANNELS: tl.constexpr = 2 * SHAPE[0] * SHAPE[2] + SHAPE[1] * SHAPE[3]
    share = tl.arange(0, SHAPE[6])
    channel = tl.program_id(0) * SHAPE[7] + share
    inside = (share < SHAPE[7]) & (channel < CHANNELS)
    old = windows + (source.to(tl.int64) * LAYERS + layer) * (WINDOW * CHANNELS) + channel
    new = windows + (wanted.to(tl.int64) * LAYERS + layer) * (WINDOW * CHANNELS) + channel
    # oldest first: where a window is shifted in place, what is written was read before
    for tap in tl.static_range(WINDOW):
        at = step + 1 - WINDOW + tap
        row = tl.load(path + at, mask=at >= 0, other=0) if TREE else at
        behind = channel * 0 + at >= 0
        own = tl.load(kept + (first + row).to(tl.int64) * CHANNELS + channel, mask=inside & behind, other=0.0)
        before = tl.load(old + (WINDOW + at) * CHANNELS, mask=inside & ~behind, other=0.0)
        tl.store(new + tap * CHANNELS, tl.where(behind, own, before), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def recur_kernel(  # type: ignore[no-untyped-def]
    memories, windows, source, saves, counts, ends, lengths, paths, queries, keys, products, values, write, left,
    kept, reads, layer, LAYERS: tl.constexpr, SHAPE: tl.constexpr, TAPS: tl.constexpr, BLOCKS: tl.constexpr,
    TILED: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, TREE: tl.constexpr, SAVES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A block of a value head's columns, of one sequence: what its rows read.

    Of a tree, a program leads the state to some of the rows that nobody continues. Rows on the way to several are read
    several times, to the same bits.
    """
    head, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    part, sequence = tl.program_id(1), tl.program_id(2)
    key_head = head % SHAPE[0] if TILED else head // (SHAPE[1] // SHAPE[0])
    slot, count = tl.load(source + sequence), tl.load(counts + sequence)
    at, inside = _tile(memories, slot, layer, head, block, LAYERS, SHAPE)
    state = tl.load(at, mask=inside & (part + tl.zeros(at.shape, tl.int32) < count), other=0.0)
    first = sequence * EACH
    if OVERLAP:
        gdc_wait()  # states were there before the kernel that is still running
    if TREE:
        for line in range(part, count, PARTS):
            end, length = tl.load(ends + first + line), tl.load(lengths + first + line)
            _follow(
                state, length, first, paths + (first + end) * _DEEP, queries, keys, products, values, write, left,
                reads, memories, windows, kept, slot, saves, layer, head, key_head, block,
                LAYERS, SHAPE, TAPS, TREE, True, False,
            )
    elif count > 0:
        _follow(
            state, tl.load(lengths + first), first, paths, queries, keys, products, values, write, left, reads,
            memories, windows, kept, slot, saves, layer, head, key_head, block,
            LAYERS, SHAPE, TAPS, TREE, True, SAVES,
        )


@triton.jit(do_not_specialize=["rows", "first_row"])
def commit_kernel(  # type: ignore[no-untyped-def]
    memories, windows, source, destination, takens, paths, keys, values, write, left, kept, rows, first_row,
    LAYERS: tl.constexpr, SHAPE: tl.constexpr, TAPS: tl.constexpr, BLOCKS: tl.constexpr, TILED: tl.constexpr,
    EACH: tl.constexpr,
):
    """A block of a value head's columns, of one layer of one sequence, behind the rows of a path."""
    head, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    layer, sequence = tl.program_id(1), tl.program_id(2)
    key_head = head % SHAPE[0] if TILED else head // (SHAPE[1] // SHAPE[0])
    taken = tl.load(takens + sequence)
    if taken > 0:
        CHANNELS: tl.constexpr = 2 * SHAPE[0] * SHAPE[2] + SHAPE[1] * SHAPE[3]
        slot, wanted = tl.load(source + sequence), tl.load(destination + sequence)
        at, inside = _tile(memories, slot, layer, head, block, LAYERS, SHAPE)
        state = tl.load(at, mask=inside, other=0.0)
        earlier = layer.to(tl.int64) * rows  # what the layers before left
        first, path = first_row + sequence * EACH, paths + sequence * _DEEP
        state = _follow(
            state, taken, first, path, keys, keys + earlier * (SHAPE[0] * SHAPE[2]), keys,
            values + earlier * (SHAPE[1] * SHAPE[3]), write + earlier * SHAPE[1], left + earlier * SHAPE[1], keys,
            memories, windows, kept, slot, takens, layer, head, key_head, block,
            LAYERS, SHAPE, TAPS, True, False, False,
        )
        at, inside = _tile(memories, wanted, layer, head, block, LAYERS, SHAPE)
        tl.store(at, state, mask=inside)
        _keep_window(
            windows, kept + earlier * CHANNELS, slot, wanted, layer, first, path, taken - 1, LAYERS, SHAPE, TAPS, True
        )


@triton.jit
def gate_kernel(  # type: ignore[no-untyped-def]
    reads, gate, gate_stride, weight, places, out, eps, scratch_place,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):
    """One head of a row: what it read, normed and weighed; zeros where a row does not count."""
    head, row = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < VALUE_DIM
    counts = d * 0 + tl.load(places + row) < scratch_place
    at = (row * VALUE_HEADS + head) * VALUE_DIM + d
    read = tl.load(reads + at, mask=inside & counts, other=0.0)
    z = tl.load(gate + row * gate_stride + head * VALUE_DIM + d, mask=inside & counts, other=0.0).to(tl.float32)
    shrink = tl.rsqrt(tl.sum(read * read, 0) / VALUE_DIM + eps)
    normed = read * shrink * tl.load(weight + d, mask=inside, other=0.0)
    tl.store(out + at, (normed * (z * tl.sigmoid(z))).to(tl.bfloat16), mask=inside)


@triton.jit
def swap_kernel(source, destination, takens):  # type: ignore[no-untyped-def]
    """Who has moved on stands in its other slot now."""
    sequence = tl.program_id(0)
    old, new = tl.load(source + sequence), tl.load(destination + sequence)
    moved = tl.load(takens + sequence) > 0
    tl.store(source + sequence, new, mask=moved)
    tl.store(destination + sequence, old, mask=moved)
