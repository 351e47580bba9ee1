"""Decides before drafting which sequences draft, from recent gains of drafting and current step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from slipstream.speculative.allocation import StepTimes
from slipstream.speculative.costs import CostTable
from slipstream.speculative.expected_gains import SIZES, ExpectedGains
from slipstream.speculative.sequence_policy import SequencePolicy

# Numbers of drafted slots that are compared, besides the full block. More options cost host time in every plan; fewer
# make drafts too shallow or too deep. The values are those of `SIZES` up to a usual block, so no curve is interpolated.
SLOT_OPTIONS = (3, 7, 15)


class View(NamedTuple):
    """A decoding sequence before drafting; `room` is how many tokens it may still commit in this step."""

    policy: SequencePolicy
    context: int
    sampled: bool
    room: int


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Which sequences draft, and the rate in tokens per millisecond that this promises."""

    drafting: frozenset[SequencePolicy]
    rate: float
    worth: float  # the rate divided by the largest margin that the gates of the drafting sequences ask for


def best_plan(costs: CostTable, step: StepTimes, prospects: Sequence[tuple[View, ExpectedGains]]) -> DraftPlan | None:
    """The best of all numbers of drafting sequences, slots and widths; sequences with the largest gains draft first."""
    deepest = max((most_slots(view) for view, _ in prospects), default=0)
    widest = max((view.policy.max_nodes for view, _ in prospects), default=0)
    plans: list[DraftPlan] = []
    options = slot_options(deepest)
    spent = [costs.drafts_ms(count + 1, options, step.context) for count in range(len(prospects))]
    for slots, times in zip(options, zip(*spent, strict=True), strict=True):
        each = [(view.policy, gains, min(slots, most_slots(view))) for view, gains in prospects]
        best = max(_grow(step, each, width, branching, times) for width, branching in _ways(slots, widest))
        drafting = frozenset(view.policy for view, _ in prospects[: best[1]])
        plans.append(DraftPlan(worth=best[0], drafting=drafting, rate=best[2]))
    return max(plans, key=lambda plan: plan.worth, default=None)


def own_outlook(costs: CostTable, step: StepTimes, view: View, gains: ExpectedGains) -> float:
    """A sequence's speed over plain decoding if it drafts alone and pays for all the time that its draft takes.

    In a batch every sequence waits for this draft, so the gains of a good neighbour must not hide its cost.
    """
    best = 0.0
    options = slot_options(most_slots(view))
    for slots, spent in zip(options, costs.drafts_ms(1, options, step.context), strict=True):
        for width, branching in _ways(slots, 0 if view.policy.chains_only else view.policy.max_nodes):
            times = step.branched if branching else step.straight
            forgone = (spent + times[width] - step.straight[0]) * step.plain_rate
            best = max(best, (1.0 + gains.expected(width, slots, branching)) / (1.0 + forgone))
    return best / view.policy.margin


def _grow(
    step: StepTimes,
    prospects: Sequence[tuple[SequencePolicy, ExpectedGains, int]],
    width: int,
    branching: bool,
    spent: Sequence[float],
) -> tuple[float, int, float]:
    """The best of 1, 2, ... drafting sequences, each verifying at most `width` nodes: (worth, sequences, rate)."""
    best = (0.0, 0, 0.0)
    tokens, nodes, margin, fewest = float(step.batch), 0, 0.0, inf
    times = step.branched if branching else step.straight
    for count, (policy, gains, depth) in enumerate(prospects, start=1):
        wide = branching and not policy.chains_only
        wanted = min(width, policy.max_nodes) if wide else min(width, depth)
        gained = gains.expected(wanted, depth, wide)
        tokens += gained
        fewest = min(fewest, 1.0 + gained)
        nodes += wanted
        margin = max(margin, policy.margin)
        ms = spent[count - 1] + times[nodes]
        rate = tokens / ms
        if rate / margin > best[0] and step.fair(ms, fewest if count == step.batch else 1.0):
            best = (rate / margin, count, rate)
    return best


def most_slots(view: View) -> int:
    return max(0, min(view.policy.deepest, view.room - 1))


def cut_worths(chain: Sequence[float], times: Sequence[float], price: float) -> dict[int, float]:
    """For each option of slots, the tokens that a chain cut there is worth beyond the price of its rows."""
    worths: dict[int, float] = {}
    best, start = 0.0, 0
    sums = list(accumulate(chain))
    for cut in slot_options(len(chain)):
        rows = zip(sums[start:cut], times[start + 1 : cut + 1], strict=True)
        best = max([best, *[tokens - price * (ms - times[0]) for tokens, ms in rows]])
        worths[cut], start = best, cut
    return worths


@cache
def slot_options(deepest: int) -> tuple[int, ...]:
    return (*(slots for slots in SLOT_OPTIONS if slots < deepest), deepest) if deepest > 0 else ()


@cache
def _ways(slots: int, widest: int) -> tuple[tuple[int, bool], ...]:
    """All numbers of nodes to verify, each with whether the nodes may branch."""
    return (*((width, False) for width in _widths(slots)), *((width, True) for width in _widths(widest)))


def _widths(most: int) -> list[int]:
    return [*(size for size in SIZES if size < most), most]
