"""Chooses the drafted nodes that a step verifies, and before that the sequences that draft at all.

A step is worth the tokens that it commits minus what its time would yield elsewhere. The nodes of all sequences are put
into one order by survival, and this order is cut where a further node is not worth its time. It is ordinary that no
node is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from slipstream.lazy import cached_property
from slipstream.speculative.costs import CostTable, StepShape

if TYPE_CHECKING:
    from slipstream.speculative.policy import SequencePolicy

# One sequence's drafts make the step longer for all sequences. No sequence may expect less than this share of the
# tokens per millisecond that plain steps would give it. Without the limit, one text that is easy to draft makes the
# other sequences of its batch 2.8 times as slow; with 0.5 it made them 2.1 times as slow, because steps take a little
# longer than their estimate.
LEAST_SHARE = 0.6
# Numbers of drafted slots that are compared, besides the full block. With fewer options, drafts are too shallow or too
# deep.
SLOT_OPTIONS = (3, 5, 7, 15, 31)


class View(NamedTuple):
    """A decoding sequence before drafting; `room` is how many tokens its request may still emit."""

    policy: SequencePolicy
    context: int
    sampled: bool
    room: int
    text: Sequence[float] = ()  # the survival probabilities of the nodes that the text itself offers


class Offer(NamedTuple):
    """A decoding sequence after drafting: the survival probabilities of its nodes, or none without a draft.

    Nodes are in best-first order, so that every prefix of them is a tree; the first `straight` of them are a chain.
    """

    policy: SequencePolicy
    context: int
    sampled: bool
    survivals: Sequence[float] = ()
    straight: int = 0


class StepTimes:
    """The times of the step that a choice is made for: with every sequence plain, and with 1, 2, ... further nodes."""

    def __init__(self, costs: CostTable, plain: StepShape, most_nodes: int) -> None:
        self.batch = plain.batch
        self.context = plain.context
        self._costs = costs
        self._plain = plain
        self._most = plain.rows + most_nodes
        self.straight = self._times(branching=False)  # milliseconds by the number of nodes, if no node branches
        self.plain_ms = self.straight[0]
        self.plain_rate = plain.batch / self.plain_ms

    def fair(self, ms: float, fewest_tokens: float) -> bool:
        """Whether a step of `ms` milliseconds is acceptable for the sequence that expects the fewest tokens from it."""
        return fewest_tokens * self.plain_ms >= LEAST_SHARE * ms

    @cached_property
    def branched(self) -> list[float]:
        return self._times(branching=True)

    def _times(self, branching: bool) -> list[float]:
        times = self._costs.steps_ms(self._plain._replace(rows=self._most, branching=branching))
        return times[self._plain.rows : self._most + 1]


def best_nodes(step: StepTimes, offers: Sequence[Offer], spent_ms: float, price: float) -> list[int]:
    """How many nodes of each offer have the largest value together.

    The value is the expected tokens minus `price` (tokens per millisecond) times the step's milliseconds.
    """
    if step.batch == 1:
        return [_best_prefix(step, offer, price) for offer in offers]
    order = _merged(offers)
    counts, expected = [0] * len(offers), [1.0] * len(offers)
    best, best_value = 0, -price * step.plain_ms
    gained, straight, fewest = 0.0, True, 1.0
    for taken, index in enumerate(order, start=1):
        offer = offers[index]
        survival = offer.survivals[counts[index]]
        counts[index] += 1
        gained += survival
        straight = straight and counts[index] <= offer.straight
        if step.batch == len(offers):  # other sequences of the step expect a single token
            expected[index] += survival
            fewest = min(expected)
        ms = step.straight[taken] if straight else step.branched[taken]
        value = gained - price * ms
        if value > best_value and step.fair(spent_ms + ms, fewest):
            best, best_value = taken, value
    chosen = [0] * len(offers)
    for index in order[:best]:
        chosen[index] += 1
    return chosen


def _best_prefix(step: StepTimes, offer: Offer, price: float) -> int:
    """Returns what `best_nodes` returns for a sequence that is alone in its step.

    The loop over all offers would make a small step 1 % longer.
    """
    times = step.straight[: offer.straight + 1] + step.branched[offer.straight + 1 :]
    best, best_value, gained = 0, -price * step.plain_ms, 0.0
    for taken, survival in enumerate(offer.survivals, start=1):
        gained += survival
        value = gained - price * times[taken]
        if value > best_value:
            best, best_value = taken, value
    return best


def _merged(offers: Sequence[Offer]) -> list[int]:
    """The offers' indices in the order in which their nodes are taken, the likeliest node first."""
    ranked = sorted((-survival, index) for index, offer in enumerate(offers) for survival in offer.survivals)
    return [index for _, index in ranked]


class Prospect(NamedTuple):
    """What one sequence's draft with so many slots has brought lately, compared with a plain step."""

    tokens: float  # accepted tokens
    rows_ms: float  # milliseconds of the verified rows


class DraftChoice(NamedTuple):
    """The best number of slots, how many sequences draft, and the speed over plain decoding that this promises."""

    slots: int
    drafting: int
    speed: float


def best_draft(
    costs: CostTable, step: StepTimes, options: Sequence[int], prospects: Sequence[Sequence[Prospect]]
) -> DraftChoice:
    """The best number of slots and of drafting sequences.

    `prospects` has for each sequence one prospect per option. Sequences draft in this order, so those that expect most
    should come first.
    """
    best = DraftChoice(options[0], 0, 0.0)
    for place, slots in enumerate(options):
        tokens, rows_ms, fewest = float(step.batch), 0.0, inf
        for drafting, each in enumerate(prospects, start=1):
            tokens += each[place].tokens
            rows_ms += each[place].rows_ms
            fewest = min(fewest, 1.0 + each[place].tokens)
            ms = step.plain_ms + rows_ms + costs.draft_ms(drafting, slots, step.context)
            speed = tokens / ms / step.plain_rate
            if speed > best.speed and step.fair(ms, fewest if drafting == step.batch else 1.0):
                best = DraftChoice(slots, drafting, speed)
    return best


def text_speed(step: StepTimes, view: View) -> float:
    """The speed over plain decoding that a step promises a sequence which verifies only what its text offers."""
    tokens = accumulate(view.text, initial=1.0)
    return max(count * step.plain_ms / ms for count, ms in zip(tokens, step.branched, strict=False))


@cache
def slot_options(deepest: int) -> tuple[int, ...]:
    return (*(slots for slots in SLOT_OPTIONS if slots < deepest), deepest) if deepest > 0 else ()
