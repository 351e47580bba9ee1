"""Whether, how deep and how wide to speculate: the choice with the most expected tokens per measured millisecond."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from slipstream.speculative.allocation import Offer, Step, Taken, best_prefix, common_nodes, offered_nodes
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.expected_gains import Draft, Gains, Quotient, assumed, assumed_chain
from slipstream.speculative.planning import Plan, View, best_plan, cut_worths, most_slots, own_outlook, slot_options
from slipstream.speculative.sequence_policy import MAX_AUTO_ROWS, Memory, SequencePolicy
from slipstream.stats import Decision
from slipstream.types import BASE_VARIANT, Gate, Mode

__all__ = ["MAX_AUTO_ROWS", "Choice", "Offer", "Policy", "SequencePolicy", "View"]

_PROBE_SLACK = 1.1  # a probe takes more slots while they cost next to nothing
_PLAN_STEPS = 8
_REST_STEPS = 32  # until plain decoding is looked at again before a probe is due: little can change without drafts
_OTHER_PROMISE = 2.0  # times as much or as little as the gains promised when a plan was made calls for a new one
_BEYOND_PLAN = (1.0, 1.4)
_FASTEST = 8.0
_SHARED_DRAFTS = 4  # one of so many is remembered for other requests as well
_LOOK_DEEPER = 16  # every so many drafts the deepest, or what lies there would never be known

_Fixed = tuple[int, int | None, int, bool]


class Choice(NamedTuple):
    """What one sequence verifies: the first `nodes` of its chain or tree."""

    kind: Literal["plain", "chain", "tree"]
    nodes: int
    decision: Decision


class Policy:
    """Chooses for all sequences of a step together; `costs` may be exchanged at any time."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        # sampled and greedy requests accept differently, and so do those of other drafters: what one kind has shown
        # says little about the others
        self._memories: dict[tuple[str, bool], Memory] = {}
        self._plans = 0
        self._choices = 0
        self._plan: Plan | None = None
        self._plan_key: tuple[object, ...] = ()
        self._plan_age = 0
        self._plan_promise = 0.0
        self._rested_key: tuple[object, ...] = ()
        self._held_slots: list[int] = []  # of the last step, where everybody drafted because it pays
        self._held_key: tuple[object, ...] = ()
        self._planned_rate = 0.0
        self._plain_rate = 0.0
        # what choosing after the draft makes of a plan made before it, and what speculation makes of plain decoding
        self._beyond_plan = Quotient(1.0, *_BEYOND_PLAN)
        self._speedup = Quotient(1.0, 1.0, _FASTEST)

    def sequence(
        self, mode: Mode, gate: Gate, proposals: int, sampled: bool = False, variant: str = BASE_VARIANT
    ) -> SequencePolicy:
        """A request's own policy; `proposals` is how many tokens a block of this variant of the drafter can draft."""
        return SequencePolicy(mode, gate, proposals, self._memories.setdefault((variant, sampled), Memory()))

    def forget(self, variant: str) -> None:
        """A variant is gone; another may come by its name."""
        for sampled in (False, True):
            self._memories.pop((variant, sampled), None)

    def plan_drafts(
        self,
        views: Sequence[View],
        fixed_rows: int = 0,
        fixed_sequences: int | None = None,
        fixed_context: int = 0,
        fixed_sampled: bool = False,
    ) -> list[int]:
        """Before drafting: the slots to draft for each view, 0 for none.

        The `fixed` arguments describe the rest of the step, which comes along whatever is chosen here: its rows, how
        many sequences of it commit a token (as many as rows if not given), its longest context, and whether any
        of it is sampled.
        """
        if self.resting([view.policy for view in views]):
            return [0] * len(views)
        most = [most_slots(view) for view in views]
        fixed = (fixed_rows, fixed_sequences, fixed_context, fixed_sampled)
        if self._same_again(views, most, fixed):
            return list(self._held_slots)
        able = [index for index, slots in enumerate(most) if slots]
        step = self._step(views, max(most, default=0), fixed)
        plain = step.plain_rate
        step_of = partial(self._step, views, fixed=fixed)
        plan = self._plan_for([views[index] for index in able], step_of)
        outlook = plan.worth * self._trusted(views) / plain if plan else 0.0
        paying = [index for index in able if plan and outlook > 1.0 and views[index].policy in plan.drafting]
        self._plans += bool(paying)
        self._planned_rate = plan.rate if plan and paying else 0.0
        slots = [0] * len(views)
        for index in paying:
            slots[index] = self._depth(step, views[index], len(paying))
            views[index].policy.believed()
        rest = [index for index in able if index not in paying]
        probing = self._due(views, rest, step_of)
        probe_slots = max(self._probe_slots(step, views, paying + probing), max(slots)) if probing else 0
        for index in probing:
            slots[index] = min(probe_slots, most[index])
            extra = self.costs.draft_ms(1, slots[index], step.context) + step.straight[slots[index]] - step.straight[0]
            break_even = extra * plain * views[index].policy.gate.margin
            views[index].policy.probed(break_even, self._own_outlook(views[index], step_of))
        for index, view in enumerate(views):
            slots[index] = min(slots[index], most[index])
            view.policy.planned(slots[index])
            if not slots[index]:
                view.policy.note = _why_plain(view, plan, plain)
        if not any(slots) and all(view.policy.backing_off for view in views):
            self._rested_key = self._key(views)
        # a look deeper than what pays is for one step only
        self._held_slots = list(slots) if len(paying) == len(views) and self._plans % _LOOK_DEEPER else []
        self._held_key = (*self._plan_key, fixed_rows, fixed_sequences)
        return slots

    def choose(
        self,
        offers: Sequence[Offer],
        fixed_rows: int = 0,
        fixed_sequences: int | None = None,
        fixed_context: int = 0,
        fixed_sampled: bool = False,
    ) -> list[Choice]:
        """After drafting: what each offer verifies; `fixed` as in plan_drafts."""
        drafted = [offer for offer in offers if offer.chain or offer.tree]
        fixed = (fixed_rows, fixed_sequences, fixed_context, fixed_sampled)
        if not drafted:
            return self._all_plain(offers, self._shape(offers, *fixed))
        chains, trees = ([offered_nodes(offer, branching) for offer in offers] for branching in (False, True))
        most = sum(max(len(chain), len(tree)) for chain, tree in zip(chains, trees, strict=True))
        step = self._step(offers, most, fixed)
        # the estimate, not the time it took: a hiccup must not enter the choice
        spent_ms = self.costs.draft_ms(len(drafted), max(len(offer.chain) for offer in drafted), step.context)
        margin = max(offer.policy.gate.margin for offer in drafted)
        self._choices += 1
        self._plain_rate = step.plain_rate
        # a millisecond is worth what it yields in the long run, not what it yields in this step
        price = step.plain_rate * max(self._speedup.value, margin)
        stay_ms = spent_ms + step.straight[0]
        best = stay = Taken((0,) * len(offers), False, (1.0,) * len(offers), stay_ms, step.batch / stay_ms)
        for branching, nodes in ((False, chains), (True, trees)):
            taken = best_prefix(self.costs, step, offers, nodes, branching, spent_ms, price)
            if taken and taken.worth(price) > best.worth(price):
                best = taken
        if self._planned_rate:
            self._beyond_plan.add(best.rate * best.ms, self._planned_rate * best.ms)
        # a sequence's share of what the step takes longer than a plain one
        per_block = spent_ms / len(drafted)
        per_node = (best.ms - stay.ms) / max(1, sum(best.nodes))
        for offer, chain, count, tokens in zip(offers, chains, best.nodes, best.tokens, strict=True):
            self._remember(offer, tokens - 1.0, (per_block + count * per_node) * step.plain_rate)
            worths = cut_worths(chain, step.straight, price)
            offer.policy.depths.blend(worths)
            if self._common_knowledge(offer.policy):
                offer.policy.shared.depths.blend(worths)
        return [_choice(offer, index, best, step.plain_rate) for index, offer in enumerate(offers)]

    def verified(self, offers: Sequence[Offer], shape: StepShape, drafting: int) -> None:
        """In place of `choose` where rows were fixed before the draft: all nodes of these offers were verified.

        `shape` is the whole step, in which so many sequences were `drafting`; those not among the offers are taken
        to have promised as much.
        """
        plain_ms, ms = self.costs.step_ms(shape._replace(rows=shape.batch, branching=False)), self.costs.step_ms(shape)
        spent_ms = self.costs.draft_ms(drafting, max(len(offer.chain) for offer in offers), shape.context)
        self._choices += 1
        self._plain_rate = shape.batch / plain_ms
        gained = [sum(offer.tree or offer.chain) for offer in offers]
        if self._planned_rate:
            tokens = shape.batch + drafting * sum(gained) / len(offers)
            self._beyond_plan.add(tokens, self._planned_rate * (spent_ms + ms))
        per_block = spent_ms / drafting
        per_node = max(0.0, ms - plain_ms) / max(1, shape.rows - shape.batch)
        for offer, tokens in zip(offers, gained, strict=True):
            nodes = len(offer.tree or offer.chain)
            self._remember(offer, tokens, (per_block + nodes * per_node) * self._plain_rate)

    def row_price(self, context: int, sampled: bool) -> float:
        """Tokens that the time of one more row yields elsewhere: a node less likely than that is not worth it."""
        plain_ms = self.costs.step_ms(StepShape(1, 1, context, sampled, branching=False))
        return self.costs.row_ms(context, sampled=sampled) * self._speedup.value / plain_ms

    def progress(self, tokens: int, ms: float) -> None:
        """What a whole step, drafting included, really committed and took."""
        if self._plain_rate:
            self._speedup.add(tokens, ms * self._plain_rate)

    @staticmethod
    def keep(policy: SequencePolicy, promised: float, committed: int) -> None:
        """What one sequence's verified draft promised to commit, and what it did."""
        policy.shared.kept.add(committed, promised)

    def _trusted(self, views: Sequence[View]) -> float:
        """What a plan's rate turns out to be worth: choosing after the draft adds to it, broken promises take away."""
        return self._beyond_plan.value * min(view.policy.shared.kept.value for view in views)

    def _all_plain(self, offers: Sequence[Offer], shape: StepShape) -> list[Choice]:
        """Nobody has drafted anything, so there is nothing to weigh."""
        for offer in offers:
            if offer.policy.asked:
                offer.policy.draft_failed()
        ms = self.costs.step_ms(shape)
        self._plain_rate = shape.batch / ms
        return [Choice("plain", 0, Decision("plain", offer.policy.note, 1.0, ms)) for offer in offers]

    @staticmethod
    def _shape(
        present: Sequence[View] | Sequence[Offer], rows: int, sequences: int | None, context: int, sampled: bool
    ) -> StepShape:
        """The step with every sequence decoding plainly."""
        return StepShape(
            batch=max(1, len(present) + (rows if sequences is None else sequences)),
            rows=max(1, len(present) + rows),
            context=max([context, *(each.context for each in present)]),
            sampled=sampled or any(each.sampled for each in present),
            branching=False,
        )

    def _step(self, present: Sequence[View] | Sequence[Offer], most_nodes: int, fixed: _Fixed) -> Step:
        return Step(self.costs, self._shape(present, *fixed), most_nodes)

    def _remember(self, offer: Offer, gained: float, forgone: float) -> None:
        """Takes in an offer's curves; `forgone` are the tokens that plain steps would have made in its time."""
        policy = offer.policy
        if offer.chain or offer.tree:
            policy.shared.account.lose(forgone)
            if gained > forgone * policy.gate.margin:
                policy.paid()
            draft = Draft.of(offer.chain, offer.tree)
            policy.gains.blend(draft, policy.proposals)
            if self._common_knowledge(policy):
                policy.shared.gains.blend(draft, policy.proposals)
        elif policy.asked:
            policy.draft_failed()

    def _common_knowledge(self, policy: SequencePolicy) -> bool:
        """Whether this draft also counts for requests to come: some do, and the first of a kind."""
        return not self._choices % _SHARED_DRAFTS or not policy.shared.gains.known

    def _prospect(self, policy: SequencePolicy) -> Gains:
        if policy.gains.known:
            return policy.gains
        return assumed(policy.proposals)

    def resting(self, policies: Sequence[SequencePolicy]) -> bool:
        """Whether nothing can have changed since all of these, and nobody else, were found to do better without drafts.

        Asked once per step: the answer ages with the plan.
        """
        rested = bool(self._rested_key) and self._plan_age < _REST_STEPS and self._rested_key == (self.costs, *policies)
        if not rested or any(policy.probe_due for policy in policies):
            self._rested_key = ()
            return False
        self._plan_age += 1
        return True

    def _same_again(self, views: Sequence[View], most: Sequence[int], fixed: _Fixed) -> bool:
        """Whether everybody drafts as many slots as in the last step without a new look at the costs."""
        if (
            not self._held_slots
            or self._held_key != (*self._key(views), *fixed[:2])
            or not self._holds(views)
            or not (self._plans + 1) % _LOOK_DEEPER
            or any(room < slots for room, slots in zip(most, self._held_slots, strict=True))
            or any(view.policy.backing_off for view in views)
        ):
            return False
        self._plan_age += 1
        self._plans += 1
        for view in views:
            view.policy.planned(1)
        return True

    def _key(self, views: Sequence[View]) -> tuple[object, ...]:
        """Whom and what a plan was made for."""
        return (self.costs, *(view.policy for view in views))

    def _promise(self, views: Sequence[View]) -> float:
        return sum(view.policy.gains.expected(7, 7, branching=False) for view in views if view.policy.gains.known)

    def _holds(self, views: Sequence[View]) -> bool:
        """Whether the last plan is young and the gains promise about what they did when it was made."""
        promise = self._promise(views)
        alike = promise <= _OTHER_PROMISE * self._plan_promise <= _OTHER_PROMISE**2 * promise
        return self._plan_age < _PLAN_STEPS and alike

    def _plan_for(self, views: Sequence[View], step_of: Callable[[int], Step]) -> Plan | None:
        """The best plan for these sequences; it holds for a few steps, since planning takes time as well."""
        key = self._key(views)
        if key == self._plan_key and self._holds(views):
            self._plan_age += 1
            return self._plan
        self._plan_promise = self._promise(views)
        gains = [(view, self._prospect(view.policy)) for view in views if view.policy.hopeful]
        gains.sort(key=lambda prospect: -prospect[1].expected(7, 7, branching=False))
        self._plan = best_plan(self.costs, step_of(sum(view.policy.max_nodes for view in views)), gains)
        settled = all(view.policy.tried for view in views)
        self._plan_key, self._plan_age = (key, 1) if settled else ((), 0)
        return self._plan

    def _depth(self, step: Step, view: View, blocks: int) -> int:
        """As many slots as have lately been worth their time, and now and then more: or nobody would know."""
        options = slot_options(most_slots(view))
        price = step.plain_rate * self._speedup.value
        # what nobody has tried promises everything, but not of a drafter nobody has seen work
        proven = view.policy.shared.calibration.proven
        assumed_worths = {} if proven else cut_worths(assumed_chain(options[-1]), step.straight, price)
        times = self.costs.drafts_ms(blocks, options, step.context)
        place = 0
        while place + 1 < len(options):
            shallow, deep = options[place : place + 2]
            extra_ms = (times[place + 1] - times[place]) / blocks
            untried = math.inf if proven else assumed_worths[deep] - assumed_worths[shallow]
            gain = view.policy.depths.gain(deep, untried)
            if gain < price * extra_ms and self._plans % _LOOK_DEEPER:
                break
            place += 1
        return options[place]

    def _own_outlook(self, view: View, step_of: Callable[[int], Step]) -> float:
        policy = view.policy
        if not policy.hopeful:
            return 0.0
        alone = own_outlook(self.costs, step_of(policy.max_nodes), view, self._prospect(policy))
        return alone * self._trusted([view])

    def _due(self, views: Sequence[View], rest: Sequence[int], step_of: Callable[[int], Step]) -> list[int]:
        """Sequences that draft although it does not seem to pay: never tried, or due for a probe."""
        probing = []
        for index in rest:
            policy = views[index].policy
            if not policy.backing_off:
                policy.back_off(self._own_outlook(views[index], step_of))
            if not policy.tried and not policy.hopeless:
                probing.append(index)
        if any(views[index].policy.probe_due for index in rest):
            probing += [index for index in rest if views[index].policy.probe_near and index not in probing]
        return probing

    def _probe_slots(self, step: Step, views: Sequence[View], drafting: Sequence[int]) -> int:
        options = slot_options(max(most_slots(views[index]) for index in drafting))
        times = self.costs.drafts_ms(len(drafting), options, step.context)
        return max(slots for slots, ms in zip(options, times, strict=True) if ms <= _PROBE_SLACK * times[0])


