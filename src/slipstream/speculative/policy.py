"""The adaptive policy: it decides per step whether, how deep and how wide to speculate.

It takes the choice with the most expected tokens per millisecond, from measured step times and past acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from slipstream.speculative.allocation import Allocation, Offer, StepTimes, best_prefix, common_nodes, offered_nodes
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.expected_gains import BoundedRatio, DraftCurves, ExpectedGains, assumed_chain, assumed_gains
from slipstream.speculative.planning import (
    DraftPlan,
    View,
    best_plan,
    cut_worths,
    most_slots,
    own_outlook,
    slot_options,
)
from slipstream.speculative.sequence_policy import MAX_AUTO_ROWS, SequencePolicy, SharedRecord
from slipstream.stats import Decision
from slipstream.types import BASE_VARIANT, Gate, Mode

__all__ = ["MAX_AUTO_ROWS", "VerifyChoice", "Offer", "Policy", "SequencePolicy", "View"]

# docs/log.md holds the measurements behind the policy; figures about a single value are repeated below.

# A probe drafts more slots while the draft pass takes at most this many times as long as with the fewest. A larger
# value makes probes dearer; with 1.0 probes say nothing about deep drafts.
_PROBE_SLACK = 1.1
# Steps that one plan serves. Planning takes host time, but a plan that is kept for longer follows a text too slowly.
_PLAN_STEPS = 8
# Steps for which a batch that decodes plainly is left alone before it is planned for again, unless a probe is due
# earlier. Little can change without drafts, so a smaller value only costs host time.
_REST_STEPS = 32
# A plan is made again when the expected gains are this many times as large or as small as when the plan was made.
_OTHER_PROMISE = 2.0
# Bounds for the factor by which the choice after the draft improves the rate that the plan promised before it. Without
# the bounds a few lucky steps would keep a losing plan alive.
_BEYOND_PLAN = (1.0, 1.4)
# The largest speed-up over plain decoding that the policy believes. It bounds the price of a millisecond, so that a
# mistimed step cannot make every further row look too dear.
_FASTEST = 8.0
# One choice of this many is also remembered for requests to come. Remembering every choice costs host time.
_SHARED_DRAFTS = 4
# Every draft with this number drafts the deepest option, because otherwise the policy would never learn what deep
# slots are worth. A smaller value spends more time on slots that do not pay.
_LOOK_DEEPER = 16

_Fixed = tuple[int, int | None, int, bool]


class VerifyChoice(NamedTuple):
    """What one sequence verifies in this step: the first `nodes` nodes of its chain or tree."""

    kind: Literal["plain", "chain", "tree"]
    nodes: int
    decision: Decision


class Policy:
    """Chooses for all sequences of a step together; `costs` may be replaced by another table at any time."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        # One record per draft variant, and per sampled or greedy decoding: these kinds accept so differently that what
        # one kind has shown says little about the others.
        self._memories: dict[tuple[str, bool], SharedRecord] = {}
        self._plans = 0
        self._choices = 0
        self._plan: DraftPlan | None = None
        self._plan_key: tuple[object, ...] = ()
        self._plan_age = 0
        self._plan_promise = 0.0
        self._rested_key: tuple[object, ...] = ()
        self._held_slots: list[int] = []  # slots per sequence of the last step, if all of them drafted because it paid
        self._held_key: tuple[object, ...] = ()
        self._planned_rate = 0.0
        self._plain_rate = 0.0
        # `_beyond_plan`: how much better the choice after the draft is than the plan before it. `_speedup`: how much
        # faster steps with speculation are than plain steps.
        self._beyond_plan = BoundedRatio(1.0, *_BEYOND_PLAN)
        self._speedup = BoundedRatio(1.0, 1.0, _FASTEST)

    def sequence(
        self, mode: Mode, gate: Gate, proposals: int, sampled: bool = False, variant: str = BASE_VARIANT
    ) -> SequencePolicy:
        """The policy of one request; `proposals` is how many tokens a block of its draft variant can draft."""
        return SequencePolicy(mode, gate, proposals, self._memories.setdefault((variant, sampled), SharedRecord()))

    def forget(self, variant: str) -> None:
        """Drops the record of a removed draft variant, because another variant may get the same name."""
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
        """Says before drafting how many slots to draft for each view; 0 means that the sequence does not draft.

        The `fixed` arguments describe the rest of the step, which runs whatever is chosen here: its rows, how many of
        its sequences commit a token (as many as rows if None), its longest context, and whether any of it is sampled.
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
        # A step that drafts deeper than what pays, in order to learn, must not be repeated by the following steps.
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
    ) -> list[VerifyChoice]:
        """Says after drafting what each offer verifies; the `fixed` arguments mean the same as in `plan_drafts`."""
        drafted = [offer for offer in offers if offer.chain or offer.tree]
        fixed = (fixed_rows, fixed_sequences, fixed_context, fixed_sampled)
        if not drafted:
            return self._all_plain(offers, self._shape(offers, *fixed))
        chains, trees = ([offered_nodes(offer, branching) for offer in offers] for branching in (False, True))
        most = sum(max(len(chain), len(tree)) for chain, tree in zip(chains, trees, strict=True))
        step = self._step(offers, most, fixed)
        # The estimate is used and not the measured time, because a single slow draft must not affect the choice.
        spent_ms = self.costs.draft_ms(len(drafted), max(len(offer.chain) for offer in drafted), step.context)
        margin = max(offer.policy.gate.margin for offer in drafted)
        self._choices += 1
        self._plain_rate = step.plain_rate
        # A millisecond is priced at what it yields in the long run, not at what it yields in this step.
        price = step.plain_rate * max(self._speedup.value, margin)
        stay_ms = spent_ms + step.straight[0]
        best = stay = Allocation((0,) * len(offers), False, (1.0,) * len(offers), stay_ms, step.batch / stay_ms)
        for branching, nodes in ((False, chains), (True, trees)):
            taken = best_prefix(self.costs, step, offers, nodes, branching, spent_ms, price)
            if taken and taken.worth(price) > best.worth(price):
                best = taken
        if self._planned_rate:
            self._beyond_plan.add(best.rate * best.ms, self._planned_rate * best.ms)
        # The extra time of this step over a plain step is divided among the sequences by their blocks and nodes.
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
        """Replaces `choose` where the rows were fixed before the draft: all nodes of these offers were verified.

        `shape` describes the whole step, in which `drafting` sequences drafted. Sequences that drafted but have no
        offer here are assumed to have promised as much as those that have one.
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
        """The tokens that the time of one more row yields elsewhere; a node that is less likely is not worth a row."""
        plain_ms = self.costs.step_ms(StepShape(1, 1, context, sampled, branching=False))
        return self.costs.row_ms(context, sampled=sampled) * self._speedup.value / plain_ms

    def progress(self, tokens: int, ms: float) -> None:
        """Takes in how many tokens a whole step committed, and how long it took with its drafting."""
        if self._plain_rate:
            self._speedup.add(tokens, ms * self._plain_rate)

    @staticmethod
    def keep(policy: SequencePolicy, promised: float, committed: int) -> None:
        """Takes in how many tokens one sequence's verified draft promised, and how many it committed."""
        policy.shared.kept.add(committed, promised)

    def _trusted(self, views: Sequence[View]) -> float:
        """The factor from planned to real rate: the choice after the draft raises it, broken promises lower it."""
        return self._beyond_plan.value * min(view.policy.shared.kept.value for view in views)

    def _all_plain(self, offers: Sequence[Offer], shape: StepShape) -> list[VerifyChoice]:
        """The choices of a step without any draft, in which there is nothing to weigh."""
        for offer in offers:
            if offer.policy.asked:
                offer.policy.draft_failed()
        ms = self.costs.step_ms(shape)
        self._plain_rate = shape.batch / ms
        return [VerifyChoice("plain", 0, Decision("plain", offer.policy.note, 1.0, ms)) for offer in offers]

    @staticmethod
    def _shape(
        present: Sequence[View] | Sequence[Offer], rows: int, sequences: int | None, context: int, sampled: bool
    ) -> StepShape:
        """The step as it would be if every sequence decoded plainly."""
        return StepShape(
            batch=max(1, len(present) + (rows if sequences is None else sequences)),
            rows=max(1, len(present) + rows),
            context=max([context, *(each.context for each in present)]),
            sampled=sampled or any(each.sampled for each in present),
            branching=False,
        )

    def _step(self, present: Sequence[View] | Sequence[Offer], most_nodes: int, fixed: _Fixed) -> StepTimes:
        return StepTimes(self.costs, self._shape(present, *fixed), most_nodes)

    def _remember(self, offer: Offer, gained: float, forgone: float) -> None:
        """Takes in an offer's curves; `forgone` is how many tokens plain steps would have made in the offer's time."""
        policy = offer.policy
        if offer.chain or offer.tree:
            policy.shared.debt.lose(forgone)
            if gained > forgone * policy.gate.margin:
                policy.paid()
            draft = DraftCurves.of(offer.chain, offer.tree)
            policy.gains.blend(draft, policy.proposals)
            if self._common_knowledge(policy):
                policy.shared.gains.blend(draft, policy.proposals)
        elif policy.asked:
            policy.draft_failed()

    def _common_knowledge(self, policy: SequencePolicy) -> bool:
        """Whether this draft is also remembered for requests to come: some are, and the first of a kind."""
        return not self._choices % _SHARED_DRAFTS or not policy.shared.gains.known

    def _prospect(self, policy: SequencePolicy) -> ExpectedGains:
        if policy.gains.known:
            return policy.gains
        return assumed_gains(policy.proposals)

    def resting(self, policies: Sequence[SequencePolicy]) -> bool:
        """Whether exactly these policies were found to do better without drafts, and nothing can have changed since.

        The caller must ask once per step, because each call makes the plan one step older.
        """
        rested = bool(self._rested_key) and self._plan_age < _REST_STEPS and self._rested_key == (self.costs, *policies)
        if not rested or any(policy.probe_due for policy in policies):
            self._rested_key = ()
            return False
        self._plan_age += 1
        return True

    def _same_again(self, views: Sequence[View], most: Sequence[int], fixed: _Fixed) -> bool:
        """Whether all sequences draft as many slots as in the last step, without a new look at the costs."""
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
        """The costs and the sequences that a plan was made for; a plan with another key does not apply."""
        return (self.costs, *(view.policy for view in views))

    def _promise(self, views: Sequence[View]) -> float:
        return sum(view.policy.gains.expected(7, 7, branching=False) for view in views if view.policy.gains.known)

    def _holds(self, views: Sequence[View]) -> bool:
        """Whether the last plan is young, and the gains promise about as much as when it was made."""
        promise = self._promise(views)
        alike = promise <= _OTHER_PROMISE * self._plan_promise <= _OTHER_PROMISE**2 * promise
        return self._plan_age < _PLAN_STEPS and alike

    def _plan_for(self, views: Sequence[View], step_of: Callable[[int], StepTimes]) -> DraftPlan | None:
        """The best plan for these sequences; a plan serves several steps, because planning takes time as well."""
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

    def _depth(self, step: StepTimes, view: View, blocks: int) -> int:
        """As many slots as have lately been worth their time; now and then more, in order to learn about them."""
        options = slot_options(most_slots(view))
        price = step.plain_rate * self._speedup.value
        # A depth without any record counts as worth drafting, but only if this drafter has had a token accepted before.
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

    def _own_outlook(self, view: View, step_of: Callable[[int], StepTimes]) -> float:
        policy = view.policy
        if not policy.hopeful:
            return 0.0
        alone = own_outlook(self.costs, step_of(policy.max_nodes), view, self._prospect(policy))
        return alone * self._trusted([view])

    def _due(self, views: Sequence[View], rest: Sequence[int], step_of: Callable[[int], StepTimes]) -> list[int]:
        """Sequences that draft although it does not seem to pay: they have never drafted, or their probe is due."""
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

    def _probe_slots(self, step: StepTimes, views: Sequence[View], drafting: Sequence[int]) -> int:
        options = slot_options(max(most_slots(views[index]) for index in drafting))
        times = self.costs.drafts_ms(len(drafting), options, step.context)
        return max(slots for slots, ms in zip(options, times, strict=True) if ms <= _PROBE_SLACK * times[0])


