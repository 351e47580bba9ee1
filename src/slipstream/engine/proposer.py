"""Decides, step by step, what every decoding sequence verifies: asks gates and policy, drafts, grows proposals.

It owns the adaptive policy. Before a device step, `batch_planner` asks that policy, and afterwards it tells the policy
the step's time and tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.engine.active_sequence import ActiveSequence
from slipstream.engine.draft_context import DraftContexts
from slipstream.engine.outcomes import Proposed, SequenceOutcome
from slipstream.engine.variants import DraftVariants
from slipstream.kernels.rows import CHAIN, SEEDED_TREE, TREE
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.constrained_drafts import allowed_part
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.draft import CANDIDATES, DraftJob
from slipstream.speculative.gates import EmaGate, EntropyGate
from slipstream.speculative.policy import ALONE, MAX_AUTO_ROWS, Offer, Policy, Rest, VerifyChoice, View
from slipstream.speculative.suffix_index import text_index
from slipstream.speculative.text_drafts import MOST_TEXT_NODES, merged
from slipstream.speculative.tree import Growth, as_claimed
from slipstream.stats import Decision
from slipstream.types import Proposal

# One of so many plain steps, and on a CPU one of so many drafting steps, refreshes the cost table, because a refresh
# takes time as well.
_TIMED_STEPS = 4


class MeasuredStep(NamedTuple):
    """A step that held nothing but decoding, as the cost table sees it."""

    shape: StepShape
    step_ms: float  # milliseconds without the draft
    total_ms: float  # milliseconds with the draft


class Proposer:
    """Decides what each sequence of one engine verifies; the policy is made when the first request needs it.

    Another policy may be set at any time; requests that are running keep their records of the one before.
    """

    def __init__(
        self,
        contexts: DraftContexts,
        variants: DraftVariants,
        measure_costs: Callable[[], CostTable],
        text_drafts: bool,
        device_steps: bool,
    ) -> None:
        """With `text_drafts`, a sequence's own text is a source of drafts, and the only one without a drafter.

        Device steps look into the text themselves, so that a draft from the text is planned before it is known.
        """
        self._contexts = contexts
        self._variants = variants
        self._measure_costs = measure_costs
        self.text_drafts = text_drafts
        self._planned_text = MOST_TEXT_NODES if text_drafts and device_steps else 0
        self._policy: Policy | None = None
        self._plain_steps = 0  # consecutive steps without a draft
        self._drafted_steps = 0

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            self._policy = Policy(self._measure_costs())
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy

    def forget(self, variant: str) -> None:
        if self._policy is not None:
            self._policy.forget(variant)

    def prepare(self, sequence: ActiveSequence) -> None:
        """Decides how a new sequence speculates; without any source of drafts it decodes plainly."""
        request = sequence.request
        reads_text = self.text_drafts and request.mode.reads_text
        if request.mode.kind == "plain" or not (self.proposals or reads_text):
            return
        sequence.row_limit = MAX_AUTO_ROWS if request.mode.kind == "auto" else request.mode.width or self.positions + 1
        sequence.index = text_index() if reads_text else None
        if request.gate.kind == "auto":
            sequence.policy = self.policy.sequence(
                request.mode, request.gate, self.positions, not sequence.greedy, sequence.state.variant
            )
        elif request.gate.kind == "ema":
            self.policy  # noqa: B018  # measures the costs now, not in the middle of a step
            sequence.gate = EmaGate(request.gate)
        elif request.gate.kind == "entropy":
            sequence.gate = EntropyGate(request.gate)

    def propose(self, sequences: Sequence[ActiveSequence]) -> tuple[list[Proposed], float]:
        """What each decoding sequence verifies, and the seconds spent on deciding and drafting."""
        began = time.perf_counter()
        texts = [self._text_growth(sequence) for sequence in sequences]
        slots = self.slots(sequences, texts)
        if not (any(slots) or any(texts)):
            return [_undrafted(sequence) for sequence in sequences], time.perf_counter() - began
        drafts, caught_up = self._draft(sequences, slots)
        proposed = self._proposed(sequences, drafts, texts)
        for sequence, block in zip(sequences, drafts, strict=True):
            if block is not None and block.broken:
                sequence.note_bad_draft("the drafter's head gives numbers that are not finite; nothing follows there")
        spent, drafting = time.perf_counter() - began, sum(map(bool, slots))
        self._drafted_steps += 1
        if self._policy is not None:
            if any(sequence.policy is not None and sequence.policy.trial for sequence in sequences):
                self._policy.charge(caught_up * 1e3)
            if not self._drafted_steps % _TIMED_STEPS:
                # Growing and choosing are part of what a draft costs, and so is a pass for every variant in the step.
                own_ms = (spent - caught_up) * 1e3
                self._policy.costs.observe_draft(drafting, max(slots), longest_context(sequences), own_ms)
        return proposed, spent

    def _draft(
        self, sequences: Sequence[ActiveSequence], slots: Sequence[int]
    ) -> tuple[list[BlockDrafts | None], float]:
        """The blocks, and the seconds that went into draft context which earlier plain steps had left to write.

        These seconds are no part of a draft's cost. Otherwise rare drafts would look more expensive than frequent ones.
        """
        wanting = [index for index, count in enumerate(slots) if count]
        began = time.perf_counter()
        self._contexts.write_waiting([sequences[index].state for index in wanting])
        caught_up = time.perf_counter() - began
        jobs = [self._job(sequences[index], slots[index]) for index in wanting]
        drafts: list[BlockDrafts | None] = [None] * len(sequences)
        for index, block in zip(wanting, self._contexts.draft(jobs), strict=True):
            drafts[index] = block
            if block is None:
                sequences[index].note_bad_draft("the drafter's numbers are not finite; such steps run plain")
        return drafts, caught_up

    def _proposed(
        self, sequences: Sequence[ActiveSequence], drafts: Sequence[BlockDrafts | None], texts: Sequence[Growth | None]
    ) -> list[Proposed]:
        """Fixed shapes as requests ask for them; the policy then chooses for all other sequences at once."""
        found = {
            index: _fixed(sequence, drafts[index], texts[index])
            for index, sequence in enumerate(sequences)
            if sequence.policy is None
        }
        governed = [index for index in range(len(sequences)) if index not in found]
        if governed:
            rest = _rest([sequences[i] for i in found], _rows(list(found.values())))
            grown = [self._grow(sequences[i], drafts[i], texts[i]) for i in governed]
            chosen = self._choose([sequences[i] for i in governed], grown, rest)
            found |= dict(zip(governed, chosen, strict=True))
        return [found[index] for index in range(len(sequences))]

    def _text_growth(self, sequence: ActiveSequence) -> Growth | None:
        """What a sequence's own text offers; None if it offers nothing."""
        policy, index = sequence.policy, sequence.index
        if index is None or sequence.room < 2 or sequence.next_step_plain or sequence.sampler.slow:
            return None
        if not index.follow(sequence.state.tokens) or not (policy or sequence.drafts_fixed):
            return None
        nodes, depth = min(MOST_TEXT_NODES, sequence.row_limit - 1), sequence.room - 1
        if policy is None:
            growth = index.grow(nodes, depth)
        else:
            growth = index.grow(nodes, depth, policy.estimate, policy.floor, policy.first_from_text)
        if growth.nodes and sequence.sampler.guide is not None:
            growth = allowed_part(sequence.sampler.guide, growth)
        return growth if growth.nodes else None

    def slots(self, sequences: Sequence[ActiveSequence], texts: Sequence[Growth | None] = ()) -> list[int]:
        """How many positions to draft for each sequence, whose own texts may offer nodes as well; 0 is none."""
        slots, views, places = [], [], []
        fixed, fixed_rows = [], 0
        for index, sequence in enumerate(sequences):
            drafts = sequence.drafts_fixed
            slots.append(min(sequence.row_limit - 1, sequence.room - 1, self.positions) if drafts else 0)
            if sequence.policy is not None:
                text = texts[index] if texts else None
                nodes = text.survivals[1:] if text is not None else ()
                views.append(View(sequence.policy, sequence.state.length, not sequence.greedy, sequence.room, nodes))
                places.append(index)
            else:
                fixed.append(sequence)
                fixed_rows += sequence.row_limit if drafts else 1
        if views:
            planned = self.policy.plan_drafts(views, _rest(fixed, fixed_rows))
            for place, count in zip(places, planned, strict=True):
                slots[place] = count
        for index, sequence in enumerate(sequences):
            # With a slow constraint, the masks of drafts would take as long as those of the text. In a host step
            # (`texts` is given) the text has been searched already, so only a drafter can fill slots.
            unfit = sequence.sampler.slow or (texts and not self.proposals)
            if sequence.take_plain_step() or (slots[index] and unfit):
                slots[index] = 0
                if sequence.policy is not None:
                    sequence.policy.slots = 0  # otherwise a draft that was not made would count as a useless one
                    sequence.policy.first_from_text = 0.0  # no draft is left that the text would have to outdo
        return slots

    def most_slots(self, sequences: Sequence[ActiveSequence]) -> list[int]:
        """As many positions for each sequence as it may draft, whatever its policy expects of them."""
        slots = []
        for sequence in sequences:
            policy = sequence.policy
            most = min(sequence.row_limit - 1, self.positions) if policy is None else policy.deepest
            depth = max(0, min(most, sequence.room - 1)) if policy is not None or sequence.drafts_fixed else 0
            if sequence.take_plain_step():
                depth = 0
            if policy is not None:
                policy.slots, policy.trial = depth, False
            slots.append(depth)
        return slots

    @property
    def proposals(self) -> int:
        """Tokens that one block of the drafter proposes."""
        drafter = self._variants.drafter
        return drafter.proposals if drafter is not None else 0

    @property
    def positions(self) -> int:
        """Positions that are planned before a draft is made: those of the drafter, or without one those of the text."""
        return self.proposals or self._planned_text

    def _job(self, sequence: ActiveSequence, slots: int) -> DraftJob:
        request = sequence.request
        candidates = max(CANDIDATES, sequence.row_limit - 1) if request.mode.kind == "tree" else CANDIDATES
        return DraftJob(sequence.state, sequence.sampler, slots, candidates, request.min_confidence)

    def _choose(self, sequences: Sequence[ActiveSequence], grown: Sequence[Growth], rest: Rest) -> list[Proposed]:
        """Lets the policy pick among what was drafted, for all sequences it governs at once."""
        offers = []
        for sequence, growth in zip(sequences, grown, strict=True):
            assert sequence.policy is not None
            length, sampled = sequence.state.length, not sequence.greedy
            offers.append(Offer(sequence.policy, length, sampled, growth.survivals[1:], growth.straight))
        choices = self.policy.choose(offers, rest)
        return [_chosen(*each) for each in zip(sequences, grown, choices, strict=True)]

    def _grow(self, sequence: ActiveSequence, block: BlockDrafts | None, text: Growth | None) -> Growth:
        """The nodes that a sequence could verify, the likeliest first."""
        anchor, policy = sequence.anchor, sequence.policy
        nodes = sequence.row_limit - 1
        if block is None or policy is None:
            return text if text is not None else Growth([anchor])
        depth = min(block.slots, sequence.room - 1)
        if policy.chains_only:
            return block.grow(anchor, CHAIN, nodes, depth, policy.estimate)
        floor = 0.0 if policy.trial else policy.floor
        growth = block.grow(anchor, TREE, nodes, depth, policy.estimate, floor)
        return growth if text is None else merged(growth, text, policy.estimate.chance, nodes)

    @staticmethod
    def learn(outcome: SequenceOutcome) -> None:
        """Tells a sequence's policy or gate what came of its verified step."""
        sequence, step = outcome.sequence, outcome.step
        if step is None:
            return
        if sequence.policy is not None:
            if step.proposal.nodes:
                sequence.policy.learn(step.proposal, step.verdict)
        elif isinstance(sequence.gate, EntropyGate) and outcome.top1 is not None:
            sequence.gate.observe(outcome.top1)

    def observe(
        self,
        sequences: Sequence[ActiveSequence],
        proposed: Sequence[Proposed],
        committed: Sequence[int],
        draft_s: float,
        step_s: float,
    ) -> None:
        """Learns costs from a host step that only decoded; `step_s` is its time without drafting."""
        rows = _rows(proposed)
        drafted = rows > len(proposed)
        if any(each.policy is not None for each in sequences):
            self.policy.progress(sum(committed), (draft_s + step_s) * 1e3)
        if not sequences or not self.timing_due(drafted):
            return
        branching = drafted and any(each.proposal.branching for each in proposed)
        sampled = any(not sequence.greedy for sequence in sequences)
        shape = StepShape(len(sequences), rows, longest_context(sequences), sampled, branching)
        gates = [
            (sequence.gate, count)
            for sequence, own, count in zip(sequences, proposed, committed, strict=True)
            if isinstance(sequence.gate, EmaGate) and own.proposal.nodes
        ]
        times = MeasuredStep(shape, step_s * 1e3, (draft_s + step_s) * 1e3)
        self.refresh(times, gates, timed=not drafted or not self._drafted_steps % _TIMED_STEPS)

    def timing_due(self, drafted: bool) -> bool:
        """Whether costs are learnt from this step. There are many plain steps, so most of them are left out."""
        if self._policy is None:
            return False
        self._plain_steps = 0 if drafted else self._plain_steps + 1
        return not self._plain_steps % _TIMED_STEPS

    def refresh(self, times: MeasuredStep, gates: Sequence[tuple[EmaGate, int]], timed: bool = True) -> None:
        """Takes in what a step really cost; `gates` are those of drafting sequences, with the tokens of each."""
        policy = self.policy
        if timed:
            policy.costs.observe_step(times.shape, times.step_ms)
        if gates:
            plain_ms = policy.costs.step_ms(times.shape._replace(rows=times.shape.batch, branching=False))
            for gate, tokens in gates:
                gate.observe(tokens, times.total_ms, plain_ms)


