"""Rows: the flat batch that prefill, plain decoding, drafting and verify all pass to a model's forward."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.errors import IntegrityError
from slipstream.lazy import cached_property

if TYPE_CHECKING:
    from slipstream.kernels.cpu.delta_rule import DeltaStep

CHAIN, TREE, SEEDED_TREE = range(3)  # shapes in which drafted tokens become rows; a seeded tree holds its chain first


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """Which keys the rows of a layer see: a window that counts the row's own position (0: no limit), and causality."""

    window: int = 0
    causal: bool = True


@dataclass(slots=True, eq=False)
class RowGroup:
    """The rows of one sequence in a batch: their positions, the pages that hold their keys, and what each row sees.

    Every step makes a group for each sequence, so a group copies nothing: `page_ids` is the sequence's own list. What a
    kernel computes from the group (masks, arrays) is kept in `derived`, because every layer needs the same.
    """

    start: int  # first row in the batch; `stop` is the row after the last
    stop: int
    base: int  # position of the first row; row i of the group is stored in slot base + i
    page_ids: Sequence[int]
    page_tokens: int
    pattern: AttentionPattern
    earliest: int = 0  # keys at positions before this one are hidden
    parents: tuple[int, ...] | None = None  # the parent row of each row, -1 for the root; None for a chain
    derived: dict[str, Any] = field(init=False, repr=False, default_factory=dict)

    @property
    def rows(self) -> int:
        return self.stop - self.start


class RowPlaces:
    """The places of rows: their positions, and the pages and offsets that hold their keys.

    The numbers are stored as the native kernels read them. Tensors for torch's kernels are made when they are first
    used.
    """

    def __init__(self, positions: Iterable[int], pages: Iterable[int], offsets: Iterable[int], end: int) -> None:
        self.position_list = array("i", positions)
        self.page_list = array("i", pages)
        self.offset_list = array("i", offsets)
        self.end = end  # one more than the largest position

    @cached_property
    def positions(self) -> Tensor:
        return _tensor(self.position_list)

    @cached_property
    def pages(self) -> Tensor:
        return _tensor(self.page_list)

    @cached_property
    def offsets(self) -> Tensor:
        return _tensor(self.offset_list)


class RowBatch(RowPlaces):
    """The rows of one forward with all that it needs to know of them; each attention pattern has its list of groups."""

    def __init__(
        self,
        tokens: Iterable[int],
        positions: Iterable[int],
        pages: Iterable[int],
        offsets: Iterable[int],
        end: int,
        groups: Mapping[AttentionPattern, Sequence[RowGroup]],
    ) -> None:
        super().__init__(positions, pages, offsets, end)
        self.token_list = array("i", tokens)
        self.groups = groups
        self.recurrent: DeltaStep | None = None  # the recurrent layers' part of the forward, if the model has any
        self.derived: dict[AttentionPattern, Any] = {}  # what kernels compute once for all layers of a pattern

    @property
    def rows(self) -> int:
        return len(self.token_list)

    @cached_property
    def token_ids(self) -> Tensor:
        return _tensor(self.token_list)


def _tensor(numbers: array[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def make_group(
    row_start: int,
    positions: range,
    page_ids: Sequence[int],
    page_tokens: int,
    pattern: AttentionPattern,
    earliest: int = 0,
) -> RowGroup:
    """Describes the attention of rows at consecutive positions of one sequence; keys before `earliest` are hidden."""
    return RowGroup(row_start, row_start + len(positions), positions.start, page_ids, page_tokens, pattern, earliest)


def make_tree_group(
    row_start: int,
    start: int,
    parents: Sequence[int],
    page_ids: Sequence[int],
    page_tokens: int,
    pattern: AttentionPattern,
) -> RowGroup:
    """Describes the attention of a tree's rows: row i is stored in slot start + i, and has position start + depth."""
    if not pattern.causal:
        raise IntegrityError("the rows of a tree cannot see ahead", "use a causal pattern")
    return RowGroup(row_start, row_start + len(parents), start, page_ids, page_tokens, pattern, parents=tuple(parents))
