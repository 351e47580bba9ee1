"""The engine on a GPU: decoding runs as whole device steps, one of them in flight while the host tells the last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.engine.engine import Engine, Outcome
from slipstream.engine.gpu.landing import Landing
from slipstream.engine.gpu.loop import DecodeLoop, Flight
from slipstream.engine.gpu.passes import GpuBlocks
from slipstream.engine.gpu.planner import Cohort, Intent, Planner, TimedStep
from slipstream.engine.gpu.state import Decoding
from slipstream.engine.proposer import Plan
from slipstream.engine.runner import ForwardResult
from slipstream.engine.scheduler import StepPlan, Ticket
from slipstream.engine.session import Session
from slipstream.engine.variants import DraftVariant
from slipstream.kernels.gpu.tree_growth import MOST_ROWS
from slipstream.models.gpu.device_models import GpuDrafter
from slipstream.speculative.gates import EntropyGate
from slipstream.types import GenEvent, Request, SamplingParams

_NO_LOGITS = ForwardResult([], [torch.empty(0)], None, [])  # they stay on the device
_NOBODY = Decoding(0, 0, (), SamplingParams(), share_noise=False)


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Who shares a whole device step (all of one variant), and who does not."""

    tickets: list[Ticket]
    whole: Cohort
    rest: list[Session]
    drafter: GpuDrafter | None


@dataclass(frozen=True, slots=True)
class _Aloft:
    """A step in flight, for whom it is and what was intended with each."""

    flight: Flight
    cohort: Cohort
    intent: Intent
    pages: list[list[int]]  # that it writes to: who has others by now was computed again meanwhile
    launched: float
    ahead: bool  # of what the host had still to do for the step before


