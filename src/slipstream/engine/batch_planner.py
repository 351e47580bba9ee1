"""Plans what each sequence proposes in a device step, before its draft exists: the host does not wait for the draft.

To save the host's time, which limits batches whose steps take a millisecond, a plan serves several steps and the policy
learns from at most two sequences a step. The sequences take turns; two outcomes of sixty teach nearly as much as all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.engine.active_sequence import ActiveSequence
from slipstream.engine.executor import NO_SEQUENCE, DeviceSteps, Landed, Wish, bucket
from slipstream.engine.proposer import MeasuredStep, Proposer, gate_reading, longest_context
from slipstream.engine.variants import DraftVariant
from slipstream.kernels.rows import CHAIN, SEEDED_TREE, TREE
from slipstream.lazy import cached_property
from slipstream.speculative.costs import StepShape
from slipstream.speculative.gates import BatchGate, EmaGate
from slipstream.speculative.slowest_share import SlowestShare
from slipstream.stats import Decision

_FEW_SEQUENCES = 4  # up to so many, the policy chooses which sequences draft; choosing among more takes too long
_LEARNT_SEQUENCES = 2  # sequences that the policy learns from in a step; more would cost the host more than they teach
# From so many sequences on, the policy learns only in some steps, because learning takes the host's time.
_SKIPPING_SEQUENCES = 64
# Steps that a plan for few sequences serves, and a plan for many. With larger numbers plans are older when they are
# used; with smaller ones the host plans more often, which slows batches down.
_SHORTEST_HELD_STEPS, _LONGEST_HELD_STEPS = 2, 32
_GOOD_ENOUGH = 0.9  # a shape with this share of the best rate is taken if no graph has to be captured for it
# Columns per remaining sequence at which the batch is laid out anew. With fewer it is laid out more often, and all its
# sequences wait for that; with more, empty columns are computed for longer.
_SPARSE_COLUMNS = 2
# At least this share of a step counts as verify, because the estimate of a draft on a busy host can be too high.
_LEAST_VERIFY_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """The sequences that decode together on the device, for as long as they are the same.

    The device has a column for each. A sequence that ends leaves an empty column until the batch is laid out anew, so
    that the others need not wait for that.
    """

    columns: tuple[ActiveSequence, ...]
    places: tuple[int, ...]  # the columns whose sequences are still there
    variant: DraftVariant | None  # the drafter of all sequences that draft

    @classmethod
    def of(cls, sequences: Sequence[ActiveSequence], variant: DraftVariant | None = None) -> DeviceBatch:
        return cls(tuple(sequences), tuple(range(len(sequences))), variant)

    def reduced(self, sequences: Sequence[ActiveSequence]) -> DeviceBatch | None:
        """The same columns with only these sequences; None if one has no column, or too many columns are empty by now.

        A batch of recurrent sequences is always laid out anew, because another sequence soon uses the states of a
        column that became empty.
        """
        left, known = set(sequences), set(self.sequences)
        if not left <= known or _SPARSE_COLUMNS * len(left) <= len(self.columns):
            return None
        if any(sequence.state.recurrent is not None for sequence in sequences):
            return None
        places = tuple(place for place in self.places if self.columns[place] in left)
        return DeviceBatch(self.columns, places, self.variant)

    @cached_property
    def sequences(self) -> tuple[ActiveSequence, ...]:
        return tuple(self.columns[place] for place in self.places)

    @cached_property
    def governed(self) -> tuple[int, ...]:
        """The places of sequences that have a policy."""
        return tuple(place for place in self.places if self.columns[place].policy is not None)

    @property
    def skips_gate(self) -> bool:
        """Returns whether the batch's gate is not asked.

        It is not asked if no sequence has a policy, or if few sequences draft from text only. A draft from the text
        costs a few percent of a small batch's step. Speeds of different texts differ by more, so the gate's comparison
        would often stop drafts that pay.
        """
        return not self.governed or (self.variant is None and len(self.columns) <= _FEW_SEQUENCES)

    @cached_property
    def speculates(self) -> bool:
        return any(sequence.row_limit > 1 for sequence in self.sequences)

    @cached_property
    def ema_gates(self) -> tuple[tuple[int, EmaGate], ...]:
        gates = ((place, self.columns[place].gate) for place in self.places)
        return tuple((place, gate) for place, gate in gates if isinstance(gate, EmaGate))

    @cached_property
    def sampled(self) -> bool:
        return any(not sequence.greedy for sequence in self.sequences)

    @property
    def context(self) -> int:
        return longest_context(self.sequences)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What every column of a batch proposes, and the reason for it."""

    wishes: Sequence[Wish]
    decisions: Sequence[Decision]
    may_draft: bool  # whether sequences with a policy may draft: the batch's gate lets them, or it was not asked
    branching: bool  # some column proposes more than a chain

    @classmethod
    def of(
        cls, batch: DeviceBatch, wishes: Sequence[Wish], decisions: Sequence[Decision], may_draft: bool
    ) -> BatchPlan:
        """Makes a plan from the wishes of the sequences that are still there; an empty column gets no rows."""
        count = len(batch.columns)
        spread, reasons = [NO_SEQUENCE] * count, [Decision()] * count
        for place, wish, decision in zip(batch.places, wishes, decisions, strict=True):
            spread[place], reasons[place] = wish, decision
        return cls(spread, reasons, may_draft, any(wish.nodes > 1 and wish.shape != CHAIN for wish in wishes))

    def left_to(self, batch: DeviceBatch) -> BatchPlan:
        """The same plan for the sequences that are still there."""
        there = set(batch.places)
        wishes = [wish if place in there else NO_SEQUENCE for place, wish in enumerate(self.wishes)]
        return BatchPlan(wishes, self.decisions, self.may_draft, self.branching)

    @classmethod
    def plain(cls, batch: DeviceBatch, reason: str) -> BatchPlan:
        count = len(batch.places)
        return cls.of(batch, [Wish()] * count, [Decision("plain", reason)] * count, may_draft=False)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What a step gave the sequences that were still there, and how long it took."""

    rows: int  # rows per sequence
    places: Sequence[int]
    tokens: Sequence[int]  # tokens that each of these sequences got
    seconds: float
    crowded: bool  # some sequence waits for a column


class BatchPlanner:
    """Plans the steps of device batches; owns the batch's gate and the plan held for the next steps.

    Device steps come in a few widths, and all of one width cost the same.
    """

    def __init__(self, proposer: Proposer, steps: DeviceSteps) -> None:
        self._proposer = proposer
        self._steps = steps
        self.gate = BatchGate()
        self._shares: dict[int, SlowestShare] = {}
        self._shares_of: tuple[ActiveSequence, ...] = ()
        self._batch: DeviceBatch | None = None
        self._plain: BatchPlan
        self._held: BatchPlan | None = None
        self._age = 0
        self._turn = 0

    def forget(self) -> None:
        """Drops the held plan, because it does not know what has happened to a sequence."""
        self._held = None

    def forget_batch(self) -> None:
        """Drops the planned batch, which refers to its drafter."""
        self._batch = self._held = None

    def plan(self, batch: DeviceBatch, alone: bool) -> BatchPlan:
        """What the sequences of a step propose.

        A step is not `alone` if it waits for a host step with prompts or other sequences. The batch's gate then runs no
        trial, and neither it nor the shared policy gets the step's time; the sequences' own policies learn as always.
        """
        count = len(batch.places)
        if batch is not self._batch:
            # Of many sequences one ends at nearly every step: a new plan each time would take longer than the steps.
            known = self._batch is not None and self._batch.columns is batch.columns
            self._held = self._held.left_to(batch) if known and self._held is not None else None
            self._batch = batch
            self._plain = BatchPlan.plain(batch, "the whole batch is quicker without drafts" if batch.governed else "")
        if not batch.speculates:
            return self._plain
        size = len(batch.columns)
        may_draft = batch.skips_gate or (self.gate.drafts(size) if alone else self.gate.better(size))
        if not may_draft and len(batch.governed) == count:
            return self._plain
        self._age += 1
        held = self._held
        longest = min(_LONGEST_HELD_STEPS, max(_SHORTEST_HELD_STEPS, count // 2))
        if held is None or held.may_draft != may_draft or self._age >= longest:
            once = any(sequence.next_step_plain for sequence in batch.sequences)
            held = self._held = self._made(batch, may_draft)
            self._age = 0
            if once or any(sequence.policy is not None and sequence.policy.trial for sequence in batch.sequences):
                self._held = None  # for a single step: a trial is paid for once, and a plain step follows bad numbers
        return held

    def _made(self, batch: DeviceBatch, may_draft: bool) -> BatchPlan:
        sequences = batch.sequences
        few = len(sequences) <= _FEW_SEQUENCES
        slots = self._proposer.slots(sequences) if few else self._proposer.most_slots(sequences)
        if not may_draft:
            slots = [0 if own.policy else depth for own, depth in zip(sequences, slots, strict=True)]
        rows = self._widest_paying(batch, self._rates(batch, slots))
        most_nodes = max(1, self._steps.most_rows // bucket(len(batch.columns))) - 1
        wishes = [
            _wish(sequence, depth, self._proposer.positions, rows, most_nodes)
            for sequence, depth in zip(sequences, slots, strict=True)
        ]
        decisions = [_decision(*each) for each in zip(sequences, wishes, strict=True)]
        return BatchPlan.of(batch, wishes, decisions, may_draft)

    def _widest_paying(self, batch: DeviceBatch, rates: dict[int, float]) -> int:
        """The rows per sequence that promise most; nearly as much is enough if that shape is captured already."""
        if not rates:
            return 1
        ready = [rows for rows in rates if self._steps.ready(len(batch.columns), rows, batch.variant)]
        best, known = max(rates, key=rates.__getitem__), max(ready, key=rates.__getitem__, default=0)
        return known if known and rates[known] >= _GOOD_ENOUGH * rates[best] else best

    def _rates(self, batch: DeviceBatch, slots: Sequence[int]) -> dict[int, float]:
        """Tokens per millisecond that so many rows per sequence promise; empty if no sequence drafts."""
        sequences = batch.sequences
        drafting = [
            (sequence.policy, depth)
            for sequence, depth in zip(sequences, slots, strict=True)
            if sequence.policy is not None and depth
        ]
        rates: dict[int, float] = {}
        if not drafting:
            return rates
        costs, context = self._proposer.policy.costs, batch.context
        draft_ms = costs.draft_ms(len(drafting), max(depth for _, depth in drafting), context)
        for rows in self._steps.widths(len(batch.columns)):
            tokens = float(len(sequences))
            for policy, depth in drafting:
                # Without a drafter, a device step verifies a chain from the text.
                chain = policy.chains_only or batch.variant is None
                tokens += policy.expected(min(rows - 1, depth if chain else policy.max_nodes))
            shape = StepShape(len(sequences), rows * len(sequences), context, batch.sampled, branching=True)
            rates[rows] = tokens / (draft_ms + costs.step_ms(shape))
        return rates

    def learnt_places(self, batch: DeviceBatch) -> set[int]:
        """The places of sequences whose policies learn from this step; where there are many, they take turns."""
        governed = batch.governed
        if len(governed) <= _LEARNT_SEQUENCES:
            return set(governed)
        self._turn += 1
        lesson, skipped = divmod(self._turn, 1 + len(governed) // _SKIPPING_SEQUENCES)
        if skipped:
            return set()
        first = lesson * _LEARNT_SEQUENCES
        return {governed[(first + turn) % len(governed)] for turn in range(_LEARNT_SEQUENCES)}

    def learn_times(self, batch: DeviceBatch, landed: Landed, plan: BatchPlan, places: Iterable[int]) -> None:
        """Tells the policies at these places how long the rows of their drafts took, before they learn the outcomes."""
        shape, costs = _shape(batch, landed, plan), self._proposer.policy.costs
        plain = shape._replace(rows=shape.batch, branching=False)
        per_node = (costs.step_ms(shape) - costs.step_ms(plain)) / max(1, shape.rows - shape.batch)
        for place in places:
            policy = batch.columns[place].policy
            if policy is not None:
                policy.rows_ms = max(0.0, per_node) * _nodes(batch, landed, plan, place)

    def tell_gate(self, batch: DeviceBatch, plan: BatchPlan, step: TimedStep, captured: bool) -> None:
        """Tells the batch's gate the tokens and the time of a step, the host's work included.

        If a graph was captured meanwhile, the time only counts as lost.
        """
        size = len(batch.columns)
        if not batch.governed:
            return
        if captured:
            self.gate.pay(size, step.seconds)
            return
        tokens = sum(step.tokens) / len(batch.places)
        if plan.may_draft and size > _FEW_SEQUENCES:  # in a small batch the policy has chosen which sequences draft
            share = self._shares_in(batch).slowest_share(step.places, step.tokens)
            # While other sequences wait for a column, one that ends early makes room, so the mean counts alone.
            tokens *= 1.0 if step.crowded else share
        self.gate.observe(size, plan.may_draft, step.rows, tokens, step.seconds)

    def _shares_in(self, batch: DeviceBatch) -> SlowestShare:
        """How the sequences of a batch differ; what is known of one batch says something about the next of its size."""
        shares = self._shares.setdefault(bucket(len(batch.columns)), SlowestShare())
        if self._shares_of is not batch.columns:
            self._shares_of = batch.columns
            shares.restart(len(batch.columns))
        return shares

    def tell_policy(self, batch: DeviceBatch, landed: Landed, plan: BatchPlan, committed: int, seconds: float) -> None:
        """Tells the policy the tokens and the time of a step.

        In some steps it also refreshes the cost table and the EMA gates.
        """
        ms = seconds * 1e3
        if batch.governed:
            self._proposer.policy.progress(committed, ms)
        if not (batch.governed or batch.ema_gates) or not self._proposer.timing_due(landed.drafted):
            return
        shape, drafting = _shape(batch, landed, plan), _drafting(batch, landed)
        costs = self._proposer.policy.costs
        draft_ms = costs.draft_ms(drafting, self._proposer.positions, shape.context) if drafting else 0.0
        step_ms = max(_LEAST_VERIFY_SHARE * ms, ms - draft_ms)
        gates = [(gate, landed.taken[place]) for place, gate in batch.ema_gates if _nodes(batch, landed, plan, place)]
        self._proposer.refresh(MeasuredStep(shape, step_ms, ms), gates)


def _drafting(batch: DeviceBatch, landed: Landed) -> int:
    """For how many sequences a draft was verified."""
    return sum(landed.nodes[place] > 0 for place in batch.places)


def _nodes(batch: DeviceBatch, landed: Landed, plan: BatchPlan, place: int) -> int:
    """Returns how many rows one sequence's draft took.

    A drafter fills nearly all rows that are planned for it. A text may fill none of them. They take their time all the
    same, so the planned rows count.
    """
    return landed.nodes[place] if batch.variant is not None else max(0, plan.wishes[place].nodes)


def _shape(batch: DeviceBatch, landed: Landed, plan: BatchPlan) -> StepShape:
    """The shape by which the cost table knows a step."""
    count = len(batch.places)
    rows = count + sum(_nodes(batch, landed, plan, place) for place in batch.places)
    return StepShape(count, rows, batch.context, batch.sampled, plan.branching and rows > count)


def _wish(sequence: ActiveSequence, depth: int, positions: int, policy_rows: int, most_nodes: int) -> Wish:
    """What a sequence proposes; a batch leaves each of its sequences `most_nodes`.

    A request with a fixed shape keeps it even if fewer tokens are left, because another shape could need another graph.
    """
    policy, mode, text = sequence.policy, sequence.request.mode, sequence.index is not None
    if not depth or not most_nodes:
        return Wish()
    if policy is not None:
        nodes = min(policy_rows - 1, policy.max_nodes, most_nodes)
        shape = CHAIN if policy.chains_only else TREE
        return Wish(nodes if shape == TREE else min(nodes, depth), depth, shape, policy.estimate, text)
    if mode.kind == "tree":
        nodes = min(sequence.row_limit - 1, most_nodes)
        return Wish(nodes, positions, SEEDED_TREE if mode.seeded else TREE, text=text)
    return Wish(min(positions, sequence.row_limit - 1, most_nodes), positions, CHAIN)


def _decision(sequence: ActiveSequence, wish: Wish) -> Decision:
    if not wish.nodes:
        return Decision("plain", sequence.policy.note if sequence.policy is not None else gate_reading(sequence))
    return Decision(f"{'chain' if wish.shape == CHAIN else 'tree'}:{wish.nodes + 1}", gate_reading(sequence))
