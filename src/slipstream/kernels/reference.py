"""The plain-torch kernels: the truth every faster twin is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.rows import MIN_ATTENTION_ROWS, RowGroup


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding, halves paired (NeoX style); cos and sin broadcast over the heads of x [..., heads, dim].

    The sine of the first half comes negated, so that exchanging the halves is all that is left to do.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def write_rows(pool: Tensor, pages: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Stores values [rows, heads, dim] at their place in a pool [pages, heads, page tokens, dim]."""
    pool[pages, :, offsets] = values


def row_attention(
    queries: Tensor, keys: Tensor, values: Tensor, groups: Sequence[RowGroup], scale: float
) -> Tensor:
    """Attention of rows [n, heads, dim] over paged keys and values [pages, kv heads, page tokens, dim].

    Sums run page by page in position order, whatever the batch, so a row's result is its own.
    """
    queries = queries * scale
    if len(groups) == 1:
        return _group_attention(queries, keys, values, groups[0])
    return torch.cat([_group_attention(queries[g.start : g.stop], keys, values, g) for g in groups])


def _group_attention(queries: Tensor, keys: Tensor, values: Tensor, group: RowGroup) -> Tensor:
    rows, heads, dim = queries.shape
    kv_heads, page_tokens = keys.shape[1], keys.shape[2]
    share = heads // kv_heads
    mask = group.mask
    padded = rows
    if rows * share < MIN_ATTENTION_ROWS:
        padded = -(-MIN_ATTENTION_ROWS // share)
        queries = torch.cat((queries, queries[-1:].expand(padded - rows, -1, -1)))
        mask = torch.cat((mask, mask[-1:].expand(padded - rows, -1)))
    # query heads that share a kv head become extra rows of it, so keys are never repeated
    grouped = queries.view(padded, kv_heads, share, dim).permute(1, 0, 2, 3).reshape(kv_heads, padded * share, dim)
    scores = _joined([_run_scores(grouped, keys[first:last]) for first, last in group.runs])
    pages = scores.shape[0]
    flat = scores.permute(1, 2, 0, 3).reshape(kv_heads, padded, share, pages * page_tokens)
    weights = torch.softmax(flat.add_(mask[None, :, None, :]), dim=-1)
    paged = weights.view(kv_heads, padded * share, pages, page_tokens).permute(2, 0, 1, 3)
    parts, done = [], 0
    for first, last in group.runs:
        span = paged[done : done + last - first].reshape(-1, padded * share, page_tokens)
        parts.append(torch.bmm(span, values[first:last].reshape(-1, page_tokens, dim)))
        done += last - first
    total = _joined(parts).view(pages, kv_heads, padded, share, dim).sum(dim=0)
    return total.permute(1, 0, 2, 3).reshape(padded, heads * dim)[:rows]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run_scores(grouped: Tensor, keys: Tensor) -> Tensor:
    """Scores of one run of neighbouring pages: [pages, kv heads, rows, page tokens]."""
    pages, kv_heads, page_tokens, dim = keys.shape
    rows = grouped.shape[1]
    repeated = grouped[None].expand(pages, -1, -1, -1).reshape(pages * kv_heads, rows, dim)
    flat = torch.bmm(repeated, keys.reshape(-1, page_tokens, dim).transpose(1, 2))
    return flat.view(pages, kv_heads, rows, page_tokens)
