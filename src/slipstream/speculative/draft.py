"""One block pass of the drafter for any number of sequences: anchors and masks in, proposals out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.pools import KvPools
from slipstream.cache.sequence import SequenceState
from slipstream.kernels.rows import RowBatch, make_group
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.sampling import RowSampler


@dataclass(frozen=True, slots=True)
class DraftJob:
    """A sequence that wants `proposals` tokens drafted behind its anchor."""

    state: SequenceState
    sampler: RowSampler
    proposals: int


class BlockDrafter:
    """Drafts over the shared pages; the block itself stands in the slots verify is about to use."""

    def __init__(self, target: Decoder, drafter: DFlashDrafter, pools: KvPools, page_tokens: int, window: int) -> None:
        self.drafter = drafter
        self.block_size = drafter.config.block_size
        self.window = window
        self._pools = pools
        self._page_tokens = page_tokens
        self._embed = drafter.embed or target.embed
        self._head = drafter.head or target.logits

    def propose(self, jobs: Sequence[DraftJob]) -> list[Tensor]:
        """The proposed tokens of each job, still on the device."""
        batch = self._batch(jobs)
        hidden = self.drafter.forward(
            self._embed(batch.token_ids), batch, self._pools.draft_keys, self._pools.draft_values
        )
        # only slots that will be verified go through the output head
        wanted = [
            block * self.block_size + slot for block, job in enumerate(jobs) for slot in range(1, job.proposals + 1)
        ]
        logits = self.drafter.shape_logits(self._head(hidden[torch.tensor(wanted)]))
        counts = [job.proposals for job in jobs]
        if all(job.sampler.plain_greedy for job in jobs):
            return list(logits.argmax(dim=-1).split(counts))
        return [
            job.sampler.choose_draft(rows, job.state.length + 1)
            for job, rows in zip(jobs, logits.split(counts), strict=True)
        ]

    def write_context(self, taps: Tensor, batch: RowBatch, rows: Tensor) -> None:
        """Stores the draft context of the given rows of a target forward."""
        self.drafter.write_context(
            taps[rows], batch.positions[rows], batch.end, batch.pages[rows], batch.offsets[rows],
            self._pools.draft_keys, self._pools.draft_values,
        )

    def _batch(self, jobs: Sequence[DraftJob]) -> RowBatch:
        size, mask = self.block_size, self.drafter.config.mask_token_id
        tokens: list[int] = []
        positions: list[int] = []
        places: list[tuple[int, int]] = []
        groups = {}
        for job in jobs:
            span = range(job.state.length, job.state.length + size)
            tokens += [job.state.tokens[job.state.length], *[mask] * (size - 1)]
            positions += span
            places += [job.state.place(position) for position in span]
        for pattern in dict.fromkeys(self.drafter.config.patterns):
            groups[pattern] = [
                make_group(
                    index * size,
                    range(job.state.length, job.state.length + size),
                    job.state.pages,
                    self._page_tokens,
                    pattern,
                    earliest=max(0, job.state.length - self.window) if self.window else 0,
                )
                for index, job in enumerate(jobs)
            ]
        where = torch.tensor(places)
        return RowBatch(
            torch.tensor(tokens), torch.tensor(positions), where[:, 0], where[:, 1], max(positions) + 1, groups
        )
