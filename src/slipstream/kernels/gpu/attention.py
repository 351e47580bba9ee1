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
from torch import Tensor

from slipstream.errors import IntegrityError
from slipstream.kernels.gpu.attention_kernels import combine_kernel, last_pages_kernel, prefill_kernel, shared_kernel
from slipstream.kernels.gpu.rows import DeviceRows

SLOTS = 32  # partial sums of a row
LEAST_PAGES = 2  # pages of a slot that rows share: fewer would write more partial sums than they save
LAST_LANES = 16  # rows times query heads of a kv head in a program of the second launch: what a warp multiplies
PROGRAMS = 264  # of the first launch: two for each multiprocessor of an H200 are at work at a time
AT_ONCE = 16  # slots whose loads are on the way together when they are added up
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the interpreter's dot is wrong for bf16


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Partial sums of one launch at a time; the same memory serves every layer."""

    sums: Tensor  # fp16 [rows, kv heads, SLOTS, share, dim]: values weighted by 2 ** (score - peak), in their unit
    stats: Tensor  # fp32 [rows, kv heads, SLOTS, share, 3]: the scores' peak, the sum of weights, peak + log2(unit)

    @classmethod
    def empty(cls, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> AttentionScratch:
        shape = rows, kv_heads, SLOTS, heads // kv_heads
        sums = torch.empty(*shape, dim, dtype=torch.float16, device=device)
        return cls(sums, torch.empty(*shape, 3, device=device))

    @classmethod
    def sized(
        cls, rows: DeviceRows, page_tokens: int, heads: int, width: int, device: torch.device
    ) -> AttentionScratch:
        """For all layers of a model: none has more heads, or more numbers in all its heads, than these."""
        # where a sequence has more rows than a page, nothing is split
        slots = rows.rows * SLOTS if rows.each <= page_tokens else 0
        sums = torch.empty(slots * width, dtype=torch.float16, device=device)
        return cls(sums, torch.empty(slots * heads * 3, device=device))


@dataclass(frozen=True, slots=True)
class Tiling:
    """How programs share the work on heads of one size: what fits into a multiprocessor's registers and memory.

    It decides the order of sums, so nothing else than the size of a head may decide it.
    """

    lanes: int  # rows times query heads of a kv head that a program of the first launch takes
    keys: int  # of a page that are summed up at a time, at most
    stages: int  # how often so many keys are on the way or in work
    warps: int  # of the first launch
    last_warps: int
    combine_warps: int
    prefill_lanes: int


TILINGS = {
    128: Tiling(64, 64, 3, 4, 4, 1, 128),
    256: Tiling(64, 32, 3, 8, 4, 1, 128),
    512: Tiling(32, 32, 2, 8, 8, 2, 64),
}  # by the largest head


def paged_attention(
    queries: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int, out: Tensor,
    scratch: AttentionScratch,
) -> None:
    """Attention of queries bf16 [rows, heads, dim] over one layer's pools [pages, kv heads, page tokens, dim].

    `window` (0: none) counts positions, the row's own included. out: bf16 [rows, heads * dim].
    """
    _, heads, dim = queries.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    if dim & (dim - 1) or page & (page - 1) or dim > max(TILINGS):
        raise IntegrityError(
            f"attention on the GPU takes heads and pages of a power of two, heads of at most {max(TILINGS)}, "
            f"not {dim} and {page}"
        )
    if rows.each > page:
        _prefill(queries, keys, values, rows, scale, window, out)
        return
    share = heads // kv_heads
    share_padded = triton.next_power_of_2(share)
    tiling = _tiling(dim)
    keys_at_once = min(tiling.keys, page)
    tile = max(tiling.lanes // share_padded, 1)
    tiles = triton.cdiv(rows.each, tile)
    programs = min(max(PROGRAMS // (kv_heads * tiles * rows.sequences), 1), SLOTS - 2)
    overlap = can_overlap(queries.device)
    scale *= math.log2(math.e)
    sizes = {
        "EACH": rows.each, "EACH_PADDED": triton.next_power_of_2(rows.each), "KV_HEADS": kv_heads, "SHARE": share,
        "SHARE_PADDED": share_padded, "DIM": dim, "PAGE": page, "PAGE_BITS": page.bit_length() - 1, "WINDOW": window,
        "BLOCK": rows.kind == "block",
    }
    shared_kernel[(kv_heads * tiles, rows.sequences, programs)](
        queries, keys, values, rows.positions, rows.earliest, rows.pages, scratch.sums, scratch.stats, scale,
        rows.pages.shape[1], KEYS=keys_at_once, TILE=tile, SLOTS=SLOTS, LEAST_PAGES=LEAST_PAGES, OVERLAP=overlap,
        INTERPRETED=_INTERPRETED, **sizes, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=overlap,
    )
    few = max(LAST_LANES // share_padded, 1)
    fews, tree = triton.cdiv(rows.each, few), rows.kind == "tree"
    # what was committed ends in or before the page that a step begins in; rows may go one page further
    work = fews + 2 * rows.each if tree else fews * (min(rows.each, 2) + 1)
    last_pages_kernel[(kv_heads, work, rows.sequences)](
        queries, keys, values, rows.positions, rows.base, rows.earliest, rows.pages, rows.paths, scratch.sums,
        scratch.stats, scale, rows.pages.shape[1], DEPTH=rows.paths.shape[1], TREE=tree, KEYS=keys_at_once, TILE=few,
        TILES=fews, SLOTS=SLOTS, OVERLAP=overlap, INTERPRETED=_INTERPRETED, **sizes,
        num_warps=tiling.last_warps, num_stages=1, launch_pdl=overlap,
    )
    combine_kernel[(heads, rows.rows)](
        rows.positions, rows.earliest, scratch.sums, scratch.stats, out, SLOTS=SLOTS, LEAST_PAGES=LEAST_PAGES,
        AT_ONCE=AT_ONCE, OVERLAP=overlap, **sizes, num_warps=tiling.combine_warps, launch_pdl=overlap,
    )


@cache
def can_overlap(device: torch.device) -> bool:
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
    tiling = _tiling(dim)
    tile = max(tiling.prefill_lanes // share_padded, 1)
    prefill_kernel[(triton.cdiv(rows.each, tile), kv_heads, rows.sequences)](
        queries, keys, values, rows.positions, rows.earliest, rows.pages, out, scale * math.log2(math.e),
        rows.pages.shape[1], EACH=rows.each, KV_HEADS=kv_heads, SHARE=share, SHARE_PADDED=share_padded, DIM=dim,
        PAGE=page, WINDOW=window, KEYS=min(tiling.keys, page), TILE=tile, INTERPRETED=_INTERPRETED, num_warps=8,
        num_stages=tiling.stages,
    )


def _tiling(dim: int) -> Tiling:
    return TILINGS[min(most for most in TILINGS if most >= dim)]


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
