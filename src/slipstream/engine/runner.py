"""Turns planned work into one target forward: the only place where rows are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.cache.cpu.state_tensors import StateTensors, Stretch
from slipstream.cache.sequence import SequenceState
from slipstream.engine.variants import DraftVariants
from slipstream.kernels.cpu.delta_rule import DeltaStep
from slipstream.kernels.rows import AttentionPattern, RowBatch, RowGroup, RowPlaces, make_group, make_tree_group
from slipstream.models.decoder import Decoder
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.draft import BlockDrafter, DraftJob
from slipstream.types import BASE_VARIANT, Proposal


class RowWork(NamedTuple):
    """Rows of one sequence from position `start` on: a stretch of known tokens, or an anchor and its drafts."""

    state: SequenceState
    start: int
    tokens: Sequence[int]
    logit_rows: int  # how many of the last rows need logits
    proposal: Proposal | None = None  # set if the rows are a proposal's

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> list[int]:
        depths = self.proposal.depths if self.proposal is not None else range(self.rows)
        return [self.start + depth for depth in depths]

    @property
    def branching(self) -> bool:
        return self.proposal is not None and self.proposal.branching


class ForwardResult(NamedTuple):
    """Logits per work item, and what is needed to keep the taps of the rows that survive."""

    works: Sequence[RowWork]
    logits: list[Tensor]
    taps: Tensor | None
    starts: list[int]  # first row of each work item


class Runner:
    """Holds the models and pools; has no idea of requests."""

    def __init__(self, target: Decoder, pools: KvPools, page_tokens: int, drafter: BlockDrafter | None) -> None:
        self.target = target
        self.variants = DraftVariants(drafter)
        self._pools = pools
        self._page_tokens = page_tokens

    @property
    def drafter(self) -> BlockDrafter | None:
        """The drafter without an adapter; its variants have the same shape."""
        base = self.variants.find(BASE_VARIANT)
        return base.blocks if base is not None else None

    def draft(self, jobs: Sequence[DraftJob]) -> list[BlockDrafts | None]:
        """What each job's block offers, in one pass per variant."""
        self.write_waiting([job.state for job in jobs])
        drafts: list[BlockDrafts | None] = [None] * len(jobs)
        for name, places in _by_variant([job.state for job in jobs]).items():
            found = self.variants[name].blocks.draft([jobs[place] for place in places])
            for place, block in zip(places, found, strict=True):
                drafts[place] = block
        return drafts

    def forward(self, works: Sequence[RowWork]) -> ForwardResult:
        """One pass of the target over all rows of all sequences."""
        batch, starts = self._batch(works)
        if self._pools.state_tensors is not None:
            batch.recurrent = self._recurrent_step(self._pools.state_tensors, works)
        tapped = self.drafter.drafter.config.target_layer_ids if self.drafter and self._taps_wanted(works) else ()
        wanted = [
            row
            for start, work in zip(starts, works, strict=True)
            for row in range(start + work.rows - work.logit_rows, start + work.rows)
        ]
        logits, taps = self.target.forward_logits(batch, self._pools.target, tapped, wanted)
        parts = [logits] if len(works) == 1 else list(logits.split([work.logit_rows for work in works]))
        return ForwardResult(works, parts, taps, starts)

    def write_context(self, result: ForwardResult, kept: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Stores the draft context of kept rows, given as (work item, its rows in order), at consecutive positions."""
        for name, places in _by_variant([result.works[item].state for item, _ in kept]).items():
            group = [kept[place] for place in places]
            rows = [result.starts[item] + row for item, chosen in group for row in chosen]
            if rows and result.taps is not None:
                spans = [(result.works[item].state, result.works[item].start, len(chosen)) for item, chosen in group]
                self._write(name, _rows(result.taps, rows), spans)

    def hold_taps(self, result: ForwardResult, item: int, rows: Sequence[int]) -> None:
        """Keeps the taps of rows whose sequence is not drafting now: written together they cost a fraction."""
        if rows and result.taps is not None:
            work, first = result.works[item], result.starts[item]
            work.state.waiting.append((work.start, _rows(result.taps, [first + row for row in rows])))

    def write_waiting(self, states: Sequence[SequenceState]) -> None:
        """Turns taps that were held into draft context."""
        held = [(state, start, cast(Tensor, taps)) for state in states for start, taps in state.waiting]
        for name, places in _by_variant([state for state, _, _ in held]).items():
            group = [held[place] for place in places]
            spans = [(state, start, len(taps)) for state, start, taps in group]
            self._write(name, torch.cat([taps for _, _, taps in group]), spans)
        for state in states:
            state.waiting.clear()

    def _write(self, variant: str, taps: Tensor, spans: Sequence[tuple[SequenceState, int, int]]) -> None:
        """Draft context for taps that stand one after the other for (sequence, first position, rows)."""
        positions: list[int] = []
        pages: list[int] = []
        offsets: list[int] = []
        for state, start, count in spans:
            positions += range(start, start + count)
            own_pages, own_offsets = state.places(start, count)
            pages += own_pages
            offsets += own_offsets
        self.variants[variant].blocks.write_context(taps, RowPlaces(positions, pages, offsets, max(positions) + 1))

    @staticmethod
    def _taps_wanted(works: Sequence[RowWork]) -> bool:
        return any(work.state.drafting for work in works)

    def _batch(self, works: Sequence[RowWork]) -> tuple[RowBatch, list[int]]:
        tokens: list[int] = []
        positions: list[int] = []
        page_ids: list[int] = []
        offsets: list[int] = []
        starts: list[int] = []
        for work in works:
            starts.append(len(tokens))
            tokens += work.tokens
            positions += work.positions
            # the rows of a tree share positions, so they are stored one behind the other until it is clear who stays
            pages, slots = work.state.places(work.start, work.rows)
            page_ids += pages
            offsets += slots
        groups = {
            pattern: [self._group(start, work, pattern) for start, work in zip(starts, works, strict=True)]
            for pattern in self.target.patterns
        }
        return RowBatch(tokens, positions, page_ids, offsets, max(positions) + 1, groups), starts

    @staticmethod
    def _recurrent_step(tensors: StateTensors, works: Sequence[RowWork]) -> DeltaStep:
        stretches = []
        for work in works:
            assert work.state.recurrent is not None, "every sequence of a recurrent target has a state"
            parents = work.proposal.parents if work.proposal is not None and work.branching else None
            stretches.append(Stretch(work.state.recurrent, work.rows, parents, work.state.checkpoint_rows(work.rows)))
        return tensors.begin(stretches)

    def _group(self, row_start: int, work: RowWork, pattern: AttentionPattern) -> RowGroup:
        pages, size = work.state.pages, self._page_tokens
        if work.proposal is not None and work.branching:
            return make_tree_group(row_start, work.start, work.proposal.parents, pages, size, pattern)
        return make_group(row_start, range(work.start, work.start + work.rows), pages, size, pattern)


def _by_variant(states: Sequence[SequenceState]) -> dict[str, list[int]]:
    """The places of sequences in a list, by the variant of the drafter they use."""
    groups: dict[str, list[int]] = {}
    for place, state in enumerate(states):
        groups.setdefault(state.variant, []).append(place)
    return groups


def _rows(taps: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows (ascending) of the taps; they nearly always follow each other, and a slice is much cheaper."""
    if len(rows) == taps.shape[0]:
        return taps
    if rows[-1] - rows[0] == len(rows) - 1:
        return taps[rows[0] : rows[-1] + 1]
    return taps[torch.tensor(rows)]