def _rest(sequences: Sequence[ActiveSequence], rows: int) -> Rest:
    if not sequences:
        return ALONE
    sampled = any(not sequence.greedy for sequence in sequences)
    return Rest(rows, len(sequences), longest_context(sequences), sampled)


def _rows(proposed: Sequence[Proposed]) -> int:
    return sum([len(each.proposal.tokens) for each in proposed])


def longest_context(sequences: Sequence[ActiveSequence]) -> int:
    return max((sequence.state.length for sequence in sequences), default=0)


def _fixed(sequence: ActiveSequence, block: BlockDrafts | None, text: Growth | None) -> Proposed:
    """The shape the request asked for, or the anchor alone."""
    mode, nodes = sequence.request.mode, sequence.row_limit - 1
    growth = Growth([sequence.anchor])
    if block is not None:
        shape = CHAIN if mode.kind != "tree" else SEEDED_TREE if mode.seeded else TREE
        growth = block.grow(sequence.anchor, shape, nodes, min(block.slots, sequence.room - 1))
    if text is not None:
        growth = merged(growth, text, as_claimed, nodes)
    if not growth.nodes:
        return _undrafted(sequence)
    return Proposed(growth.proposal(), Decision(f"{mode.kind}:{growth.nodes + 1}", gate_reading(sequence)))


def gate_reading(sequence: ActiveSequence) -> str:
    """What a request's gate says about this step; empty without a gate."""
    gate = sequence.gate
    if gate is None:
        return ""
    return gate.reading if gate.open else f"the gate has closed: {gate.reading}"


def _undrafted(sequence: ActiveSequence) -> Proposed:
    """The anchor alone, where nothing was drafted."""
    note = sequence.policy.note if sequence.policy is not None else gate_reading(sequence)
    return Proposed(Proposal((sequence.anchor,), (-1,)), Decision("plain", note))


def _chosen(sequence: ActiveSequence, growth: Growth, choice: VerifyChoice) -> Proposed:
    if not choice.nodes and sequence.policy is not None and sequence.policy.slots:
        sequence.policy.draft_was_useless()
    return Proposed(growth.proposal(choice.nodes), choice.decision)
