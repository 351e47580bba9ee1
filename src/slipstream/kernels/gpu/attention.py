"""Attention of rows over paged keys and values, in two launches, with the same bits for a row in any company.

The pages a row sees are dealt out to SLOTS partial sums by the row's own position: the last two pages have a slot each,
the pages before them are split evenly over the others. All keys of the evenly split pages are older than the step, so
all rows of a sequence read the same ones, and the first launch sums them up for many rows at a time. Where a tree
branches is always within the last two pages; there a row's keys are gathered through its ancestors in position order,
which the second launch does row by row, while the first still runs, before it adds a row's slots up. A page that a row
does not see changes no bit of its sums, so rows of one program may have different pages.
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
LEAST_PAGES = 2  # pages of a slot that is not one of the last two: fewer would write more partial sums than they save
# Lanes (rows times query heads of a kv head) of a program: 64 is what the tensor cores of a warp group take, and more
# of them are further warp groups. Another instruction may sum in another order, so there is none for fewer lanes.
LANES = 64
MANY_LANES = 128
PROGRAMS = 264  # of the first launch: two for each multiprocessor of an H200 are at work at a time
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
    """How a row's pages are dealt out: its first and last page, the pages of a shared slot, the shared slots it fills."""
    first_page = low // PAGE
    last_page = (until - 1) // PAGE
    shared = tl.maximum(last_page - 1 - first_page, 0)
    each = tl.maximum((shared + SLOTS - 3) // (SLOTS - 2), LEAST_PAGES)
    return first_page, last_page, each, (shared + each - 1) // each


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
    queries, keys, values, positions, base, earliest, pages, sums, stats, scale, most_pages,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, LAST_PAGES: tl.constexpr, SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr,
    OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Sums up pages that rows share. A program has a tile of rows and goes through their parts in steps of the number
    of programs they have: first the LAST_PAGES pages about the end of what was committed, then the shared slots.
    """
    if OVERLAP:
        gdc_launch_dependents()
    tile, kv_head, sequence = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    lane, d = tl.arange(0, TILE * SHARE_PADDED), tl.arange(0, DIM)
    member = lane % SHARE_PADDED
    row = tile * TILE + lane // SHARE_PADDED
    used = (row < EACH) & (member < SHARE)
    row = sequence * EACH + tl.minimum(row, EACH - 1)
    position = tl.load(positions + row)
    before_last = tl.load(base + sequence) // PAGE - 1
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(position, tl.load(earliest + sequence), last, WINDOW, BLOCK)
    vector = row * KV_HEADS + kv_head
    query = tl.load(queries + (vector * SHARE + member)[:, None] * DIM + d[None, :], mask=used[:, None], other=0.0)
    first_page, last_page, each, slots = _split(low, until, PAGE, SLOTS, LEAST_PAGES)
    for part in range(tl.program_id(2), LAST_PAGES + tl.max(slots, 0), tl.num_programs(2)):
        if part < LAST_PAGES:
            first = last_page * 0 + before_last + part
            stop = first + 1
            slot = SLOTS - 1 + first - last_page
            # a row whose last two pages are others than this one has it in a shared slot, or not at all
            here = used & (slot >= SLOTS - 2) & (slot < SLOTS) & (first >= first_page)
        else:
            slot = last_page * 0 + part - LAST_PAGES
            first = first_page + slot * each
            stop = tl.minimum(first + each, last_page - 1)
            here = used & (slot < slots)
        begin, end = tl.min(tl.where(here, first, 1 << 30), 0), tl.max(tl.where(here, stop, 0), 0)
        peak = tl.full([TILE * SHARE_PADDED], float("-inf"), tl.float32)
        weight = tl.zeros([TILE * SHARE_PADDED], tl.float32)
        total = tl.zeros([TILE * SHARE_PADDED, DIM], tl.float32)
        peak, weight, total = _fold_pages(
            query, keys, values, pages + sequence * most_pages, begin, end, tl.maximum(low, first * PAGE),
            tl.where(here, tl.minimum(until, stop * PAGE), 0), scale, kv_head, peak, weight, total,
            KV_HEADS, DIM, PAGE, INTERPRETED,
        )
        _store_part(sums, stats, (vector * SLOTS + slot) * SHARE + member, peak, weight, total, here, DIM)


@triton.jit
def _fold_paths(  # type: ignore[no-untyped-def]
    queries, keys, values, own_pages, most_pages, path, committed, low, until, sums, stats, vector, kv_head, scale,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr,
    LANES: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """The pages of a tree's row from the one on in which the step began: a page's keys are those of the row's
    ancestors, in the order of their positions.
    """
    lane, token, d = tl.arange(0, LANES), tl.arange(0, PAGE), tl.arange(0, DIM)
    used = lane < SHARE
    query = tl.load(queries + (vector * SHARE + lane)[:, None] * DIM + d[None, :], mask=used[:, None], other=0.0)
    last_page = (until - 1) // PAGE
    step_page = committed // PAGE  # the row's ancestors lie there or in the page behind
    held, held_next = tl.load(own_pages + step_page), tl.load(own_pages + tl.minimum(step_page + 1, most_pages - 1))
    for page in range(tl.maximum(step_page, low // PAGE), last_page + 1):
        position = page * PAGE + token
        reached = position < until
        depth = position - committed
        ancestor = tl.load(path + depth, mask=reached & (depth >= 0), other=0)
        slot = tl.where(depth >= 0, committed + ancestor, position)
        held_here = tl.where(slot // PAGE == step_page, held, held_next).to(tl.int64)
        at = ((held_here * KV_HEADS + kv_head) * PAGE + slot % PAGE)[:, None] * DIM + d[None, :]
        key = tl.load(keys + at, mask=reached[:, None], other=0.0)
        value = tl.load(values + at, mask=reached[:, None], other=0.0)
        seen = (position >= low) & reached & (lane[:, None] < SHARE)
        peak, weight, total = _fold_page(
            query, key, value, seen, scale, tl.full([LANES], float("-inf"), tl.float32),
            tl.zeros([LANES], tl.float32), tl.zeros([LANES, DIM], tl.float32), INTERPRETED,
        )
        part = (vector * SLOTS + SLOTS - 1 + page - last_page) * SHARE + lane
        _store_part(sums, stats, part, peak, weight, total, used, DIM)


@triton.jit
def _finish_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, positions, base, earliest, pages, paths, sums, stats, out, scale, most_pages,
    EACH: tl.constexpr, EACH_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, DEPTH: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, LEAST_PAGES: tl.constexpr,
    LANES: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """A program adds up the slots of a row for the heads of a kv head, in the order of the slots."""
    kv_head, row = tl.program_id(0), tl.program_id(1)
    sequence = row // EACH
    last = _last_position(positions, sequence, EACH, EACH_PADDED) if BLOCK else 0
    low, until = _visible(tl.load(positions + row), tl.load(earliest + sequence), last, WINDOW, BLOCK)
    vector = row * KV_HEADS + kv_head
    if TREE:
        _fold_paths(
            queries, keys, values, pages + sequence * most_pages, most_pages, paths + row * DEPTH,
            tl.load(base + sequence), low, until, sums, stats, vector, kv_head, scale, KV_HEADS, SHARE, DIM, PAGE, SLOTS, LANES, INTERPRETED,
        )
        tl.debug_barrier()  # they are read back by other threads than those that stored them
    if OVERLAP:
        gdc_wait()  # for all of the first launch
    first_page, last_page, _, slots = _split(low, until, PAGE, SLOTS, LEAST_PAGES)
    own = tl.minimum(last_page - first_page, 1) + 1  # of the slots of the last two pages, those that are filled
    member, d = tl.arange(0, SHARE_PADDED), tl.arange(0, DIM)
    peak = tl.full([SHARE_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([SHARE_PADDED], tl.float32)
    total = tl.zeros([SHARE_PADDED, DIM], tl.float32)
    for begin in range(0, slots + own, AT_ONCE):
        slot = begin + tl.arange(0, AT_ONCE)
        slot = tl.where(slot < slots, slot, slot - slots + SLOTS - own)
        there = (slot < SLOTS)[:, None] & (member < SHARE)[None, :]
        at = (vector * SLOTS + slot)[:, None] * SHARE + member[None, :]
        # read past the first cache, which does not hear of what other multiprocessors wrote
        peaks = tl.load(stats + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(stats + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        at = at[:, :, None] * DIM + d[None, None, :]
        totals = tl.load(sums + at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        shrink, shares = tl.exp2(peak - new_peak), tl.exp2(peaks - new_peak[None, :])
        weight = tl.fma(weight, shrink, tl.sum(weights * shares, 0))
        shrink = tl.broadcast_to(shrink[:, None], [SHARE_PADDED, DIM])
        total = tl.fma(total, shrink, tl.sum(totals * shares[:, :, None], 0))
        peak = new_peak
    head = (vector * SHARE + member)[:, None]
    tl.store(out + head * DIM + d[None, :], (total / weight[:, None]).to(tl.bfloat16), mask=(member < SHARE)[:, None])


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
    lanes = LANES if rows.each * share_padded <= LANES else MANY_LANES
    tile = max(lanes // share_padded, 1)
    tiles = triton.cdiv(rows.each, tile)
    tree, overlap = rows.kind == "tree", _can_overlap(queries.device)
    # behind the last page that is full a tree's rows have pages of their own; other rows share those they end in
    last_pages = 1 if tree else min(rows.each, 2) + 1
    groups = kv_heads * tiles * rows.sequences
    programs = min(max(PROGRAMS // groups, 1), last_pages + SLOTS - 2)
    scale *= math.log2(math.e)
    sizes = {
        "EACH": rows.each, "EACH_PADDED": triton.next_power_of_2(rows.each), "KV_HEADS": kv_heads, "SHARE": share,
        "SHARE_PADDED": share_padded, "DIM": dim, "PAGE": page, "WINDOW": window, "BLOCK": rows.kind == "block",
        "SLOTS": SLOTS, "LEAST_PAGES": LEAST_PAGES, "OVERLAP": overlap, "INTERPRETED": _INTERPRETED,
    }
    _shared_kernel[(kv_heads * tiles, rows.sequences, programs)](
        queries, keys, values, rows.positions, rows.base, rows.earliest, rows.pages, scratch.sums, scratch.stats,
        scale, rows.pages.shape[1], TILE=tile, LAST_PAGES=last_pages, **sizes, num_warps=lanes // 16,
        num_stages=_stages(dim),
    )
    _finish_kernel[(kv_heads, rows.rows)](
        queries, keys, values, rows.positions, rows.base, rows.earliest, rows.pages, rows.paths, scratch.sums,
        scratch.stats, out, scale, rows.pages.shape[1], DEPTH=rows.paths.shape[1], TREE=tree,
        LANES=LANES, AT_ONCE=AT_ONCE, **sizes, num_warps=4, num_stages=1,
        launch_pdl=overlap,
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
    tile = max(MANY_LANES // share_padded, 1)
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
