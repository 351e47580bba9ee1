"""Rows: the flat batch that prefill, plain decoding, drafting and verify all hand to a model's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# MKL sums fewer than four rows in another order than four or more; padding keeps one order for all.
MIN_ATTENTION_ROWS = 4


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """Which keys a layer's rows see: a window (0: all) counted with the row's own position, and causality."""

    window: int = 0
    causal: bool = True


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one sequence in a batch: where they stand, which pages hold their keys, what each row sees."""

    start: int
    stop: int
    runs: tuple[tuple[int, int], ...]  # ranges of page ids, in position order
    mask: Tensor  # [rows, keys], 0 or -inf
    # behind the runs, each row's own way through a tree: [pages, kv heads, rows, page tokens] as rows of a flat pool
    tail: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Everything one forward needs to know about its rows; groups are given per attention pattern."""

    token_ids: Tensor
    positions: Tensor
    pages: Tensor
    offsets: Tensor
    end: int  # one more than the largest position, known without asking the device
    groups: Mapping[AttentionPattern, Sequence[RowGroup]]


def page_runs(page_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Joins consecutive page ids into ranges, so that neighbouring pages are read in one call."""
    runs: list[tuple[int, int]] = []
    for page in page_ids:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return tuple(runs)


def make_group(
    row_start: int,
    positions: range,
    page_ids: Sequence[int],
    page_tokens: int,
    pattern: AttentionPattern,
    earliest: int = 0,
) -> RowGroup:
    """Describes the attention of rows at consecutive positions of one sequence.

    Keys before `earliest` are hidden; pages nobody in the group can see are not read at all.
    """
    first_page = _first_page(positions.start, page_tokens, pattern, earliest)
    last_page = -(-positions.stop // page_tokens)
    keys = torch.arange(first_page * page_tokens, last_page * page_tokens)
    queries = torch.arange(positions.start, positions.stop)[:, None]
    return RowGroup(
        start=row_start,
        stop=row_start + len(positions),
        runs=page_runs(page_ids[first_page:last_page]),
        mask=_mask(queries, keys, positions.stop - 1, pattern, earliest),
    )


def make_tree_group(
    row_start: int, start: int, parents: Sequence[int], page_ids: Sequence[int], page_tokens: int, kv_heads: int,
    pattern: AttentionPattern,
) -> RowGroup:
    """Describes the attention of a tree's rows: row i is stored in slot start + i and stands at start + its depth.

    The stretch from the page of `start` on is gathered for every row through its ancestors in position order, so
    that the row does the very sums a plain row at its position would.
    """
    ways: list[list[int]] = []  # rows from the root to each row
    for row, parent in enumerate(parents):
        ways.append([*ways[parent], row] if parent >= 0 else [row])
    deepest = max(map(len, ways))
    first_page = _first_page(start, page_tokens, pattern, 0)
    tail_page, last_page = start // page_tokens, -(-(start + deepest) // page_tokens)
    committed = list(range(tail_page * page_tokens, start))
    behind = last_page * page_tokens - start
    slots = [committed + [start + row for row in way] + [start] * (behind - len(way)) for way in ways]
    own_slots = torch.tensor(slots)
    queries = torch.tensor([start + len(way) - 1 for way in ways])[:, None]
    keys = torch.arange(first_page * page_tokens, last_page * page_tokens)
    return RowGroup(
        start=row_start,
        stop=row_start + len(parents),
        runs=page_runs(page_ids[first_page:tail_page]),
        mask=_mask(queries, keys, start + deepest - 1, pattern, 0),
        tail=_pool_rows(own_slots, page_ids, page_tokens, kv_heads),
    )


def _pool_rows(slots: Tensor, page_ids: Sequence[int], page_tokens: int, kv_heads: int) -> Tensor:
    """Where slots [rows, tokens] stand in a pool [pages, kv heads, page tokens, dim] seen as a list of vectors."""
    pages = torch.tensor(page_ids)[slots // page_tokens].view(slots.shape[0], -1, page_tokens).transpose(0, 1)
    offsets = (slots % page_tokens).view(slots.shape[0], -1, page_tokens).transpose(0, 1)
    heads = torch.arange(kv_heads)[:, None, None]
    return ((pages[:, None] * kv_heads + heads) * page_tokens + offsets[:, None]).contiguous()


def _first_page(start: int, page_tokens: int, pattern: AttentionPattern, earliest: int) -> int:
    return max(earliest, start - pattern.window + 1 if pattern.window else 0, 0) // page_tokens


def _mask(queries: Tensor, keys: Tensor, last: int, pattern: AttentionPattern, earliest: int) -> Tensor:
    """0 where a query position sees a key position, -inf elsewhere."""
    last_visible = queries if pattern.causal else torch.full_like(queries, last)
    visible = (keys >= earliest) & (keys <= last_visible)
    if pattern.window:
        visible &= queries - keys < pattern.window
        if not pattern.causal:
            visible &= keys - queries < pattern.window
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
