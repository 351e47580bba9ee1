"""What a step asks of the drafter: blocks for the sequences that draft, and draft context for the rows that stay.

A step runs one pass per variant of the drafter, so every method groups its sequences by variant first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from slipstream.cache.sequence import SequenceState
from slipstream.engine.executor import ForwardResult
from slipstream.engine.variants import DraftVariants
from slipstream.kernels.rows import RowPlaces
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.draft import DraftJob

# Taps of so many positions may wait before they become draft context. More would make one write longer than a step;
# fewer would read the drafter's weights more often while a sequence decodes plainly.
MOST_WAITING_ROWS = 64


class DraftContexts:
    """The draft context of all sequences, over the variants of one drafter."""

    def __init__(self, variants: DraftVariants) -> None:
        self._variants = variants

    def draft(self, jobs: Sequence[DraftJob]) -> list[BlockDrafts | None]:
        """What the block of each job offers; None where the drafter's logits are not finite.

        Taps that wait must be written first, or the drafter does not see their positions.
        """
        drafts: list[BlockDrafts | None] = [None] * len(jobs)
        for name, places in _by_variant([job.state for job in jobs]).items():
            found = self._variants[name].drafter.draft([jobs[place] for place in places])
            for place, block in zip(places, found, strict=True):
                drafts[place] = block
        return drafts

    def write(self, result: ForwardResult, kept: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Stores the draft context of kept rows, given as (work item, its rows in order), at consecutive positions."""
        kept = [own for own in kept if own[0] not in result.written]
        for name, places in _by_variant([result.works[item].state for item, _ in kept]).items():
            group = [kept[place] for place in places]
            rows = [result.starts[item] + row for item, chosen in group for row in chosen]
            if rows and result.taps is not None:
                spans = [(result.works[item].state, result.works[item].start, len(chosen)) for item, chosen in group]
                self._write(name, _rows(result.taps, rows), spans)

    def hold(self, result: ForwardResult, item: int, rows: Sequence[int]) -> None:
        """Keeps the taps of a sequence that is not drafting now, because writing many together takes far less time."""
        work, first = result.works[item], result.starts[item]
        if work.state.waiting_rows >= MOST_WAITING_ROWS:
            self.write_waiting([work.state])
        if rows and result.taps is not None:
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
        """Writes draft context for taps that lie one after the other for (sequence, first position, rows)."""
        positions: list[int] = []
        pages: list[int] = []
        offsets: list[int] = []
        for state, start, count in spans:
            positions += range(start, start + count)
            own_pages, own_offsets = state.places(start, count)
            pages += own_pages
            offsets += own_offsets
        self._variants[variant].drafter.write_context(taps, RowPlaces(positions, pages, offsets, max(positions) + 1))


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
