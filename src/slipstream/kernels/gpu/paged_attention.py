"""Attention of rows over paged keys and values in three launches; a row has the same bits whatever rows are beside it.

The keys that a row sees are divided into SLOTS partial sums by the row's own position: the last two groups of GROUP
keys have a slot each, and the pages before them are split evenly over the others. These pages contain no keys of a
tree's branches, so all rows of a sequence read the same ones, and the first launch sums them for many rows at a time.
The second launch sums the last two groups; a tree's keys are gathered through a row's ancestors in the order of their
positions. A key that a row does not see does not change a bit of its sums, so rows of one program may see different
keys. The third launch adds up a row's slots. Each launch begins while the one before it is still running, and waits
only for what it needs.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.errors import IntegrityError
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.paged_attention_kernels import (
    combine_kernel,
    last_groups_kernel,
    prefill_kernel,
    shared_kernel,
)

SLOTS = 32  # partial sums of a row
FEW_SLOTS, LEAST_PAGES = 2, 4  # more than FEW_SLOTS slots are used only if each has at least LEAST_PAGES pages
GROUP = 32  # keys in each of a row's last two slots
DEEPEST_ROW = GROUP  # the largest depth of a tree's row whose path surely lies within its last two groups
LAST_LANES = 16  # rows times query heads of a kv head in a program of the second launch, as many as a warp multiplies
PROGRAMS = 264  # programs of the first launch: two for each multiprocessor of an H200 run at the same time
AT_ONCE = 16  # slots whose loads are in flight together when they are added up
# Under Triton's interpreter kernels multiply in fp32, because its dot of bf16 numbers is wrong.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """The partial sums of one launch at a time; all layers use the same memory."""

    # [sequences, kv heads, SLOTS, rows of a sequence, query heads of a kv head (padded to a power of two), ...]
    sums: Tensor  # fp16 [..., dim]: values weighted by 2 ** (score - peak), in multiples of their own unit
    stats: Tensor  # fp32 [..., 3]: the peak of the scores, the sum of weights, peak + log2(unit)

    @classmethod
    def empty(cls, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> AttentionScratch:
        lanes = rows * SLOTS * padded_heads(heads, kv_heads)
        sums = torch.empty(lanes * dim, dtype=torch.float16, device=device)
        return cls(sums, torch.empty(lanes * 3, device=device))

    @classmethod
    def sized(
        cls, rows: DeviceRows, page_tokens: int, heads: int, width: int, device: torch.device
    ) -> AttentionScratch:
        """Makes scratch for all layers of a model.

        `heads` is the largest number of padded heads of a layer, `width` the largest product of that and the head size.
        """
        # nothing is split if a sequence has more rows than a page has tokens
        slots = rows.rows * SLOTS if rows.each <= page_tokens else 0
        sums = torch.empty(slots * width, dtype=torch.float16, device=device)
        return cls(sums, torch.empty(slots * heads * 3, device=device))

    def by_row(self, sequences: int, kv_heads: int, share: int, dim: int) -> Tensor:
        """Returns the partial sums of a launch [rows, kv heads, SLOTS, share, dim + 3], with zeros in unused slots."""
        lanes = sequences, kv_heads, SLOTS, -1, triton.next_power_of_2(share)
        parts = torch.cat((self.sums.view(*lanes, dim), self.stats.view(*lanes, 3)), dim=-1)
        used = self.stats.view(*lanes, 3)[..., 1:2] > 0.0
        return parts.where(used, 0.0)[..., :share, :].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How programs share the work on heads of one size, as registers and memory of a multiprocessor allow.

    It determines the order of sums, so it must depend on nothing but the size of a head.
    """

    lanes: int  # rows times query heads of a kv head in a program of the first launch
    keys: int  # the most keys of a page that are summed at a time
    stages: int  # how many such portions of keys are in flight or being summed
    warps: int  # warps of a program of the first launch
    last_warps: int
    combine_warps: int
    prefill_lanes: int


