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
    first_visible = max(earliest, positions.start - pattern.window + 1 if pattern.window else 0, 0)
    first_page = first_visible // page_tokens
    last_page = -(-positions.stop // page_tokens)
    keys = torch.arange(first_page * page_tokens, last_page * page_tokens)
    queries = torch.arange(positions.start, positions.stop)[:, None]
    last_visible = queries if pattern.causal else torch.full_like(queries, positions.stop - 1)
    visible = (keys >= earliest) & (keys <= last_visible)
    if pattern.window:
        visible &= queries - keys < pattern.window
        if not pattern.causal:
            visible &= keys - queries < pattern.window
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return RowGroup(
        start=row_start,
        stop=row_start + len(positions),
        runs=page_runs(page_ids[first_page:last_page]),
        mask=mask,
    )
