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
    mask, tail = group.mask, group.tail
    padded = rows
    if rows * share < MIN_ATTENTION_ROWS:
        padded = -(-MIN_ATTENTION_ROWS // share)
        queries = torch.cat((queries, queries[-1:].expand(padded - rows, -1, -1)))
        mask = torch.cat((mask, mask[-1:].expand(padded - rows, -1)))
        tail = None if tail is None else torch.cat((tail, tail[:, :, -1:].expand(-1, -1, padded - rows, -1)), dim=2)
    # query heads that share a kv head become extra rows of it, so keys are never repeated
    grouped = queries.view(padded, kv_heads, share, dim).permute(1, 0, 2, 3).reshape(kv_heads, padded * share, dim)
    parts = [_run_scores(grouped, keys[first:last]) for first, last in group.runs]
    if tail is not None:
        parts.append(_tail_scores(grouped, _own_rows(keys, tail)))
    scores = _joined(parts)
    pages = scores.shape[0]
    flat = scores.permute(1, 2, 0, 3).reshape(kv_heads, padded, share, pages * page_tokens)
    weights = torch.softmax(flat.add_(mask[None, :, None, :]), dim=-1)
    paged = weights.view(kv_heads, padded * share, pages, page_tokens).permute(2, 0, 1, 3)
    parts, done = [], 0
    for first, last in group.runs:
        span = paged[done : done + last - first].reshape(-1, padded * share, page_tokens)
        sums = torch.bmm(span, values[first:last].reshape(-1, page_tokens, dim))
        parts.append(sums.view(-1, kv_heads, padded * share, dim))
        done += last - first
    if tail is not None:
        parts.append(_tail_sums(paged[done:], _own_rows(values, tail)))
    total = _joined(parts).view(pages, kv_heads, padded, share, dim).sum(dim=0)
    return total.permute(1, 0, 2, 3).reshape(padded, heads * dim)[:rows]


def _own_rows(pool: Tensor, places: Tensor) -> Tensor:
    """What each row sees of a pool at its own places: [pages, kv heads, rows, page tokens, dim]."""
    dim = pool.shape[-1]
    return pool.view(-1, dim).index_select(0, places.reshape(-1)).view(*places.shape, dim)


def _tail_scores(grouped: Tensor, own_keys: Tensor) -> Tensor:
    """Scores of every row against its own keys: [pages, kv heads, rows * share, page tokens]."""
    pages, kv_heads, rows, page_tokens, dim = own_keys.shape
    share = grouped.shape[1] // rows
    queries = _at_least_four(grouped.view(1, kv_heads, rows, share, dim).expand(pages, -1, -1, -1, -1))
    flat = torch.bmm(
        queries.reshape(-1, queries.shape[3], dim), own_keys.reshape(-1, page_tokens, dim).transpose(1, 2)
    )
    return flat.view(*queries.shape[:4], page_tokens)[:, :, :, :share].reshape(pages, kv_heads, -1, page_tokens)


def _tail_sums(weights: Tensor, own_values: Tensor) -> Tensor:
    """Weighted sums of every row's own values: [pages, kv heads, rows * share, dim]."""
    pages, kv_heads, rows, page_tokens, dim = own_values.shape
    share = weights.shape[2] // rows
    padded = _at_least_four(weights.reshape(pages, kv_heads, rows, share, page_tokens))
    flat = torch.bmm(padded.reshape(-1, padded.shape[3], page_tokens), own_values.reshape(-1, page_tokens, dim))
    return flat.view(*padded.shape[:4], dim)[:, :, :, :share].reshape(pages, kv_heads, -1, dim)


def _at_least_four(rows: Tensor) -> Tensor:
    """Repeats the last of few query heads: with fewer than four rows MKL would sum in another order."""
    missing = MIN_ATTENTION_ROWS - rows.shape[3]
    return rows if missing <= 0 else torch.cat((rows, rows[:, :, :, -1:].expand(-1, -1, -1, missing, -1)), dim=3)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run_scores(grouped: Tensor, keys: Tensor) -> Tensor:
    """Scores of one run of neighbouring pages: [pages, kv heads, rows, page tokens]."""
    pages, kv_heads, page_tokens, dim = keys.shape
    rows = grouped.shape[1]
    repeated = grouped[None].expand(pages, -1, -1, -1).reshape(pages * kv_heads, rows, dim)
    flat = torch.bmm(repeated, keys.reshape(-1, page_tokens, dim).transpose(1, 2))
    return flat.view(pages, kv_heads, rows, page_tokens)
