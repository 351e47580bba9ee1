"""Whole device steps, one of them launched ahead: while the host reports a step, the device runs the next.

A step is *launched* when the device has been given its work, and it has *landed* when its results are on the host. A
sequence that finishes in a step still has rows in the step that is already launched; when that step lands, the results
of those rows are dropped. They were written only after the committed length, in pages that no other sequence can get
before the step is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.engine.active_sequence import ActiveSequence
from slipstream.engine.batch_planner import BatchPlan, BatchPlanner, DeviceBatch, TimedStep
from slipstream.engine.draft_context import DraftContexts
from slipstream.engine.executor import EMPTY_COLUMN, BatchColumn, DeviceSteps, Landed, Launched
from slipstream.engine.outcomes import Proposed, SequenceOutcome, decode_outcome, taken_outcome
from slipstream.engine.variants import DraftVariant, DraftVariants
from slipstream.speculative.gates import EntropyGate


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way: its batch, and what was planned for each of its sequences."""

    launched: Launched
    batch: DeviceBatch
    plan: BatchPlan
    pages: list[list[int]]  # pages that each column writes; a sequence with other pages by now was computed again
    launched_at: float
    ahead: bool  # launched before the host had finished the step before it


@dataclass(frozen=True, slots=True)
class LandedStep:
    """A step whose results are on the host."""

    step: LaunchedStep
    results: Landed
    present: Sequence[int]  # columns whose sequences still decode, in the pages they had
    seconds: float
    learning: set[int] = field(default_factory=set)  # columns whose policies learn from this step

    def sequence(self, column: int) -> ActiveSequence:
        return self.step.batch.columns[column]

    def outcome(self, column: int) -> SequenceOutcome:
        """Commits one column's results to its sequence and its policy; returns what the request takes of the step."""
        sequence, results, learns = self.sequence(column), self.results, column in self.learning
        verdict, tokens = results.outcome(column)
        proposed = Proposed(results.proposal(column, learns), self.step.plan.decisions[column])
        sequence.state.land(max(1, len(verdict.path)))
        if column in results.failed:
            return decode_outcome(sequence, proposed, results.chosen(column), None, 0.0, self.seconds)
        outcome = taken_outcome(sequence, proposed, verdict, tokens, 0.0, self.seconds)
        if learns and sequence.policy is not None and proposed.proposal.nodes:
            sequence.policy.learn(proposed.proposal, verdict)
            sequence.policy.learn_widths(proposed.proposal.nodes, verdict.path)
        if column in results.broken:
            sequence.note_bad_draft("the drafter's numbers are not finite; such steps run plain")
        without_nodes = self.step.plan.wishes[column].nodes > 0 and not proposed.proposal.nodes
        if sequence.policy is not None and without_nodes and (learns or column in results.broken):
            sequence.policy.draft_was_useless(sequence.policy.rows_ms)  # rows without nodes take as long as others
            sequence.policy.learn_widths(0, [0])
        # The device has moved the kept rows of a tree together already.
        outcome.rows = range(len(outcome.rows))
        return outcome


