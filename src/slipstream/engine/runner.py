"""Turns planned work into one target forward: the only place where rows are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.pools import KvPools
from slipstream.cache.sequence import SequenceState
from slipstream.kernels.rows import RowBatch, make_group
from slipstream.models.decoder import Decoder
from slipstream.speculative.draft import BlockDrafter, DraftJob


@dataclass(frozen=True, slots=True)
class RowWork:
    """Consecutive rows of one sequence: known tokens first, then proposals that are still on the device."""

    state: SequenceState
    start: int
    known: Sequence[int]
    proposed: Tensor
    logit_rows: int  # how many of the last rows need logits

    @property
    def rows(self) -> int:
        return len(self.known) + self.proposed.numel()


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logits per work item, and what is needed to keep the taps of the rows that survive."""

    logits: list[Tensor]
    batch: RowBatch
    taps: Tensor | None
    starts: list[int]  # first row of each work item


class Runner:
    """Holds the models and pools; has no idea of requests."""

    def __init__(self, target: Decoder, pools: KvPools, page_tokens: int, drafter: BlockDrafter | None) -> None:
        self.target = target
        self.drafter = drafter
        self._pools = pools
        self._page_tokens = page_tokens

    def propose(self, jobs: Sequence[DraftJob]) -> list[Tensor]:
        return self.drafter.propose(jobs) if jobs and self.drafter is not None else []

    def forward(self, works: Sequence[RowWork]) -> ForwardResult:
        """One pass of the target over all rows of all sequences."""
        batch, starts = self._batch(works)
        tapped = self.drafter.drafter.config.target_layer_ids if self.drafter and self._taps_wanted(works) else ()
        hidden, taps = self.target.forward(batch, self._pools.target, tapped)
        wanted = [
            row
            for start, work in zip(starts, works, strict=True)
            for row in range(start + work.rows - work.logit_rows, start + work.rows)
        ]
        counts = [work.logit_rows for work in works]
        logits = self.target.logits(hidden[torch.tensor(wanted)]).split(counts) if wanted else [hidden[:0]] * len(works)
        return ForwardResult(list(logits), batch, taps, starts)

    def write_context(self, result: ForwardResult, kept: Sequence[tuple[int, int]]) -> None:
        """Stores the draft context of kept rows, given as (work item, rows from its first one)."""
        rows = [result.starts[item] + row for item, count in kept for row in range(count)]
        if rows and self.drafter is not None and result.taps is not None:
            self.drafter.write_context(result.taps, result.batch, torch.tensor(rows))

    @staticmethod
    def _taps_wanted(works: Sequence[RowWork]) -> bool:
        return any(work.state.drafting for work in works)

    def _batch(self, works: Sequence[RowWork]) -> tuple[RowBatch, list[int]]:
        positions: list[int] = []
        places: list[tuple[int, int]] = []
        tokens: list[Tensor] = []
        starts: list[int] = []
        for work in works:
            span = range(work.start, work.start + work.rows)
            starts.append(len(positions))
            positions += span
            places += [work.state.place(position) for position in span]
            tokens += [torch.tensor(work.known), work.proposed]
        groups = {
            pattern: [
                make_group(
                    start, range(work.start, work.start + work.rows), work.state.pages, self._page_tokens, pattern
                )
                for start, work in zip(starts, works, strict=True)
            ]
            for pattern in self.target.patterns
        }
        where = torch.tensor(places)
        batch = RowBatch(
            torch.cat(tokens), torch.tensor(positions), where[:, 0], where[:, 1], max(positions) + 1, groups
        )
        return batch, starts
