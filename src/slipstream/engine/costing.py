"""Measures what steps cost on this machine, once, before the first decision is made from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from slipstream.cache.pages import PageTable
from slipstream.cache.pools import KvPools
from slipstream.cache.sequence import SequenceState
from slipstream.engine.proposer import AUTO_CANDIDATES
from slipstream.engine.runner import RowWork, Runner
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.draft import BlockDrafter, DraftJob
from slipstream.speculative.planning import SLOT_OPTIONS
from slipstream.speculative.sampling import RowSampler
from slipstream.types import Proposal, SamplingParams

_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 64)  # kernels work in steps, so neighbours may differ much
_TREE_ROWS = (4, 8, 16, 32)
_CONTEXT = 64
_REPEATS = 3

Progress = Callable[[str, int, int], None]


@torch.inference_mode()
def measure_costs(
    target: Decoder, drafter: DFlashDrafter, make_pools: Callable[[int], KvPools], page_tokens: int,
    progress: Progress | None = None,
) -> CostTable:
    """Times verify steps of several widths and draft passes on a small cache of their own."""
    pages = -(-(_CONTEXT + max(_ROWS)) // page_tokens) + 1
    pools = make_pools(pages)
    blocks = BlockDrafter(target, drafter, pools, page_tokens, window=0)
    runner = Runner(target, pools, page_tokens, blocks)
    state = SequenceState(PageTable(pages), page_tokens, pools, drafting=True)
    state.start([1] * (_CONTEXT + 1), [])
    state.reserve(_CONTEXT + max(_ROWS))
    prompt = runner.forward([RowWork(state, 0, state.tokens[:_CONTEXT], 0)])
    runner.write_context(prompt, [(0, range(_CONTEXT))])
    state.commit(range(_CONTEXT), [], _CONTEXT)
    sampler = RowSampler(SamplingParams(), target.config.vocab_size, state.tokens, share_noise=True)
    slots = sorted({min(count, blocks.proposals) for count in SLOT_OPTIONS} | {blocks.proposals})
    done, total = 0, len(_ROWS) + len(slots) + len(_TREE_ROWS)

    def report() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("measuring step costs", done, total)

    def step(work: RowWork) -> None:
        result = runner.forward([work])
        result.logits[0].argmax(dim=-1).tolist()
        runner.write_context(result, [(0, [0])])

    steps, drafts = {}, {}
    for rows in _ROWS:
        steps[rows] = _best_ms(partial(step, RowWork(state, _CONTEXT, [1] * rows, rows)))
        report()
    for count in slots:
        drafts[count] = _best_ms(partial(blocks.draft, [DraftJob(state, sampler, count, AUTO_CANDIDATES)]))
        report()
    table = CostTable(steps, drafts)
    for rows in _TREE_ROWS:
        tree = Proposal((1,) * rows, (-1, *(row // 2 for row in range(rows - 1))))
        ms = _best_ms(partial(step, RowWork(state, _CONTEXT, tree.tokens, rows, tree)))
        table.teach(StepShape(1, rows, _CONTEXT, sampled=False, branching=True), ms)
        report()
    return table


def _best_ms(action: Callable[[], object]) -> float:
    """The least of a few runs: what disturbs a run only ever makes it longer."""
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return best * 1e3
