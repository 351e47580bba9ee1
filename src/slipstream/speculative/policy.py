"""Whether, how deep and how wide to speculate: the choice with the most expected tokens per measured millisecond."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.speculative.calibration import Calibration
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.gains import SIZES, Depths, Gains, assumed
from slipstream.speculative.sequence_policy import MAX_AUTO_ROWS, SequencePolicy
from slipstream.types import Decision, Gate, Mode

__all__ = ["MAX_AUTO_ROWS", "Choice", "Offer", "Policy", "SequencePolicy", "View"]

SLOT_OPTIONS = (3, 7, 15)
_PROBE_SLACK = 1.1  # a probe takes more slots while they cost next to nothing
_PLAN_STEPS = 4
_BEYOND_PLAN = (1.0, 1.4)
_FASTEST = 8.0
_QUOTIENT_KEEP, _QUOTIENT_PRIOR = 0.95, 20.0
_LOOK_DEEPER = 16  # every so many drafts the next deeper one, or what lies there would never be known


@dataclass(frozen=True, slots=True)
class View:
    """A decoding sequence before drafting; `room` is how many tokens it may still commit in this step."""

    policy: SequencePolicy
    context: int
    sampled: bool
    room: int


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


@dataclass(frozen=True, slots=True)
class Choice:
    """What one sequence verifies: the first `nodes` of its chain or tree."""

    kind: Literal["plain", "chain", "tree"]
    nodes: int
    decision: Decision


class _Step:
    """The step a choice is made for: everybody in it plain, and what every further node would cost."""

    def __init__(self, costs: CostTable, batch: int, rows: int, context: int, sampled: bool, most_nodes: int) -> None:
        self.costs = costs
        self.batch = batch
        self.context = context
        self.sampled = sampled
        most = rows + most_nodes
        straight = costs.steps_ms(StepShape(batch, most, context, sampled, branching=False))
        branched = costs.steps_ms(StepShape(batch, most, context, sampled, branching=True))
        self.straight, self.branched = straight[rows : most + 1], branched[rows : most + 1]  # ms by nodes
        self.plain_rate = batch / self.straight[0]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which sequences draft, and what that promises."""

    drafting: frozenset[SequencePolicy]
    rate: float
    worth: float  # the rate after the gates' margins


@dataclass(frozen=True, slots=True)
class _Taken:
    """Nodes taken from each offer, and what the step then promises."""

    nodes: tuple[int, ...]
    branching: bool
    tokens: tuple[float, ...]
    ms: float
    rate: float

    def worth(self, price: float) -> float:
        """Tokens of the whole step beyond what its time is worth."""
        return (self.rate - price) * self.ms


class _Quotient:
    """A slowly moving quotient of sums, within bounds."""

    def __init__(self, value: float, least: float, most: float) -> None:
        self._sums = (value * _QUOTIENT_PRIOR, _QUOTIENT_PRIOR)
        self._least, self._most = least, most

    def add(self, above: float, below: float) -> None:
        self._sums = (self._sums[0] * _QUOTIENT_KEEP + above, self._sums[1] * _QUOTIENT_KEEP + below)

    @property
    def value(self) -> float:
        return min(self._most, max(self._least, self._sums[0] / self._sums[1]))


