"""The engine on a GPU: decoding runs as whole device steps, one of them in flight while the host tells the last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.gpu.loop import DecodeLoop, Flight
from slipstream.engine.gpu.passes import GpuBlocks
from slipstream.engine.gpu.planner import Planner
from slipstream.engine.gpu.state import Decoding
from slipstream.engine.proposer import Plan
from slipstream.engine.runner import ForwardResult
from slipstream.engine.scheduler import StepPlan, Ticket
from slipstream.engine.session import Session
from slipstream.kernels.gpu.growth import MOST_ROWS
from slipstream.models.gpu_models import GpuDrafter
from slipstream.speculative.gates import EntropyGate
from slipstream.types import Decision, GenEvent, Request

_NO_LOGITS = ForwardResult([], [torch.empty(0)], None, [])  # they stay on the device


@dataclass(frozen=True, slots=True)
class _Aloft:
    """A step in flight, for whom it is and what was decided for each."""

    flight: Flight
    sessions: tuple[Session, ...]
    decisions: list[Decision]
    launched: float


class GpuEngine(Engine):
    """Requests that need the host between draft and token (constraints, penalties, log-probabilities) go the general
    way, everybody else shares whole device steps.
    """

    loop: DecodeLoop
    planner: Planner
    _aloft: _Aloft | None = None
    _landed_at = 0.0
    _device_view: object = None  # where the device's sequences stand, as the host last saw them

    def install(self, loop: DecodeLoop, most_rows: int) -> None:
        self.loop = loop
        self.planner = Planner(self.proposer, most_rows)

    def _ticket(self, request: Request) -> Ticket:
        ticket = super()._ticket(request)
        # a step launched ahead may stand behind the last token already
        ticket.positions += 2 * MOST_ROWS
        return ticket

    def remove_variant(self, name: str) -> None:
        found = self._runner.variants.find(name)
        super().remove_variant(name)
        if found is not None and isinstance(found.blocks, GpuBlocks):
            self.loop.forget_drafter(found.blocks.gpu)
            found.blocks.forget()

    def _run(self, plan: StepPlan) -> list[GenEvent]:
        whole, rest = self._sorted(plan.decode)
        events: list[GenEvent] = []
        if plan.prefill or rest:
            events += super()._run(StepPlan(plan.prefill, [session.ticket for session in rest]))
        if whole:
            events += self._decode(tuple(whole), alone=not (plan.prefill or rest or self.scheduler.waiting))
        return events

    def _sorted(self, tickets: Sequence[Ticket]) -> tuple[list[Session], list[Session]]:
        """Who shares a whole device step (all of one variant), and who does not."""
        whole: list[Session] = []
        rest: list[Session] = []
        variant: str | None = None
        for session in map(self._session, tickets):
            fits = _device_serves(session)
            if fits and session.ticket.state.drafting:
                variant = variant or session.ticket.state.variant
                fits = session.ticket.state.variant == variant and self._drafter(variant) is not None
            (whole if fits else rest).append(session)
        return whole, rest

    def _drafter(self, variant: str | None) -> GpuDrafter | None:
        """The variant as device steps use it; some heads ask the host between their tokens."""
        found = self._runner.variants.find(variant) if variant is not None else None
        if found is None or not isinstance(found.blocks, GpuBlocks) or not found.blocks.gpu.on_device:
            return None
        return found.blocks.gpu

    def _decode(self, sessions: tuple[Session, ...], alone: bool) -> list[GenEvent]:
        aloft, self._aloft = self._aloft, None
        if aloft is None:
            if self._device_view != _standing(sessions):
                self.loop.forget_batch()  # somebody was paused, computed again, or decoded another way meanwhile
            aloft = self._launch(sessions)
        if aloft.sessions == sessions and alone and all(session.ticket.room > 1 for session in sessions):
            self._aloft = self._launch(sessions)
        return self._land(aloft, sessions)

    def _launch(self, sessions: tuple[Session, ...]) -> _Aloft:
        wishes, decisions = self.planner.plan(sessions)
        drafting = next((s.ticket.state.variant for s in sessions if s.ticket.state.drafting), None)
        batch = tuple(session.ticket.request.id for session in sessions)
        flight = self.loop.launch(batch, partial(self._describe, sessions), wishes, self._drafter(drafting))
        return _Aloft(flight, sessions, decisions, time.perf_counter())

    def _describe(self, sessions: Sequence[Session]) -> list[Decoding]:
        states = [session.ticket.state for session in sessions]
        self._runner.write_waiting(states)
        return [
            Decoding(
                state.length, state.tokens[state.length], state.pages, session.ticket.request.sampling,
                session.ticket.request.share_noise,
            )
            for state, session in zip(states, sessions, strict=True)
        ]

    def _land(self, aloft: _Aloft, present: Sequence[Session]) -> list[GenEvent]:
        """What the step did for those who are still there."""
        landed = self.loop.land(aloft.flight)
        # a step launched ahead begins when the one before it ends
        now = time.perf_counter()
        seconds, self._landed_at = now - max(aloft.launched, self._landed_at), now
        sessions, plans, outcomes = [], [], []
        for session, decision, each in zip(aloft.sessions, aloft.decisions, landed, strict=True):
            if session not in present:
                continue
            plan = Plan(each.proposal, decision)
            outcome = self._guarded(session, partial(
                self._decode_outcome, 0, session, plan, _NO_LOGITS, each.chosen, (0.0, seconds)
            ))
            # the device has moved a tree's kept rows together already
            outcomes.append(replace(outcome, rows=range(len(outcome.rows))))
            sessions.append(session)
            plans.append(plan)
            if not outcome.tokens:
                self._forget_device()
        self.planner.learn(sessions, [plan.proposal for plan in plans])
        drafted = any(plan.proposal.nodes for plan in plans)
        self.planner.observe(sessions, drafted, sum(len(outcome.tokens) for outcome in outcomes), seconds)
        events = self._settle(outcomes)
        self._device_view = _standing(aloft.sessions)
        if len(sessions) < len(aloft.sessions):
            self._forget_device()  # whose results were dropped stands further on the device than here
        committed = [len(outcome.tokens) for outcome in outcomes]
        self.proposer.observe(sessions, plans, committed, 0.0, seconds)
        return events

    def _forget_device(self) -> None:
        """A sequence did not move on as the device believes: what is in flight is void."""
        self._aloft = None
        self.loop.forget_batch()


def _standing(sessions: Sequence[Session]) -> object:
    """Everything the device must agree on about sequences."""
    states = [session.ticket.state for session in sessions]
    ids = [session.ticket.request.id for session in sessions]
    return [(name, state.length, len(state.tokens), *state.pages) for name, state in zip(ids, states, strict=True)]


def _device_serves(session: Session) -> bool:
    request = session.ticket.request
    params = request.sampling
    return (
        request.constraint is None and session.sampler.guide is None and not params.penalised
        and not params.logit_bias and params.logprobs is None and not request.min_confidence
        and not isinstance(session.speculation.gate, EntropyGate) and session.speculation.rows <= MOST_ROWS
    )
