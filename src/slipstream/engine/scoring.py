"""Runs the target on given tokens outside any request, to see how it predicts a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS
from slipstream.engine.cpu.cpu_executor import CpuExecutor, pool_shapes
from slipstream.engine.executor import RowWork
from slipstream.models.decoder import Decoder


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


def text_logits(target: Decoder, ids: Sequence[int], chunk: int = 256) -> Iterator[Tensor]:
    """Yields the logits after every token of a text, `chunk` rows at a time, from the forward that requests use too."""
    scratch = ScratchSequence(target, ids, len(ids))
    for start in range(0, len(ids), chunk):
        rows = ids[start : start + chunk]
        # The mode does not span the whole loop, because the caller's code between two chunks must not inherit it.
        with torch.inference_mode():
            logits = scratch.run(rows, len(rows))
        yield logits
        scratch.state.commit(range(len(rows)), [], 0)
