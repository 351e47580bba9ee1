"""Which drafted nodes a step verifies: those of all sequences in one order, cut where they are not worth their time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.sequence_policy import SequencePolicy


@dataclass(frozen=True, slots=True)
class Offer:
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
        most = plain.rows + most_nodes
        straight, branched = (
            costs.steps_ms(replace(plain, rows=most, branching=branching)) for branching in (False, True)
        )
        self.straight, self.branched = straight[plain.rows : most + 1], branched[plain.rows : most + 1]  # ms by nodes
        self.plain_rate = plain.batch / self.straight[0]


@dataclass(frozen=True, slots=True)
class Taken:
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
    costs: CostTable, step: Step, offers: Sequence[Offer], branching: bool, spent_ms: float, price: float
) -> Taken | None:
    """All sequences' nodes in one order by survival per millisecond, cut where they stop to be worth their time."""
    lists = [offered_nodes(offer, branching) for offer in offers]
    trunks = [common_nodes(nodes, offer.chain) for nodes, offer in zip(lists, offers, strict=True)]
    taken, left = [0] * len(offers), sum(len(nodes) for nodes in lists)
    order: list[int] = []
    best_count, best_worth, best_rate, best_ms = 0, -math.inf, 0.0, 0.0
    tokens, times = float(step.batch), step.straight
    for index, survival in _merged(costs, offers, lists, step):
        # no later prefix can win if even all nodes at today's survival would not
        if tokens + left * survival - price * (spent_ms + times[len(order) + 1]) <= best_worth:
            break
        order.append(index)
        taken[index] += 1
        left -= 1
        tokens += survival
        if taken[index] > trunks[index]:
            times = step.branched
        ms = spent_ms + times[len(order)]
        if tokens - price * ms > best_worth:
            best_count, best_worth, best_rate, best_ms = len(order), tokens - price * ms, tokens / ms, ms
    if not best_count:
        return None
    counts = [0] * len(offers)
    for index in order[:best_count]:
        counts[index] += 1
    each = tuple(1.0 + sum(nodes[:count]) for nodes, count in zip(lists, counts, strict=True))
    return Taken(tuple(counts), branching, each, best_ms, best_rate)


def _merged(
    costs: CostTable, offers: Sequence[Offer], lists: Sequence[Sequence[float]], step: Step
) -> Iterator[tuple[int, float]]:
    if sum(1 for nodes in lists if nodes) == 1:
        index = next(index for index, nodes in enumerate(lists) if nodes)
        return ((index, survival) for survival in lists[index])
    prices = [costs.row_ms(offer.context, step.batch, step.sampled) for offer in offers]
    ranked = sorted(
        (-survival / price, index, survival)
        for index, (nodes, price) in enumerate(zip(lists, prices, strict=True)) for survival in nodes
    )
    return ((index, survival) for _, index, survival in ranked)


def offered_nodes(offer: Offer, branching: bool) -> Sequence[float]:
    policy = offer.policy
    nodes = offer.tree if branching and offer.tree and not policy.chains_only else offer.chain
    return nodes[: policy.max_nodes]


def common_nodes(nodes: Sequence[float], chain: Sequence[float]) -> int:
    """How many of the first nodes are those of the chain; equal survival makes them as good as the same."""
    count = 0
    while count < min(len(nodes), len(chain)) and nodes[count] == chain[count]:
        count += 1
    return count
