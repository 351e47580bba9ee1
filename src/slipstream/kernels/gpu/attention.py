"""Attention of rows over paged keys and values, in two launches, with the same bits for a row in any company.

The pages a row sees are dealt out to SLOTS partial sums by the row's own position: the last two pages have a slot each,
the pages before them are split evenly over the others. All keys of the evenly split pages are older than the step, so
all rows of a sequence read the same ones; where a tree branches is always within the last two pages, and there a row's
keys are gathered through its ancestors in position order. A page that a row does not see changes no bit of its sums,
so rows of one program may have different pages. The second launch adds a row's slots up.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.errors import IntegrityError
from slipstream.kernels.gpu.rows import DeviceRows

SLOTS = 32  # partial sums of a row; a power of two
LEAST_PAGES = 2  # pages of a slot that is not one of the last two: fewer would write more partial sums than they save
# Lanes (rows times query heads of a kv head) of a program: 64 is what the tensor cores of a warp group take. It must
# not depend on the number of rows, since another instruction may sum in another order.
LANES = 64
PREFILL_LANES = 128
STAGES = 3  # pages that a program has on the way or in work; wide heads leave room for two
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
def _slot_pages(  # type: ignore[no-untyped-def]
    slot, low, until, PAGE: tl.constexpr, SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr
):
    """The range of pages whose keys a slot adds up, empty where the row does not need it."""
    first_page = low // PAGE
    last_page = (until - 1) // PAGE
    shared = tl.maximum(last_page - 1 - first_page, 0)
    each = tl.maximum((shared + SLOTS - 3) // (SLOTS - 2), LEAST_PAGES)
    first = first_page + slot * each
    tail = last_page - (SLOTS - 1) + slot
    is_tail = slot >= SLOTS - 2
    return (
        tl.where(is_tail, tl.maximum(tail, first_page), first),
        tl.where(is_tail, tail + 1, tl.minimum(first + each, last_page - 1)),
    )


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
    token, d = tl.arange(0, PAGE), tl.arange(0, DIM)
    held = tl.load(own_pages + begin)
    for page in range(begin, end):
        at = (held.to(tl.int64) * KV_HEADS + kv_head) * (PAGE * DIM) + token[:, None] * DIM + d[None, :]
        # looked up one page ahead: a load that waits for a load would keep the compiler from fetching pages early
        held = tl.load(own_pages + tl.minimum(page + 1, end - 1))
        key, value = tl.load(keys + at), tl.load(values + at)
        position = page * PAGE + token
        seen = (position[None, :] >= low[:, None]) & (position[None, :] < until[:, None])
        peak, weight, total = _fold_page(query, key, value, seen, scale, peak, weight, total, INTERPRETED)
    return peak, weight, total


@triton.jit
def _fold_path(  # type: ignore[no-untyped-def]
    query, keys, values, own_pages, path, page, committed, low, until, scale, kv_head, peak, weight, total,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Folds one page of a tree's row: its keys are those of its ancestors, in the order of their positions."""
    token, d = tl.arange(0, PAGE), tl.arange(0, DIM)
    position = page * PAGE + token
    reached = position < tl.max(until, 0)
    depth = position - committed
    ancestor = tl.load(path + depth, mask=reached & (depth >= 0), other=0)
    slot = tl.where(depth >= 0, committed + ancestor, position)
    held = tl.load(own_pages + slot // PAGE, mask=reached, other=0).to(tl.int64)
    at = ((held * KV_HEADS + kv_head) * PAGE + slot % PAGE)[:, None] * DIM + d[None, :]
    key = tl.load(keys + at, mask=reached[:, None], other=0.0)
    value = tl.load(values + at, mask=reached[:, None], other=0.0)
    seen = (position[None, :] >= low[:, None]) & (position[None, :] < until[:, None])
    return _fold_page(query, key, value, seen, scale, peak, weight, total, INTERPRETED)


@triton.jit
def _partials_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, positions, base, earliest, pages, paths, sums, stats, scale, most_pages,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, DEPTH: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr,
    LEAST_PAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """A program takes a tile of rows and either one of their shared slots or one of the last pages; behind those, for a
    tree, there is a program for each row and page from the one on in which the step began.
    """
    work, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    committed = tl.load(base + sequence)
    lane, d = tl.arange(0, TILE * SHARE_PADDED), tl.arange(0, DIM)
    member = lane % SHARE_PADDED
    item = work // TILES
    row = (work % TILES) * TILE + lane // SHARE_PADDED
    lanes = TILE * SHARE_PADDED
    tail_page = committed // PAGE - 1 + item - (SLOTS - 2)
    own = work - TILES * (SLOTS - 1)  # which of a tree's programs for single rows this is, if it is one
    if TREE:
        row = tl.where(own >= 0, own // 2, row)
        lanes = tl.where(own >= 0, SHARE, lanes)
        tail_page = tl.where(own >= 0, committed // PAGE + own % 2, tail_page)
    # most of a short context's programs have nothing to do, and find it out here with one load
    if tl.where(item < SLOTS - 2, item * LEAST_PAGES + 2, tail_page) > (committed + EACH - 1) // PAGE:
        return
    used = (row < EACH) & (member < SHARE) & (lane < lanes)
    row = tl.minimum(row, EACH - 1)
    position = tl.load(positions + sequence * EACH + row)
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(position, tl.load(earliest + sequence), last, WINDOW, BLOCK)
    slot = tl.where(item < SLOTS - 2, item, tail_page - (until - 1) // PAGE + SLOTS - 1)
    first, stop = _slot_pages(slot, low, until, PAGE, SLOTS, LEAST_PAGES)
    # a row whose last two pages are others than this one has it in a shared slot, or not at all
    used = used & (slot >= tl.minimum(item, SLOTS - 2)) & (slot < SLOTS) & (first < stop)
    begin, end = tl.min(tl.where(used, first, 1 << 30), 0), tl.max(tl.where(used, stop, 0), 0)
    if begin >= end:
        return
    low, until = tl.maximum(low, first * PAGE), tl.where(used, tl.minimum(until, stop * PAGE), 0)
    vector = (sequence * EACH + row) * KV_HEADS + kv_head
    query = tl.load(queries + (vector * SHARE + member)[:, None] * DIM + d[None, :], mask=used[:, None], other=0.0)
    own_pages = pages + sequence * most_pages
    peak = tl.full([TILE * SHARE_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([TILE * SHARE_PADDED], tl.float32)
    total = tl.zeros([TILE * SHARE_PADDED, DIM], tl.float32)
    path = paths + (sequence * EACH + own // 2) * DEPTH
    if TREE:  # noqa: SIM102 (one is known when compiling, the other is not)
        if own >= 0:
            peak, weight, total = _fold_path(
                query, keys, values, own_pages, path, begin, committed, low, until, scale, kv_head, peak, weight,
                total, KV_HEADS, DIM, PAGE, INTERPRETED,
            )
            end = begin
    peak, weight, total = _fold_pages(
        query, keys, values, own_pages, begin, end, low, until, scale, kv_head, peak, weight, total,
        KV_HEADS, DIM, PAGE, INTERPRETED,
    )
    at = (vector * SLOTS + slot) * SHARE + member
    tl.store(sums + at[:, None] * DIM + d[None, :], total, mask=used[:, None])
    tl.store(stats + at * 2, peak, mask=used)
    tl.store(stats + at * 2 + 1, weight, mask=used)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    positions, earliest, sums, stats, out,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    sequence = row // EACH
    slot, d = tl.arange(0, SLOTS), tl.arange(0, DIM)
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(tl.load(positions + row), tl.load(earliest + sequence), last, WINDOW, BLOCK)
    first, stop = _slot_pages(slot, low, until, PAGE, SLOTS, LEAST_PAGES)
    filled = first < stop
    at = ((row * (HEADS // SHARE) + head // SHARE) * SLOTS + slot) * SHARE + head % SHARE
    peaks = tl.load(stats + at * 2, mask=filled, other=float("-inf"))
    weights = tl.load(stats + at * 2 + 1, mask=filled, other=0.0)
    parts = tl.load(sums + at[:, None] * DIM + d[None, :], mask=filled[:, None], other=0.0)
    shares = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(parts * shares[:, None], 0) / tl.sum(weights * shares, 0)
    tl.store(out + (row * HEADS + head) * DIM + d, total.to(tl.bfloat16))


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
    tree, block = rows.kind == "tree", rows.kind == "block"
    # the last pages of a tree: one before the step's, then two for each row; of others: three that rows may end in
    work = tiles * (SLOTS - 1) + 2 * rows.each if tree else tiles * (SLOTS + 1)
    each_padded = triton.next_power_of_2(rows.each)
    _partials_kernel[(work, kv_heads, rows.sequences)](
        queries, keys, values, rows.positions, rows.base, rows.earliest, rows.pages, rows.paths, scratch.sums,
        scratch.stats, scale * math.log2(math.e), rows.pages.shape[1], EACH=rows.each, EACH_PADDED=each_padded,
        KV_HEADS=kv_heads, SHARE=share, SHARE_PADDED=share_padded, DIM=dim, PAGE=page, DEPTH=rows.paths.shape[1],
        WINDOW=window, TREE=tree, BLOCK=block, TILE=tile, TILES=tiles, SLOTS=SLOTS, LEAST_PAGES=LEAST_PAGES,
        INTERPRETED=_INTERPRETED, num_warps=4, num_stages=_stages(dim),
    )
    _combine_kernel[(heads, rows.rows)](
        rows.positions, rows.earliest, scratch.sums, scratch.stats, out, EACH=rows.each, EACH_PADDED=each_padded,
        HEADS=heads, SHARE=share, DIM=dim, PAGE=page, WINDOW=window, BLOCK=block, SLOTS=SLOTS,
        LEAST_PAGES=LEAST_PAGES, num_warps=4,
    )


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
