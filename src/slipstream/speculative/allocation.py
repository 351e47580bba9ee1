"""Chooses the drafted nodes that a step verifies.

The nodes of all sequences compete in one order by survival per millisecond, which is cut where a further node is not
worth its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from slipstream.lazy import cached_property
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.sequence_policy import SequencePolicy

# One sequence's drafts make the step longer for all sequences. No sequence may expect less than this share of the
# tokens per millisecond that plain steps would give it. Without the limit, one text that is easy to draft makes the
# other sequences of its batch 2.8 times as slow.
LEAST_SHARE = 0.5


class Offer(NamedTuple):
    """A decoding sequence after drafting: the calibrated survival probabilities of its nodes, or none without a draft.

    `tree` is in best-first order, so that every prefix of it is a tree; `chain` is in depth order.
    """

    policy: SequencePolicy
    context: int
    sampled: bool
    tree: Sequence[float] = ()
    chain: Sequence[float] = ()


class StepTimes:
    """The times of the step that a choice is made for: with every sequence plain, and with 1, 2, ... further nodes."""

    def __init__(self, costs: CostTable, plain: StepShape, most_nodes: int) -> None:
        self.batch = plain.batch
        self.context = plain.context
        self.sampled = plain.sampled
        self._costs = costs
        self._rows = plain.rows
        self._most = plain.rows + most_nodes
        self.straight = self._times(branching=False)  # milliseconds by the number of nodes, if no node branches
        self.plain_rate = plain.batch / self.straight[0]

    def fair(self, ms: float, fewest_tokens: float) -> bool:
        """Whether a step of `ms` milliseconds is acceptable for the sequence that expects the fewest tokens from it."""
        return fewest_tokens * self.straight[0] >= LEAST_SHARE * ms

    @cached_property
    def branched(self) -> list[float]:
        return self._times(branching=True)

    def _times(self, branching: bool) -> list[float]:
        times = self._costs.steps_ms(StepShape(self.batch, self._most, self.context, self.sampled, branching))
        return times[self._rows : self._most + 1]


class Allocation(NamedTuple):
    """How many nodes a step takes from each offer, and the tokens and milliseconds that the step then promises."""

    nodes: tuple[int, ...]
    branching: bool
    tokens: tuple[float, ...]
    ms: float
    rate: float

    def worth(self, price: float) -> float:
        """The tokens of the whole step beyond what its time would yield at `price` tokens per millisecond."""
        return (self.rate - price) * self.ms


def best_prefix(
    costs: CostTable,
    step: StepTimes,
    offers: Sequence[Offer],
    lists: Sequence[Sequence[float]],
    branching: bool,
    spent_ms: float,
    price: float,
) -> Allocation | None:
    """The best prefix of all offers' nodes (`lists`), which are ordered by survival per millisecond of their row."""
    if len(offers) == 1:
        return _best_of_one(step, offers[0], lists[0], branching, spent_ms, price)
    order, survivals = _merged(costs, offers, lists, step)
    if not order:
        return None
    straight = _before_branching(order, lists, offers) if branching else len(order)
    times = [*step.straight[1 : straight + 1], *(step.branched[straight + 1 : len(order) + 1] if branching else ())]
    tokens = list(accumulate(survivals, initial=float(step.batch)))
    fewest = _fewest_tokens(order, survivals, len(offers))
    worths = [
        gained - price * (spent_ms + ms) if step.fair(spent_ms + ms, least) else -inf
        for gained, ms, least in zip(tokens[1:], times, fewest, strict=True)
    ]
    best = worths.index(max(worths)) + 1
    if worths[best - 1] == -inf:
        return None
    chosen = order[:best]
    counts = [chosen.count(index) for index in range(len(offers))]
    each = tuple(1.0 + sum(nodes[:count]) for nodes, count in zip(lists, counts, strict=True))
    ms = spent_ms + times[best - 1]
    return Allocation(tuple(counts), branching, each, ms, tokens[best] / ms)


def _fewest_tokens(order: Sequence[int], survivals: Sequence[float], offers: int) -> list[float]:
    """For every prefix of the nodes, the tokens that the least served offer expects."""
    expected, fewest = [1.0] * offers, []
    for index, survival in zip(order, survivals, strict=True):
        expected[index] += survival
        fewest.append(min(expected))
    return fewest


def _best_of_one(
    step: StepTimes, offer: Offer, nodes: Sequence[float], branching: bool, spent_ms: float, price: float
) -> Allocation | None:
    """`best_prefix` for a single offer, whose nodes compete with no others."""
    if not nodes:
        return None
    times = step.straight
    if branching:
        straight = common_nodes(nodes, offer.chain)
        times = [*times[: straight + 1], *step.branched[straight + 1 :]]
    tokens = list(accumulate(nodes, initial=float(step.batch)))
    worths = [gained - price * ms for gained, ms in zip(tokens, times, strict=False)]
    worths[0] = -inf
    best = worths.index(max(worths))
    ms = spent_ms + times[best]
    return Allocation((best,), branching, (1.0 + sum(nodes[:best]),), ms, tokens[best] / ms)


def _merged(
    costs: CostTable, offers: Sequence[Offer], lists: Sequence[Sequence[float]], step: StepTimes
) -> tuple[list[int], Sequence[float]]:
    """The offers' indices in the order in which their nodes are taken, and the nodes' survivals in that order."""
    some = [index for index, nodes in enumerate(lists) if nodes]
    if len(some) == 1:
        return some * len(lists[some[0]]), lists[some[0]]
    prices = [costs.row_ms(offer.context, step.batch, step.sampled) for offer in offers]
    ranked = sorted(
        (-survival / price, index, survival)
        for index, (nodes, price) in enumerate(zip(lists, prices, strict=True))
        for survival in nodes
    )
    return [index for _, index, _ in ranked], [survival for _, _, survival in ranked]


def _before_branching(order: Sequence[int], lists: Sequence[Sequence[float]], offers: Sequence[Offer]) -> int:
    """How many nodes at the start of the order belong to chains only, so that the step does not branch yet."""
    left = [common_nodes(nodes, offer.chain) for nodes, offer in zip(lists, offers, strict=True)]
    for count, index in enumerate(order):
        if not left[index]:
            return count
        left[index] -= 1
    return len(order)


def offered_nodes(offer: Offer, branching: bool) -> Sequence[float]:
    policy = offer.policy
    nodes = offer.tree if branching and offer.tree and not policy.chains_only else offer.chain
    return nodes[: policy.max_nodes]


def common_nodes(nodes: Sequence[float], chain: Sequence[float]) -> int:
    """How many of the first nodes are those of the chain; nodes of equal survival count as the same node."""
    for count, (node, chained) in enumerate(zip(nodes, chain, strict=False)):
        if node != chained:
            return count
    return min(len(nodes), len(chain))