class GpuEngine(Engine):
    """Requests that need the host between draft and token (constraints, penalties, log-probabilities) go the general
    way, everybody else shares whole device steps.
    """

    loop: DecodeLoop
    planner: Planner
    _groups: _Sorted | None = None
    _aloft: _Aloft | None = None
    _landed_at = 0.0
    _device_view: dict[Session, object]  # where the device's sequences stand, as the host last saw them

    def install(self, loop: DecodeLoop, most_rows: int) -> None:
        self.loop = loop
        self.planner = Planner(self.proposer, loop, most_rows)
        self._device_view = {}

    def _ticket(self, request: Request) -> Ticket:
        ticket = super()._ticket(request)
        # a step launched ahead may stand behind the last token already
        ticket.positions += 2 * MOST_ROWS
        return ticket

    def add_variant(self, variant: DraftVariant) -> None:
        super().add_variant(variant)
        self._groups = None

    def remove_variant(self, name: str) -> None:
        found = self._runner.variants.find(name)
        super().remove_variant(name)
        self._groups = None
        if found is not None and isinstance(found.blocks, GpuBlocks):
            self.loop.forget_drafter(found.blocks.gpu)
            found.blocks.forget()

    def _run(self, plan: StepPlan) -> list[GenEvent]:
        groups = self._groups
        if groups is None or groups.tickets != plan.decode:
            groups = self._groups = self._sorted(plan.decode, groups)
        events: list[GenEvent] = []
        if plan.prefill or groups.rest:
            events += super()._run(StepPlan(plan.prefill, [session.ticket for session in groups.rest]))
        if groups.whole.places:
            events += self._decode(groups, alone=not (plan.prefill or groups.rest))
        return events

    def _sorted(self, tickets: list[Ticket], before: _Sorted | None) -> _Sorted:
        whole: list[Session] = []
        rest: list[Session] = []
        variant: str | None = None
        for session in map(self._session, tickets):
            fits = _device_serves(session)
            if fits and session.ticket.state.drafting:
                variant = variant or session.ticket.state.variant
                fits = session.ticket.state.variant == variant and self._drafter(variant) is not None
            (whole if fits else rest).append(session)
        drafter = self._drafter(variant)
        same = before.whole.without_others(whole) if before is not None and before.drafter is drafter else None
        return _Sorted(tickets, same or Cohort.of(whole), rest, drafter)

    def _drafter(self, variant: str | None) -> GpuDrafter | None:
        """The variant as device steps use it; some heads ask the host between their tokens."""
        found = self._runner.variants.find(variant) if variant is not None else None
        if found is None or not isinstance(found.blocks, GpuBlocks) or not found.blocks.gpu.on_device:
            return None
        return found.blocks.gpu

    def _decode(self, groups: _Sorted, alone: bool) -> list[GenEvent]:
        cohort = groups.whole
        aloft, self._aloft = self._aloft, None
        if aloft is None:
            if any(self._device_view.get(session) != _standing(session) for session in cohort.sessions):
                self.loop.forget_batch()  # somebody was paused, computed again, or decoded another way meanwhile
            aloft = self._launch(groups, alone, ahead=False)
        here = _still_here(aloft, cohort)
        tickets = [session.ticket for session in cohort.sessions]
        # who gets his last token now is in the next step for nothing, unless there is nobody else in it
        if (
            alone
            and aloft.cohort.columns is cohort.columns
            and len(here) == len(tickets)
            and any(ticket.max_tokens - ticket.generated > 1 for ticket in tickets)
        ):
            self._aloft = self._launch(groups, alone, ahead=True)
        return self._land(aloft, here, alone)

    def _launch(self, groups: _Sorted, alone: bool, ahead: bool) -> _Aloft:
        cohort = groups.whole
        intent = self.planner.plan(cohort, groups.drafter, alone)
        flight = self.loop.launch(cohort.columns, partial(self._describe, cohort), intent.wishes, groups.drafter)
        pages = [session.ticket.state.pages for session in cohort.columns]
        return _Aloft(flight, cohort, intent, pages, time.perf_counter(), ahead)

    def _describe(self, cohort: Cohort) -> list[Decoding]:
        self._runner.write_waiting([session.ticket.state for session in cohort.sessions])
        described = [_NOBODY] * len(cohort.columns)
        for place, session in zip(cohort.places, cohort.sessions, strict=True):
            state, request = session.ticket.state, session.ticket.request
            described[place] = Decoding(
                state.length,
                state.tokens[state.length],
                state.pages,
                request.sampling,
                request.share_noise,
                state.slots,
            )
        return described

    def _land(self, aloft: _Aloft, here: Sequence[int], alone: bool) -> list[GenEvent]:
        """What the step did for those who are still there, by their places in it."""
        landing, cohort = self.loop.land(aloft.flight), aloft.cohort
        # a step launched ahead begins when the one before it ends
        now = time.perf_counter()
        seconds, self._landed_at = now - max(aloft.launched, self._landed_at), now
        pupils = self.planner.pupils(cohort) if landing.drafted else set()
        outcomes = [self._told(aloft, landing, place, seconds, place in pupils) for place in here]
        if pupils:
            self.planner.learn(cohort, landing, aloft.intent, pupils.intersection(here))
        counts = [len(outcome.tokens) for outcome in outcomes]
        events = self._settle(outcomes)
        # whose results were dropped stands further on the device than here, which only matters if he comes back
        gone = set(cohort.places).difference(here) if len(here) < len(cohort.places) else ()
        dropped = [cohort.columns[place] for place in gone]
        if not all(outcome.tokens for outcome in outcomes) or any(session.finish_reason is None for session in dropped):
            self._forget_device()
        if self._aloft is None:
            self._device_view = {session: _standing(session) for session in cohort.sessions}
        captured = aloft.flight.captured or (self._aloft is not None and self._aloft.flight.captured)
        if aloft.ahead and alone:
            step = TimedStep(aloft.flight.rows, here, counts, seconds, bool(self.scheduler.waiting))
            self.planner.time(cohort, aloft.intent, step, captured)
            if not (captured or dropped):
                self.planner.cost(cohort, landing, aloft.intent, sum(counts), seconds)
        return events

    def _told(self, aloft: _Aloft, landing: Landing, place: int, seconds: float, learns: bool) -> Outcome:
        """The step as one request takes it; what goes wrong with its own tokens ends that request only."""
        session, decision = aloft.cohort.columns[place], aloft.intent.decisions[place]
        if session.finish_reason is not None:
            return Outcome(session, [])
        (verdict, tokens), spent = landing.outcome(place), (0.0, seconds)
        proposal = landing.proposal(place, learns)
        session.ticket.state.land(max(1, len(verdict.path)))
        try:
            if place in landing.failed:
                plan = Plan(proposal, decision)
                return self._decode_outcome(0, session, plan, _NO_LOGITS, landing.chosen(place), spent)
            outcome = self._taken(session, proposal, decision, verdict, tokens, spent)
            policy = session.speculation.policy
            if learns and policy is not None and proposal.nodes:
                policy.learn(proposal, verdict, verdict.tokens)
        except Exception as error:
            self._blame(session, error)
            return Outcome(session, [])
        if place in landing.broken:
            session.stats.bad_drafts += 1
            session.ticket.state.spoiled = True
            if policy is not None:
                policy.draft_failed()
        # the device has moved a tree's kept rows together already
        outcome.rows = range(len(outcome.rows))
        return outcome

    def _forget_device(self) -> None:
        """A sequence did not move on as the device believes: what is in flight is void, and so is what was planned."""
        self._aloft = None
        self.planner.forget()
        self.loop.forget_batch()


def _standing(session: Session) -> object:
    """Everything the device must agree on about a sequence."""
    state = session.ticket.state
    return state.length, len(state.tokens), state.slots, *state.pages


def _still_here(aloft: _Aloft, cohort: Cohort) -> list[int]:
    """The places of those in flight who are still decoding, in the pages they had."""
    present = set(cohort.sessions) if aloft.cohort is not cohort else None
    columns, pages = aloft.cohort.columns, aloft.pages
    return [
        place
        for place in aloft.cohort.places
        if columns[place].ticket.state.pages is pages[place] and (present is None or columns[place] in present)
    ]


def _device_serves(session: Session) -> bool:
    request = session.ticket.request
    params = request.sampling
    return (
        request.constraint is None
        and session.sampler.guide is None
        and not params.penalised
        and not params.logit_bias
        and params.logprobs is None
        and not request.min_confidence
        and not isinstance(session.speculation.gate, EntropyGate)
        and session.speculation.rows <= MOST_ROWS
    )