class Policy:
    """Chooses for all sequences of a step together; `costs` may be exchanged at any time."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self.calibration = Calibration()
        self.gains = Gains()
        self.depths = Depths()
        self._plans = 0
        self._plan: _Plan | None = None
        self._plan_key: tuple[object, ...] = ()
        self._plan_age = 0
        self._planned_rate = 0.0
        self._plain_rate = 0.0
        # what choosing after the draft makes of a plan made before it, and what speculation makes of plain decoding
        self._beyond_plan = _Quotient(1.0, *_BEYOND_PLAN)
        self._speedup = _Quotient(1.0, 1.0, _FASTEST)

    def sequence(self, mode: Mode, gate: Gate, proposals: int) -> SequencePolicy:
        """A request's own policy; `proposals` is how many tokens a block can draft."""
        return SequencePolicy(mode, gate, proposals, self.calibration, self.gains, self.depths)

    def plan_drafts(
        self, views: Sequence[View], fixed_rows: int = 0, fixed_sequences: int | None = None,
        fixed_context: int = 0, fixed_sampled: bool = False,
    ) -> list[int]:
        """Before drafting: the slots to draft for each view, 0 for none.

        The `fixed` arguments describe the rest of the step, which comes along whatever is chosen here: its rows, how
        many sequences of it commit a token (as many as rows if not given), its longest context, and whether any
        of it is sampled.
        """
        able = [index for index, view in enumerate(views) if _most_slots(view) > 0]
        fixed = (fixed_rows, fixed_sequences, fixed_context, fixed_sampled)
        step = self._step(views, max((_most_slots(view) for view in views), default=0), *fixed)
        plain = step.plain_rate
        plan = self._plan_for([views[index] for index in able], lambda nodes: self._step(views, nodes, *fixed))
        outlook = plan.worth * self._beyond_plan.value / plain if plan else 0.0
        paying = [index for index in able if plan and outlook > 1.0 and views[index].policy in plan.drafting]
        self._plans += bool(paying)
        self._planned_rate = plan.rate if plan and paying else 0.0
        slots = [0] * len(views)
        for index in paying:
            slots[index] = self._depth(step, views[index], len(paying))
            views[index].policy.believed()
        rest = [index for index in able if index not in paying]
        probing = self._due(views, rest, outlook)
        probe_slots = max(self._probe_slots(step, views, paying + probing), max(slots, default=0))
        for index in probing:
            slots[index] = min(probe_slots, _most_slots(views[index]))
            extra = self.costs.draft_ms(1, slots[index], step.context) + step.straight[slots[index]] - step.straight[0]
            views[index].policy.probed(extra * plain * views[index].policy.gate.margin, outlook)
        for index, view in enumerate(views):
            slots[index] = min(slots[index], _most_slots(view))
            view.policy.planned(slots[index])
            if not slots[index]:
                view.policy.note = _why_plain(view, plan, plain)
        return slots

    def choose(
        self, offers: Sequence[Offer], fixed_rows: int = 0, fixed_sequences: int | None = None,
        fixed_context: int = 0, fixed_sampled: bool = False, spent_ms: float | None = None,
    ) -> list[Choice]:
        """After drafting: what each offer verifies; `fixed` as in plan_drafts.

        `spent_ms` is the time drafting took. Left out it is estimated, which keeps a hiccup out of the choice.
        """
        most = sum(max(len(_nodes(offer, True)), len(_nodes(offer, False))) for offer in offers)
        step = self._step(offers, most, fixed_rows, fixed_sequences, fixed_context, fixed_sampled)
        drafted = [offer for offer in offers if offer.chain or offer.tree]
        if spent_ms is None:
            slots = max((len(offer.chain) for offer in drafted), default=0)
            spent_ms = self.costs.draft_ms(len(drafted), slots, step.context)
        margin = max((offer.policy.gate.margin for offer in drafted), default=1.0)
        self._plain_rate = step.plain_rate
        # a millisecond is worth what it yields in the long run, not what it yields in this step
        price = step.plain_rate * max(self._speedup.value, margin)
        stay_ms = spent_ms + step.straight[0]
        best = stay = _Taken((0,) * len(offers), False, (1.0,) * len(offers), stay_ms, step.batch / stay_ms)
        for branching in (False, True):
            taken = self._best_prefix(step, offers, branching, spent_ms, price)
            if taken and taken.worth(price) > best.worth(price):
                best = taken
        if drafted and self._planned_rate:
            self._beyond_plan.add(best.rate * best.ms, self._planned_rate * best.ms)
        # a sequence's share of what the step takes longer than a plain one
        per_block = spent_ms / max(1, len(drafted))
        per_node = (best.ms - stay.ms) / max(1, sum(best.nodes))
        for offer, nodes, tokens in zip(offers, best.nodes, best.tokens, strict=True):
            self._remember(offer, tokens - 1.0, (per_block + nodes * per_node) * step.plain_rate)
            worths = _cut_worths(offer.chain, step.straight, price)
            offer.policy.depths.blend(worths)
            self.depths.blend(worths)
        return [_choice(offer, index, best, step.plain_rate) for index, offer in enumerate(offers)]

    def row_price(self, context: int, sampled: bool) -> float:
        """Tokens that the time of one more row yields elsewhere: a node less likely than that is not worth it."""
        plain_ms = self.costs.step_ms(StepShape(1, 1, context, sampled, branching=False))
        return self.costs.row_ms(context, sampled=sampled) * self._speedup.value / plain_ms

    def progress(self, tokens: int, ms: float) -> None:
        """What a whole step, drafting included, really committed and took."""
        if self._plain_rate:
            self._speedup.add(tokens, ms * self._plain_rate)

    def _step(
        self, present: Sequence[View] | Sequence[Offer], most_nodes: int,
        rows: int, sequences: int | None, context: int, sampled: bool,
    ) -> _Step:
        return _Step(
            self.costs,
            batch=max(1, len(present) + (rows if sequences is None else sequences)),
            rows=max(1, len(present) + rows),
            context=max([context, *(each.context for each in present)]),
            sampled=sampled or any(each.sampled for each in present),
            most_nodes=most_nodes,
        )

    def _remember(self, offer: Offer, gained: float, forgone: float) -> None:
        """Takes in an offer's curves; `forgone` are the tokens that plain steps would have made in its time."""
        policy = offer.policy
        if offer.chain or offer.tree:
            if gained > forgone * policy.gate.margin:
                policy.paid()
            for gains in (policy.gains, self.gains):
                gains.blend(offer.chain, offer.tree, policy.proposals)
        elif policy.asked:
            policy.draft_failed()

    def _prospect(self, policy: SequencePolicy) -> Gains:
        if policy.gains.known:
            return policy.gains
        return assumed(policy.proposals)

    def _plan_for(self, views: Sequence[View], step_of: Callable[[int], _Step]) -> _Plan | None:
        """The best plan for these sequences; it holds for a few steps, since planning takes time as well."""
        key = (self.costs, *(view.policy for view in views))
        if key == self._plan_key and self._plan_age < _PLAN_STEPS:
            self._plan_age += 1
            return self._plan
        gains = [(view, self._prospect(view.policy)) for view in views if view.policy.hopeful]
        gains.sort(key=lambda prospect: -prospect[1].expected(7, 7, branching=False))
        self._plan = self._best_plan(step_of(sum(view.policy.max_nodes for view in views)), gains)
        settled = all(view.policy.tried for view in views)
        self._plan_key, self._plan_age = (key, 1) if settled else ((), 0)
        return self._plan

    def _best_plan(self, step: _Step, prospects: Sequence[tuple[View, Gains]]) -> _Plan | None:
        """The best of all numbers of drafting sequences, slots and widths; the likeliest sequences draft first."""
        deepest = max((_most_slots(view) for view, _ in prospects), default=0)
        widest = max((view.policy.max_nodes for view, _ in prospects), default=0)
        plans: list[_Plan] = []
        for slots in _slot_options(deepest):
            spent = [self.costs.draft_ms(count + 1, slots, step.context) for count in range(len(prospects))]
            ways = [(width, False) for width in _widths(slots)] + [(width, True) for width in _widths(widest)]
            best = max(_grow(step, prospects, slots, width, branching, spent) for width, branching in ways)
            drafting = frozenset(view.policy for view, _ in prospects[: best[1]])
            plans.append(_Plan(worth=best[0], drafting=drafting, rate=best[2]))
        return max(plans, key=lambda plan: plan.worth, default=None)

    def _depth(self, step: _Step, view: View, blocks: int) -> int:
        """As many slots as have lately been worth their time, and now and then more: or nobody would know."""
        options = _slot_options(_most_slots(view))
        price = step.plain_rate * self._speedup.value
        times = [self.costs.draft_ms(blocks, slots, step.context) for slots in options]
        place = 0
        while place + 1 < len(options):
            extra_ms = (times[place + 1] - times[place]) / blocks
            if view.policy.depths.gain(options[place + 1]) < price * extra_ms and self._plans % _LOOK_DEEPER:
                break
            place += 1
        return options[place]

    def _due(self, views: Sequence[View], rest: Sequence[int], outlook: float) -> list[int]:
        """Sequences that draft although it does not seem to pay: never tried, or due for a probe."""
        probing = []
        for index in rest:
            policy = views[index].policy
            if not policy.tried:
                probing.append(index)
            else:
                policy.back_off(outlook)
        if any(views[index].policy.probe_due for index in rest):
            probing += [index for index in rest if views[index].policy.probe_near and index not in probing]
        return probing

    def _probe_slots(self, step: _Step, views: Sequence[View], drafting: Sequence[int]) -> int:
        if not drafting:
            return 0
        options = _slot_options(max(_most_slots(views[index]) for index in drafting))
        times = [self.costs.draft_ms(len(drafting), slots, step.context) for slots in options]
        return max(slots for slots, ms in zip(options, times, strict=True) if ms <= _PROBE_SLACK * times[0])

    def _best_prefix(
        self, step: _Step, offers: Sequence[Offer], branching: bool, spent_ms: float, price: float
    ) -> _Taken | None:
        """All sequences' nodes in one order by survival per millisecond, cut where they stop to be worth their time."""
        lists = [_nodes(offer, branching) for offer in offers]
        trunks = [_common(nodes, offer.chain) for nodes, offer in zip(lists, offers, strict=True)]
        taken, left = [0] * len(offers), sum(len(nodes) for nodes in lists)
        order: list[int] = []
        best_count, best_worth, best_rate, best_ms = 0, -math.inf, 0.0, 0.0
        tokens, times = float(step.batch), step.straight
        for index, survival in self._merged(offers, lists, step):
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
        return _Taken(tuple(counts), branching, each, best_ms, best_rate)

    def _merged(
        self, offers: Sequence[Offer], lists: Sequence[Sequence[float]], step: _Step
    ) -> Iterator[tuple[int, float]]:
        if sum(1 for nodes in lists if nodes) == 1:
            index = next(index for index, nodes in enumerate(lists) if nodes)
            return ((index, survival) for survival in lists[index])
        prices = [self.costs.row_ms(offer.context, step.batch, step.sampled) for offer in offers]
        ranked = sorted(
            (-survival / price, index, survival)
            for index, (nodes, price) in enumerate(zip(lists, prices, strict=True)) for survival in nodes
        )
        return ((index, survival) for _, index, survival in ranked)


