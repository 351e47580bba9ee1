"""Runs one block pass of the drafter for any number of sequences: anchors and masks in, candidates per slot out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.cache.sequence import SequenceState
from slipstream.kernels.rows import RowBatch, RowPlaces, make_group
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.sampling import RowSampler


class DraftJob(NamedTuple):
    """A sequence for which `slots` positions after its anchor are drafted, with `candidates` tokens at each."""

    state: SequenceState
    sampler: RowSampler
    slots: int
    candidates: int
    min_confidence: float = 0.0


class BlockDrafter:
    """Drafts over the shared pages; the block occupies the page slots that verify is about to use."""

    def __init__(self, target: Decoder, drafter: DFlashDrafter, pools: KvPools, page_tokens: int, window: int) -> None:
        self.drafter = drafter
        self.block_size = drafter.config.block_size
        self.proposals = drafter.config.proposals
        self.window = window
        self._pools = pools
        self._page_tokens = page_tokens
        self._embed = drafter.borrow(target.embed, target.config.softcap)
        self._head = drafter.head or target.draft_head
        self._patterns = tuple(dict.fromkeys(drafter.config.patterns))

    def draft(self, jobs: Sequence[DraftJob]) -> list[BlockDrafts | None]:
        """What each job's block offers; None if the drafter's logits are NaN or infinite."""
        if not jobs:
            return []
        hidden, logits = self._logits(jobs)
        parts = [logits] if len(jobs) == 1 else logits.split([job.slots for job in jobs])
        return [self._offer(job, parts[block], hidden, block) for block, job in enumerate(jobs)]

    def _logits(self, jobs: Sequence[DraftJob]) -> tuple[Tensor, Tensor]:
        """The hidden rows of all blocks, and the logits of the wanted slots, job by job."""
        batch = self._batch(jobs)
        # Only slots that may be verified need logits, so only they go through the output head.
        first = self.drafter.config.first_slot
        wanted = [block * self.block_size + first + slot for block, job in enumerate(jobs) for slot in range(job.slots)]
        hidden, logits = self.drafter.forward_logits(
            self._embed(batch.token_ids), batch, self._pools.draft_keys, self._pools.draft_values, wanted, self._head
        )
        return hidden, self.drafter.shape_logits(logits)

    def _offer(self, job: DraftJob, logits: Tensor, hidden: Tensor, block: int) -> BlockDrafts | None:
        """What the logits of one block offer; `hidden` holds the rows of all blocks, which only heads read."""
        heads = self.drafter.heads
        count = job.candidates if heads is None else heads.candidate_limit or job.candidates
        best = job.sampler.draft_candidates(logits, job.state.length + 1, count)
        if best is None:
            return None
        drafts = BlockDrafts(best.tokens, best.scores, job.sampler.draft_scale, job.min_confidence)
        drafts.rule = job.sampler.draft_rule(logits, job.state.length + 1)
        if heads is None:
            return drafts
        start = block * self.block_size + self.drafter.config.first_slot
        walk = heads.begin(hidden[start : start + job.slots], drafts.tokens)
        drafts.bind(walk, walk.compiled)
        return drafts

    def write_context(self, taps: Tensor, places: RowPlaces) -> None:
        """Stores the draft context of committed rows at their positions in the draft pool."""
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
                    self._page_tokens,
                    pattern,
                    earliest=max(0, job.state.length - self.window) if self.window else 0,
                )
                for index, job in enumerate(jobs)
            ]
        return RowBatch(tokens, positions, page_ids, offsets, max(positions) + 1, groups)
