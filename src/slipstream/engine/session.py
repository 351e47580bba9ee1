"""The host side of one running request: its sampler, its text so far, its stop rules and its numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.scheduler import Ticket
from slipstream.speculative.gates import EmaGate, EntropyGate
from slipstream.speculative.policy import SequencePolicy
from slipstream.speculative.sampling import RowSampler
from slipstream.stats import RequestStats, novel_steps
from slipstream.text.detokenize import IncrementalDetokenizer
from slipstream.text.stops import StopMatcher
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import FinishReason, GenEvent, StepRecord, TokenOut


@dataclass(slots=True)
class Speculation:
    """How one request speculates: a policy of its own, or a fixed shape behind a gate."""

    ticket: Ticket
    rows: int  # verified at most, the anchor included
    policy: SequencePolicy | None = None
    gate: EmaGate | EntropyGate | None = None
    warned: bool = False
    told: int = 0  # tokens of the answer that the policy knows of, where it is not told at every step
    distrust: bool = False  # the last step's drafts were no numbers to the target: the next step runs plain

    @property
    def drafts(self) -> bool:
        """Whether a fixed shape is drafted in this step."""
        return self.policy is None and self.rows > 1 and self.ticket.room > 1 and (self.gate is None or self.gate.open)


class Session:
    """Takes committed tokens one at a time, so that a text ends at the same token however many came at once."""

    def __init__(self, ticket: Ticket, sampler: RowSampler, speculation: Speculation, tokenizer: Tokenizer) -> None:
        self.ticket = ticket
        self.sampler = sampler
        self.speculation = speculation
        self.stats = RequestStats(
            prompt_tokens=len(ticket.request.prompt_ids),
            draft_lora=ticket.state.variant if ticket.state.drafting else None,
        )
        self.finish_reason: FinishReason | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopMatcher(ticket.request.stop)
        self._last = ticket.request.stop_token_ids
        # stop strings, grammars and penalties look at every token; all others can be taken together
        self._watched = bool(ticket.request.stop) or sampler.guide is not None or ticket.request.sampling.penalised
        self._added_at = time.perf_counter()
        self._first_token_at = 0.0
        self._token_ids: list[int] = []
        self._step_sizes: list[int] = []
        self._error: str | None = None

    def absorb(self, tokens: Sequence[TokenOut]) -> tuple[int, str]:
        """Takes tokens until one of them ends the request; returns how many were taken and the text to show."""
        if self._watched:
            return self._absorb_singly(tokens)
        ticket = self.ticket
        room = ticket.max_tokens - ticket.generated
        if len(tokens) == 1 < room and tokens[0].id not in self._last:
            self._token_ids.append(tokens[0].id)
            ticket.generated += 1
            return 1, self._detokenizer.push((tokens[0].id,))
        ids = [token.id for token in tokens[:room]]
        if not self._last.isdisjoint(ids):
            self.finish_reason = "stop"
            del ids[next(place for place, token in enumerate(ids, start=1) if token in self._last) :]
        elif len(ids) == room:
            self.finish_reason = "length"
        self._token_ids += ids
        ticket.generated += len(ids)
        text = self._detokenizer.push(ids)
        return len(ids), text if self.finish_reason is None else text + self._leftover_text()

    def _absorb_singly(self, tokens: Sequence[TokenOut]) -> tuple[int, str]:
        text = ""
        for count, token in enumerate(tokens, start=1):
            self._token_ids.append(token.id)
            self.ticket.generated += 1
            self.sampler.observe([token.id])
            shown, stopped = self._stops.push(self._detokenizer.push([token.id]))
            text += shown
            if stopped or token.id in self.ticket.request.stop_token_ids or self.sampler.complete:
                self.finish_reason = "stop"
            elif self.ticket.generated >= self.ticket.max_tokens:
                if not self.sampler.settled:
                    return count, text  # the mask that says whether the text is complete ends it, with `end`
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return count, text if stopped else text + self._leftover_text()
        return len(tokens), text

    def _leftover_text(self) -> str:
        """What was held back in case it became a stop string or the rest of a character."""
        shown, stopped = self._stops.push(self._detokenizer.flush())
        return shown if stopped else shown + self._stops.flush()

    def first_token(self) -> None:
        self._first_token_at = time.perf_counter()
        self.stats.ttft_ms = (self._first_token_at - self._added_at) * 1e3
        self.stats.cached_tokens = self.ticket.cached_tokens

    @property
    def greedy(self) -> bool:
        return self.ticket.request.sampling.greedy

    def record_step(self, step: StepRecord, committed: int) -> None:
        """Counts a verify step of which `committed` tokens were taken (a stop rule may leave the rest)."""
        proposal = step.proposal
        nodes, stats = len(proposal.tokens) - 1, self.stats
        if nodes:
            stats.record_step(nodes, proposal.depth, min(step.verdict.accepted, committed), committed)
        else:
            stats.record_step(0, 0, 0, committed)
        stats.policy.record(step.decision, committed)
        stats.draft_ms += step.draft_ms
        stats.verify_ms += step.verify_ms
        self._step_sizes.append(committed)

    def end(self) -> str:
        """Ends the request behind its last token; returns the text that was held back."""
        self.finish_reason = "stop" if self.sampler.complete else "length"
        return self._leftover_text()

    def fail(self, message: str) -> str:
        """Ends the request with an error; what was written before stays. Returns the text that was held back."""
        self.finish_reason = "error"
        self._error = message
        return self._leftover_text()

    def close(self, reason: FinishReason) -> RequestStats:
        """Settles the numbers once the request is over."""
        self.finish_reason = reason
        stats = self.stats
        stats.completion_tokens = len(self._token_ids)
        if self._first_token_at:
            stats.decode_ms = (time.perf_counter() - self._first_token_at) * 1e3
            stats.other_ms = max(0.0, stats.decode_ms - stats.draft_ms - stats.verify_ms)
        stats.novel_steps, stats.novel_committed = novel_steps(self._token_ids, self._step_sizes)
        return stats

    def event(self, tokens: Sequence[TokenOut], text: str, step: StepRecord | None = None) -> GenEvent:
        reason = self.finish_reason
        stats = self.close(reason) if reason is not None else None
        return GenEvent(self.ticket.request.id, list(tokens), text, reason, stats, self._error, step)
