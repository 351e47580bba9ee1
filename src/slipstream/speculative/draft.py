"""One block pass of the drafter for any number of sequences: anchors and masks in, candidates per slot out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from slipstream.cache.sequence import SequenceState
from slipstream.kernels.rows import RowPlaces
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.sampling import RowSampler

# Candidates of a slot. A head may prefer a token that ranks low without it: among 8 candidates it finds up to 6 % fewer
# accepted tokens a step, among 64 no more (docs/log.md).
CANDIDATES = 32


class DraftJob(NamedTuple):
    """A sequence for which `slots` positions are drafted after its anchor, with `candidates` tokens at each."""

    state: SequenceState
    sampler: RowSampler
    slots: int
    candidates: int
    min_confidence: float = 0.0


class BlockDrafter(ABC):
    """A drafter on one device. The device computes logits; candidates are ranked here, on the host."""

    def __init__(self, drafter: DFlashDrafter, window: int) -> None:
        self.drafter = drafter
        self.block_size = drafter.config.block_size
        self.proposals = drafter.config.proposals
        self.window = window

    @abstractmethod
    def logits(self, jobs: Sequence[DraftJob]) -> tuple[Tensor, Tensor]:
        """The hidden rows of all blocks, and the logits of their wanted slots, job by job."""

    @abstractmethod
    def write_context(self, taps: Tensor, places: RowPlaces) -> None:
        """Stores the draft context of committed rows at their positions."""

    def wanted_rows(self, jobs: Sequence[DraftJob]) -> list[int]:
        """The rows of all blocks whose slots the jobs ask for."""
        first = self.drafter.config.first_slot
        return [block * self.block_size + first + slot for block, job in enumerate(jobs) for slot in range(job.slots)]

    def draft(self, jobs: Sequence[DraftJob]) -> list[BlockDrafts | None]:
        """What the block of each job offers; None where the drafter's logits are not finite."""
        if not jobs:
            return []
        hidden, logits = self.logits(jobs)
        parts = [logits] if len(jobs) == 1 else logits.split([job.slots for job in jobs])
        return [self._offer(job, parts[block], hidden, block) for block, job in enumerate(jobs)]

    def _offer(self, job: DraftJob, logits: Tensor, hidden: Tensor, block: int) -> BlockDrafts | None:
        """What the logits of one block offer; `hidden` are the rows of all blocks, which only heads read."""
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
