"""The step: plan, draft, one target forward, sample, accept, commit. Everything else prepares or reports it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from slipstream.cache.pages import PageTable
from slipstream.cache.prefix import PrefixCache
from slipstream.cache.sequence import PageMemory, SequenceState
from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.proposer import Plan, Proposer
from slipstream.engine.runner import ForwardResult, RowWork, Runner
from slipstream.engine.scheduler import PrefillChunk, Scheduler, StepPlan, Ticket
from slipstream.engine.session import Session
from slipstream.engine.snapshots import EngineSnapshot, LineSnapshot, sequence_snapshots
from slipstream.engine.stepping import StepLock
from slipstream.engine.variants import DraftVariant
from slipstream.errors import RequestError
from slipstream.grammar.constraints import Grammars
from slipstream.speculative.accept import NO_TOKEN, accept
from slipstream.speculative.costs import CostTable
from slipstream.speculative.gates import EntropyGate
from slipstream.speculative.policy import MAX_AUTO_ROWS
from slipstream.speculative.sampling import RowSampler, log_probabilities
from slipstream.stats import Decision
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import BASE_VARIANT, GenEvent, Proposal, Request, StepRecord, TokenOut, Verdict

_MOST_WAITING_ROWS = 64
_log = logging.getLogger("slipstream")


@dataclass(slots=True)
class Outcome:
    """What one step means for one request: the rows that stay, the tokens they lead to and the text to show."""

    session: Session
    rows: Sequence[int]
    tokens: list[TokenOut] = field(default_factory=list)
    text: str = ""
    step: StepRecord | None = None


class Engine:
    """Runs any number of requests, each with its own settings, with one target forward per step."""

    def __init__(
        self,
        runner: Runner,
        pools: PageMemory,
        table: PageTable,
        tokenizer: Tokenizer,
        config: EngineConfig,
        max_context: int,
        draft_key: str | None,
        share_generated: bool,
        measure_costs: Callable[[], CostTable],
    ) -> None:
        self._runner = runner
        self.proposer = Proposer(runner, measure_costs)
        self._pools = pools
        self._table = table
        self._tokenizer = tokenizer
        self._config = config
        self._max_context = max_context
        self._draft_key = draft_key
        # pages written by decoding may serve others only where decoding and prefill sum alike
        self._share_generated = share_generated
        self.prefix = PrefixCache(table, PAGE_TOKENS, pools.states) if config.prefix_cache else None
        self.scheduler = Scheduler(
            table,
            self.prefix,
            PAGE_TOKENS,
            config.max_sequences,
            config.max_waiting,
            config.prefill_chunk,
            config.step_rows,
            states=pools.states,
        )
        self.grammars = Grammars(tokenizer, runner.target.config.vocab_size)
        self._sessions: dict[str, Session] = {}
        self._stepping = StepLock()

    @property
    def has_work(self) -> bool:
        return bool(self._sessions)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything: paused requests are work, but none that can be done now."""
        return self.scheduler.busy

    def check(self, request: Request) -> Ticket:
        """Refuses what could never run; changes nothing, so any thread may ask."""
        vocab = self._runner.target.config.vocab_size
        biased = [token for token, _ in request.sampling.logit_bias]
        bad = next((token for token in (*request.prompt_ids, *biased) if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"token {bad} is not in the vocabulary of {vocab}")
        ticket = self._ticket(request)
        self.scheduler.check_fits(ticket)
        return ticket

    def add(self, request: Request) -> None:
        """Queues a request; refuses what could never run."""
        if request.id in self._sessions:
            raise RequestError(f"a request '{request.id}' is running already", "give every request its own id")
        ticket = self.check(request)
        vocab = self._runner.target.config.vocab_size
        guide = self.grammars.guide(request.constraint, request.thinking)
        sampler = RowSampler(request.sampling, vocab, request.prompt_ids, request.share_noise, guide)
        speculation = self.proposer.speculation(ticket)
        self.scheduler.add(ticket)
        if guide is not None:
            ticket.ready = guide.ready
        self._sessions[request.id] = Session(ticket, sampler, speculation, self._tokenizer)

    def _ticket(self, request: Request) -> Ticket:
        variant, drafter = self._runner.variants.find(request.draft_lora), self._runner.drafter
        drafting = request.mode.kind != "plain"
        if drafting and drafter is None:
            raise RequestError(f"mode '{request.mode}' needs a drafter", "load one with --draft, or use mode plain")
        block = drafter.block_size if drafting and drafter is not None else 1
        widest = drafter.proposals + 1 if drafting and drafter is not None else 1
        if request.mode.kind == "chain" and request.mode.width > widest:
            raise RequestError(f"mode '{request.mode}' is wider than the {widest} rows this drafter can fill")
        heads = drafter.drafter.heads if drafter is not None else None
        if request.min_confidence and (heads is None or not heads.has_confidence):
            raise RequestError("this drafter has no confidence head", "leave min_confidence out")
        rows = MAX_AUTO_ROWS if request.mode.kind == "auto" else max(request.mode.width, widest)
        room = self._max_context - len(request.prompt_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(request.prompt_ids)} tokens, the context holds {self._max_context}",
                "shorten the prompt",
            )
        max_tokens = min(request.max_tokens, room)
        return Ticket(
            request=request,
            state=SequenceState(self._table, PAGE_TOKENS, self._pools, drafting, request.draft_lora),
            positions=len(request.prompt_ids) + max_tokens + max(block, rows),
            draft_key=self._context_key(variant) if drafting and variant is not None else None,
            max_tokens=max_tokens,
        )

    def _context_key(self, variant: DraftVariant) -> str:
        return f"{self._draft_key}{variant.context_key}"

    @property
    def variants(self) -> list[str]:
        """The names of the drafter's variants, the drafter itself first."""
        return self._runner.variants.names

    def check_new_variant(self, name: str) -> None:
        """Refuses a name that is taken; any thread may ask."""
        self._runner.variants.check_free(name)

    def add_variant(self, variant: DraftVariant) -> None:
        self._runner.variants.install(variant)

    def remove_variant(self, name: str) -> None:
        """Lets a variant go, unless somebody needs it, and everything that only it has made."""
        tickets = [session.ticket for session in self._sessions.values()]
        users = sum(ticket.state.drafting and ticket.state.variant == name for ticket in tickets)
        if users and name != BASE_VARIANT:
            raise RequestError(f"the draft variant '{name}' is in use (open requests: {users})", "wait or cancel")
        variants = self._runner.variants
        gone = variants.remove(name)
        self.proposer.forget(name)
        if self.prefix is not None and not variants.makes_context(gone.context_key):
            self.prefix.forget(self._context_key(gone))

    def cancel(self, request_id: str) -> bool:
        """Ends a request at the next step; False if it is not known (any more)."""
        ticket = self.scheduler.find(request_id)
        if ticket is None:
            return False
        ticket.cancelled = True
        return True

    def pause(self, request_id: str) -> int | None:
        """Takes a request out of the next steps and returns the epoch that resumes it; None if it is not known.

        It keeps its pages unless others cannot start without them; then it is computed again from its tokens.
        """
        ticket = self.scheduler.find(request_id)
        return None if ticket is None else self.scheduler.pause(ticket)

    def resume(self, request_id: str, epoch: int) -> bool:
        """Lets a paused request go on; False if it is not known (any more), StaleEpochError if the epoch is old."""
        ticket = self.scheduler.find(request_id)
        if ticket is None:
            return False
        self.scheduler.resume(ticket, epoch)
        return True

    def snapshot(self) -> EngineSnapshot:
        """Requests and pages as plain values; another thread may ask too, and may then see the middle of a step."""
        cached = self.prefix.size if self.prefix is not None else 0
        used, total = self._table.total - self._table.free, self._table.total
        return EngineSnapshot(sequence_snapshots(list(self._sessions.values())), used, cached, total)

    def line(self) -> LineSnapshot:
        """How many requests wait for a slot; only the thread that steps the engine may ask."""
        return LineSnapshot(self.scheduler.newcomers, len(self.scheduler.waiting))

    def step(self) -> list[GenEvent]:
        """Does one step for everybody and says what came of it."""
        with self._stepping:
            return self._step()

    @torch.inference_mode()
    def _step(self) -> list[GenEvent]:
        events = self._drop_cancelled()
        self.grammars.lane.begin_step()
        self.scheduler.admit()
        plan = self.scheduler.plan()
        events += self._end_complete(plan)
        if plan:
            self.grammars.lane.begin_forward()
            began = time.perf_counter()
            events += self._run(plan)
            self.scheduler.took(plan, time.perf_counter() - began)
        elif self.scheduler.running:
            self.grammars.lane.wait()
        if self._config.check_integrity:
            self.scheduler.check()
        return events

    def _drop_cancelled(self) -> list[GenEvent]:
        events = []
        for ticket in self.scheduler.drop_cancelled():
            session = self._close(ticket)
            session.finish_reason = "cancelled"
            events.append(session.event([], ""))
        return events

    def _end_complete(self, plan: StepPlan) -> list[GenEvent]:
        """Ends requests of which only now is known whether their constraint leaves anything more to write."""
        over = [s for s in map(self._session, plan.decode) if s.sampler.complete or not s.ticket.room]
        for session in over:
            plan.decode.remove(session.ticket)
        return self._settle([Outcome(session, [], text=session.end()) for session in over])

    def _run(self, plan: StepPlan) -> list[GenEvent]:
        began = time.perf_counter()
        decoding = [self._session(ticket) for ticket in plan.decode]
        plans, draft_s = self.proposer.propose(decoding)
        works = [
            RowWork(c.ticket.state, c.start, c.ticket.state.tokens[c.start : c.stop], int(c.last)) for c in plan.prefill
        ]
        works += [
            RowWork(s.ticket.state, s.ticket.state.length, p.proposal.tokens, len(p.proposal.tokens), p.proposal)
            for s, p in zip(decoding, plans, strict=True)
        ]
        result = self._runner.forward(works)
        sessions = [self._session(chunk.ticket) for chunk in plan.prefill] + decoding
        chosen = self._sample(sessions, works, result)
        verify_s = time.perf_counter() - began - draft_s
        outcomes = [
            self._guarded(sessions[i], partial(self._prefill_outcome, i, chunk, result, chosen[i]))
            for i, chunk in enumerate(plan.prefill)
        ]
        for item, (session, step_plan) in enumerate(zip(decoding, plans, strict=True), start=len(plan.prefill)):
            outcomes.append(
                self._guarded(
                    session,
                    partial(self._decode_outcome, item, session, step_plan, result, chosen[item], (draft_s, verify_s)),
                )
            )
        events = self._commit(outcomes, result)
        if not plan.prefill:
            committed = [len(outcome.tokens) for outcome in outcomes]
            self.proposer.observe(decoding, plans, committed, draft_s, time.perf_counter() - began - draft_s)
        return events

    def _session(self, ticket: Ticket) -> Session:
        return self._sessions[ticket.request.id]

    def _sample(self, sessions: list[Session], works: list[RowWork], result: ForwardResult) -> list[list[int]]:
        """The target's own choice after every row that has logits; the host waits here."""
        return [
            self._choose(session, work, logits) if work.logit_rows else []
            for session, work, logits in zip(sessions, works, result.logits, strict=True)
        ]

    def _choose(self, session: Session, work: RowWork, logits: Tensor) -> list[int]:
        first = work.start + work.rows - work.logit_rows + 1
        try:
            return session.sampler.choose(logits, first, work.proposal).tolist()
        except Exception as error:
            self._blame(session, error)
            return []

    def _guarded(self, session: Session, outcome: Callable[[], Outcome]) -> Outcome:
        """What goes wrong with one request's own tokens ends that request and nobody else's."""
        if session.finish_reason is None:
            try:
                return outcome()
            except Exception as error:
                self._blame(session, error)
        return Outcome(session, [])

    @staticmethod
    def _blame(session: Session, error: Exception) -> None:
        _log.error("request %s failed", session.ticket.request.id, exc_info=error)
        session.ticket.state.spoiled = True
        with suppress(Exception):  # the text that was held back may be what failed
            session.fail(f"the request failed inside the engine: {type(error).__name__}: {error}")

    def _commit(self, outcomes: list[Outcome], result: ForwardResult) -> list[GenEvent]:
        """Keeps what was agreed on: draft context first, then every length together, then the text."""
        self._keep_taps(outcomes, result)
        return self._settle(outcomes)

    def _settle(self, outcomes: list[Outcome]) -> list[GenEvent]:
        """Moves every sequence on by what it keeps and says so."""
        events = []
        for outcome in outcomes:
            session, tokens, ticket = outcome.session, outcome.tokens, outcome.session.ticket
            state, finished = ticket.state, session.finish_reason is not None
            prompt_done = bool(tokens) and state.length < len(ticket.request.prompt_ids)
            state.commit(outcome.rows, [token.id for token in tokens], len(outcome.rows) if state.drafting else 0)
            if prompt_done or finished:
                self._publish(ticket, prompt_done)
            if tokens or finished:
                events.append(session.event(tokens, outcome.text, outcome.step))
            if finished:
                self.scheduler.finish(ticket)
                self._close(ticket)
        return events

    def _close(self, ticket: Ticket) -> Session:
        session = self._sessions.pop(ticket.request.id)
        if session.sampler.guide is not None:
            session.sampler.guide.abandon()
        return session

    def _keep_taps(self, outcomes: list[Outcome], result: ForwardResult) -> None:
        """Writes draft context, except for sequences that decode plainly for now: theirs waits until they draft."""
        writing = []
        for item, outcome in enumerate(outcomes):
            state = outcome.session.ticket.state
            if not state.drafting:
                continue
            if outcome.step is None or outcome.step.proposal.nodes:
                writing.append((item, outcome.rows))
                continue
            if state.waiting_rows >= _MOST_WAITING_ROWS:
                self._runner.write_waiting([state])
            self._runner.hold_taps(result, item, outcome.rows)
        self._runner.write_context(result, writing)

    def _prefill_outcome(self, item: int, chunk: PrefillChunk, result: ForwardResult, chosen: list[int]) -> Outcome:
        session, rows = self._session(chunk.ticket), range(chunk.stop - chunk.start)
        if not chosen:
            return Outcome(session, rows)
        session.first_token()
        if chosen[0] == NO_TOKEN:
            return Outcome(session, rows, text=self._fail(session))
        tokens = self._token_outs(session, chosen, 0, result.logits[item], [0])
        _, text = session.absorb(tokens)
        return Outcome(session, rows, tokens, text)

    def _decode_outcome(
        self,
        item: int,
        session: Session,
        plan: Plan,
        result: ForwardResult,
        chosen: list[int],
        seconds: tuple[float, float],
    ) -> Outcome:
        verdict = accept(plan.proposal, chosen)
        if NO_TOKEN in chosen and session.sampler.failure is None:
            session.ticket.state.spoiled = True
            if plan.proposal.nodes:
                return self._void_outcome(session, plan)
        logits = result.logits[item]
        tokens = self._token_outs(session, verdict.tokens, verdict.accepted, logits, verdict.path)
        outcome = self._taken(session, plan.proposal, plan.decision, verdict, tokens, seconds)
        top1 = None
        if isinstance(session.speculation.gate, EntropyGate) and not verdict.failed:
            top1 = float(logits[verdict.path[-1]].softmax(dim=-1).amax())
        self.proposer.learn(session, plan, verdict, len(outcome.tokens), top1)
        return outcome

    def _taken(
        self,
        session: Session,
        proposal: Proposal,
        decision: Decision,
        verdict: Verdict,
        tokens: list[TokenOut],
        seconds: tuple[float, float],
    ) -> Outcome:
        """What a request takes of a verified step: all of it, unless a token ends the request."""
        taken, text = session.absorb(tokens)
        draft_s, verify_s = seconds
        step = StepRecord(session.ticket.state.length, proposal, verdict, decision, draft_s * 1e3, verify_s * 1e3)
        session.record_step(step, taken)
        if verdict.failed and session.finish_reason is None:
            text += self._fail(session)
        # the anchor's row and those of all new tokens but the last, which is the next anchor (none after a failure)
        return Outcome(session, verdict.path[: taken + verdict.failed], tokens[:taken], text, step)

    def _void_outcome(self, session: Session, plan: Plan) -> Outcome:
        """A drafted row that is no number may have spoiled the others: nothing is kept, the next step runs plain."""
        state = session.ticket.state
        state.clear_ahead(len(plan.proposal.tokens))
        self.proposer.bad_rows(session)
        return Outcome(session, [])

    def _fail(self, session: Session) -> str:
        """Ends a request that has no next token; returns the text that was held back."""
        if session.sampler.failure is not None:
            return session.fail(session.sampler.failure)
        session.ticket.state.spoiled = True
        return session.fail(
            "the target produced logits that are not numbers (NaN or infinity): the model file is damaged or its "
            "values overflow in this format; try --dtype fp32"
        )

    @staticmethod
    def _token_outs(
        session: Session, tokens: Sequence[int], drafted: int, logits: Tensor, rows: Sequence[int]
    ) -> list[TokenOut]:
        """Tokens as they are reported; `rows` of the logits come before each."""
        top = session.ticket.request.sampling.logprobs
        if top is None or not tokens:
            return [TokenOut(token, index < drafted) for index, token in enumerate(tokens)]
        logprobs, values, ids = (
            part.tolist() for part in log_probabilities(logits[list(rows[: len(tokens)])], torch.tensor(tokens), top)
        )
        return [
            TokenOut(token, i < drafted, logprobs[i], tuple(zip(ids[i], values[i], strict=True)))
            for i, token in enumerate(tokens)
        ]

    def _publish(self, ticket: Ticket, prompt_done: bool) -> None:
        """Offers finished pages to later requests: the prompt's as soon as it is computed, answers where exact."""
        if self.prefix is None or not ticket.request.cache_prompt or ticket.state.spoiled:
            return
        finished = self._session(ticket).finish_reason is not None
        if prompt_done:
            length = len(ticket.request.prompt_ids)
        elif finished and self._share_generated:
            length = ticket.state.length
        else:
            return
        self._runner.write_waiting([ticket.state])
        self.prefix.put(ticket.state.tokens[:length], ticket.state.pages, ticket.draft_key)
