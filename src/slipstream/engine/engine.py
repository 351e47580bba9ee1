"""The step: admit, plan, propose, verify, accept, commit, report. Everything else prepares it or reports it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from slipstream.cache.pages import PageTable
from slipstream.cache.prefix import PrefixCache
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.active_sequence import ActiveSequence
from slipstream.engine.batch_planner import BatchPlanner, DeviceBatch
from slipstream.engine.draft_context import DraftContexts
from slipstream.engine.executor import Executor, ForwardResult, RowWork
from slipstream.engine.launch_ahead import LaunchAhead
from slipstream.engine.outcomes import Proposed, SequenceOutcome, decode_outcome, prefill_outcome
from slipstream.engine.proposer import Proposer
from slipstream.engine.scheduler import PrefillChunk, Requirements, Scheduler, SchedulerLimits, StepPlan
from slipstream.engine.snapshots import EngineSnapshot, LineSnapshot, sequence_snapshot
from slipstream.engine.stepping import StepLock
from slipstream.engine.variants import DraftVariant
from slipstream.errors import RequestError
from slipstream.grammar.constraints import Grammars
from slipstream.speculative.policy import MAX_AUTO_ROWS
from slipstream.speculative.sampling import RowSampler
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import BASE_VARIANT, GenEvent, Request

_log = logging.getLogger("slipstream")
Chunks = Sequence[PrefillChunk[ActiveSequence]]


class Engine:
    """Runs any number of requests, each with its own settings, with one target forward per step."""

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, config: EngineConfig, max_context: int, draft_key: str | None
    ) -> None:
        self.executor = executor
        self._tokenizer = tokenizer
        self._config = config
        self._max_context = max_context
        self._draft_key = draft_key
        self.table = PageTable(executor.pages)
        states = executor.memory.states
        self.prefix = PrefixCache(self.table, PAGE_TOKENS, states) if config.prefix_cache else None
        self.scheduler: Scheduler[ActiveSequence] = Scheduler(
            self.table,
            self.prefix,
            PAGE_TOKENS,
            SchedulerLimits(config.max_sequences, config.max_waiting, config.prefill_chunk, config.step_rows),
            states,
        )
        self.grammars = Grammars(tokenizer, executor.target.config.vocab_size)
        self.contexts = DraftContexts(executor.variants)
        on_device = executor.device_steps is not None
        self.proposer = Proposer(
            self.contexts, executor.variants, executor.measure_costs, config.text_drafts, on_device
        )
        self.ahead: LaunchAhead | None = None  # a CPU has no device steps
        if executor.device_steps is not None:
            planner = BatchPlanner(self.proposer, executor.device_steps)
            self.ahead = LaunchAhead(executor.device_steps, planner, self.contexts, executor.variants)
        # Asked now, because the answer may take a measurement, which must not fall into a step.
        self._shares_generated = executor.shares_generated
        self.sequences: dict[str, ActiveSequence] = {}  # the open requests, by id
        self._stepping = StepLock()

    # One step.

    def step(self) -> list[GenEvent]:
        """Does one step for all requests and says what came of it."""
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
            self.grammars.lane.begin_forward(len(plan.prefill) + len(plan.decode))
            began = time.perf_counter()
            events += self._run(plan)
            self.scheduler.took(plan, time.perf_counter() - began)
        elif self.scheduler.running:
            self.grammars.lane.wait()
        if self._config.check_integrity:
            self.scheduler.check()
        return events

    def _run(self, plan: StepPlan[ActiveSequence]) -> list[GenEvent]:
        """Runs a host step, a device step, or both.

        Prompts, and sequences that need the host between draft and token, share the host step. All other sequences
        share the device step. On a CPU everything runs in the host step.
        """
        batch, hosted = self.ahead.split(plan.decode) if self.ahead is not None else (None, plan.decode)
        events: list[GenEvent] = []
        alone = not (plan.prefill or hosted)
        if not alone:
            events += self._host_step(plan.prefill, hosted)
        if batch is not None:
            events += self._device_step(batch, alone)
        return events

    def _host_step(self, prefill: Chunks, decoding: Sequence[ActiveSequence]) -> list[GenEvent]:
        """The phases one by one: the host may look at a draft before it chooses the rows to verify."""
        began = time.perf_counter()
        proposed, draft_s = self.proposer.propose(decoding)
        works = [*map(_chunk_work, prefill), *map(_proposal_work, decoding, proposed)]
        result = self.executor.forward(works)
        sequences = [*(chunk.sequence for chunk in prefill), *decoding]
        chosen = self._sample(sequences, works, result)
        verify_s = time.perf_counter() - began - draft_s
        accepted = self._accept(prefill, list(zip(decoding, proposed, strict=True)), chosen, result, draft_s, verify_s)
        self._keep_taps(accepted, result)
        events = self._settle(accepted)
        if not prefill:
            committed = [len(outcome.tokens) for outcome in accepted]
            self.proposer.observe(decoding, proposed, committed, draft_s, time.perf_counter() - began - draft_s)
        return events

    def _device_step(self, batch: DeviceBatch, alone: bool) -> list[GenEvent]:
        """Launches the next step, then waits for the one before it: the host's work runs beside the device's."""
        assert self.ahead is not None
        landed = self.ahead.step(batch, alone)
        self.ahead.learn_times(landed)
        outcomes = [self._guarded(landed.sequence(column), landed.outcome, column) for column in landed.present]
        events = self._settle(outcomes)
        self.ahead.settled(landed, outcomes, alone, crowded=bool(self.scheduler.waiting))
        return events

    def _sample(
        self, sequences: Sequence[ActiveSequence], works: Sequence[RowWork], result: ForwardResult
    ) -> list[list[int]]:
        """The target's own choice after every row that has logits."""
        return [
            self._choose(sequence, work, logits) if work.logit_rows else []
            for sequence, work, logits in zip(sequences, works, result.logits, strict=True)
        ]

    def _choose(self, sequence: ActiveSequence, work: RowWork, logits: Tensor) -> list[int]:
        first = work.start + work.rows - work.logit_rows + 1
        try:
            return sequence.sampler.choose(logits, first, work.proposal).tolist()
        except Exception as error:
            self._blame(sequence, error)
            return []

    def _accept(
        self,
        prefill: Chunks,
        decoding: Sequence[tuple[ActiveSequence, Proposed]],
        chosen: Sequence[list[int]],
        result: ForwardResult,
        draft_s: float,
        verify_s: float,
    ) -> list[SequenceOutcome]:
        """What every request takes of the step, in the order of the work items."""
        outcomes = [
            self._guarded(chunk.sequence, prefill_outcome, chunk, chosen[item], result.logits[item])
            for item, chunk in enumerate(prefill)
        ]
        for item, (sequence, own) in enumerate(decoding, start=len(prefill)):
            facts = sequence, own, chosen[item], result.logits[item], draft_s, verify_s
            outcomes.append(self._guarded(sequence, self._decode, *facts))
        return outcomes

    def _decode(
        self,
        sequence: ActiveSequence,
        proposed: Proposed,
        chosen: list[int],
        logits: Tensor,
        draft_s: float,
        verify_s: float,
    ) -> SequenceOutcome:
        outcome = decode_outcome(sequence, proposed, chosen, logits, draft_s, verify_s)
        self.proposer.learn(outcome)
        return outcome

    def _guarded(
        self, sequence: ActiveSequence, outcome: Callable[..., SequenceOutcome], *facts: object
    ) -> SequenceOutcome:
        """An error in one request's own tokens ends that request and no other."""
        if sequence.finish_reason is None:
            try:
                return outcome(*facts)
            except Exception as error:
                self._blame(sequence, error)
        return SequenceOutcome(sequence, [])

    @staticmethod
    def _blame(sequence: ActiveSequence, error: Exception) -> None:
        _log.error("request %s failed", sequence.request.id, exc_info=error)
        sequence.state.spoiled = True
        with suppress(Exception):  # the text that was held back may be what failed
            sequence.fail(f"the request failed inside the engine: {type(error).__name__}: {error}")

    def _keep_taps(self, outcomes: Sequence[SequenceOutcome], result: ForwardResult) -> None:
        """Writes draft context; the taps of a sequence that decodes plainly for now wait until it drafts."""
        writing = []
        for item, outcome in enumerate(outcomes):
            if not outcome.sequence.state.drafting:
                continue
            if outcome.step is None or (outcome.step.proposal.nodes and outcome.sequence.drafted):
                writing.append((item, outcome.rows))
            else:
                self.contexts.hold(result, item, outcome.rows)
        self.contexts.write(result, writing)

    def _settle(self, outcomes: Sequence[SequenceOutcome]) -> list[GenEvent]:
        """Commits what every sequence keeps, all its parts together, and reports it."""
        events = []
        for outcome in outcomes:
            sequence, tokens = outcome.sequence, outcome.tokens
            state, finished = sequence.state, sequence.finish_reason is not None
            prompt_done = bool(tokens) and state.length < len(sequence.request.prompt_ids)
            state.commit(outcome.rows, [token.id for token in tokens], len(outcome.rows) if state.drafting else 0)
            if prompt_done or finished:
                self._publish(sequence, prompt_done)
            if tokens or finished:
                events.append(sequence.event(tokens, outcome.text, outcome.step))
            if finished:
                self.scheduler.finish(sequence)
                self._close(sequence)
        return events

    def _publish(self, sequence: ActiveSequence, prompt_done: bool) -> None:
        """Offers full pages to later requests through the prefix cache.

        A prompt's pages are offered when the prompt is computed, an answer's only if `shares_generated` allows it.
        """
        if self.prefix is None or not sequence.request.cache_prompt or sequence.state.spoiled:
            return
        if prompt_done:
            length = len(sequence.request.prompt_ids)
        elif sequence.finish_reason is not None and self._shares_generated:
            length = sequence.state.length
        else:
            return
        self.contexts.write_waiting([sequence.state])
        self.prefix.put(sequence.state.tokens[:length], sequence.state.pages, sequence.draft_key)

    def _drop_cancelled(self) -> list[GenEvent]:
        events = []
        for sequence in self.scheduler.drop_cancelled():
            self._close(sequence)
            sequence.finish_reason = "cancelled"
            events.append(sequence.event([], ""))
        return events

    def _end_complete(self, plan: StepPlan[ActiveSequence]) -> list[GenEvent]:
        """Ends constrained requests that may write nothing more; their last token alone did not show that yet."""
        constrained = [sequence for sequence in plan.decode if sequence.sampler.guide is not None]
        over = [sequence for sequence in constrained if sequence.sampler.complete or not sequence.room]
        for sequence in over:
            plan.decode.remove(sequence)
        return self._settle([SequenceOutcome(sequence, [], text=sequence.end()) for sequence in over])

    def _close(self, sequence: ActiveSequence) -> None:
        del self.sequences[sequence.request.id]
        if sequence.sampler.guide is not None:
            sequence.sampler.guide.abandon()

    # Requests.

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything: paused requests are work, but none that can be done now."""
        return self.scheduler.busy

    def check(self, request: Request) -> Requirements:
        """Refuses what could never run; changes nothing, so any thread may call it."""
        vocab = self.executor.target.config.vocab_size
        biased = [token for token, _ in request.sampling.logit_bias]
        bad = next((token for token in (*request.prompt_ids, *biased) if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"token {bad} is not in the vocabulary of {vocab}")
        needs = self._requirements(request)
        self.scheduler.check_fits(needs.positions)
        return needs

    def _requirements(self, request: Request) -> Requirements:
        variant, drafter = self.executor.variants.find(request.draft_lora), self.executor.variants.drafter
        drafting = self._drafts(request)
        block = drafter.block_size if drafting and drafter is not None else 1
        widest = drafter.proposals + 1 if drafting and drafter is not None else 1
        if request.mode.kind == "chain" and request.mode.width > widest:
            raise RequestError(f"mode '{request.mode}' is wider than the {widest} rows this drafter can fill")
        steps = self.executor.device_steps
        if steps is not None and request.mode.width > steps.most_rows_each:
            most = f"the {steps.most_rows_each} rows that a GPU verifies of one sequence"
            raise RequestError(f"mode '{request.mode}' is wider than {most}", "ask for fewer rows")
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
        spare = max(block, rows) + self.executor.spare_positions
        return Requirements(
            positions=len(request.prompt_ids) + max_tokens + spare,
            max_tokens=max_tokens,
            draft_key=self._context_key(variant) if drafting and variant is not None else None,
        )

    def _drafts(self, request: Request) -> bool:
        """Whether the drafter drafts for a request, which then needs draft context; refuses a mode without a source."""
        if request.mode.kind == "plain":
            return False
        text_drafts = self.proposer.text_drafts
        if request.mode.text and not text_drafts:
            raise RequestError(
                f"mode '{request.mode}' needs drafts from the text", "leave --no-text-drafts and --draft none out"
            )
        if self.executor.variants.drafter is None and not (text_drafts and request.mode.reads_text):
            other = "auto" if text_drafts else "plain"
            raise RequestError(f"mode '{request.mode}' needs a drafter", f"load one with --draft, or use mode {other}")
        return self.executor.variants.drafter is not None

    def _context_key(self, variant: DraftVariant) -> str:
        return f"{self._draft_key}{variant.context_key}"

    def add(self, request: Request) -> None:
        """Queues a request; refuses what could never run."""
        if request.id in self.sequences:
            raise RequestError(f"a request '{request.id}' is running already", "give every request its own id")
        sequence = self.make_sequence(request)
        self.scheduler.add(sequence)
        sequence.note_queued()
        self.sequences[request.id] = sequence

    def make_sequence(self, request: Request) -> ActiveSequence:
        """A sequence for a request that fits, not queued yet."""
        needs, drafting = self.check(request), self._drafts(request)
        vocab = self.executor.target.config.vocab_size
        guide = self.grammars.guide(request.constraint, request.thinking)
        sampler = RowSampler(request.sampling, vocab, request.prompt_ids, request.share_noise, guide)
        state = SequenceState(self.table, PAGE_TOKENS, self.executor.memory, drafting, request.draft_lora)
        sequence = ActiveSequence(request, state, needs, sampler, self._tokenizer)
        self.proposer.prepare(sequence)
        return sequence

    def cancel(self, request_id: str) -> bool:
        """Ends a request at the next step; False if it is not known (any more)."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        sequence.cancelled = True
        return True

    def pause(self, request_id: str) -> bool:
        """Takes a request out of the next steps; False if it is not known (any more).

        It keeps its pages unless others cannot start without them; then it is computed again from its tokens.
        """
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        self.scheduler.pause(sequence)
        return True

    def resume(self, request_id: str) -> bool:
        """Lets a paused request go on; False if it is not paused or not known (any more)."""
        sequence = self.sequences.get(request_id)
        return sequence is not None and self.scheduler.resume(sequence)

    def snapshot(self) -> EngineSnapshot:
        """Requests and pages as plain values; another thread may ask too, and may then see the middle of a step."""
        cached = self.prefix.size if self.prefix is not None else 0
        used, total = self.table.total - self.table.free, self.table.total
        return EngineSnapshot(tuple(map(sequence_snapshot, list(self.sequences.values()))), used, cached, total)

    def line(self) -> LineSnapshot:
        """How many requests wait for a slot; only the thread that steps the engine may ask."""
        return LineSnapshot(self.scheduler.newcomers, len(self.scheduler.waiting))

    # Variants of the drafter.

    def remove_variant(self, name: str) -> None:
        """Removes a variant that no open request drafts with, and all context that only this variant made."""
        states = [sequence.state for sequence in self.sequences.values()]
        users = sum(state.drafting and state.variant == name for state in states)
        if users and name != BASE_VARIANT:
            raise RequestError(f"the draft variant '{name}' is in use (open requests: {users})", "wait or cancel")
        variants = self.executor.variants
        gone = variants.remove(name)
        self.proposer.forget(name)
        if self.ahead is not None:
            self.ahead.forget_variant(gone)
        self.executor.forget(gone)
        if self.prefix is not None and not variants.makes_context(gone.context_key):
            self.prefix.forget(self._context_key(gone))


def _chunk_work(chunk: PrefillChunk[ActiveSequence]) -> RowWork:
    state = chunk.sequence.state
    return RowWork(state, chunk.start, state.tokens[chunk.start : chunk.stop], int(chunk.last))


def _proposal_work(sequence: ActiveSequence, proposed: Proposed) -> RowWork:
    proposal = proposed.proposal
    return RowWork(sequence.state, sequence.state.length, proposal.tokens, len(proposal.tokens), proposal)
