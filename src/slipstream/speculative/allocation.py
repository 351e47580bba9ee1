"""Which drafted nodes a step verifies: those of all sequences in one order, cut where they are not worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from slipstream.lazy import cached_property
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.sequence_policy import SequencePolicy

# One sequence's drafts make the step longer for all. No sequence may expect less than this share of the tokens per
# millisecond that plain steps would give it: without the limit, one text that is easy to draft makes the others in its
# batch 2.8 times as slow.
LEAST_SHARE = 0.5


class Offer(NamedTuple):
    """A decoding sequence after drafting: calibrated survival probabilities, or nothing if it did not draft.

    `tree` is in best-first order, so that every prefix is a tree; `chain` is in depth order.
    """

    policy: SequencePolicy
    context: int
    sampled: bool
    tree: Sequence[float] = ()
    chain: Sequence[float] = ()


class Step:
    """The step a choice is made for: everybody in it plain, and what every further node would cost."""

    def __init__(self, costs: CostTable, plain: StepShape, most_nodes: int) -> None:
        self.batch = plain.batch
        self.context = plain.context
        self.sampled = plain.sampled
        self._costs = costs
        self._rows = plain.rows
        self._most = plain.rows + most_nodes
        self.straight = self._times(branching=False)  # ms by nodes
        self.plain_rate = plain.batch / self.straight[0]

    def fair(self, ms: float, fewest_tokens: float) -> bool:
        """Whether a step of `ms` is acceptable for the sequence that expects the fewest tokens of it."""
        return fewest_tokens * self.straight[0] >= LEAST_SHARE * ms

    @cached_property
    def branched(self) -> list[float]:
        return self._times(branching=True)

    def _times(self, branching: bool) -> list[float]:
        times = self._costs.steps_ms(StepShape(self.batch, self._most, self.context, self.sampled, branching))
        return times[self._rows : self._most + 1]


class Taken(NamedTuple):
    """Nodes taken from each offer, and what the step then promises."""

    nodes: tuple[int, ...]
    branching: bool
    tokens: tuple[float, ...]
    ms: float
    rate: float

    def worth(self, price: float) -> float:
        """Tokens of the whole step beyond what its time is worth."""
        return (self.rate - price) * self.ms


def best_prefix(
    costs: CostTable,
    step: Step,
    offers: Sequence[Offer],
    lists: Sequence[Sequence[float]],
    branching: bool,
    spent_ms: float,
    price: float,
) -> Taken | None:
    """The offers' nodes (`lists`) in one order by survival per millisecond, cut where they are not worth their time."""
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
    return Taken(tuple(counts), branching, each, ms, tokens[best] / ms)


def _fewest_tokens(order: Sequence[int], survivals: Sequence[float], offers: int) -> list[float]:
    """For every prefix of the nodes, the tokens that the offer with the least of them expects."""
    expected, fewest = [1.0] * offers, []
    for index, survival in zip(order, survivals, strict=True):
        expected[index] += survival
        fewest.append(min(expected))
    return fewest


def _best_of_one(
    step: Step, offer: Offer, nodes: Sequence[float], branching: bool, spent_ms: float, price: float
) -> Taken | None:
    """The same where there is nobody to share with."""
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
    return Taken((best,), branching, (1.0 + sum(nodes[:best]),), ms, tokens[best] / ms)


def _merged(
    costs: CostTable, offers: Sequence[Offer], lists: Sequence[Sequence[float]], step: Step
) -> tuple[list[int], Sequence[float]]:
    """Whose node comes when, and the nodes' survivals in that order."""
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
    """How many of the first nodes belong to nothing but chains."""
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
    """How many of the first nodes are those of the chain; equal survival makes them as good as the same."""
    for count, (node, chained) in enumerate(zip(nodes, chain, strict=False)):
        if node != chained:
            return count
    return min(len(nodes), len(chain))