def _grow(
    step: _Step, prospects: Sequence[tuple[View, Gains]], slots: int, width: int, branching: bool,
    spent: Sequence[float],
) -> tuple[float, int, float]:
    """The best of one, two, ... sequences drafting so many slots for so many nodes: worth, sequences, rate."""
    best = (0.0, 0, 0.0)
    tokens, nodes, margin = float(step.batch), 0, 0.0
    times = step.branched if branching else step.straight
    for count, (view, gains) in enumerate(prospects, start=1):
        policy = view.policy
        depth = min(slots, _most_slots(view))
        wide = branching and not policy.chains_only
        wanted = min(width, policy.max_nodes) if wide else min(width, depth)
        tokens += gains.expected(wanted, depth, wide)
        nodes += wanted
        margin = max(margin, policy.gate.margin)
        rate = tokens / (spent[count - 1] + times[nodes])
        if rate / margin > best[0]:
            best = (rate / margin, count, rate)
    return best


def _most_slots(view: View) -> int:
    policy = view.policy
    deepest = min(policy.proposals, policy.max_nodes, view.room - 1)
    return max(0, deepest)


def _cut_worths(chain: Sequence[float], times: Sequence[float], price: float) -> dict[int, float]:
    """What a drafted chain is worth beyond the price of its rows if it is cut at each option of slots."""
    worths: dict[int, float] = {}
    best, tokens = 0.0, 0.0
    options = _slot_options(len(chain))
    for nodes, survival in enumerate(chain, start=1):
        tokens += survival
        best = max(best, tokens - price * (times[nodes] - times[0]))
        if nodes in options:
            worths[nodes] = best
    return worths


