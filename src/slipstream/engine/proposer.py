"""Decides, step by step, what every decoding sequence verifies: asks gates and policy, drafts, grows proposals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Ticket
from slipstream.engine.session import Session, Speculation
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.draft import DraftJob
from slipstream.speculative.gates import EmaGate, EntropyGate
from slipstream.speculative.policy import MAX_AUTO_ROWS, Offer, Policy, VerifyChoice, View
from slipstream.speculative.tree import Growth
from slipstream.stats import Decision
from slipstream.types import Proposal, Verdict

_HEAD_CANDIDATES = 64  # what a head may choose among; the base ranking hardly ever hides its favourite further down
AUTO_CANDIDATES = 16  # per slot; deeper ranks hardly ever survive a comparison with a row's cost
_FLOOR_SHARE = 0.7  # rows become dearer in steps, so a node below the average price may still come for free
_TIMED_PLAIN_STEPS, _TIMED_DRAFTED_STEPS = 4, 2  # one of so many refreshes the cost table: looking takes time as well
_log = logging.getLogger("slipstream")


class Plan(NamedTuple):
    """What one sequence verifies in this step, and why."""

    proposal: Proposal
    decision: Decision


class Proposer:
    """One per engine; the policy and its cost table are made when the first request needs them."""

    def __init__(self, runner: Runner, measure_costs: Callable[[], CostTable]) -> None:
        self._runner = runner
        self._measure_costs = measure_costs
        self._policy: Policy | None = None
        self._plain_steps = 0  # in a row
        self._drafted_steps = 0

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            self._policy = Policy(self._measure_costs())
        return self._policy

    def forget(self, variant: str) -> None:
        if self._policy is not None:
            self._policy.forget(variant)

    def speculation(self, ticket: Ticket) -> Speculation:
        """The state a new request speculates with."""
        request, drafter = ticket.request, self._runner.drafter
        if request.mode.kind == "plain" or drafter is None:
            return Speculation(ticket, rows=1)
        rows = MAX_AUTO_ROWS if request.mode.kind == "auto" else request.mode.width or drafter.proposals + 1
        if request.gate.kind == "auto":
            sampled = not request.sampling.greedy
            policy = self.policy.sequence(request.mode, request.gate, drafter.proposals, sampled, ticket.state.variant)
            return Speculation(ticket, rows, policy)
        if request.gate.kind == "ema":
            self.policy  # noqa: B018  # measures the costs now, not in the middle of a step
            return Speculation(ticket, rows, gate=EmaGate(request.gate))
        return Speculation(ticket, rows, gate=EntropyGate(request.gate) if request.gate.kind == "entropy" else None)

    def propose(self, sessions: Sequence[Session]) -> tuple[list[Plan], float]:
        """One plan per decoding sequence, and the seconds spent on them."""
        began = time.perf_counter()
        if self._resting(sessions):
            return [_undrafted(session) for session in sessions], time.perf_counter() - began
        slots = self.slots(sessions)
        wanting = [index for index, count in enumerate(slots) if count]
        drafts: list[BlockDrafts | None] = [None] * len(sessions)
        jobs = [self._job(sessions[index], slots[index]) for index in wanting]
        for index, block in zip(wanting, self._runner.draft(jobs), strict=True):
            drafts[index] = block
            if block is None:
                self._bad_draft(sessions[index], "the drafter's numbers are not finite; such steps run plain")
        fixed = {
            index: _fixed(session, drafts[index])
            for index, session in enumerate(sessions)
            if session.speculation.policy is None
        }
        governed = [index for index in range(len(sessions)) if index not in fixed]
        chosen = [_undrafted(sessions[index]) for index in governed]
        if jobs and governed:
            rest = _rest([sessions[i] for i in fixed], sum(len(plan.proposal.tokens) for plan in fixed.values()))
            chosen = self._choose([sessions[i] for i in governed], [drafts[i] for i in governed], rest)
        settled = fixed | dict(zip(governed, chosen, strict=True))
        plans = [settled[index] for index in range(len(sessions))]
        for session, block in zip(sessions, drafts, strict=True):
            if block is not None and block.broken:
                self._bad_draft(session, "the drafter's head gives numbers that are not finite; nothing follows there")
        spent = time.perf_counter() - began
        self._drafted_steps += bool(jobs)
        if jobs and self._policy is not None and not self._drafted_steps % _TIMED_DRAFTED_STEPS:
            # growing and choosing are part of what a draft costs, and so is a pass for every variant in the step
            self._policy.costs.observe_draft(len(jobs), max(slots), _context(sessions), spent * 1e3)
        return plans, spent

    def _resting(self, sessions: Sequence[Session]) -> bool:
        """Whether all decode plainly for now: such steps come by the hundred, and planning each takes time."""
        if self._policy is None or not sessions:
            return False
        governed = [session.speculation.policy for session in sessions if session.speculation.policy is not None]
        if len(governed) < len(sessions) or not self._policy.resting(governed):
            return False
        for session in sessions:
            session.speculation.distrust = False
        return True

    def slots(self, sessions: Sequence[Session]) -> list[int]:
        """How many positions to draft for each sequence; 0 is none."""
        slots, views, places = [], [], []
        fixed, fixed_rows = [], 0
        for index, session in enumerate(sessions):
            speculation, ticket = session.speculation, session.ticket
            depth = min(speculation.rows, ticket.room) - 1
            slots.append(min(depth, self.proposals) if speculation.drafts else 0)
            if speculation.policy is not None:
                views.append(View(speculation.policy, ticket.state.length, not session.greedy, ticket.room))
                places.append(index)
            else:
                fixed.append(session)
                fixed_rows += speculation.rows if speculation.drafts else 1
        if views:
            planned = self.policy.plan_drafts(views, **_rest(fixed, fixed_rows))
            for place, count in zip(places, planned, strict=True):
                slots[place] = count
        for index, session in enumerate(sessions):
            # the masks of drafts would take as long as a slow constraint's own
            if session.speculation.distrust or session.sampler.slow:
                session.speculation.distrust, slots[index] = False, 0
        return slots

    def most_slots(self, sessions: Sequence[Session]) -> list[int]:
        """As many positions for each sequence as it may draft, whatever its policy promises itself of them."""
        slots = []
        for session in sessions:
            speculation, policy = session.speculation, session.speculation.policy
            most = min(speculation.rows - 1, self.proposals) if policy is None else policy.deepest
            depth = max(0, min(most, session.ticket.room - 1)) if policy is not None or speculation.drafts else 0
            if speculation.distrust:
                speculation.distrust, depth = False, 0
            if policy is not None:
                policy.planned(depth)
            slots.append(depth)
        return slots

    @property
    def proposals(self) -> int:
        return self._runner.drafter.proposals if self._runner.drafter is not None else 0

    def _job(self, session: Session, slots: int) -> DraftJob:
        speculation, request = session.speculation, session.ticket.request
        candidates = speculation.rows - 1 if request.mode.kind == "tree" else 1
        if speculation.policy is not None:
            candidates = AUTO_CANDIDATES
        elif self._runner.drafter is not None and self._runner.drafter.drafter.heads is not None:
            candidates = max(candidates, _HEAD_CANDIDATES)
        return DraftJob(session.ticket.state, session.sampler, slots, candidates, request.min_confidence)

    def bad_rows(self, session: Session) -> None:
        """The target's rows of a proposal are not numbers, which may be the drafted tokens' doing."""
        session.speculation.distrust = True
        self._bad_draft(session, "the target's numbers for a drafted token are not finite; the next step runs plain")

    @staticmethod
    def _bad_draft(session: Session, what: str) -> None:
        """Numbers that are none cost a step its speculation, never the request."""
        session.stats.bad_drafts += 1
        session.ticket.state.spoiled = True
        if not session.speculation.warned:
            session.speculation.warned = True
            _log.warning("request %s: %s", session.ticket.request.id, what)

    def _choose(self, sessions: Sequence[Session], drafts: Sequence[BlockDrafts | None], rest: _Rest) -> list[Plan]:
        """Lets the policy pick among what was drafted, for all sequences it governs at once."""
        trees, chains, offers = [], [], []
        for session, block in zip(sessions, drafts, strict=True):
            chain, tree = self._grow(session, block)
            trees.append(tree)
            chains.append(chain)
            policy, ticket = session.speculation.policy, session.ticket
            assert policy is not None
            offers.append(
                Offer(policy, ticket.state.length, not session.greedy, tree.survivals[1:], chain.survivals[1:])
            )
        choices = self.policy.choose(offers, **rest)
        return [_settled(*settled) for settled in zip(sessions, trees, chains, choices, strict=True)]

    def _grow(self, session: Session, block: BlockDrafts | None) -> tuple[Growth, Growth]:
        """The chain and the tree a sequence could verify, with calibrated survival."""
        speculation, ticket = session.speculation, session.ticket
        anchor = ticket.state.tokens[ticket.state.length]
        policy = speculation.policy
        if block is None or policy is None:
            return Growth([anchor]), Growth([anchor])
        depth = min(block.slots, ticket.room - 1)
        nodes = speculation.rows - 1
        if ticket.request.mode.kind == "chain":
            return block.grow(anchor, min(depth, nodes), 0, 0, policy.calibration)
        floor = _FLOOR_SHARE * self.policy.row_price(ticket.state.length, not session.greedy)
        return block.grow(anchor, min(depth, nodes), nodes, depth, policy.calibration, floor=floor)

    def learn(self, session: Session, plan: Plan, verdict: Verdict, taken: int, top1: float | None) -> None:
        """Tells the sequence's policy or gate what came of the step."""
        speculation = session.speculation
        if speculation.policy is not None:
            if plan.proposal.nodes:
                speculation.policy.learn(plan.proposal, verdict, verdict.tokens)
            speculation.policy.committed(verdict.tokens[:taken])
        elif isinstance(speculation.gate, EntropyGate) and top1 is not None:
            speculation.gate.observe(top1)

    def observe(
        self,
        sessions: Sequence[Session],
        plans: Sequence[Plan],
        committed: Sequence[int],
        draft_s: float,
        step_s: float,
    ) -> None:
        """Refreshes the cost table with a step that held nothing but decoding; `step_s` leaves drafting out."""
        if self._policy is None or not sessions:
            return
        drafted = any(plan.proposal.nodes for plan in plans)
        self._plain_steps = 0 if drafted else self._plain_steps + 1
        # plain steps come by the hundred, and looking at each would cost a hundredth of it
        if self._plain_steps % _TIMED_PLAIN_STEPS:
            return
        sampled, step_ms = any(not session.greedy for session in sessions), step_s * 1e3
        if not drafted or not self._drafted_steps % _TIMED_DRAFTED_STEPS:
            branching = any(plan.proposal.branching for plan in plans)
            rows = sum(len(plan.proposal.tokens) for plan in plans)
            shape = StepShape(len(sessions), rows, _context(sessions), sampled, branching)
            self._policy.costs.observe_step(shape, step_ms)
        if any(session.speculation.policy is not None for session in sessions):
            self._policy.progress(sum(committed), draft_s * 1e3 + step_ms)
        for session, plan, tokens in zip(sessions, plans, committed, strict=True):
            promised = plan.decision.expected_tokens
            if session.speculation.policy is not None and plan.proposal.nodes and promised is not None:
                self._policy.keep(session.speculation.policy, promised, tokens)
            if isinstance(session.speculation.gate, EmaGate) and plan.proposal.nodes:
                plain = StepShape(len(sessions), len(sessions), _context(sessions), sampled, branching=False)
                session.speculation.gate.observe(tokens, draft_s * 1e3 + step_ms, self._policy.costs.step_ms(plain))


