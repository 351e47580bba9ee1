"""The adaptive policy: it decides per step whether, how deep and how wide to speculate.

`estimate` says how likely a drafted node is accepted, `costs` how long a step takes, and `choose` takes the nodes that
are worth their time. This module adds what decides before a draft exists: what drafts have brought lately, and a budget
for drafts that are made only to learn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from slipstream.speculative.choose import (
    SLOT_OPTIONS,
    Offer,
    Prospect,
    StepTimes,
    View,
    best_draft,
    best_nodes,
    slot_options,
    text_speed,
)
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.estimate import DraftOutcome, Estimate, Record
from slipstream.speculative.text_drafts import MOST_TEXT_NODES
from slipstream.stats import Decision
from slipstream.types import BASE_VARIANT, Gate, Mode, Proposal, Source, Verdict

__all__ = ["MAX_AUTO_ROWS", "Offer", "Policy", "Rest", "SequencePolicy", "VerifyChoice", "View"]

# Rows that one sequence may verify in auto mode. A GPU's matmuls of up to 64 rows agree bit for bit with those
# of fewer rows; a larger value would leave that range.
MAX_AUTO_ROWS = 64
# The time that trials may lose at the start, and the most that is saved up for later, in plain steps.
_SAVED_STEPS = 3.0
_TRIAL_NODES = 3  # nodes that a trial verifies at least; without any, it would teach nothing
# The share of the newest draft in the means of one request, and in those of its kind. A larger share follows luck, a
# smaller one follows a change of the text too slowly.
_NEWEST_OWN, _NEWEST_OF_KIND = 0.08, 0.03
# Calls that one plan serves at most: with drafts, whose prospects change slowly, and without, where only the budget for
# trials grows. Planning anew for each call takes 1 to 2 % of a small step.
_HELD_DRAFTING, _HELD_PLAIN = 4, 64
# Nodes down to this share of a row's average price are grown, because costs rise in jumps and some rows are free.
_FLOOR_SHARE = 0.5
_UNKNOWN_CHANCE = 0.7  # the assumed acceptance probability of each token of which nothing is known yet
# The speed over plain decoding, which sets the price of a millisecond, is a ratio of two sums over the steps. At each
# step both sums keep this share.
_SPEED_KEEP = 0.95
_SIZES = (
    1,
    3,
    7,
    15,
    31,
    63,
)  # numbers of nodes whose accepted tokens are averaged; between them they are interpolated


class VerifyChoice(NamedTuple):
    """What one sequence verifies in this step: the first `nodes` nodes of its tree."""

    kind: Literal["plain", "chain", "tree"]
    nodes: int
    decision: Decision


class Rest(NamedTuple):
    """The part of a step that runs whatever the policy chooses."""

    rows: int = 0
    sequences: int = 0
    context: int = 0
    sampled: bool = False


ALONE = Rest()  # a step that holds nothing else


class RecentMeans:
    """Means of what verified drafts have brought, of which the newest count most.

    They start from an assumption, which the first draft replaces, or from those of the request's kind.
    """

    def __init__(self, assumed: Sequence[float], kind: RecentMeans | None = None) -> None:
        self._newest = _NEWEST_OF_KIND if kind is None else _NEWEST_OWN
        self.values: list[float] = list(assumed if kind is None else kind.values)
        self.drafts: int = 0 if kind is None else kind.drafts

    @property
    def share(self) -> float:
        """The share that the next draft has in the means."""
        return max(self._newest, 1.0 / (self.drafts + 1))

    def add(self, values: Sequence[float]) -> None:
        share = self.share
        self.drafts += 1
        self.values = [mean + share * (value - mean) for mean, value in zip(self.values, values, strict=True)]


class _Kind(NamedTuple):
    """What requests of one draft variant, sampled or greedy, have shown; a new request of the kind starts from it."""

    record: Record
    by_slots: RecentMeans
    by_nodes: RecentMeans


class SequencePolicy:
    """The policy's memory of one request."""

    def __init__(self, mode: Mode, gate: Gate, proposals: int, kind: _Kind) -> None:
        self.margin = gate.margin
        self.explore = gate.explore
        self.chains_only = mode.kind == "chain"
        self.max_nodes = _most_nodes(mode, proposals)
        self.deepest = min(proposals, self.max_nodes)
        self.estimate = Estimate(kind.record)
        # `by_slots` has the accepted tokens for each of SLOT_OPTIONS and then the milliseconds of rows for each of
        # them; `by_nodes` has the accepted tokens for each of _SIZES.
        self.by_slots = RecentMeans((), kind.by_slots)
        self.by_nodes = RecentMeans((), kind.by_nodes)
        self.note = ""  # why the last plan drafted nothing for this sequence
        self.trial = False  # whether the last plan drafted for this sequence only to learn
        self.slots = 0  # slots of the last plan
        self.floor = 0.0  # the least survival with which a node may be worth a row
        self.first_from_text = 0.0  # the least chance of its next token with which the text may be worth a search
        self.rows_ms = 0.0  # the time of the last verified rows beyond the anchor
        self._kind = kind

    def learn(self, proposal: Proposal, verdict: Verdict) -> None:
        """Takes in what the target chose where a proposal was verified."""
        if verdict.failed:
            return
        depths = proposal.depths
        if self.slots:
            self._add(_brought(depths, len(verdict.path) - 1, self.slots, self.deepest, self.rows_ms))
        if proposal.claims:
            self.estimate.learn(_outcomes(proposal, verdict, depths))

    def learn_widths(self, nodes: int, path: Sequence[int]) -> None:
        """Takes in which of so many nodes were accepted.

        Only device steps need this, because they plan their nodes before the draft is made.
        """
        for means in (self.by_nodes, self._kind.by_nodes):
            means.add(_brought_by_nodes(means, nodes, path))

    def draft_was_useless(self, rows_ms: float = 0.0) -> None:
        """Takes in that a draft brought no nodes, or none that was worth a row; `rows_ms` is the time of its rows."""
        self._add([0.0] * len(SLOT_OPTIONS) + [rows_ms] * len(SLOT_OPTIONS))

    def _add(self, brought: Sequence[float]) -> None:
        for means in (self.by_slots, self._kind.by_slots):
            means.add(brought)

    def expected(self, nodes: int) -> float:
        """The accepted tokens to expect of so many nodes."""
        return _interpolated(self.by_nodes, nodes)

    def prospect(self, slots: int) -> Prospect:
        """What a draft of so many slots is expected to bring."""
        place = min(bisect_left(SLOT_OPTIONS, slots), len(SLOT_OPTIONS) - 1)
        return Prospect(self.by_slots.values[place], self.by_slots.values[place + len(SLOT_OPTIONS)])


