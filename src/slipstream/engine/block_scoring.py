"""Runs a target or a drafter on given tokens outside any request, for the logits of a text and of draft blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import DRAFT_WINDOW_LIMIT, PAGE_TOKENS
from slipstream.engine.cpu.cpu_executor import CpuExecutor, pool_shapes
from slipstream.engine.executor import RowWork
from slipstream.errors import IntegrityError
from slipstream.kernels.rows import RowPlaces
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter, check_pair
from slipstream.speculative.draft import CANDIDATES, DraftJob
from slipstream.speculative.sampling import RowSampler
from slipstream.types import SamplingParams

_CHUNK = 256  # tokens of a text that one target forward reads


class ScratchSequence:
    """A small cache with one sequence in it, apart from the engine's cache."""

    def __init__(self, target: Decoder, tokens: Sequence[int], room: int) -> None:
        pages = -(-room // PAGE_TOKENS) + 1
        pools = KvPools(pages, PAGE_TOKENS, *pool_shapes(target, None))
        self._executor = CpuExecutor(target, None, pools, pages, draft_window=0)
        self.state = SequenceState(PageTable(pages), PAGE_TOKENS, pools, drafting=False)
        self.state.start(tokens, [])
        self.state.reserve(room)

    def run(self, tokens: Sequence[int], logit_rows: int) -> Tensor:
        """Runs tokens after the committed ones and returns the logits of the last `logit_rows` of them."""
        return self._executor.forward([RowWork(self.state, self.state.length, tokens, logit_rows)]).logits[0]


def text_logits(target: Decoder, ids: Sequence[int], chunk: int = _CHUNK) -> Iterator[Tensor]:
    """Yields the logits after every token of a text, `chunk` rows at a time, from the forward that requests use too."""
    scratch = ScratchSequence(target, ids, len(ids))
    for start in range(0, len(ids), chunk):
        rows = ids[start : start + chunk]
        # Inference mode does not span the whole loop, because the caller's code between two chunks must not inherit it.
        with torch.inference_mode():
            logits = scratch.run(rows, len(rows))
        yield logits
        scratch.state.commit(range(len(rows)), [], 0)


class OurBlocks:
    """A drafter of the engine on given texts: `begin` computes the target's taps once, `block` drafts at a position."""

    def __init__(self, label: str, target: Decoder, drafter: DFlashDrafter) -> None:
        check_pair(target.config, drafter)
        self.label = label
        self.target = target
        self.drafter = drafter
        self.proposals = drafter.config.proposals
        self.taps = torch.empty(0)
        self._ids: Sequence[int] = ()
        self._sampler = RowSampler(SamplingParams(), target.config.vocab_size, [], True)

    @property
    def window(self) -> int:
        """How many tokens back this drafter looks if the engine's configuration does not say."""
        return min(self.drafter.config.trained_length or DRAFT_WINDOW_LIMIT, DRAFT_WINDOW_LIMIT)

    @torch.inference_mode()
    def begin(self, ids: Sequence[int]) -> None:
        pages = -(-(len(ids) + self.drafter.config.block_size) // PAGE_TOKENS)
        pools = KvPools(pages, PAGE_TOKENS, *pool_shapes(self.target, self.drafter), 2)
        self._ids, self._pools = ids, pools
        executor = CpuExecutor(self.target, self.drafter, pools, pages, self.window)
        self._blocks = executor.blocks(self.drafter)
        reading = self._sequence(pages, ids)
        parts: list[Tensor] = []
        while reading.length < len(ids):
            rows = ids[reading.length : reading.length + _CHUNK]
            result = executor.forward([RowWork(reading, reading.length, rows, 0)])
            assert result.taps is not None, "a drafting sequence asks for taps"
            parts.append(result.taps)
            reading.commit(range(len(rows)), [], len(rows))
        self.taps = torch.cat(parts)
        # A second sequence over the same pages drafts; its context grows up to the position that is asked for.
        self._state = self._sequence(pages, ids)
        self._state.recurrent = None  # no row of this sequence goes through the target

    def _sequence(self, pages: int, ids: Sequence[int]) -> SequenceState:
        state = SequenceState(PageTable(pages), PAGE_TOKENS, self._pools, drafting=True)
        state.start(ids, [])
        state.reserve(pages * PAGE_TOKENS)
        return state

    @torch.inference_mode()
    def block(self, position: int) -> tuple[Tensor, list[int]]:
        """Returns the logits [slots, vocabulary] of the block after `position` and the tokens that it would propose.

        Positions must not go down from call to call.

        A head's answer depends on the token before the slot. The head is given the text's own token there, so that two
        drafters that are compared are asked the same.
        """
        state = self._state
        if position < state.length:
            raise IntegrityError(f"blocks are asked for in order, and {position} comes before {state.length}")
        if position > state.length:
            span = range(state.length, position)
            pages, offsets = zip(*[state.place(index) for index in span], strict=True)
            self._blocks.write_context(self.taps[span.start : span.stop], RowPlaces(span, pages, offsets, span.stop))
            state.commit(range(len(span)), [], len(span))
        hidden, logits = self._blocks.logits([DraftJob(state, self._sampler, self.proposals, 1)])
        first = self.drafter.config.first_slot
        return logits, self._choices(hidden[first : first + self.proposals], logits, position)

    def _choices(self, hidden: Tensor, logits: Tensor, position: int) -> list[int]:
        heads = self.drafter.heads
        if heads is None or not heads.corrects:
            return [int(token) for token in logits.argmax(-1)]
        best = logits.topk(min(heads.candidate_limit or CANDIDATES, logits.shape[-1]))
        walk = heads.begin(hidden, best.indices)
        state, chosen = None, []
        for slot in range(len(logits)):
            before = self._ids[min(position + slot, len(self._ids) - 1)]
            correction, state = walk.correct(slot, before, state)
            scores = best.values[slot] + torch.from_numpy(correction)
            chosen.append(int(best.indices[slot, int(scores.argmax())]))
        return chosen

    def embed(self, ids: Tensor) -> Tensor:
        return self.drafter.borrow(self.target.embed, self.target.config.softcap)(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return (self.drafter.head or self.target.draft_head)(hidden)