def _choice(offer: Offer, index: int, taken: Taken, plain: float) -> Choice:
    nodes, tokens = taken.nodes[index], taken.tokens[index]
    rates = f"({taken.rate:.3f}/ms), plain {plain:.3f}/ms"
    if not nodes:
        reason = f"the draft promises too little for more rows, plain {plain:.3f}/ms"
        if not (offer.chain or offer.tree):
            reason = offer.policy.note
        return Choice("plain", 0, Decision("plain", reason, tokens, taken.ms))
    tree = taken.branching and common_nodes(offered_nodes(offer, True), offer.chain) < nodes
    kind: Literal["chain", "tree"] = "tree" if tree else "chain"
    name = f"{kind}:{nodes + 1}"
    reason = f"{name} expects {tokens:.1f} tokens in {taken.ms:.0f} ms {rates}"
    return Choice(kind, nodes, Decision(name, reason, tokens, taken.ms))


def _why_plain(view: View, plan: Plan | None, plain: float) -> str:
    if view.room <= 1:
        return "one token is left to commit"
    wait = view.policy.tokens_to_probe
    if plan is None:
        return f"no draft has come yet; next probe in {wait} tokens" if wait else "nothing can be drafted"
    return f"drafting would give {plan.rate:.3f}/ms, plain {plain:.3f}/ms; next probe in {wait} tokens"
