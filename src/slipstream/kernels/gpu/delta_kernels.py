"""Triton kernels around the walk of delta_walk.py: they plan it, prepare the rows' inputs, and gate its output."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.gpu.delta_walk import BACK, KEEP, LAST, SHELF, fresh, fresh_one
from slipstream.kernels.gpu.device_rows import MAX_DEPTH

_DEEP = tl.constexpr(MAX_DEPTH)
_NORM_EPS = tl.constexpr(1e-6)  # the same number as in the CPU's delta_rule.py


@triton.jit
def plan_kernel(  # type: ignore[no-untyped-def]
    positions, places, base, paths, counts, steps, scratch_place,
    EACH: tl.constexpr, PADDED: tl.constexpr, TREE: tl.constexpr,
):
    """Plans one sequence: how many rows it has and, for a tree, in which order they are walked through.

    A row is followed by all rows that continue it, its smallest branch first. A state then has to be kept only at the
    entry of a branch that is not the last one, and such a branch has at most half of the rows around it.
    """
    sequence = tl.program_id(0)
    row = tl.arange(0, PADDED)
    at = sequence * EACH + row
    used = tl.load(places + at, mask=row < EACH, other=scratch_place) < scratch_place
    tl.store(counts + sequence, tl.sum(used.to(tl.int32), 0))
    if TREE:
        depth = tl.where(used, tl.load(positions + at, mask=used, other=0) - tl.load(base + sequence), 0)
        parent = tl.load(paths + at * _DEEP + depth - 1, mask=used & (depth > 0), other=-1)
        both = used[:, None] & used[None, :]
        above = both & (depth[None, :] <= depth[:, None])
        leads = tl.load(paths + at[:, None] * _DEEP + depth[None, :], mask=above, other=-1) == row[None, :]
        size = tl.sum(leads.to(tl.int32), 0)  # rows of a branch, including its first
        rank = size * PADDED + row
        sibling = both & (parent[:, None] == parent[None, :])
        earlier = sibling & (rank[None, :] < rank[:, None])
        passed = tl.sum(tl.where(earlier, size[None, :], 0), 1)
        changed = tl.max((earlier & (size[None, :] > 1)).to(tl.int32), 1)
        followed = tl.max((sibling & (rank[None, :] > rank[:, None])).to(tl.int32), 1)
        kept = followed * (size > 1).to(tl.int32)
        place = tl.sum(tl.where(leads, (passed + 1)[None, :], 0), 1) - 1
        shelf = tl.sum(tl.where(leads, kept[None, :], 0), 1) - kept
        entry = row + (size == 1).to(tl.int32) * LAST + kept * KEEP + changed * BACK + shelf * SHELF
        tl.store(steps + sequence * EACH + place, entry, mask=used)


@triton.jit
def _convolved(  # type: ignore[no-untyped-def]
    inputs, input_stride, window, kernel, kept, row, own, depth, paths, channel, inside,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, EACH: tl.constexpr, TREE: tl.constexpr,
):
    """Computes some channels of a row after the convolution and its silu; keeps the row's inputs for the commit."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        at = depth - (TAPS - 1 - tap)  # depth of the input; a negative one is in the window of earlier inputs
        ancestor = own - (TAPS - 1 - tap)
        if TREE and tap < TAPS - 1:
            ancestor = tl.load(paths + row * _DEEP + at, mask=at >= 0, other=0)
        found = (row - own + ancestor).to(tl.int64) * input_stride + channel
        behind = channel * 0 + at >= 0
        x = fresh(inputs + found, inside & behind)
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
    """Computes, for one row, a key head's query and key with their norms, or a value head's values and gates."""
    part, row = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    place = tl.load(places + row)
    sequence, own = row // EACH, row % EACH
    depth = tl.load(positions + row) - tl.load(base + sequence) if TREE else own
    slot = tl.load(source + sequence).to(tl.int64)
    if OVERLAP:
        gdc_wait()  # the kernel that may still run writes none of what was loaded above
        gdc_launch_dependents()
    if place < scratch_place:
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
            tl.store(write + at, tl.sigmoid(fresh_one(gates + row * gate_stride + head).to(tl.float32)))
            forget = fresh_one(gates + row * gate_stride + VALUE_HEADS + head).to(tl.float32) + tl.load(shift + head)
            softplus = tl.maximum(forget, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(forget)))
            tl.store(left + at, tl.exp(tl.load(rates + head) * softplus))


@triton.jit
def gate_kernel(  # type: ignore[no-untyped-def]
    reads, gate, gate_stride, weight, places, out, eps, scratch_place,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Norms and gates what one head of a row has read; padding rows get zeros."""
    head, row = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < VALUE_DIM
    counts = d * 0 + tl.load(places + row) < scratch_place
    scale = tl.load(weight + d, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()  # the kernel that may still run writes none of what was loaded above
        gdc_launch_dependents()
    at = (row * VALUE_HEADS + head) * VALUE_DIM + d
    read = fresh(reads + at, inside & counts)
    z = fresh(gate + row * gate_stride + head * VALUE_DIM + d, inside & counts).to(tl.float32)
    shrink = tl.rsqrt(tl.sum(read * read, 0) / VALUE_DIM + eps)
    normed = read * shrink * scale
    tl.store(out + at, (normed * (z * tl.sigmoid(z))).to(tl.bfloat16), mask=inside)


@triton.jit
def swap_kernel(source, destination, takens):  # type: ignore[no-untyped-def]
    """Exchanges the two slots of a sequence that has kept rows, so that `source` names its newest state."""
    sequence = tl.program_id(0)
    old, new = tl.load(source + sequence), tl.load(destination + sequence)
    moved = tl.load(takens + sequence) > 0
    tl.store(source + sequence, new, mask=moved)
    tl.store(destination + sequence, old, mask=moved)
