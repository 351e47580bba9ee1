"""Measures once what steps cost on this machine, before the policy makes its first decision from those times."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS
from slipstream.engine.cpu.cpu_executor import CpuExecutor, pool_shapes
from slipstream.engine.draft_context import DraftContexts
from slipstream.engine.executor import RowWork
from slipstream.engine.proposer import AUTO_CANDIDATES
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.choose import SLOT_OPTIONS
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.draft import DraftJob
from slipstream.speculative.sampling import RowSampler
from slipstream.types import BASE_VARIANT, Proposal, SamplingParams

# Rows of the timed steps. Kernels work on several rows at once, so costs rise in steps: with a straight line between 4
# and 8 rows the policy chose 5 rows, which cost nearly as much as 8 (docs/log.md).
_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 64)
_TREE_ROWS = (4, 8, 16, 32)  # rows of the timed trees, which cost 4 to 8 % more than chains (docs/log.md)
_CONTEXT = 64  # tokens behind which steps are timed; real steps teach what a longer context costs
# Every action runs 6 times; after 2 rounds the measurement ends early if it has taken 1.5 seconds, because a first
# request waits for it. With fewer rounds, a disturbed run may be taken for the cost.
_ROUNDS, _LEAST_ROUNDS, _MOST_SECONDS = 6, 2, 1.5

Progress = Callable[[str, int, int], None]


@torch.inference_mode()
def measure_costs(target: Decoder, drafter: DFlashDrafter, progress: Progress | None = None) -> CostTable:
    """Times verify steps of several widths, and draft passes, on a small cache that is made for this measurement."""
    pages = -(-(_CONTEXT + max(_ROWS)) // PAGE_TOKENS) + 1
    pools = KvPools(pages, PAGE_TOKENS, *pool_shapes(target, drafter))
    executor = CpuExecutor(target, drafter, pools, pages, draft_window=0)
    blocks, contexts = executor.variants[BASE_VARIANT].blocks, DraftContexts(executor.variants)
    state = SequenceState(PageTable(pages), PAGE_TOKENS, pools, drafting=True)
    state.start([1] * (_CONTEXT + 1), [])
    state.reserve(_CONTEXT + max(_ROWS))
    prompt = executor.forward([RowWork(state, 0, state.tokens[:_CONTEXT], 0)])
    contexts.write(prompt, [(0, range(_CONTEXT))])
    state.commit(range(_CONTEXT), [], _CONTEXT)
    sampler = RowSampler(SamplingParams(), target.config.vocab_size, state.tokens, share_noise=True)
    slots = sorted({min(count, blocks.proposals) for count in SLOT_OPTIONS} | {blocks.proposals})

    def step(tokens: int, tree: Proposal | None = None) -> None:
        result = executor.forward([RowWork(state, _CONTEXT, [1] * tokens, tokens, tree)])
        sampler.choose(result.logits[0], _CONTEXT + 1, tree or _chain(tokens)).tolist()
        contexts.write(result, [(0, [0])])

    actions: dict[tuple[str, int], Callable[[], object]] = {}
    for rows in _ROWS:
        actions["step", rows] = partial(step, rows)
    for rows in _TREE_ROWS:
        actions["tree", rows] = partial(step, rows, Proposal((1,) * rows, (-1, *(row // 2 for row in range(rows - 1)))))
    for count in slots:
        actions["draft", count] = partial(blocks.draft, [DraftJob(state, sampler, count, AUTO_CANDIDATES)])
    best = _best_ms(actions, progress)
    table = CostTable({rows: best["step", rows] for rows in _ROWS}, {count: best["draft", count] for count in slots})
    for rows in _TREE_ROWS:
        table.teach(StepShape(1, rows, _CONTEXT, sampled=False, branching=True), best["tree", rows])
    return table


def _chain(rows: int) -> Proposal:
    return Proposal((1,) * rows, tuple(range(-1, rows - 1)))


def _best_ms(
    actions: dict[tuple[str, int], Callable[[], object]], progress: Progress | None
) -> dict[tuple[str, int], float]:
    """Returns the fastest of a few runs of each action, because a disturbance can only make a run longer.

    The actions take turns, so that a busy spell of the machine does not fall on one of them alone. The widest step runs
    once before the clock starts, because the first access to new memory is slow.
    """
    best = dict.fromkeys(actions, float("inf"))
    actions["step", max(_ROWS)]()
    started, done = time.perf_counter(), 0
    for turn in range(_ROUNDS):
        if turn >= _LEAST_ROUNDS and time.perf_counter() - started > _MOST_SECONDS:
            break
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            best[name] = min(best[name], (time.perf_counter() - began) * 1e3)
            done += 1
            if progress is not None:
                progress("measuring step costs", done, _ROUNDS * len(actions))
    if progress is not None:
        progress("measuring step costs", 1, 1)
    return best
