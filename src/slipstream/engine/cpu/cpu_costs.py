"""Measures once what steps cost on this machine, before the policy makes its first decision from those times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import NamedTuple

import torch

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS
from slipstream.engine.cpu.cpu_executor import CpuExecutor, pool_shapes
from slipstream.engine.draft_context import DraftContexts
from slipstream.engine.executor import RowWork
from slipstream.kernels.cpu.native_library import threads
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.choose import SLOT_OPTIONS
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.draft import CANDIDATES, DraftJob
from slipstream.speculative.sampling import RowSampler
from slipstream.types import BASE_VARIANT, Progress, Proposal, SamplingParams

# Rows of the timed steps. Kernels work on several rows at once, so costs rise in jumps: with a straight line between 4
# and 8 rows the policy chose 5 rows, which cost nearly as much as 8 (docs/log.md).
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 24, 32, 64)
_TREE_ROWS = (4, 8, 16, 32)  # rows of the timed trees, which cost 4 to 8 % more than chains (docs/log.md)
_CONTEXT = 64  # tokens before the timed rows; timings of real steps show what a longer context costs
# Actions run in turns until each had 6 runs that no other process disturbed. After 2 rounds the measurement also ends
# when it has taken 1.5 s, because a first request waits for it; with the shipped pair on two idle cores it takes 1.6 s.
# With fewer runs, one that a shared cache or the hypervisor slowed down may be taken for the cost.
_CLEAN_RUNS, _LEAST_ROUNDS, _MOST_SECONDS = 6, 2, 1.5

Action = tuple[str, int]


class TimedRun(NamedTuple):
    """One run of an action; it is clean if no thread of this process had to leave its core for another process."""

    wall_ms: float
    cpu_ms: float  # of all threads
    clean: bool


@torch.inference_mode()
def measure_costs(target: Decoder, drafter: DFlashDrafter | None, progress: Progress | None = None) -> CostTable:
    """Times verify steps of several widths, and the drafter's passes, on a small cache that is made for this."""
    pages = -(-(_CONTEXT + max(_ROWS)) // PAGE_TOKENS) + 1
    pools = KvPools(pages, PAGE_TOKENS, *pool_shapes(target, drafter))
    executor = CpuExecutor(target, drafter, pools, pages, draft_window=0)
    blocks = executor.variants[BASE_VARIANT].drafter if drafter is not None else None
    contexts = DraftContexts(executor.variants)
    state = SequenceState(PageTable(pages), PAGE_TOKENS, pools, drafting=drafter is not None)
    state.start([1] * (_CONTEXT + 1), [])
    state.reserve(_CONTEXT + max(_ROWS))
    prompt = executor.forward([RowWork(state, 0, state.tokens[:_CONTEXT], 0)])
    if blocks is not None:
        contexts.write(prompt, [(0, range(_CONTEXT))])
    state.commit(range(_CONTEXT), [], _CONTEXT if blocks is not None else 0)
    sampler = RowSampler(SamplingParams(), target.config.vocab_size, state.tokens, share_noise=True)
    slots = sorted({min(count, blocks.proposals) for count in (*SLOT_OPTIONS, blocks.proposals)}) if blocks else []

    def step(tokens: int, tree: Proposal | None = None) -> None:
        result = executor.forward([RowWork(state, _CONTEXT, [1] * tokens, tokens, tree)])
        sampler.choose(result.logits[0], _CONTEXT + 1, tree or _chain(tokens)).tolist()
        if blocks is not None:
            contexts.write(result, [(0, [0])])

    def draft(count: int) -> None:
        if blocks is not None:
            blocks.draft([DraftJob(state, sampler, count, CANDIDATES)])

    actions: dict[Action, Callable[[], object]] = {}
    for rows in _ROWS:
        actions["step", rows] = partial(step, rows)
    for rows in _TREE_ROWS:
        actions["tree", rows] = partial(step, rows, Proposal((1,) * rows, (-1, *(row // 2 for row in range(rows - 1)))))
    for count in slots:
        actions["draft", count] = partial(draft, count)
    # What ran before decides which weights lie in the processor's caches: a plain step usually follows a plain step, a
    # verify step follows a draft, and a draft follows a step of the target.
    plain_step, short_draft = partial(step, 1), partial(draft, slots[0] if slots else 0)
    before = {name: plain_step if name == ("step", 1) or name[0] == "draft" else short_draft for name in actions}
    times = _take_turns(actions, before, progress)
    table = CostTable({rows: times["step", rows] for rows in _ROWS}, {count: times["draft", count] for count in slots})
    for rows in _TREE_ROWS:
        table.teach(StepShape(1, rows, _CONTEXT, sampled=False, branching=True), times["tree", rows])
    return table


def _chain(rows: int) -> Proposal:
    return Proposal((1,) * rows, tuple(range(-1, rows - 1)))


def _take_turns(
    actions: Mapping[Action, Callable[[], object]],
    before: Mapping[Action, Callable[[], object]],
    progress: Progress | None,
) -> dict[Action, float]:
    """Returns how long each action takes right after its entry in `before`, while no other process takes a core away.

    The actions take turns, so that a busy spell of the machine does not fall on one of them alone. The widest step runs
    once before the clock starts, because the first access to new memory is slow.
    """
    runs: dict[Action, list[TimedRun]] = {name: [] for name in actions}
    actions["step", max(_ROWS)]()
    started, rounds, clean = time.perf_counter(), 0, 0
    while rounds < _LEAST_ROUNDS or (clean < _CLEAN_RUNS and time.perf_counter() - started < _MOST_SECONDS):
        for name, action in actions.items():
            before[name]()
            runs[name].append(_timed(action))
        rounds, clean = rounds + 1, min(sum(run.clean for run in own) for own in runs.values())
        if progress is not None:
            progress("measuring step costs", clean, _CLEAN_RUNS)
    if progress is not None:
        progress("measuring step costs", 1, 1)
    return {name: undisturbed_ms(own, threads()) for name, own in runs.items()}


def _timed(action: Callable[[], object]) -> TimedRun:
    switches, cpu, wall = getrusage(RUSAGE_SELF).ru_nivcsw, time.process_time(), time.perf_counter()
    action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return TimedRun(wall * 1e3, cpu * 1e3, getrusage(RUSAGE_SELF).ru_nivcsw == switches)


def undisturbed_ms(runs: Sequence[TimedRun], cores: int) -> float:
    """Returns the fastest clean run or, without any, the processor time that the runs needed on each core.

    Beside a busy process, a step that lasts longer than the system's time slice is never clean, and takes up to twice
    its time. Its processor time does not change. Where not all of the work is shared among the cores the result is too
    small, which does less harm than one that is too large: the policy uses such a size, and its timings correct it.
    """
    clean = [run.wall_ms for run in runs if run.clean]
    return min(clean) if clean else min(median(run.cpu_ms for run in runs) / cores, *(run.wall_ms for run in runs))
