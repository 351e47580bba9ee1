"""The plain-torch kernels, which are the reference for every faster kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.rows import AttentionPattern, RowGroup

# MKL sums few rows in another order than many: up to 3 rows everywhere, and with large heads on some processors up to
# 15. Padding to this many rows gives one order for all.
MIN_ATTENTION_ROWS = 16
# Torch processes this many numbers together, and those left at a tensor's end one by one with another formula. If this
# is too small, the bits of a number depend on its place.
_VECTOR = 32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def row_by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Applies a function to every number of rows [..., width], in whole vectors only.

    A number's result then does not depend on its place, although torch rounds a tensor's end differently.
    """
    width = rows.shape[-1]
    missing = -width % _VECTOR
    return function(F.pad(rows, (0, missing)))[..., :width] if missing else function(rows)


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """Bends logits so that none is beyond plus or minus `cap`; a cap of 0 leaves them unchanged."""
    return torch.tanh(logits / cap) * cap if cap > 0 else logits


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Applies the rotary embedding with paired halves (NeoX style); cos and sin broadcast over x [..., heads, dim].

    The sine of the first half is already negated, so that only the halves have to be exchanged.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def write_rows(pool: Tensor, pages: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Stores values [rows, heads, dim] at their places in a pool [pages, heads, page tokens, dim]."""
    pool[pages, :, offsets] = values


def row_attention(queries: Tensor, keys: Tensor, values: Tensor, groups: Sequence[RowGroup], scale: float) -> Tensor:
    """Computes attention of rows [n, heads, dim] over paged keys and values [pages, kv heads, page tokens, dim].

    Sums run page by page in the order of positions, so that a row's result does not depend on the batch.
    """
    queries = queries * scale
    if len(groups) == 1:
        return _group_attention(queries, keys, values, groups[0])
    return torch.cat([_group_attention(queries[g.start : g.stop], keys, values, g) for g in groups])


def _group_attention(queries: Tensor, keys: Tensor, values: Tensor, group: RowGroup) -> Tensor:
    rows, heads, dim = queries.shape
    kv_heads, page_tokens = keys.shape[1], keys.shape[2]
    share = heads // kv_heads
    layout = group_layout(group, kv_heads)
    runs, mask, tail = layout.runs, layout.mask, layout.tail
    padded = rows
    if rows * share < MIN_ATTENTION_ROWS:
        padded = -(-MIN_ATTENTION_ROWS // share)
        queries = torch.cat((queries, queries[-1:].expand(padded - rows, -1, -1)))
        mask = torch.cat((mask, mask[-1:].expand(padded - rows, -1)))
        tail = None if tail is None else torch.cat((tail, tail[:, :, -1:].expand(-1, -1, padded - rows, -1)), dim=2)
    # query heads that share a kv head become extra rows of it, so that keys are never repeated
    grouped = queries.view(padded, kv_heads, share, dim).permute(1, 0, 2, 3).reshape(kv_heads, padded * share, dim)
    parts = [_run_scores(grouped, keys[first:last]) for first, last in runs]
    if tail is not None:
        parts.append(_tail_scores(grouped, _own_rows(keys, tail)))
    scores = _concatenated(parts)
    pages = scores.shape[0]
    flat = scores.permute(1, 2, 0, 3).reshape(kv_heads, padded, share, pages * page_tokens)
    weights = torch.softmax(flat.add_(mask[None, :, None, :]), dim=-1)
    paged = weights.view(kv_heads, padded * share, pages, page_tokens).permute(2, 0, 1, 3)
    parts, done = [], 0
    for first, last in runs:
        span = paged[done : done + last - first].reshape(-1, padded * share, page_tokens)
        sums = torch.bmm(span, values[first:last].reshape(-1, page_tokens, dim))
        parts.append(sums.view(-1, kv_heads, padded * share, dim))
        done += last - first
    if tail is not None:
        parts.append(_tail_sums(paged[done:], _own_rows(values, tail)))
    total = _concatenated(parts).view(pages, kv_heads, padded, share, dim).sum(dim=0)
    return total.permute(1, 0, 2, 3).reshape(padded, heads * dim)[:rows]


def _own_rows(pool: Tensor, places: Tensor) -> Tensor:
    """Gathers what each row sees of a pool at its own places: [pages, kv heads, rows, page tokens, dim]."""
    dim = pool.shape[-1]
    return pool.view(-1, dim).index_select(0, places.reshape(-1)).view(*places.shape, dim)


def _tail_scores(grouped: Tensor, own_keys: Tensor) -> Tensor:
    """Computes the scores of every row against its own keys: [pages, kv heads, rows * share, page tokens]."""
    pages, kv_heads, rows, page_tokens, dim = own_keys.shape
    share = grouped.shape[1] // rows
    queries = _padded_heads(grouped.view(1, kv_heads, rows, share, dim).expand(pages, -1, -1, -1, -1))
    flat = torch.bmm(queries.reshape(-1, queries.shape[3], dim), own_keys.reshape(-1, page_tokens, dim).transpose(1, 2))
    return flat.view(*queries.shape[:4], page_tokens)[:, :, :, :share].reshape(pages, kv_heads, -1, page_tokens)


def _tail_sums(weights: Tensor, own_values: Tensor) -> Tensor:
    """Computes the weighted sums of every row's own values: [pages, kv heads, rows * share, dim]."""
    pages, kv_heads, rows, page_tokens, dim = own_values.shape
    share = weights.shape[2] // rows
    padded = _padded_heads(weights.reshape(pages, kv_heads, rows, share, page_tokens))
    flat = torch.bmm(padded.reshape(-1, padded.shape[3], page_tokens), own_values.reshape(-1, page_tokens, dim))
    return flat.view(*padded.shape[:4], dim)[:, :, :, :share].reshape(pages, kv_heads, -1, dim)


def _padded_heads(rows: Tensor) -> Tensor:
    """Repeats the last query head if there are few, so that MKL sums in the order that it uses for many rows."""
    missing = MIN_ATTENTION_ROWS - rows.shape[3]
    return rows if missing <= 0 else torch.cat((rows, rows[:, :, :, -1:].expand(-1, -1, -1, missing, -1)), dim=3)


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run_scores(grouped: Tensor, keys: Tensor) -> Tensor:
    """Computes the scores of one run of neighbouring pages: [pages, kv heads, rows, page tokens]."""
    pages, kv_heads, page_tokens, dim = keys.shape
    rows = grouped.shape[1]
    repeated = grouped[None].expand(pages, -1, -1, -1).reshape(pages * kv_heads, rows, dim)
    flat = torch.bmm(repeated, keys.reshape(-1, page_tokens, dim).transpose(1, 2))
    return flat.view(pages, kv_heads, rows, page_tokens)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """What torch's attention needs of a group: the pages to read, and what each row sees of them."""

    runs: tuple[tuple[int, int], ...]  # ranges of page ids, in position order
    mask: Tensor  # [rows, keys], 0 where a row sees a key and -inf elsewhere
    # the keys after the runs, which each row of a tree reads along its own path: indices into a flat pool,
    # [pages, kv heads, rows, page tokens]
    tail: Tensor | None = None


def group_layout(group: RowGroup, kv_heads: int) -> GroupLayout:
    """Returns the layout of a group, cached for all layers; pages that no row of the group sees are not read."""
    key = f"layout for {kv_heads}"
    found = group.derived.get(key)
    if not isinstance(found, GroupLayout):
        found = group.derived[key] = _layout(group, kv_heads)
    return found


def page_runs(page_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Joins consecutive page ids into ranges, so that one call reads neighbouring pages."""
    runs: list[tuple[int, int]] = []
    for page in page_ids:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return tuple(runs)


def _layout(group: RowGroup, kv_heads: int) -> GroupLayout:
    """Finds the pages of a group and what its rows see of them.

    In a tree, each row has its own keys from the root's page on: those of its ancestors, gathered in the order of their
    positions. A row of a tree then does exactly the sums that a plain row at its position would do.
    """
    start, page_tokens, tail = group.base, group.page_tokens, None
    window = group.pattern.window
    first_page = max(group.earliest, start - window + 1 if window else 0, 0) // page_tokens
    ways: list[list[int]] = []  # the rows of a tree from the root to each row
    for row, parent in enumerate(group.parents or ()):
        ways.append([*ways[parent], row] if parent >= 0 else [row])
    end = start + (max(map(len, ways)) if ways else group.rows)
    shared_end = last_page = -(-end // page_tokens)
    queries = torch.arange(start, end)
    if ways:
        shared_end = start // page_tokens
        committed = list(range(shared_end * page_tokens, start))
        behind = last_page * page_tokens - start
        slots = [committed + [start + row for row in way] + [start] * (behind - len(way)) for way in ways]
        tail = _pool_rows(torch.tensor(slots), group.page_ids, page_tokens, kv_heads)
        queries = torch.tensor([start + len(way) - 1 for way in ways])
    keys = torch.arange(first_page * page_tokens, last_page * page_tokens)
    mask = _mask(queries[:, None], keys, end - 1, group.pattern, group.earliest)
    return GroupLayout(page_runs(group.page_ids[first_page:shared_end]), mask, tail)


def _pool_rows(slots: Tensor, page_ids: Sequence[int], page_tokens: int, kv_heads: int) -> Tensor:
    """Returns the indices of slots [rows, tokens] in a pool [pages, kv heads, page tokens, dim] of vectors."""
    pages = torch.tensor(page_ids)[slots // page_tokens].view(slots.shape[0], -1, page_tokens).transpose(0, 1)
    offsets = (slots % page_tokens).view(slots.shape[0], -1, page_tokens).transpose(0, 1)
    heads = torch.arange(kv_heads)[:, None, None]
    return ((pages[:, None] * kv_heads + heads) * page_tokens + offsets[:, None]).contiguous()


def _mask(queries: Tensor, keys: Tensor, last: int, pattern: AttentionPattern, earliest: int) -> Tensor:
    """Returns 0 where a query position sees a key position, and -inf elsewhere."""
    last_visible = queries if pattern.causal else torch.full_like(queries, last)
    visible = (keys >= earliest) & (keys <= last_visible)
    if pattern.window:
        visible &= queries - keys < pattern.window
        if not pattern.causal:
            visible &= keys - queries < pattern.window
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
