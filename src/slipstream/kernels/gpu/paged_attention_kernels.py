"""The Triton kernels of attention over pages; `paged_attention.py` launches them and says how they divide the work."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _last_position(positions, sequence, EACH: tl.constexpr, EACH_PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the position of the last row of a sequence; unused rows have the position of its first."""
    row = tl.arange(0, EACH_PADDED)
    return tl.max(tl.load(positions + sequence * EACH + tl.minimum(row, EACH - 1)), 0)


@triton.jit
def _visible(position, earliest, last, WINDOW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the range of key positions that a row at `position` sees."""
    low = position * 0 + earliest
    until = position + 1
    if BLOCK:
        until = position * 0 + last + 1
    if WINDOW > 0:
        low = tl.maximum(low, position - (WINDOW - 1))
        if BLOCK:
            until = tl.minimum(until, position + WINDOW)
    return low, until


@triton.jit
def _shared_until(until, GROUP_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the position at which the last two groups of a row's keys begin."""
    return tl.maximum((until - 1 >> GROUP_BITS) - 1, 0) << GROUP_BITS


@triton.jit
def _split(low, until, PAGE_BITS: tl.constexpr, GROUP_BITS: tl.constexpr, SLOTS: tl.constexpr,  # type: ignore[no-untyped-def]
           FEW_SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr):  # fmt: skip
    """Returns how the pages before a row's last two groups are split: first page, page after the last, pages per slot.
    """
    first_page = low >> PAGE_BITS
    stop_page = tl.maximum(_shared_until(until, GROUP_BITS) + (1 << PAGE_BITS) - 1 >> PAGE_BITS, first_page)
    return first_page, stop_page, _pages_of_slot(stop_page - first_page, SLOTS, FEW_SLOTS, LEAST_PAGES)


@triton.jit
def _pages_of_slot(  # type: ignore[no-untyped-def]
    shared_pages, SLOTS: tl.constexpr, FEW_SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr
):
    """Returns the pages per slot, which never decrease as the number of pages grows."""
    few = tl.minimum(tl.cdiv(shared_pages, FEW_SLOTS), LEAST_PAGES)
    return tl.maximum(tl.maximum(tl.cdiv(shared_pages, SLOTS - 2), few), 1)


@triton.jit
def _slot_begin(  # type: ignore[no-untyped-def]
    sequence, kv_head, slot, EACH: tl.constexpr, KV_HEADS: tl.constexpr, SHARE_PADDED: tl.constexpr, SLOTS: tl.constexpr
):
    """Returns where a slot's partial sums begin; those of all rows of a sequence lie side by side."""
    return ((sequence * KV_HEADS + kv_head) * SLOTS + slot) * (EACH * SHARE_PADDED)


@triton.jit
def _store_part(  # type: ignore[no-untyped-def]
    sums, stats, at, peak, weight, total, used, DIM: tl.constexpr
):
    """Stores the sums of a slot; values have 16 bits, as multiples of a power of two chosen for them."""
    d = tl.arange(0, DIM)
    largest = tl.max(tl.abs(total), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(largest, 252)  # infinities stay infinite
    shrink = (253 - exponent << 23).to(tl.float32, bitcast=True)
    tl.store(sums + at[:, None] * DIM + d[None, :], (total * shrink[:, None]).to(tl.float16), mask=used[:, None])
    tl.store(stats + at * 3, peak, mask=used)
    tl.store(stats + at * 3 + 1, weight, mask=used)
    tl.store(stats + at * 3 + 2, peak + (exponent - 126).to(tl.float32), mask=used)


@triton.jit
def _fold_keys(  # type: ignore[no-untyped-def]
    query, key, value, seen, scale, peak, weight, total, INTERPRETED: tl.constexpr
):
    """Adds some keys to the sums of every lane; the sums of a lane that sees none of them do not change by a bit."""
    if INTERPRETED:
        query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    scores = tl.where(seen, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - anchor)
    weights = tl.exp2(scores - anchor[:, None])
    # explicit, so that the compiler cannot choose which product rounds
    weight = tl.fma(weight, shrink, tl.sum(weights, 1))
    weights = weights.to(tl.bfloat16)
    if INTERPRETED:
        weights = weights.to(tl.float32)
    total = tl.dot(weights, value, total * shrink[:, None])
    return new_peak, weight, total


@triton.jit
def _fold_pages(  # type: ignore[no-untyped-def]
    query, keys, values, own_pages, begin, end, low, until, scale, kv_head, peak, weight, total,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Adds pages begin..end of a sequence, KEYS keys at a time; a lane sees the key positions low..until of them."""
    PIECES: tl.constexpr = PAGE // KEYS
    token = tl.arange(0, KEYS)
    held = tl.load(own_pages + tl.where(begin < end, begin, 0))
    for piece in range(begin * PIECES, end * PIECES):
        at = (held * KV_HEADS + kv_head) * PAGE + piece % PIECES * KEYS
        # the page is looked up one step ahead: a load that depends on a load would keep the compiler from prefetching
        # keys
        held = tl.load(own_pages + tl.minimum((piece + 1) // PIECES, end - 1))
        key, value = keys.load([at, 0]), values.load([at, 0])
        position = piece * KEYS + token
        seen = (position[None, :] >= low[:, None]) & (position[None, :] < until[:, None])
        peak, weight, total = _fold_keys(query, key, value, seen, scale, peak, weight, total, INTERPRETED)
    return peak, weight, total


@triton.jit
def shared_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, positions, earliest, pages, sums, stats, scale, most_pages,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PAGE_BITS: tl.constexpr,
    GROUP_BITS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
    SLOTS: tl.constexpr, FEW_SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr, OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A program handles a tile of rows and every n-th of their shared slots; n is the number of programs of the tile.
    """
    tile, kv_head, sequence = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    lane, d = tl.arange(0, TILE * SHARE_PADDED), tl.arange(0, DIM)
    member = lane % SHARE_PADDED
    row = tile * TILE + lane // SHARE_PADDED
    used = (row < EACH) & (member < SHARE)
    row = sequence * EACH + tl.minimum(row, EACH - 1)
    position = tl.load(positions + row)
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(position, tl.load(earliest + sequence), last, WINDOW, BLOCK)
    first_page, stop_page, each = _split(low, until, PAGE_BITS, GROUP_BITS, SLOTS, FEW_SLOTS, LEAST_PAGES)
    # some rows may fill fewer slots than this; one division for all rows is faster than one for each
    fewest = _pages_of_slot(tl.min(stop_page - first_page, 0), SLOTS, FEW_SLOTS, LEAST_PAGES)
    most_slots = tl.minimum(tl.cdiv(tl.max(stop_page - first_page, 0), fewest), SLOTS - 2)
    at = ((row * KV_HEADS + kv_head) * SHARE + member)[:, None] * DIM + d[None, :]
    if OVERLAP:
        gdc_wait()  # waits for the queries; the rows' positions and the keys of these slots were written earlier
        gdc_launch_dependents()
    query = tl.load(queries + at, mask=used[:, None], other=0.0)
    shared_until = _shared_until(until, GROUP_BITS)
    first_lane = tile * (TILE * SHARE_PADDED)
    for slot in range(tl.program_id(2), most_slots, tl.num_programs(2)):
        first = first_page + slot * each
        here = used & (first < stop_page)
        stop = tl.minimum(first + each, stop_page)
        # if no row has such a slot, `begin` is after every page, yet small enough to be multiplied by the pieces of a
        # page
        begin, end = tl.min(tl.where(here, first, 1 << 26), 0), tl.max(tl.where(here, stop, 0), 0)
        peak = tl.full([TILE * SHARE_PADDED], float("-inf"), tl.float32)
        weight = tl.zeros([TILE * SHARE_PADDED], tl.float32)
        total = tl.zeros([TILE * SHARE_PADDED, DIM], tl.float32)
        peak, weight, total = _fold_pages(
            query, keys, values, pages + sequence * most_pages, begin, end, tl.maximum(low, first * PAGE),
            tl.where(here, tl.minimum(stop * PAGE, shared_until), 0), scale, kv_head, peak, weight, total,
            KV_HEADS, PAGE, KEYS, INTERPRETED,
        )
        # Rows without such a slot store sums that are never read. A mask for them would need registers, and with fewer
        # registers the programs of the next launch fit beside these.
        begin = _slot_begin(sequence, kv_head, slot, EACH, KV_HEADS, SHARE_PADDED, SLOTS) + first_lane
        known = lane < EACH * SHARE_PADDED - first_lane
        _store_part(sums, stats, begin + lane, peak, weight, total, known, DIM)


@triton.jit
def _found(  # type: ignore[no-untyped-def]
    own_pages, most_pages, path, position, reached, page, committed, kv_head, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, PAGE_BITS: tl.constexpr, TREE: tl.constexpr,
):
    """Returns the indices of the pool's vectors that hold the keys of positions within one of a row's pages."""
    held = (tl.load(own_pages + page) * KV_HEADS + kv_head) * PAGE
    if not TREE:
        return held + (position & (PAGE - 1))
    depth = position - committed
    ancestor = committed + tl.load(path + depth, mask=reached & (depth >= 0), other=0)
    step_page = committed >> PAGE_BITS  # the rows of a step are in this page or in the next one
    here = (tl.load(own_pages + step_page) * KV_HEADS + kv_head) * PAGE
    behind = (tl.load(own_pages + tl.minimum(step_page + 1, most_pages - 1)) * KV_HEADS + kv_head) * PAGE
    own = tl.where(ancestor >> PAGE_BITS == step_page, here, behind)
    return tl.where(depth >= 0, own, held) + (tl.where(depth >= 0, ancestor, position) & (PAGE - 1))


@triton.jit
def last_groups_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, positions, base, earliest, pages, paths, sums, stats, scale, most_pages,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PAGE_BITS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP_BITS: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, SLOTS: tl.constexpr, OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """A program sums one group of keys for a few rows, for each of which it is the last group or the last but one.

    From the group in which a tree's step began, every row has its own keys, and a program handles one row.
    """
    if OVERLAP:
        gdc_launch_dependents()
    # programs of later groups, which a step seldom reaches, start last
    kv_head, work, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    committed = tl.load(base + sequence)
    lane, d = tl.arange(0, TILE * SHARE_PADDED), tl.arange(0, DIM)
    member = lane % SHARE_PADDED
    group = (committed >> GROUP_BITS) - 1 + work // TILES
    row = work % TILES * TILE + lane // SHARE_PADDED
    used = (row < EACH) & (member < SHARE)
    own = tl.maximum(work - TILES, 0)
    if TREE:
        group = (committed >> GROUP_BITS) + tl.where(work < TILES, -1, own // EACH)
        row = tl.where(work < TILES, row, own % EACH)
        used = tl.where(work < TILES, used, lane < SHARE)
    own_row = tl.minimum(row, EACH - 1)
    row = sequence * EACH + own_row
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(tl.load(positions + row), tl.load(earliest + sequence), last, WINDOW, BLOCK)
    slot = SLOTS - 1 + group - (until - 1 >> GROUP_BITS)
    here = used & (slot >= SLOTS - 2) & (slot < SLOTS) & (group >= (low >> GROUP_BITS))
    stop = tl.max(tl.where(here, until, 0), 0)
    if stop > 0:
        at = ((row * KV_HEADS + kv_head) * SHARE + member)[:, None] * DIM + d[None, :]
        query = tl.load(queries + at, mask=here[:, None], other=0.0)
        path = paths + (sequence * EACH + own % EACH) * DEPTH
        peak = tl.full([TILE * SHARE_PADDED], float("-inf"), tl.float32)
        weight = tl.zeros([TILE * SHARE_PADDED], tl.float32)
        total = tl.zeros([TILE * SHARE_PADDED, DIM], tl.float32)
        position = (group << GROUP_BITS) + tl.arange(0, 1 << GROUP_BITS)
        reached = position < stop
        found = _found(
            pages + sequence * most_pages, most_pages, path, position, reached, group << GROUP_BITS >> PAGE_BITS,
            committed, kv_head, KV_HEADS, PAGE, PAGE_BITS, TREE,
        )
        found = found.to(tl.int64)[:, None] * DIM + d[None, :]
        key = tl.load(keys + found, mask=reached[:, None], other=0.0)
        value = tl.load(values + found, mask=reached[:, None], other=0.0)
        seen = (position[None, :] >= low[:, None]) & (position[None, :] < until[:, None])
        peak, weight, total = _fold_keys(query, key, value, seen, scale, peak, weight, total, INTERPRETED)
        begin = _slot_begin(sequence, kv_head, slot, EACH, KV_HEADS, SHARE_PADDED, SLOTS)
        _store_part(sums, stats, begin + own_row * SHARE_PADDED + member, peak, weight, total, here, DIM)
    # A kernel that waits for this launch waits for its first program, and therefore also for the first launch. The
    # other programs must not wait: as long as they stay, there is no room for programs that have not started.
    if OVERLAP and (work == 0) & (kv_head == 0) & (sequence == 0):
        gdc_wait()


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    positions, earliest, sums, stats, out,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PAGE_BITS: tl.constexpr,
    GROUP_BITS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, FEW_SLOTS: tl.constexpr,
    LEAST_PAGES: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Adds up the slots of one head of a row."""
    head, row = tl.program_id(0), tl.program_id(1)
    sequence = row // EACH
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(tl.load(positions + row), tl.load(earliest + sequence), last, WINDOW, BLOCK)
    first_page, stop_page, each = _split(low, until, PAGE_BITS, GROUP_BITS, SLOTS, FEW_SLOTS, LEAST_PAGES)
    slots = tl.cdiv(stop_page - first_page, each)
    ends = tl.minimum((until - 1 >> GROUP_BITS) - (low >> GROUP_BITS), 1) + 1  # how many of the last two groups it sees
    d = tl.arange(0, DIM)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    peak, weight, total = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
    for begin in range(0, slots + ends, AT_ONCE):
        slot = begin + tl.arange(0, AT_ONCE)
        slot = tl.where(slot < slots, slot, slot - slots + SLOTS - ends)
        there = slot < SLOTS
        at = _slot_begin(sequence, head // SHARE, slot, EACH, KV_HEADS, SHARE_PADDED, SLOTS)
        at += row % EACH * SHARE_PADDED + head % SHARE
        # loads bypass the first cache, which does not see what other multiprocessors wrote
        peaks = tl.load(stats + at * 3, mask=there, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(stats + at * 3 + 1, mask=there, other=0.0, cache_modifier=".cg")
        units = tl.load(stats + at * 3 + 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(
            sums + at[:, None] * DIM + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        shrink, sizes = tl.exp2(peak - new_peak), tl.exp2(units - new_peak)
        weight = tl.fma(weight, shrink, tl.sum(weights * tl.exp2(peaks - new_peak), 0))
        total = tl.fma(total, tl.broadcast_to(shrink, [DIM]), tl.sum(totals * sizes[:, None], 0))
        peak = new_peak
    tl.store(out + (row * KV_HEADS * SHARE + head) * DIM + d, (total / weight).to(tl.bfloat16))


@triton.jit
def prefill_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, positions, earliest, pages, out, scale, most_pages,
    EACH: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr, SHARE_PADDED: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Handles many rows of one sequence: a program takes a tile of them through all their pages."""
    tile, kv_head, sequence = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, d = tl.arange(0, TILE * SHARE_PADDED), tl.arange(0, DIM)
    member = lane % SHARE_PADDED
    row = tile * TILE + lane // SHARE_PADDED
    used = (row < EACH) & (member < SHARE)
    row = sequence * EACH + tl.minimum(row, EACH - 1)
    low, until = _visible(tl.load(positions + row), tl.load(earliest + sequence), 0, WINDOW, False)
    at = ((row * KV_HEADS + kv_head) * SHARE + member)[:, None] * DIM + d[None, :]
    query = tl.load(queries + at, mask=used[:, None], other=0.0)
    peak = tl.full([TILE * SHARE_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([TILE * SHARE_PADDED], tl.float32)
    total = tl.zeros([TILE * SHARE_PADDED, DIM], tl.float32)
    begin, end = tl.min(low, 0) // PAGE, (tl.max(until, 0) + PAGE - 1) // PAGE
    peak, weight, total = _fold_pages(
        query, keys, values, pages + sequence * most_pages, begin, end, low, until, scale, kv_head, peak, weight, total,
        KV_HEADS, PAGE, KEYS, INTERPRETED,
    )
    tl.store(out + at, (total / weight[:, None]).to(tl.bfloat16), mask=used[:, None])
