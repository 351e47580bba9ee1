"""Attention of rows over paged keys and values, in three launches, with the same bits for a row in any company.

The pages a row sees are dealt out to SLOTS partial sums by the row's own position: the last two pages have a slot each,
the pages before them are split evenly over the others. All keys of the evenly split pages are older than the step, so
all rows of a sequence read the same ones, and the first launch sums them up for many rows at a time. Where a tree
branches is always within the last two pages: the second launch sums these up, a tree's keys gathered through a row's
ancestors in the order of their positions. A page that a row does not see changes no bit of its sums, so rows of one
program may have different pages. The third launch adds up a row's slots. Each launch begins while the one before it is
still running, and waits only for what it needs.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.errors import IntegrityError
from slipstream.kernels.gpu.rows import DeviceRows

SLOTS = 32  # partial sums of a row
LEAST_PAGES = 2  # pages of a slot that rows share: fewer would write more partial sums than they save
LANES = 64  # rows times query heads of a kv head that a program of the first launch takes: what a warp group multiplies
PREFILL_LANES = 128
LAST_LANES = 16  # of the second launch: what a warp multiplies
PROGRAMS = 264  # of the first launch: two for each multiprocessor of an H200 are at work at a time
LAST_WARPS = 4
STAGES = 3  # pages that a program has on the way or in work; wide heads leave room for two
AT_ONCE = 16  # slots whose loads are on the way together when they are added up
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the interpreter's dot is wrong for bf16


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Partial sums of one launch at a time; the same memory serves every layer."""

    sums: Tensor  # fp32 [rows, kv heads, SLOTS, share, dim]: values weighted by 2 ** (score - peak)
    stats: Tensor  # fp32 [rows, kv heads, SLOTS, share, 2]: the peak of the scores, the sum of the weights

    @classmethod
    def empty(cls, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> AttentionScratch:
        shape = rows, kv_heads, SLOTS, heads // kv_heads
        return cls(torch.empty(*shape, dim, device=device), torch.empty(*shape, 2, device=device))


@triton.jit
def _last_position(positions, sequence, EACH: tl.constexpr, EACH_PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the last row of a sequence stands; rows that are not used look like its first."""
    row = tl.arange(0, EACH_PADDED)
    return tl.max(tl.load(positions + sequence * EACH + tl.minimum(row, EACH - 1)), 0)


@triton.jit
def _visible(position, earliest, last, WINDOW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The range of key positions that a row at `position` sees."""
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
def _split(low, until, PAGE: tl.constexpr, SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How a row's pages are dealt out: its first page, the one behind its shared slots, the pages of a shared slot, and
    how many of these it fills.
    """
    first_page = low // PAGE
    stop_page = tl.maximum((until - 1) // PAGE - 1, first_page)
    each = tl.maximum((stop_page - first_page + SLOTS - 3) // (SLOTS - 2), LEAST_PAGES)
    return first_page, stop_page, each, (stop_page - first_page + each - 1) // each


@triton.jit
def _store_part(  # type: ignore[no-untyped-def]
    sums, stats, at, peak, weight, total, used, DIM: tl.constexpr
):
    d = tl.arange(0, DIM)
    tl.store(sums + at[:, None] * DIM + d[None, :], total, mask=used[:, None])
    tl.store(stats + at * 2, peak, mask=used)
    tl.store(stats + at * 2 + 1, weight, mask=used)


@triton.jit
def _fold_page(  # type: ignore[no-untyped-def]
    query, key, value, seen, scale, peak, weight, total, INTERPRETED: tl.constexpr
):
    """Adds a page's keys to the sums of every lane. A lane that sees none of them keeps its sums to the bit."""
    if INTERPRETED:
        query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    scores = tl.where(seen, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - anchor)
    weights = tl.exp2(scores - anchor[:, None])
    weight = tl.fma(weight, shrink, tl.sum(weights, 1))  # spelt out: the compiler must not choose which product rounds
    weights = weights.to(tl.bfloat16)
    if INTERPRETED:
        weights = weights.to(tl.float32)
    total = tl.dot(weights, value, total * shrink[:, None])
    return new_peak, weight, total


@triton.jit
def _fold_pages(  # type: ignore[no-untyped-def]
    query, keys, values, own_pages, begin, end, low, until, scale, kv_head, peak, weight, total,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Folds pages begin..end of a sequence; a lane sees key positions low..until of them."""
    token = tl.arange(0, PAGE)
    within = token[:, None] * DIM + tl.arange(0, DIM)[None, :]
    held = tl.load(own_pages + tl.where(begin < end, begin, 0))
    for page in range(begin, end):
        at = (held.to(tl.int64) * KV_HEADS + kv_head) * (PAGE * DIM)
        # looked up one page ahead: a load that waits for a load would keep the compiler from fetching pages early
        held = tl.load(own_pages + tl.minimum(page + 1, end - 1))
        key, value = tl.load(keys + at + within), tl.load(values + at + within)
        position = page * PAGE + token
        seen = (position[None, :] >= low[:, None]) & (position[None, :] < until[:, None])
        peak, weight, total = _fold_page(query, key, value, seen, scale, peak, weight, total, INTERPRETED)
    return peak, weight, total


@triton.jit
def _shared_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, positions, earliest, pages, sums, stats, scale, most_pages,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr, OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A program has a tile of rows and sums up every n-th of their shared slots, n being the tile's programs."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    tile, kv_head, sequence = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    lane, d = tl.arange(0, TILE * SHARE_PADDED), tl.arange(0, DIM)
    member = lane % SHARE_PADDED
    row = tile * TILE + lane // SHARE_PADDED
    used = (row < EACH) & (member < SHARE)
    row = sequence * EACH + tl.minimum(row, EACH - 1)
    position = tl.load(positions + row)
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(position, tl.load(earliest + sequence), last, WINDOW, BLOCK)
    first_page, stop_page, each, slots = _split(low, until, PAGE, SLOTS, LEAST_PAGES)
    vector = row * KV_HEADS + kv_head
    at = (vector * SHARE + member)[:, None] * DIM + d[None, :]
    query = tl.load(queries + at, mask=used[:, None], other=0.0)
    for slot in range(tl.program_id(2), tl.max(slots, 0), tl.num_programs(2)):
        here = used & (slot < slots)
        first = first_page + slot * each
        stop = tl.minimum(first + each, stop_page)
        begin, end = tl.min(tl.where(here, first, 1 << 30), 0), tl.max(tl.where(here, stop, 0), 0)
        peak = tl.full([TILE * SHARE_PADDED], float("-inf"), tl.float32)
        weight = tl.zeros([TILE * SHARE_PADDED], tl.float32)
        total = tl.zeros([TILE * SHARE_PADDED, DIM], tl.float32)
        peak, weight, total = _fold_pages(
            query, keys, values, pages + sequence * most_pages, begin, end, tl.maximum(low, first * PAGE),
            tl.where(here, stop * PAGE, 0), scale, kv_head, peak, weight, total, KV_HEADS, DIM, PAGE, INTERPRETED,
        )
        _store_part(sums, stats, (vector * SLOTS + slot) * SHARE + member, peak, weight, total, here, DIM)


@triton.jit
def _held(  # type: ignore[no-untyped-def]
    own_pages, most_pages, path, position, reached, page, committed, PAGE: tl.constexpr, TREE: tl.constexpr
):
    """In which page of the pool, and which token of it, a row finds the keys of the positions of one of its pages."""
    held = tl.load(own_pages + page)
    if not TREE:
        return position * 0 + held, position % PAGE
    depth = position - committed
    ancestor = committed + tl.load(path + depth, mask=reached & (depth >= 0), other=0)
    step_page = committed // PAGE  # the rows of a step lie there or in the page behind
    here, behind = tl.load(own_pages + step_page), tl.load(own_pages + tl.minimum(step_page + 1, most_pages - 1))
    own = tl.where(ancestor // PAGE == step_page, here, behind)
    return tl.where(depth >= 0, own, held), tl.where(depth >= 0, ancestor, position) % PAGE


@triton.jit
def _last_pages_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, positions, base, earliest, pages, paths, sums, stats, scale, most_pages,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, DEPTH: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """A program sums up one page for those of a few rows whose last page or last but one it is. From the page on in
    which a tree's step began every row has keys of its own, and a program takes one row.
    """
    if OVERLAP:
        gdc_launch_dependents()
    work, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    committed = tl.load(base + sequence)
    lane, d = tl.arange(0, TILE * SHARE_PADDED), tl.arange(0, DIM)
    member = lane % SHARE_PADDED
    page = committed // PAGE - 1 + work // TILES
    row = work % TILES * TILE + lane // SHARE_PADDED
    lanes = TILE * SHARE_PADDED
    own = tl.maximum(work - TILES, 0)
    if TREE:
        page = committed // PAGE + tl.where(work < TILES, -1, own // EACH)
        row = tl.where(work < TILES, row, own % EACH)
        lanes = tl.where(work < TILES, lanes, SHARE_PADDED)
    used = (row < EACH) & (member < SHARE) & (lane < lanes)
    row = sequence * EACH + tl.minimum(row, EACH - 1)
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(tl.load(positions + row), tl.load(earliest + sequence), last, WINDOW, BLOCK)
    slot = SLOTS - 1 + page - (until - 1) // PAGE
    used = used & (slot >= SLOTS - 2) & (slot < SLOTS) & (page >= low // PAGE)
    stop = tl.max(tl.where(used, until, 0), 0)
    if stop > 0:
        vector = row * KV_HEADS + kv_head
        at = (vector * SHARE + member)[:, None] * DIM + d[None, :]
        query = tl.load(queries + at, mask=used[:, None], other=0.0)
        position = page * PAGE + tl.arange(0, PAGE)
        reached = position < stop
        path = paths + (sequence * EACH + own % EACH) * DEPTH
        own_pages = pages + sequence * most_pages
        held, offset = _held(own_pages, most_pages, path, position, reached, page, committed, PAGE, TREE)
        found = ((held.to(tl.int64) * KV_HEADS + kv_head) * PAGE + offset)[:, None] * DIM + d[None, :]
        key = tl.load(keys + found, mask=reached[:, None], other=0.0)
        value = tl.load(values + found, mask=reached[:, None], other=0.0)
        seen = (position[None, :] >= low[:, None]) & (position[None, :] < until[:, None])
        peak, weight, total = _fold_page(
            query, key, value, seen, scale, tl.full([TILE * SHARE_PADDED], float("-inf"), tl.float32),
            tl.zeros([TILE * SHARE_PADDED], tl.float32), tl.zeros([TILE * SHARE_PADDED, DIM], tl.float32), INTERPRETED,
        )
        _store_part(sums, stats, (vector * SLOTS + slot) * SHARE + member, peak, weight, total, used, DIM)
    if OVERLAP:
        gdc_wait()  # so that who waits for this launch has waited for the first one too


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    positions, earliest, sums, stats, out,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Adds up the slots of a row's head."""
    head, row = tl.program_id(0), tl.program_id(1)
    sequence = row // EACH
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(tl.load(positions + row), tl.load(earliest + sequence), last, WINDOW, BLOCK)
    first_page, _, _, slots = _split(low, until, PAGE, SLOTS, LEAST_PAGES)
    ends = tl.minimum((until - 1) // PAGE - first_page, 1) + 1  # how many of the last two pages the row sees
    d = tl.arange(0, DIM)
    if OVERLAP:
        gdc_wait()
    peak, weight, total = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
    for begin in range(0, slots + ends, AT_ONCE):
        slot = begin + tl.arange(0, AT_ONCE)
        slot = tl.where(slot < slots, slot, slot - slots + SLOTS - ends)
        there = slot < SLOTS
        at = ((row * KV_HEADS + head // SHARE) * SLOTS + slot) * SHARE + head % SHARE
        # read past the first cache, which does not hear of what other multiprocessors wrote
        peaks = tl.load(stats + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(stats + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        totals = tl.load(
            sums + at[:, None] * DIM + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
        )
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        shrink, shares = tl.exp2(peak - new_peak), tl.exp2(peaks - new_peak)
        weight = tl.fma(weight, shrink, tl.sum(weights * shares, 0))
        total = tl.fma(total, tl.broadcast_to(shrink, [DIM]), tl.sum(totals * shares[:, None], 0))
        peak = new_peak
    tl.store(out + (row * KV_HEADS * SHARE + head) * DIM + d, (total / weight).to(tl.bfloat16))


@triton.jit
def _prefill_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, positions, earliest, pages, out, scale, most_pages,
    EACH: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr, SHARE_PADDED: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Many rows of one sequence: a program takes a tile of them through all their pages."""
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
        KV_HEADS, DIM, PAGE, INTERPRETED,
    )
    tl.store(out + at, (total / weight[:, None]).to(tl.bfloat16), mask=used[:, None])


def paged_attention(
    queries: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int, out: Tensor,
    scratch: AttentionScratch,
) -> None:
    """Attention of queries bf16 [rows, heads, dim] over one layer's pools [pages, kv heads, page tokens, dim].

    `window` (0: none) counts positions, the row's own included. out: bf16 [rows, heads * dim].
    """
    _, heads, dim = queries.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    if dim & (dim - 1) or page & (page - 1):
        raise IntegrityError(f"attention on the GPU takes heads and pages of a power of two, not {dim} and {page}")
    if rows.each > page:
        _prefill(queries, keys, values, rows, scale, window, out)
        return
    share = heads // kv_heads
    share_padded = triton.next_power_of_2(share)
    tile = max(LANES // share_padded, 1)
    tiles = triton.cdiv(rows.each, tile)
    programs = min(max(PROGRAMS // (kv_heads * tiles * rows.sequences), 1), SLOTS - 2)
    overlap = _can_overlap(queries.device)
    scale *= math.log2(math.e)
    sizes = {
        "EACH": rows.each, "EACH_PADDED": triton.next_power_of_2(rows.each), "KV_HEADS": kv_heads, "SHARE": share,
        "SHARE_PADDED": share_padded, "DIM": dim, "PAGE": page, "WINDOW": window, "BLOCK": rows.kind == "block",
    }
    _shared_kernel[(kv_heads * tiles, rows.sequences, programs)](
        queries, keys, values, rows.positions, rows.earliest, rows.pages, scratch.sums, scratch.stats, scale,
        rows.pages.shape[1], TILE=tile, SLOTS=SLOTS, LEAST_PAGES=LEAST_PAGES, OVERLAP=overlap,
        INTERPRETED=_INTERPRETED, **sizes, num_warps=4, num_stages=_stages(dim), launch_pdl=overlap,
    )
    few = max(LAST_LANES // share_padded, 1)
    fews, tree = triton.cdiv(rows.each, few), rows.kind == "tree"
    # what was committed ends in or before the page that a step begins in; rows may go one page further
    work = fews + 2 * rows.each if tree else fews * (min(rows.each, 2) + 1)
    _last_pages_kernel[(work, kv_heads, rows.sequences)](
        queries, keys, values, rows.positions, rows.base, rows.earliest, rows.pages, rows.paths, scratch.sums,
        scratch.stats, scale, rows.pages.shape[1], DEPTH=rows.paths.shape[1], TREE=tree, TILE=few, TILES=fews,
        SLOTS=SLOTS, OVERLAP=overlap, INTERPRETED=_INTERPRETED, **sizes, num_warps=LAST_WARPS, num_stages=1,
        launch_pdl=overlap,
    )
    _combine_kernel[(heads, rows.rows)](
        rows.positions, rows.earliest, scratch.sums, scratch.stats, out, SLOTS=SLOTS, LEAST_PAGES=LEAST_PAGES,
        AT_ONCE=AT_ONCE, OVERLAP=overlap, **sizes, num_warps=1, launch_pdl=overlap,
    )


@cache
def _can_overlap(device: torch.device) -> bool:
    """Whether a launch can begin before the one that it waits for has ended."""
    return device.type == "cuda" and not _INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def _prefill(
    queries: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int, out: Tensor
) -> None:
    _, heads, dim = queries.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    if rows.kind != "chain":
        raise IntegrityError(f"{rows.each} rows of kind {rows.kind} in a sequence: no more than {page} can be attended")
    share = heads // kv_heads
    share_padded = triton.next_power_of_2(share)
    tile = max(PREFILL_LANES // share_padded, 1)
    _prefill_kernel[(triton.cdiv(rows.each, tile), kv_heads, rows.sequences)](
        queries, keys, values, rows.positions, rows.earliest, rows.pages, out, scale * math.log2(math.e),
        rows.pages.shape[1], EACH=rows.each, KV_HEADS=kv_heads, SHARE=share, SHARE_PADDED=share_padded, DIM=dim,
        PAGE=page, WINDOW=window, TILE=tile, INTERPRETED=_INTERPRETED, num_warps=8, num_stages=_stages(dim),
    )


def _stages(dim: int) -> int:
    return STAGES if dim <= 128 else 2


def paged_attention_reference(
    queries: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int, out: Tensor,
    scratch: AttentionScratch | None = None, precision: torch.dtype = torch.float32,
) -> None:
    """The same in torch, a sequence at a time, every key a row sees in one sum."""
    _, heads, dim = queries.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    for sequence in range(rows.sequences):
        own = slice(sequence * rows.each, (sequence + 1) * rows.each)
        at = rows.positions[own].long()[:, None]
        last = int(at.max())
        base = int(rows.base[sequence])
        position = torch.arange(last + 1, device=keys.device)[None]
        seen = (position >= rows.earliest[sequence]) & (position <= (last if rows.kind == "block" else at))
        if window:
            seen = seen & (at - position < window) & (position - at < window)
        slots = position
        if rows.kind == "tree":  # behind the anchor every row has keys of its own
            depth = (position - base).clamp(0, rows.paths.shape[1] - 1).expand(rows.each, -1)
            ancestors = base + rows.paths[own].long().gather(1, depth)
            slots = torch.where(position < base, position, torch.where(seen, ancestors, base))
        places = rows.pages[sequence].long()[slots // page]
        k, v = (pool[places, :, slots % page].to(precision) for pool in (keys, values))  # [rows or 1, keys, kv, dim]
        q = queries[own].to(precision).view(rows.each, kv_heads, heads // kv_heads, dim) * scale
        scores = torch.einsum("rgsd,rtgd->rgst", q, k).masked_fill(~seen[:, None, None], float("-inf"))
        mixed = torch.einsum("rgst,rtgd->rgsd", scores.softmax(-1), v)
        out[own] = mixed.reshape(rows.each, heads * dim).to(out.dtype)