class LaunchAhead:
    """Splits decoding sequences into a device batch and the rest, and keeps one device step in flight."""

    def __init__(
        self, steps: DeviceSteps, planner: BatchPlanner, contexts: DraftContexts, variants: DraftVariants
    ) -> None:
        self.steps = steps
        self.planner = planner
        self._contexts = contexts
        self._variants = variants
        self._decoding: list[ActiveSequence] = []  # the sequences that were split last
        self._split: tuple[DeviceBatch | None, list[ActiveSequence]] = (None, [])
        self._in_flight: LaunchedStep | None = None
        self._landed_at = 0.0
        # Where the device's sequences stand, as the host last saw them.
        self._standing: dict[ActiveSequence, object] = {}

    def split(self, decoding: list[ActiveSequence]) -> tuple[DeviceBatch | None, list[ActiveSequence]]:
        """The sequences that share a device step (they draft with one variant), and those that need the host."""
        if decoding != self._decoding:
            self._decoding, self._split = list(decoding), self._sorted(decoding)
        return self._split

    def _sorted(self, decoding: Sequence[ActiveSequence]) -> tuple[DeviceBatch | None, list[ActiveSequence]]:
        whole: list[ActiveSequence] = []
        hosted: list[ActiveSequence] = []
        variant: DraftVariant | None = None
        for sequence in decoding:
            fits = self._serves(sequence)
            if fits and sequence.state.drafting:
                own = self._variants[sequence.state.variant]
                variant = variant or own
                fits = own is variant and self.steps.serves(own)
            (whole if fits else hosted).append(sequence)
        if not whole:
            return None, hosted
        served = variant if variant is not None and self.steps.serves(variant) else None
        before = self._split[0]
        same = before.reduced(whole) if before is not None and before.variant is served else None
        return same or DeviceBatch.of(whole, served), hosted

    def _serves(self, sequence: ActiveSequence) -> bool:
        """Returns whether a device step can serve a sequence.

        It must have few enough rows, and nothing may need the host between draft and token: no constraint, penalty,
        bias, log-probabilities, least confidence or entropy gate.
        """
        request, params = sequence.request, sequence.request.sampling
        return (
            sequence.sampler.guide is None
            and not params.penalised
            and not params.logit_bias
            and params.logprobs is None
            and not request.min_confidence
            and not isinstance(sequence.gate, EntropyGate)
            and sequence.row_limit <= self.steps.most_rows_each
        )

    def step(self, batch: DeviceBatch, alone: bool) -> LandedStep:
        """Launches the next step, then waits for the one before it."""
        current, self._in_flight = self._in_flight, None
        if current is None:
            if any(self._standing.get(sequence) != _standing(sequence) for sequence in batch.sequences):
                self.steps.forget_batch()  # a sequence was paused, computed again, or decoded another way meanwhile
            current = self._launch(batch, alone, ahead=False)
        present = _present(current, batch)
        unchanged = current.batch.columns is batch.columns and len(present) == len(batch.places)
        # If every sequence gets its last token now, the next step would run for nothing.
        if alone and unchanged and any(sequence.room > 1 for sequence in batch.sequences):
            self._in_flight = self._launch(batch, alone, ahead=True)
        return self._land(current, present)

    def _launch(self, batch: DeviceBatch, alone: bool, ahead: bool) -> LaunchedStep:
        plan = self.planner.plan(batch, alone)
        launched = self.steps.launch(batch.columns, lambda: self._describe(batch), plan.wishes, batch.variant)
        pages = [sequence.state.pages for sequence in batch.columns]
        return LaunchedStep(launched, batch, plan, pages, time.perf_counter(), ahead)

    def _describe(self, batch: DeviceBatch) -> list[BatchColumn]:
        self._contexts.write_waiting([sequence.state for sequence in batch.sequences])
        described = [EMPTY_COLUMN] * len(batch.columns)
        for place, sequence in zip(batch.places, batch.sequences, strict=True):
            state, request = sequence.state, sequence.request
            described[place] = BatchColumn(
                state.length, sequence.anchor, state.pages, request.sampling, request.share_noise, state.slots
            )
        return described

    def _land(self, step: LaunchedStep, present: Sequence[int]) -> LandedStep:
        results = self.steps.land(step.launched)
        # A step launched ahead begins when the one before it ends.
        now = time.perf_counter()
        seconds, self._landed_at = now - max(step.launched_at, self._landed_at), now
        learning = self.planner.learnt_places(step.batch) if step.launched.rows > 1 else set()
        return LandedStep(step, results, present, seconds, learning)

    def learn_times(self, landed: LandedStep) -> None:
        """Tells the policies how long the rows of their drafts took, before they learn what came of them."""
        if landed.learning:
            step = landed.step
            self.planner.learn_times(
                step.batch, landed.results, step.plan, landed.learning.intersection(landed.present)
            )

    def settled(self, landed: LandedStep, outcomes: Sequence[SequenceOutcome], alone: bool, crowded: bool) -> None:
        """Compares the device's view with what was committed, and takes in how long the step took."""
        step, counts = landed.step, [len(outcome.tokens) for outcome in outcomes]
        gone = set(step.batch.places).difference(landed.present)
        dropped = [landed.sequence(column) for column in gone]
        # A dropped sequence stands further on the device than on the host, which matters only if it comes back.
        if not all(counts) or any(sequence.finish_reason is None for sequence in dropped):
            self._forget_device()
        if self._in_flight is None:
            self._standing = {sequence: _standing(sequence) for sequence in step.batch.sequences}
        captured = step.launched.captured or (self._in_flight is not None and self._in_flight.launched.captured)
        if step.ahead and alone:
            timed = TimedStep(step.launched.rows, landed.present, counts, landed.seconds, crowded)
            self.planner.tell_gate(step.batch, step.plan, timed, captured)
            if not (captured or dropped):
                self.planner.tell_policy(step.batch, landed.results, step.plan, sum(counts), landed.seconds)

    def _forget_device(self) -> None:
        """Drops the step in flight and the held plan, because a sequence did not advance as they assume."""
        self._in_flight = None
        self.planner.forget()
        self.steps.forget_batch()

    def forget_variant(self, gone: DraftVariant) -> None:
        """Drops every reference to a removed variant, so that its weights are freed."""
        self._decoding, self._split = [], (None, [])
        if self._in_flight is not None and self._in_flight.batch.variant is gone:
            self._forget_device()
        self.planner.forget_batch()


def _standing(sequence: ActiveSequence) -> object:
    """Everything about a sequence on which device and host must agree."""
    state = sequence.state
    return state.length, len(state.tokens), state.slots, *state.pages


def _present(step: LaunchedStep, batch: DeviceBatch) -> list[int]:
    """The columns in flight whose sequences still decode, in the pages they had."""
    here = set(batch.sequences) if step.batch is not batch else None
    columns, pages = step.batch.columns, step.pages
    return [
        place
        for place in step.batch.places
        if columns[place].state.pages is pages[place] and (here is None or columns[place] in here)
    ]