class _Rest(TypedDict):
    """The part of a step that comes along whatever the policy chooses."""

    fixed_rows: int
    fixed_sequences: int
    fixed_context: int
    fixed_sampled: bool


def _rest(sessions: Sequence[Session], rows: int) -> _Rest:
    sampled = any(not session.greedy for session in sessions)
    return _Rest(
        fixed_rows=rows, fixed_sequences=len(sessions), fixed_context=_context(sessions), fixed_sampled=sampled
    )


def _context(sessions: Sequence[Session]) -> int:
    return max((session.ticket.state.length for session in sessions), default=0)


def _fixed(session: Session, block: BlockDrafts | None) -> Plan:
    """The shape the request asked for, or the anchor alone."""
    ticket, speculation = session.ticket, session.speculation
    anchor = ticket.state.tokens[ticket.state.length]
    if block is None:
        closed = speculation.gate is not None and not speculation.gate.open
        return Plan(Proposal((anchor,), (-1,)), Decision("plain", "the gate has closed" if closed else ""))
    mode, depth = ticket.request.mode, min(block.slots, ticket.room - 1)
    if mode.kind == "tree":
        growth = block.grow(anchor, 0, speculation.rows - 1, depth, seeded=mode.seeded)[1]
    else:
        growth = block.grow(anchor, min(depth, speculation.rows - 1), 0, 0)[0]
    return Plan(growth.proposal(), Decision(f"{mode.kind}:{growth.nodes + 1}" if growth.nodes else "plain"))


def _undrafted(session: Session) -> Plan:
    """The anchor alone, where the policy has asked for no draft and there is nothing to weigh."""
    state, policy = session.ticket.state, session.speculation.policy
    return Plan(Proposal((state.tokens[state.length],), (-1,)), Decision("plain", policy.note if policy else ""))


def _settled(session: Session, tree: Growth, chain: Growth, choice: VerifyChoice) -> Plan:
    growth = tree if choice.kind == "tree" else chain
    if choice.kind == "plain":
        if chain.nodes and session.speculation.policy is not None:
            session.speculation.policy.shadow(chain.tokens[1:], chain.chances[1:])
        return Plan(growth.proposal(0), choice.decision)
    return Plan(growth.proposal(choice.nodes), choice.decision)
