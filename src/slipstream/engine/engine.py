"""The step: plan, draft, one target forward, sample, accept, commit. Everything else prepares or reports it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.pages import PageTable
from slipstream.cache.pools import KvPools
from slipstream.cache.prefix import PrefixCache
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.runner import ForwardResult, RowWork, Runner
from slipstream.engine.scheduler import Scheduler, StepPlan, Ticket
from slipstream.engine.session import Session
from slipstream.errors import RequestError
from slipstream.speculative.accept import accept_chain
from slipstream.speculative.draft import DraftJob
from slipstream.speculative.sampling import RowSampler, log_probabilities
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import GenEvent, Request, TokenOut

_NOTHING = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The host's view of a step: proposals and the target's own tokens, per work item."""

    proposed: list[list[int]]
    chosen: list[list[int]]
    device_chosen: list[Tensor]


class Engine:
    """Runs any number of requests, each with its own settings, with one target forward per step."""

    def __init__(
        self, runner: Runner, pools: KvPools, table: PageTable, tokenizer: Tokenizer, config: EngineConfig,
        max_context: int, draft_key: str | None, share_generated: bool,
    ) -> None:
        self._runner = runner
        self._pools = pools
        self._table = table
        self._tokenizer = tokenizer
        self._config = config
        self._max_context = max_context
        self._draft_key = draft_key
        # pages written by decoding may serve others only where decoding and prefill sum alike
        self._share_generated = share_generated
        self.prefix = PrefixCache(table, PAGE_TOKENS) if config.prefix_cache else None
        self.scheduler = Scheduler(
            table, self.prefix, PAGE_TOKENS, config.max_sequences, config.max_waiting, config.prefill_chunk,
            config.step_rows,
        )
        self._sessions: dict[str, Session] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._sessions)

    def add(self, request: Request) -> None:
        """Queues a request; refuses what could never run."""
        if request.id in self._sessions:
            raise RequestError(f"a request '{request.id}' is running already", "give every request its own id")
        vocab = self._runner.target.config.vocab_size
        bad = next((token for token in request.prompt_ids if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"token {bad} is not in the vocabulary of {vocab}")
        ticket = self._ticket(request)
        sampler = RowSampler(request.sampling, vocab, request.prompt_ids, request.share_noise)
        self.scheduler.add(ticket)
        self._sessions[request.id] = Session(ticket, sampler, self._tokenizer)

    def _ticket(self, request: Request) -> Ticket:
        drafter = self._runner.drafter
        drafting = request.mode.kind != "plain"
        if drafting and drafter is None:
            raise RequestError(f"mode '{request.mode}' needs a drafter", "load one with --draft, or use mode plain")
        block = drafter.block_size if drafting and drafter is not None else 1
        if request.mode.width > block:
            raise RequestError(f"mode '{request.mode}' is wider than the drafter's block of {block} rows")
        room = self._max_context - len(request.prompt_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(request.prompt_ids)} tokens, the context holds {self._max_context}",
                "shorten the prompt",
            )
        max_tokens = min(request.max_tokens, room)
        return Ticket(
            request=request,
            state=SequenceState(self._table, PAGE_TOKENS, self._pools.copy_page, drafting),
            positions=len(request.prompt_ids) + max_tokens + block,
            draft_key=self._draft_key if drafting else None,
            width=(request.mode.width or block) if drafting else 1,
            max_tokens=max_tokens,
        )

    def cancel(self, request_id: str) -> bool:
        """Ends a request at the next step; False if it is not known (any more)."""
        ticket = self.scheduler.find(request_id)
        if ticket is None:
            return False
        ticket.cancelled = True
        return True

    @torch.inference_mode()
    def step(self) -> list[GenEvent]:
        """Does one step for everybody and says what came of it."""
        events = self._drop_cancelled()
        self.scheduler.admit()
        plan = self.scheduler.plan()
        if plan:
            events += self._run(plan)
        if self._config.check_integrity:
            self.scheduler.check()
        return events

    def _drop_cancelled(self) -> list[GenEvent]:
        events = []
        for ticket in self.scheduler.drop_cancelled():
            session = self._sessions.pop(ticket.request.id)
            session.finish_reason = "cancelled"
            events.append(session.event([], ""))
        return events

    def _run(self, plan: StepPlan) -> list[GenEvent]:
        began = time.perf_counter()
        drafting = [ticket for ticket in plan.decode if ticket.step_width > 1]
        proposals = self._runner.propose(
            [DraftJob(t.state, self._session(t).sampler, t.step_width - 1) for t in drafting]
        )
        drafted = time.perf_counter()
        by_ticket = dict(zip(map(id, drafting), proposals, strict=True))
        works = [
            RowWork(c.ticket.state, c.start, c.ticket.state.tokens[c.start : c.stop], _NOTHING, int(c.last))
            for c in plan.prefill
        ]
        for ticket in plan.decode:
            proposed = by_ticket.get(id(ticket), _NOTHING)
            works.append(
                RowWork(ticket.state, ticket.state.length, ticket.state.tokens[ticket.state.length :], proposed,
                        1 + proposed.numel())
            )
        result = self._runner.forward(works)
        tickets = [chunk.ticket for chunk in plan.prefill] + plan.decode
        sampled = self._sample(tickets, works, result)
        verified = time.perf_counter()
        return self._commit(plan, works, result, sampled, (drafted - began, verified - drafted))

    def _session(self, ticket: Ticket) -> Session:
        return self._sessions[ticket.request.id]

    def _sample(self, tickets: list[Ticket], works: list[RowWork], result: ForwardResult) -> _Sampled:
        """The target's own choice after every row that has logits; the host waits here, once."""
        chosen: list[Tensor] = []
        for ticket, work, logits in zip(tickets, works, result.logits, strict=True):
            if not logits.shape[0]:
                chosen.append(_NOTHING)
                continue
            first = work.start + work.rows - work.logit_rows + 1
            chosen.append(self._session(ticket).sampler.choose(logits, first, work.proposed))
        flat = torch.cat([*chosen, *(work.proposed for work in works)]).tolist()
        on_host = [_take(flat, part.numel()) for part in [*chosen, *(work.proposed for work in works)]]
        return _Sampled(proposed=on_host[len(works) :], chosen=on_host[: len(works)], device_chosen=chosen)

    def _commit(
        self, plan: StepPlan, works: list[RowWork], result: ForwardResult, sampled: _Sampled,
        seconds: tuple[float, float],
    ) -> list[GenEvent]:
        """Keeps what was agreed on: draft context first, then every length together, then the text."""
        outcomes: list[tuple[Ticket, int, list[TokenOut], str]] = []
        for item, chunk in enumerate(plan.prefill):
            outcomes.append(self._prefill_outcome(item, chunk.ticket, chunk.stop - chunk.start, result, sampled))
        for item, ticket in enumerate(plan.decode, start=len(plan.prefill)):
            outcomes.append(self._decode_outcome(item, ticket, result, sampled, seconds))
        self._runner.write_context(
            result, [(item, rows) for item, (ticket, rows, _, _) in enumerate(outcomes) if ticket.state.drafting]
        )
        events = []
        for ticket, rows, tokens, text in outcomes:
            was_prefill = ticket.state.length < len(ticket.request.prompt_ids)
            ticket.state.commit(rows, [token.id for token in tokens], rows if ticket.state.drafting else 0)
            self._publish(ticket, prompt_done=was_prefill and bool(tokens))
            if tokens:
                events.append(self._session(ticket).event(tokens, text))
            if self._session(ticket).finish_reason is not None:
                self.scheduler.finish(ticket)
                del self._sessions[ticket.request.id]
        return events

    def _prefill_outcome(
        self, item: int, ticket: Ticket, rows: int, result: ForwardResult, sampled: _Sampled
    ) -> tuple[Ticket, int, list[TokenOut], str]:
        if not sampled.chosen[item]:
            return ticket, rows, [], ""
        session = self._session(ticket)
        session.first_token()
        tokens = self._token_outs(ticket, item, sampled.chosen[item], 0, result, sampled)
        _, text = session.absorb(tokens)
        return ticket, rows, tokens, text

    def _decode_outcome(
        self, item: int, ticket: Ticket, result: ForwardResult, sampled: _Sampled, seconds: tuple[float, float]
    ) -> tuple[Ticket, int, list[TokenOut], str]:
        session = self._session(ticket)
        proposed = sampled.proposed[item]
        verdict = accept_chain(proposed, sampled.chosen[item])
        tokens = self._token_outs(ticket, item, verdict.tokens, verdict.accepted, result, sampled)
        taken, text = session.absorb(tokens)
        session.record_step(len(proposed), min(verdict.accepted, taken), taken, *seconds)
        # rows 0 to taken-1 are the anchor and all new tokens but the last, which is the next anchor
        return ticket, taken, tokens[:taken], text

    def _token_outs(
        self, ticket: Ticket, item: int, tokens: tuple[int, ...] | list[int], drafted: int, result: ForwardResult,
        sampled: _Sampled,
    ) -> list[TokenOut]:
        top = ticket.request.sampling.logprobs
        if top is None:
            return [TokenOut(token, index < drafted) for index, token in enumerate(tokens)]
        count = len(tokens)
        logprobs, values, ids = (
            part.tolist()
            for part in log_probabilities(result.logits[item][:count], sampled.device_chosen[item][:count], top)
        )
        return [
            TokenOut(token, i < drafted, logprobs[i], tuple(zip(ids[i], values[i], strict=True)))
            for i, token in enumerate(tokens)
        ]

    def _publish(self, ticket: Ticket, prompt_done: bool) -> None:
        """Offers finished pages to later requests: the prompt's as soon as it is computed, answers where exact."""
        if self.prefix is None or not ticket.request.cache_prompt:
            return
        finished = self._session(ticket).finish_reason is not None
        if prompt_done:
            length = len(ticket.request.prompt_ids)
        elif finished and self._share_generated:
            length = ticket.state.length
        else:
            return
        self.prefix.put(ticket.state.tokens[:length], ticket.state.pages, ticket.draft_key)


def _take(flat: list[int], count: int) -> list[int]:
    taken = flat[:count]
    del flat[:count]
    return taken