def _slot_options(deepest: int) -> list[int]:
    return [*(slots for slots in SLOT_OPTIONS if slots < deepest), deepest] if deepest > 0 else []


def _widths(most: int) -> list[int]:
    return [*(size for size in SIZES if size < most), most]


def _nodes(offer: Offer, branching: bool) -> Sequence[float]:
    policy = offer.policy
    nodes = offer.tree if branching and offer.tree and not policy.chains_only else offer.chain
    return nodes[: policy.max_nodes]


def _common(nodes: Sequence[float], chain: Sequence[float]) -> int:
    """How many of the first nodes are those of the chain; equal survival makes them as good as the same."""
    count = 0
    while count < min(len(nodes), len(chain)) and nodes[count] == chain[count]:
        count += 1
    return count


def _choice(offer: Offer, index: int, taken: _Taken, plain: float) -> Choice:
    nodes, tokens = taken.nodes[index], taken.tokens[index]
    rates = f"({taken.rate:.3f}/ms), plain {plain:.3f}/ms"
    if not nodes:
        reason = f"the draft promises too little for more rows, plain {plain:.3f}/ms"
        if not (offer.chain or offer.tree):
            reason = offer.policy.note
        return Choice("plain", 0, Decision("plain", reason, tokens, taken.ms))
    tree = taken.branching and _common(_nodes(offer, True), offer.chain) < nodes
    kind: Literal["chain", "tree"] = "tree" if tree else "chain"
    name = f"{kind}:{nodes + 1}"
    reason = f"{name} expects {tokens:.1f} tokens in {taken.ms:.0f} ms {rates}"
    return Choice(kind, nodes, Decision(name, reason, tokens, taken.ms))


def _why_plain(view: View, plan: _Plan | None, plain: float) -> str:
    if view.room <= 1:
        return "one token is left to commit"
    wait = view.policy.tokens_to_probe
    if plan is None:
        return f"no draft has come yet; next probe in {wait} tokens" if wait else "nothing can be drafted"
    return f"drafting would give {plan.rate:.3f}/ms, plain {plain:.3f}/ms; next probe in {wait} tokens"
