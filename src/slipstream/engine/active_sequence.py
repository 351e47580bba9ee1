"""One running request: its place in the schedule, its pages, its sampler, its text so far and its numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from slipstream.cache.sequence import SequenceState
from slipstream.engine.scheduler import Requirements, ScheduledSequence
from slipstream.speculative.gates import EmaGate, EntropyGate
from slipstream.speculative.policy import SequencePolicy
from slipstream.speculative.sampling import RowSampler
from slipstream.speculative.suffix_index import TextIndex
from slipstream.stats import RequestStats, novel_steps
from slipstream.text.detokenize import IncrementalDetokenizer
from slipstream.text.stops import StopMatcher
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import FinishReason, GenEvent, Request, Source, StepRecord, TokenOut

_log = logging.getLogger("slipstream")


class ActiveSequence(ScheduledSequence):
    """Everything the engine knows about one request.

    Tokens are absorbed one at a time where stop rules look at each, so that a text ends at the same token however many
    tokens a step commits.
    """

    def __init__(
        self, request: Request, state: SequenceState, needs: Requirements, sampler: RowSampler, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, state, needs.positions, needs.draft_key, needs.max_tokens)
        self.sampler = sampler
        if sampler.guide is not None:
            self.ready = sampler.guide.ready
        self.finish_reason: FinishReason | None = None
        self.stats = RequestStats(
            prompt_tokens=len(request.prompt_ids), draft_lora=state.variant if state.drafting else None
        )
        # How the request speculates: a policy of its own, or a fixed shape behind a gate; with one row it does not.
        self.row_limit = 1  # rows of a step at most, the anchor included
        self.policy: SequencePolicy | None = None
        self.gate: EmaGate | EntropyGate | None = None
        self.index: TextIndex | None = None  # over prompt and answer, where the text itself is a source of drafts
        self.next_step_plain = False  # the last drafts led to logits that are not numbers: the next step drafts nothing
        self._warned = False
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopMatcher(request.stop)
        # Stop strings, grammars and penalties look at every token; otherwise all tokens of a step are taken together.
        self._watched = bool(request.stop) or sampler.guide is not None or request.sampling.penalised
        self._queued_at = 0.0
        self._first_token_at = 0.0
        self._token_ids: list[int] = []
        self._texts: list[str] = []  # the text of each token absorbed since the last event
        self._step_sizes: list[int] = []
        self._error: str | None = None

    @property
    def greedy(self) -> bool:
        return self.request.sampling.greedy

    @property
    def anchor(self) -> int:
        """The last committed token, which has not been through the target yet."""
        return self.state.tokens[self.state.length]

    @property
    def drafts_fixed(self) -> bool:
        """Whether a request with a fixed shape drafts in this step."""
        open_gate = self.gate is None or self.gate.open
        return self.policy is None and self.row_limit > 1 and self.room > 1 and open_gate

    @property
    def drafted(self) -> bool:
        """Whether the drafter ran for this sequence in the last step, or runs in every step."""
        return self.policy is None or self.policy.slots > 0

    def take_plain_step(self) -> bool:
        """Whether this step must run without drafts. The call clears the mark, which holds for one step."""
        plain, self.next_step_plain = self.next_step_plain, False
        return plain

    def note_bad_draft(self, what: str) -> None:
        """Counts drafted numbers that are NaN or infinite: the step runs without them and the request goes on."""
        self.stats.bad_drafts += 1
        self.state.spoiled = True
        if not self._warned:
            self._warned = True
            _log.warning("request %s: %s", self.request.id, what)

    def absorb(self, tokens: Sequence[TokenOut]) -> tuple[int, str]:
        """Takes tokens until one of them ends the request; returns how many were taken and the text to show."""
        if self._watched:
            return self._absorb_singly(tokens)
        room, last = self.room, self.request.stop_token_ids
        if len(tokens) == 1 < room and tokens[0].id not in last:
            self._token_ids.append(tokens[0].id)
            self.generated += 1
            return 1, self._push((tokens[0].id,))
        ids = [token.id for token in tokens[:room]]
        if not last.isdisjoint(ids):
            self.finish_reason = "stop"
            del ids[next(place for place, token in enumerate(ids, start=1) if token in last) :]
        elif len(ids) == room:
            self.finish_reason = "length"
        self._token_ids += ids
        self.generated += len(ids)
        text = self._push(ids)
        return len(ids), text if self.finish_reason is None else text + self._leftover_text()

    def _absorb_singly(self, tokens: Sequence[TokenOut]) -> tuple[int, str]:
        text = ""
        for count, token in enumerate(tokens, start=1):
            self._token_ids.append(token.id)
            self.generated += 1
            self.sampler.observe([token.id])
            shown, stopped = self._stops.push(self._push((token.id,)))
            text += shown
            if stopped or token.id in self.request.stop_token_ids or self.sampler.complete:
                self.finish_reason = "stop"
            elif not self.room:
                if not self.sampler.settled:
                    return count, text  # `end` follows once the mask says whether the text is complete
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return count, text if stopped else text + self._leftover_text()
        return len(tokens), text

    def _push(self, ids: Sequence[int]) -> str:
        """The text that becomes certain with these tokens; the part of each is kept for the next event."""
        texts = self._detokenizer.push(ids)
        self._texts += texts
        return "".join(texts)

    def _leftover_text(self) -> str:
        """The text that was held back because it could have become a stop string or the rest of a character."""
        shown, stopped = self._stops.push(self._detokenizer.flush())
        return shown if stopped else shown + self._stops.flush()

    def note_queued(self) -> None:
        """Starts the clock of the time to the first token."""
        self._queued_at = time.perf_counter()

    def note_first_token(self) -> None:
        self._first_token_at = time.perf_counter()
        self.stats.ttft_ms = (self._first_token_at - self._queued_at) * 1e3
        self.stats.cached_tokens = self.cached_tokens

    def record_step(self, step: StepRecord, committed: int) -> None:
        """Counts a verify step of which `committed` tokens were taken (a stop rule may leave the rest)."""
        proposal, stats = step.proposal, self.stats
        if proposal.nodes:
            kept = step.verdict.path[1 : committed + 1]
            sources = [proposal.source(row) for row in kept]
            own = len(sources) - sources.count(Source.TEXT)
            stats.record_step(proposal.nodes, proposal.depth, len(kept), committed, proposal.drafter_depth, own)
        else:
            stats.record_step(0, 0, 0, committed)
        stats.policy.record(step.decision, committed)
        stats.draft_ms += step.draft_ms
        stats.verify_ms += step.verify_ms
        self._step_sizes.append(committed)

    def end(self) -> str:
        """Ends the request after its last token; returns the text that was held back."""
        self.finish_reason = "stop" if self.sampler.complete else "length"
        return self._leftover_text()

    def fail(self, message: str) -> str:
        """Ends the request with an error; the text before it stays. Returns the text that was held back."""
        self.finish_reason = "error"
        self._error = message
        return self._leftover_text()

    def event(self, tokens: list[TokenOut], text: str, step: StepRecord | None = None) -> GenEvent:
        """What a step did for the request; the last event carries the numbers of the whole request."""
        stats = self._final_stats() if self.finish_reason is not None else None
        texts, self._texts = self._texts[: len(tokens)], []
        return GenEvent(self.request.id, tokens, text, self.finish_reason, stats, self._error, step, texts)

    def _final_stats(self) -> RequestStats:
        stats = self.stats
        stats.completion_tokens = len(self._token_ids)
        if self._first_token_at:
            stats.decode_ms = (time.perf_counter() - self._first_token_at) * 1e3
            stats.other_ms = max(0.0, stats.decode_ms - stats.draft_ms - stats.verify_ms)
        stats.novel_steps, stats.novel_committed = novel_steps(self._token_ids, self._step_sizes)
        return stats