@dataclass(slots=True)
class _HeldPlan:
    """How many slots the sequences draft in the next steps, unless the text of one of them promises more."""

    planned_for: list[object]  # the costs, the rest of the step and the sequences
    slots: list[int]
    step: StepTimes
    speed: float  # the speed over plain decoding that the drafts promise
    steps: int  # steps that the plan still serves


class Policy:
    """Chooses for all sequences of a step together; `costs` may be replaced by another table at any time."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self._engine = Record()
        self._kinds: dict[tuple[str, bool], _Kind] = {}
        self._plain_ms = costs.step_ms(StepShape(1, 1, 0, sampled=False, branching=False))
        self._budget_ms = _SAVED_STEPS * self._plain_ms
        self._explored = 0.0  # the share of the current step's time that trials may lose later
        self._missing_ms = 0.0  # what the budget lacks for the next trial
        self._held: _HeldPlan | None = None
        self._plain_rate = 0.0  # tokens per millisecond that the last step would have had without drafts
        # Committed tokens, and the tokens of plain steps in the same time; both fade, and their ratio is the speed.
        self._speed = (1.0 / (1.0 - _SPEED_KEEP),) * 2

    def sequence(
        self, mode: Mode, gate: Gate, proposals: int, sampled: bool = False, variant: str = BASE_VARIANT
    ) -> SequencePolicy:
        """The policy of one request; `proposals` is how many tokens a block of its draft variant can draft."""
        kind = self._kinds.get((variant, sampled))
        if kind is None:
            kind = self._kinds[variant, sampled] = self._unknown_kind(proposals, sampled)
        return SequencePolicy(mode, gate, proposals, kind)

    def _unknown_kind(self, proposals: int, sampled: bool) -> _Kind:
        times = self.costs.steps_ms(StepShape(1, SLOT_OPTIONS[-1] + 1, 0, sampled, branching=False))
        tokens = [_chain(min(slots, proposals)) for slots in SLOT_OPTIONS]
        rows_ms = [times[slots + 1] - times[1] for slots in SLOT_OPTIONS]
        by_nodes = [_chain(min(nodes, proposals)) for nodes in _SIZES]
        return _Kind(Record(self._engine), RecentMeans(tokens + rows_ms), RecentMeans(by_nodes))

    def forget(self, variant: str) -> None:
        """Drops the record of a removed draft variant, because another variant may get the same name."""
        for sampled in (False, True):
            self._kinds.pop((variant, sampled), None)

    def plan_drafts(self, views: Sequence[View], rest: Rest = ALONE) -> list[int]:
        """Says before drafting how many slots to draft for each view; 0 means that the sequence does not draft."""
        plan = self._held
        if plan is None or not plan.steps or plan.planned_for != self._subject(views, rest):
            plan = self._held = self._plan(views, rest)
        plan.steps -= 1
        for view, slots in zip(views, plan.slots, strict=True):
            # Where the text itself promises as much, the time of a draft pass is saved.
            outbid = slots and view.text and text_speed(plan.step, view) >= plan.speed
            view.policy.slots = 0 if outbid else max(0, min(slots, view.policy.deepest, view.room - 1))
        return [view.policy.slots for view in views]

    def _subject(self, present: Sequence[View] | Sequence[Offer], rest: Rest) -> list[object]:
        return [self.costs, rest.rows, rest.sequences, rest.sampled, *[each.policy for each in present]]

    def _plan(self, views: Sequence[View], rest: Rest) -> _HeldPlan:
        self._explored = max((view.policy.explore for view in views), default=0.0)
        most = [max(0, min(view.policy.deepest, view.room - 1)) for view in views]
        slots = [0] * len(views)
        options = slot_options(max(most, default=0))
        step = self._step(views, rest)
        self._plain_ms, self._plain_rate = step.plain_ms, step.plain_rate
        able = [index for index, room in enumerate(most) if room]
        speed, trials, steps = 0.0, list[int](), _HELD_PLAIN
        if able:
            middle = options[len(options) // 2]
            able.sort(key=lambda index: -views[index].policy.prospect(middle).tokens)
            prospects = [[views[index].policy.prospect(option) for option in options] for index in able]
            best = best_draft(self.costs, step, options, prospects)
            speed = best.speed
            paying = able[: best.drafting] if speed > max(views[index].policy.margin for index in able) else []
            for index in paying:
                slots[index] = best.slots
            losing = [index for index in able if index not in paying and not views[index].text]
            trials = self._trials(step, views, losing, options[0])
            for index in trials:
                slots[index] = options[0]
            if trials:
                steps = 1  # the budget has paid for a single step
            elif paying:
                steps = _HELD_DRAFTING if all(views[index].policy.by_slots.drafts for index in paying) else 1
            elif self._explored:  # until the budget has grown enough for a trial, nothing changes
                steps = 1 + int(min(_HELD_PLAIN, self._missing_ms / (self._explored * step.plain_ms)))
        for index, view in enumerate(views):
            own = view.policy
            own.trial = index in trials
            own.note = "" if slots[index] else _why_plain(view, speed)
            own.floor = _FLOOR_SHARE * self.row_price(view.context, view.sampled)
            # Tokens of this chance, one after the other, would promise as much as the planned drafts.
            own.first_from_text = 1.0 - 1.0 / max(1.0, speed) if slots[index] else 0.0
        return _HeldPlan(self._subject(views, rest), slots, step, speed, steps)

    def _trials(self, step: StepTimes, views: Sequence[View], losing: Sequence[int], slots: int) -> list[int]:
        """The sequences that draft although it does not seem to pay, as far as the budget covers what that loses."""
        trials: list[int] = []
        before_ms = self._missing_ms = 0.0
        for index in losing:
            own = views[index].policy
            if not own.explore:
                continue
            draft_ms = self.costs.draft_ms(len(trials) + 1, slots, step.context)
            tokens, rows_ms = own.prospect(slots)
            cost_ms = draft_ms - before_ms + rows_ms
            # A draft that pays, but not by its margin, loses what is missing to that margin, and at most its own time.
            needed_ms = own.margin * cost_ms + (own.margin - 1.0) * step.plain_ms
            loss_ms = min(cost_ms, needed_ms - tokens / step.plain_rate)
            if step.batch > 1 and not step.fair(step.plain_ms + cost_ms, 1.0):
                loss_ms = cost_ms  # its tokens do not make up for what other sequences lose
            if loss_ms > self._budget_ms:
                self._missing_ms = loss_ms - self._budget_ms
                break
            self._budget_ms -= max(0.0, loss_ms)
            before_ms = draft_ms
            trials.append(index)
        return trials

    def choose(self, offers: Sequence[Offer], rest: Rest = ALONE) -> list[VerifyChoice]:
        """Says after drafting what each offer verifies."""
        drafted = [offer for offer in offers if offer.policy.slots]
        plan = self._held
        planned = plan is not None and plan.planned_for == self._subject(offers, rest)
        step = plan.step if plan is not None and planned else self._step(offers, rest)
        self._plain_rate = step.plain_rate
        slots = max((offer.policy.slots for offer in drafted), default=0)
        spent_ms = self.costs.draft_ms(len(drafted), slots, step.context)
        # A millisecond is priced at what it yields in the long run, not at what it yields in this step.
        price = step.plain_rate * max(1.0, self._speed[0] / self._speed[1])
        counts = [
            max(count, min(_TRIAL_NODES, len(offer.survivals))) if offer.policy.trial else count
            for offer, count in zip(offers, best_nodes(step, offers, spent_ms, price), strict=True)
        ]
        branching = any(count > offer.straight for offer, count in zip(offers, counts, strict=True))
        verify_ms = (step.branched if branching else step.straight)[sum(counts)]
        for offer, count in zip(offers, counts, strict=True):
            offer.policy.rows_ms = (verify_ms - step.plain_ms) * count / max(1, sum(counts))
        return [
            _choice(offer, count, spent_ms + verify_ms, step.plain_rate)
            for offer, count in zip(offers, counts, strict=True)
        ]

    def progress(self, tokens: int, ms: float) -> None:
        """Takes in how many tokens a whole step committed, and how long it took with its drafting."""
        self._budget_ms = min(_SAVED_STEPS * self._plain_ms, self._budget_ms + self._explored * ms)
        if self._plain_rate:
            made, plain = self._speed
            self._speed = _SPEED_KEEP * made + tokens, _SPEED_KEEP * plain + ms * self._plain_rate

    def charge(self, ms: float) -> None:
        """Takes time off the budget of trials: a trial must first write the draft context that plain steps left out."""
        self._budget_ms -= ms

    def row_price(self, context: int, sampled: bool) -> float:
        """The tokens that the time of one more row yields elsewhere; a node that is less likely is not worth a row."""
        plain_ms = self.costs.step_ms(StepShape(1, 1, context, sampled, branching=False))
        return self.costs.row_ms(context, sampled=sampled) * max(1.0, self._speed[0] / self._speed[1]) / plain_ms

    def _step(self, present: Sequence[View] | Sequence[Offer], rest: Rest) -> StepTimes:
        """The times of the step; its shape is the one that it has if every sequence decodes plainly."""
        shape = StepShape(
            batch=max(1, len(present) + rest.sequences),
            rows=max(1, len(present) + rest.rows),
            context=max([rest.context, *[each.context for each in present]]),
            sampled=rest.sampled or any(each.sampled for each in present),
            branching=False,
        )
        return StepTimes(self.costs, shape, sum([max(each.policy.max_nodes, MOST_TEXT_NODES) for each in present]))


def _chain(slots: int) -> float:
    """The accepted tokens to expect of a chain over so many slots, before any draft has been verified."""
    return sum([_UNKNOWN_CHANCE**depth for depth in range(1, slots + 1)])


def _brought(depths: Sequence[int], accepted: int, slots: int, deepest: int, rows_ms: float) -> list[float]:
    """The accepted tokens that a draft would have brought with each of SLOT_OPTIONS, and then the time of its rows."""
    tokens, times, nodes = list[float](), list[float](), len(depths) - 1
    accepted = min(accepted, slots)  # what is deeper came from the text
    for option in SLOT_OPTIONS:
        if option < slots:
            within = sum([depth <= option for depth in depths]) - 1
            tokens.append(min(accepted, option))
            times.append(rows_ms * within / nodes)
        else:  # a draft that was right up to its last slot would have gone on
            tokens.append(accepted + (_chain(min(option, deepest) - slots) if accepted >= slots else 0.0))
            times.append(rows_ms)
    return tokens + times


def _brought_by_nodes(means: RecentMeans, nodes: int, path: Sequence[int]) -> list[float]:
    """The accepted tokens among the first nodes of a draft, for each of _SIZES."""
    right = [bisect_right(path, min(size, nodes)) - 1.0 for size in _SIZES]
    if not nodes:
        return right
    # Nodes beyond those that were verified count as before. What they bring is compared with the mean that this draft
    # leads to, so that they look better after poor drafts and are tried.
    before = _interpolated(means, nodes)
    now = before + means.share * (bisect_right(path, nodes) - 1.0 - before)
    more = [max(0.0, mean - now) if size > nodes else 0.0 for size, mean in zip(_SIZES, means.values, strict=True)]
    return [known + further for known, further in zip(right, more, strict=True)]


def _interpolated(means: RecentMeans, nodes: int) -> float:
    """The accepted tokens of so many nodes, on straight lines between _SIZES."""
    low = 0, 0.0
    for high in zip(_SIZES, means.values, strict=True):
        if nodes <= high[0]:
            return low[1] + (high[1] - low[1]) * (nodes - low[0]) / (high[0] - low[0])
        low = high
    return low[1]


def _outcomes(proposal: Proposal, verdict: Verdict, depths: Sequence[int]) -> list[DraftOutcome]:
    """What came of the children of every accepted row."""
    chosen = dict(zip(verdict.path, verdict.tokens, strict=False))
    sources = proposal.sources or [Source.DRAFTER] * len(depths)
    facts = zip(proposal.parents, proposal.tokens, proposal.claims, depths, sources, strict=True)
    return [
        DraftOutcome(claim, depth, token == chosen[parent], source)
        for parent, token, claim, depth, source in facts
        if parent in chosen
    ]


def _choice(offer: Offer, nodes: int, ms: float, plain_rate: float) -> VerifyChoice:
    tokens, own = 1.0 + sum(offer.survivals[:nodes]), offer.policy
    if not nodes:
        return VerifyChoice("plain", 0, Decision("plain", own.note, tokens, ms, plain_rate))
    kind: Literal["chain", "tree"] = "tree" if nodes > offer.straight else "chain"
    note = "a trial" if own.trial else ""
    return VerifyChoice(kind, nodes, Decision(f"{kind}:{nodes + 1}", note, tokens, ms, plain_rate))


def _why_plain(view: View, speed: float) -> str:
    if view.room <= 1:
        return "one token is left to commit"
    if not view.policy.deepest:
        return "the text offers nothing that is worth a row" if view.text else "nothing can be drafted"
    return f"drafting would give {speed:.2f} times plain decoding's speed" if speed else "a draft would take too long"


def _most_nodes(mode: Mode, proposals: int) -> int:
    if mode.kind == "auto":
        return MAX_AUTO_ROWS - 1
    if mode.kind == "plain" or proposals < 1:
        return 0
    nodes = mode.width - 1 if mode.width else proposals
    return min(nodes, proposals) if mode.kind == "chain" else nodes