def _choice(offer: Offer, index: int, taken: Allocation, plain: float) -> VerifyChoice:
    nodes, tokens = taken.nodes[index], taken.tokens[index]
    rates = f"({taken.rate:.3f}/ms), plain {plain:.3f}/ms"
    if not nodes:
        reason = f"the draft promises too little for more rows, plain {plain:.3f}/ms"
        if not (offer.chain or offer.tree):
            reason = offer.policy.note
        return VerifyChoice("plain", 0, Decision("plain", reason, tokens, taken.ms))
    tree = taken.branching and common_nodes(offered_nodes(offer, True), offer.chain) < nodes
    kind: Literal["chain", "tree"] = "tree" if tree else "chain"
    name = f"{kind}:{nodes + 1}"
    reason = f"{name} expects {tokens:.1f} tokens in {taken.ms:.0f} ms {rates}"
    return VerifyChoice(kind, nodes, Decision(name, reason, tokens, taken.ms))


def _why_plain(view: View, plan: DraftPlan | None, plain: float) -> str:
    if view.room <= 1:
        return "one token is left to commit"
    wait = view.policy.tokens_to_probe
    if plan is None:
        return f"no draft has come yet; next probe in {wait} tokens" if wait else "nothing can be drafted"
    return f"drafting would give {plan.rate:.3f}/ms, plain {plain:.3f}/ms; next probe in {wait} tokens"
