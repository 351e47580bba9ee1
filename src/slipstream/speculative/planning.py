"""Before drafting: which sequences to draft for, judged by what drafting has been worth lately and costs today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from slipstream.speculative.allocation import Step
from slipstream.speculative.costs import CostTable
from slipstream.speculative.expected_gains import SIZES, Gains
from slipstream.speculative.sequence_policy import SequencePolicy

SLOT_OPTIONS = (3, 7, 15)


class View(NamedTuple):
    """A decoding sequence before drafting; `room` is how many tokens it may still commit in this step."""

    policy: SequencePolicy
    context: int
    sampled: bool
    room: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which sequences draft, and what that promises."""

    drafting: frozenset[SequencePolicy]
    rate: float
    worth: float  # the rate after the gates' margins


def best_plan(costs: CostTable, step: Step, prospects: Sequence[tuple[View, Gains]]) -> Plan | None:
    """The best of all numbers of drafting sequences, slots and widths; the likeliest sequences draft first."""
    deepest = max((most_slots(view) for view, _ in prospects), default=0)
    widest = max((view.policy.max_nodes for view, _ in prospects), default=0)
    plans: list[Plan] = []
    options = slot_options(deepest)
    spent = [costs.drafts_ms(count + 1, options, step.context) for count in range(len(prospects))]
    for slots, times in zip(options, zip(*spent, strict=True), strict=True):
        each = [(view.policy, gains, min(slots, most_slots(view))) for view, gains in prospects]
        best = max(_grow(step, each, width, branching, times) for width, branching in _ways(slots, widest))
        drafting = frozenset(view.policy for view, _ in prospects[: best[1]])
        plans.append(Plan(worth=best[0], drafting=drafting, rate=best[2]))
    return max(plans, key=lambda plan: plan.worth, default=None)


def own_outlook(costs: CostTable, step: Step, view: View, gains: Gains) -> float:
    """A sequence's speed over plain decoding if it drafts alone and answers for all the time that this takes.

    In a batch everybody waits for its draft, so a good neighbour does not make a hopeless one look fair.
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
    step: Step,
    prospects: Sequence[tuple[SequencePolicy, Gains, int]],
    width: int,
    branching: bool,
    spent: Sequence[float],
) -> tuple[float, int, float]:
    """The best of one, two, ... sequences drafting to their depth for so many nodes: worth, sequences, rate."""
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
    """What a drafted chain is worth beyond the price of its rows if it is cut at each option of slots."""
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
    """Nodes to verify, and whether they may branch."""
    return (*((width, False) for width in _widths(slots)), *((width, True) for width in _widths(widest)))


def _widths(most: int) -> list[int]:
    return [*(size for size in SIZES if size < most), most]
