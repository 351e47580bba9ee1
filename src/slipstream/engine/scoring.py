"""Runs the target on given tokens outside any request, to see how it predicts a text and how long a step takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS
from slipstream.engine.cpu.cpu_executor import CpuExecutor, pool_shapes
from slipstream.engine.executor import RowWork
from slipstream.models.decoder import Decoder

_CONTEXT = 64  # tokens behind which steps are timed
_LEAST_SECONDS = 0.3  # each number of rows is timed so long; with less, a median rests on few steps


class _Scratch:
    """A small cache with one sequence in it, apart from the engine's cache."""

    def __init__(self, target: Decoder, tokens: Sequence[int], room: int) -> None:
        pages = -(-room // PAGE_TOKENS) + 1
        pools = KvPools(pages, PAGE_TOKENS, *pool_shapes(target, None))
        self._executor = CpuExecutor(target, None, pools, pages, draft_window=0)
        self.state = SequenceState(PageTable(pages), PAGE_TOKENS, pools, drafting=False)
        self.state.start(tokens, [])
        self.state.reserve(room)

    def run(self, tokens: Sequence[int], logit_rows: int) -> Tensor:
        """Runs tokens behind the committed ones and returns the logits of the last `logit_rows` of them."""
        return self._executor.forward([RowWork(self.state, self.state.length, tokens, logit_rows)]).logits[0]


def text_logits(target: Decoder, ids: Sequence[int], chunk: int = 256) -> Iterator[Tensor]:
    """Yields the logits after every token of a text, `chunk` rows at a time, from the forward that requests use too."""
    scratch = _Scratch(target, ids, len(ids))
    for start in range(0, len(ids), chunk):
        rows = ids[start : start + chunk]
        # The mode does not span the whole loop, because the caller's code between two chunks must not inherit it.
        with torch.inference_mode():
            logits = scratch.run(rows, len(rows))
        yield logits
        scratch.state.commit(range(len(rows)), [], 0)


def predictions(
    target: Decoder, ids: Sequence[int], chunk: int = 256, progress: Callable[[int], None] = lambda done: None
) -> Iterator[tuple[float, int]]:
    """Yields, for every token but the first, its log-probability and the token that the target would have chosen."""
    position = 0
    for logits in text_logits(target, ids, chunk):
        following = torch.tensor(ids[position + 1 : position + 1 + len(logits)])
        known = logits[: len(following)]
        chosen = torch.log_softmax(known.double(), dim=-1).gather(1, following[:, None])[:, 0]
        yield from zip(chosen.tolist(), known.argmax(dim=-1).tolist(), strict=True)
        position += len(logits)
        progress(len(logits))


@torch.inference_mode()
def row_times(target: Decoder, rows: Sequence[int]) -> dict[int, float]:
    """Returns the median milliseconds of greedy steps by their rows, all with logits, behind a short context."""
    scratch = _Scratch(target, [1] * (_CONTEXT + 1), _CONTEXT + max(rows))
    scratch.run(scratch.state.tokens[:_CONTEXT], 0)
    scratch.state.commit(range(_CONTEXT), [], 0)

    def step(count: int) -> float:
        began = time.perf_counter()
        scratch.run([1] * count, count).argmax(dim=-1).tolist()
        return 1e3 * (time.perf_counter() - began)

    times: dict[int, list[float]] = {count: [] for count in rows}
    until = time.perf_counter() + _LEAST_SECONDS * len(rows)
    # The widths take turns, so that a busy moment of the machine hits all of them.
    while time.perf_counter() < until or len(times[rows[0]]) < 3:
        for count in rows:
            step(count)  # a first step, not counted, replaces what the last width left in the processor's caches
            times[count].append(step(count))
    return {count: statistics.median(seen) for count, seen in times.items()}