def padded_heads(heads: int, kv_heads: int) -> int:
    """Returns the number of query heads after those of each kv head are padded to a power of two."""
    return kv_heads * triton.next_power_of_2(heads // kv_heads)


TILINGS = {
    128: Tiling(64, 64, 3, 4, 2, 1, 128),
    256: Tiling(64, 32, 3, 8, 4, 1, 128),
    512: Tiling(32, 32, 2, 8, 8, 2, 64),
}  # keyed by the largest head size


def paged_attention(
    queries: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int, out: Tensor,
    scratch: AttentionScratch,
) -> None:
    """Computes attention of queries bf16 [rows, heads, dim] over one layer's pools [pages, kv heads, page tokens, dim].

    `window` counts positions including the row's own; 0 means no window. out: bf16 [rows, heads * dim].
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
    keys_at_once, group = min(tiling.keys, page), min(GROUP, page)
    tile = max(tiling.lanes // share_padded, 1)
    tiles = triton.cdiv(rows.each, tile)
    programs = min(max(PROGRAMS // (kv_heads * tiles * rows.sequences), 1), SLOTS - 2)
    overlap = can_overlap(queries.device)
    scale *= math.log2(math.e)
    pools = [_read_in_turns(pool, keys_at_once) for pool in (keys, values)]
    sizes = {
        "EACH": rows.each, "EACH_PADDED": triton.next_power_of_2(rows.each), "KV_HEADS": kv_heads, "SHARE": share,
        "SHARE_PADDED": share_padded, "DIM": dim, "PAGE": page, "PAGE_BITS": page.bit_length() - 1,
        "GROUP_BITS": group.bit_length() - 1, "WINDOW": window, "BLOCK": rows.kind == "block",
    }
    dealing = {"SLOTS": SLOTS, "FEW_SLOTS": FEW_SLOTS, "LEAST_PAGES": LEAST_PAGES}
    shared_kernel[(kv_heads * tiles, rows.sequences, programs)](
        queries, *pools, rows.positions, rows.earliest, rows.pages, scratch.sums, scratch.stats, scale,
        rows.pages.shape[1], KEYS=keys_at_once, TILE=tile, OVERLAP=overlap, INTERPRETED=_INTERPRETED, **sizes,
        **dealing, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=overlap,
    )
    few = max(LAST_LANES // share_padded, 1)
    fews, tree = triton.cdiv(rows.each, few), rows.kind == "tree"
    groups = (group - 1 + rows.each - 1) // group + 1  # how many groups the rows' positions may fall into
    work = fews + 2 * rows.each if tree else fews * (1 + groups)
    last_groups_kernel[(kv_heads, work, rows.sequences)](
        queries, keys, values, rows.positions, rows.base, rows.earliest, rows.pages, rows.paths, scratch.sums,
        scratch.stats, scale, rows.pages.shape[1], DEPTH=rows.paths.shape[1], TREE=tree, TILE=few,
        TILES=fews, SLOTS=SLOTS, OVERLAP=overlap, INTERPRETED=_INTERPRETED, **sizes,
        num_warps=tiling.last_warps, num_stages=1, launch_pdl=overlap,
    )
    combine_kernel[(heads, rows.rows)](
        rows.positions, rows.earliest, scratch.sums, scratch.stats, out, AT_ONCE=AT_ONCE, OVERLAP=overlap,
        **sizes, **dealing, num_warps=tiling.combine_warps, launch_pdl=overlap,
    )


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a launch can begin before the launch that it waits for has ended."""
    return device.type == "cuda" and not _INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def _prefill(
    queries: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int, out: Tensor
) -> None:
    _, heads, dim = queries.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    if rows.kind != "chain":
        raise IntegrityError(f"a sequence has {rows.each} rows of kind {rows.kind}; attention supports at most {page}")
    share = heads // kv_heads
    share_padded = triton.next_power_of_2(share)
    tiling = _tiling(dim)
    tile = max(tiling.prefill_lanes // share_padded, 1)
    keys_at_once = min(tiling.keys, page)
    pools = [_read_in_turns(pool, keys_at_once) for pool in (keys, values)]
    prefill_kernel[(triton.cdiv(rows.each, tile), kv_heads, rows.sequences)](
        queries, *pools, rows.positions, rows.earliest, rows.pages, out, scale * math.log2(math.e),
        rows.pages.shape[1], EACH=rows.each, KV_HEADS=kv_heads, SHARE=share, SHARE_PADDED=share_padded, DIM=dim,
        PAGE=page, WINDOW=window, KEYS=keys_at_once, TILE=tile, INTERPRETED=_INTERPRETED, num_warps=8,
        num_stages=tiling.stages,
    )


def _read_in_turns(pool: Tensor, count: int) -> TensorDescriptor:
    """Describes a pool for the memory unit, which copies `count` vectors at a time without registers for addresses."""
    return TensorDescriptor.from_tensor(pool.view(-1, pool.shape[-1]), [count, pool.shape[-1]])


def _tiling(dim: int) -> Tiling:
    return TILINGS[min(most for most in TILINGS if most >= dim)]


def paged_attention_reference(
    queries: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int, out: Tensor,
    scratch: AttentionScratch | None = None, precision: torch.dtype = torch.float32,
) -> None:
    """Does in torch what `paged_attention` does, sequence by sequence, with all keys that a row sees in one sum."""
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
        if rows.kind == "tree":  # after the anchor every row has its own keys
            depth = (position - base).clamp(0, rows.paths.shape[1] - 1).expand(rows.each, -1)
            ancestors = base + rows.paths[own].long().gather(1, depth)
            slots = torch.where(position < base, position, torch.where(seen, ancestors, base))
        places = rows.pages[sequence].long()[slots // page]
        k, v = (pool[places, :, slots % page].to(precision) for pool in (keys, values))  # [rows or 1, keys, kv, dim]
        q = queries[own].to(precision).view(rows.each, kv_heads, heads // kv_heads, dim) * scale
        scores = torch.einsum("rgsd,rtgd->rgst", q, k).masked_fill(~seen[:, None, None], float("-inf"))
        mixed = torch.einsum("rgst,rtgd->rgsd", scores.softmax(-1), v)
        out[own] = mixed.reshape(rows.each, heads * dim).to(out.dtype)
