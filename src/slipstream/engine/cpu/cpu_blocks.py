"""The drafter's block pass on a CPU: anchors and masks in, hidden rows and logits of the wanted slots out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.config import PAGE_TOKENS
from slipstream.kernels.rows import RowBatch, RowPlaces, make_group
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.draft import BlockDrafter, DraftJob


class CpuBlocks(BlockDrafter):
    """Drafts over the shared pages; the block itself stands in the page slots that verify is about to use."""

    def __init__(self, target: Decoder, drafter: DFlashDrafter, pools: KvPools, window: int) -> None:
        super().__init__(drafter, window)
        self._pools = pools
        self._embed = drafter.borrow(target.embed, target.config.softcap)
        self._head = drafter.head or target.draft_head
        self._patterns = tuple(dict.fromkeys(drafter.config.patterns))

    def logits(self, jobs: Sequence[DraftJob]) -> tuple[Tensor, Tensor]:
        batch = self._batch(jobs)
        # Only slots that may be verified go through the output head.
        hidden, logits = self.drafter.forward_logits(
            self._embed(batch.token_ids),
            batch,
            self._pools.draft_keys,
            self._pools.draft_values,
            self.wanted_rows(jobs),
            self._head,
        )
        return hidden, self.drafter.shape_logits(logits)

    def write_context(self, taps: Tensor, places: RowPlaces) -> None:
        self.drafter.write_context(taps, places, self._pools.draft_keys, self._pools.draft_values)

    def _batch(self, jobs: Sequence[DraftJob]) -> RowBatch:
        size, mask = self.block_size, self.drafter.config.mask_token_id
        tokens: list[int] = []
        positions: list[int] = []
        page_ids: list[int] = []
        offsets: list[int] = []
        groups = {}
        for job in jobs:
            span = range(job.state.length, job.state.length + size)
            tokens += [job.state.tokens[job.state.length], *[mask] * (size - 1)]
            positions += span
            pages, slots = job.state.places(job.state.length, size)
            page_ids += pages
            offsets += slots
        for pattern in self._patterns:
            groups[pattern] = [
                make_group(
                    index * size,
                    range(job.state.length, job.state.length + size),
                    job.state.pages,
                    PAGE_TOKENS,
                    pattern,
                    earliest=max(0, job.state.length - self.window) if self.window else 0,
                )
                for index, job in enumerate(jobs)
            ]
        return RowBatch(tokens, positions, page_ids, offsets, max(positions) + 1, groups)
