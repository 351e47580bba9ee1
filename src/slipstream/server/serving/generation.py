"""One answer while it grows: a job becomes an engine's request, and its events become deltas and an answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.engine.llm import LLM
from slipstream.errors import EngineFailedError, SlipstreamError
from slipstream.server.operations.canary import promise_of
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.serving.jobs import Answer, AnswerDelta, DeadlineError, Job, ToolCall
from slipstream.server.serving.parsing import Piece, Splitter
from slipstream.server.serving.preparing import prompt_chars
from slipstream.server.serving.prompts import Prompt, build_prompt, constraint_of
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import FinishReason, GenEvent, Request, StepRecord, Thinking, TokenOut

if TYPE_CHECKING:
    from slipstream.server.serving.model_entries import Lease

# The longest answer in tokens if neither the request nor the model's entry sets one. It bounds answers that never end
# by themselves; a smaller value would cut ordinary answers off.
DEFAULT_MAX_TOKENS = 1024
# How long a cancelled generation waits for the engine's last event. With a shorter wait, a slow engine would cost the
# request its last tokens and its numbers; with a longer one, a hanging engine would hold the client's connection.
LAST_EVENT_WAIT_S = 5.0


async def start(lease: Lease, job: Job) -> Generation:
    """Hands a job to the lease's engine; the lease is released when the answer is over or cannot begin."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        lease.worker.check_room(lease.preparation.count)
        prompt, request = await lease.preparation.run(prompt_chars(job), _prepare, lease, job)
        generation = Generation(lease, job, prompt, request)
        generation.submit(None if job.deadline_s is None else began + job.deadline_s)
    except BaseException:
        lease.release()
        raise
    return generation


def _prepare(lease: Lease, job: Job) -> tuple[Prompt, Request]:
    prompt = build_prompt(lease.llm, job)
    settings: dict[str, object] = {"max_tokens": DEFAULT_MAX_TOKENS, **lease.spec.defaults, **job.settings}
    if "mode" in job.settings and "gate" not in job.settings:
        settings.pop("gate", None)  # the model's default gate is meant for its default mode
    constraint = constraint_of(job)
    if constraint is not None:
        settings["constraint"] = constraint
    if prompt.thinking and (constraint is not None or job.thinking_budget is not None):
        settings["thinking"] = Thinking(job.thinking_budget, prompt.opened)
    request = lease.llm.request(prompt.ids, **settings)
    return prompt, replace(request, id=uuid.uuid4().hex, priority=job.priority)


class Generation:
    """An answer while it grows: iterate over its deltas; `answer` is complete when they end.

    The generation goes on even if its deltas are not read. Closing it early cancels the request at the next step.
    """

    def __init__(self, lease: Lease, job: Job, prompt: Prompt, request: Request) -> None:
        llm: LLM = lease.llm
        self.request = request
        self.prompt_tokens = len(prompt.ids)
        self.promise = promise_of(llm)
        self.tokenizer = llm.tokenizer  # APIs need it even after the model has been released
        self.failure: SlipstreamError | None = None  # why the answer ended with an error
        plain = request.mode.kind == "plain"
        self.answer = Answer(lease.name, str(request.mode), None if plain else llm.draft_label)
        self._lease: Lease | None = lease  # None once the answer is over: an unread answer must not keep a model loaded
        self._loop = asyncio.get_running_loop()
        self._deltas: deque[AnswerDelta] = deque()
        self._news = asyncio.Event()
        self._arriving: list[GenEvent] = []  # events on their way from the engine's thread
        self._arriving_lock = threading.Lock()
        self._assembly = _Assembly(self.answer, job, prompt, llm.tokenizer, request)
        self._ending: FinishReason | None = None  # the reason to report if this server cancelled the request
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def request_id(self) -> str:
        return self.request.id

    @property
    def over(self) -> bool:
        return self.answer.finish_reason is not None

    def submit(self, deadline: float | None) -> None:
        """Queues the request; `deadline` is a time of the event loop's clock."""
        assert self._lease is not None
        self._lease.worker.submit(self.request, self._put)
        if deadline is not None:
            self._timers.append(self._loop.call_at(deadline, self._expire))

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> AnswerDelta:
        while not self._deltas:
            if self.over:
                raise StopAsyncIteration
            await self._wait_for_news()
        return self._deltas.popleft()

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def finish(self) -> Answer:
        """Waits for the end and returns the whole answer; raises the reason if the answer is not complete."""
        async for _ in self:
            pass
        self.raise_failure()
        return self.answer

    def raise_failure(self) -> None:
        """Raises the error that kept an ended answer from being complete, if there is one."""
        if self.failure is not None:
            raise self.failure
        if self.answer.finish_reason == "cancelled":
            raise ApiError(
                503,
                "the server ended this request before its answer was complete",
                "ask again",
                kind="server_error",
                code="cancelled",
            )

    async def aclose(self) -> None:
        """Cancels the request if it still runs, and waits for its last event, for `LAST_EVENT_WAIT_S` at most."""
        if self.over:
            return
        self._stop("cancelled")
        # If this wait is cancelled, the request's last event still ends the answer and releases the lease.
        while not self.over:
            await self._wait_for_news()

    def _stop(self, meaning: FinishReason) -> None:
        if self._ending is not None or self._lease is None:
            return
        self._ending = meaning
        self._lease.worker.cancel(self.request.id)
        last = GenEvent(self.request.id, [], "", meaning)  # in case the engine sends none in time
        self._timers.append(self._loop.call_later(LAST_EVENT_WAIT_S, self._put, last))

    def _expire(self) -> None:
        if self._ending is None and not self.over:
            self.failure = DeadlineError("the request's time is up", "ask for less, or allow more time")
            self._stop("error")

    def _put(self, event: GenEvent) -> None:
        """Carries an event from the engine's thread to the event loop; events that wait are delivered together."""
        with self._arriving_lock:
            first = not self._arriving
            self._arriving.append(event)
        if first:
            # A closed event loop has no reader left, and its error must not reach the engine's thread.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self._arriving_lock:
            events, self._arriving = self._arriving, []
        for event in events:
            if self.over:
                break
            self._deltas += self._assembly.add(event)
            if event.finish_reason is not None:
                self._end(event)
        self._news.set()

    def _end(self, event: GenEvent) -> None:
        assert self._lease is not None, "an answer ends once"
        reason = event.finish_reason
        if reason == "cancelled" and self._ending is not None:
            reason = self._ending
        elif reason in ("stop", "length"):
            self.failure = None  # the answer was complete before the cancellation reached the engine
        if reason == "error" and self.failure is None:
            said = event.error or "the engine gave no reason"
            self.failure = SlipstreamError(said) if self._lease.worker.alive else EngineFailedError(said)
        if event.stats is not None:
            self.answer.stats = event.stats
        if self.failure is not None:
            self.answer.error = str(self.failure)
        self.answer.finish_reason = reason
        for timer in self._timers:
            timer.cancel()
        self._lease.release()
        self._lease = None


class _Assembly:
    """Turns events into deltas and fills the answer: it splits text by kind and assigns each token to its text."""

    def __init__(self, answer: Answer, job: Job, prompt: Prompt, tokenizer: Tokenizer, request: Request) -> None:
        names = () if job.tool_choice.kind == "none" else tuple(tool.name for tool in job.tools)
        self._splitter = Splitter(thinking=prompt.thinking, opened=prompt.opened, tools=names)
        self._answer = answer
        self._places = _TokenPlaces(tokenizer)
        self._keep_tokens = request.sampling.logprobs is not None
        self._stops = request.stop
        self._step: StepRecord | None = None

    def add(self, event: GenEvent) -> list[AnswerDelta]:
        self._places.add(event)
        self._step = event.step or self._step
        pieces = self._splitter.push(event.text)
        if event.finish_reason is not None:
            pieces += self._splitter.finish()
            # The engine cuts the text where the stop string begins. If two begin there, the shorter was complete first.
            found = [stop for stop in self._stops if self._places.unshown.startswith(stop)]
            if event.finish_reason == "stop" and found:
                self._answer.stop_sequence = min(found, key=len)
        return [delta for piece in pieces for delta in self._deltas(piece)]

    def _deltas(self, piece: Piece) -> list[AnswerDelta]:
        tokens, texts = self._places.take(piece.end)
        if piece.kind == "markup":
            return []
        answer, found = self._answer, []
        if piece.kind == "reasoning":
            answer.reasoning_tokens += len(tokens)
            answer.reasoning += piece.text
        elif piece.kind == "content":
            answer.content += piece.text
            if self._keep_tokens:
                answer.tokens += tokens
                answer.token_texts += texts
        elif piece.begins is not None:
            call = ToolCall(f"call_{uuid.uuid4().hex[:24]}", piece.begins, "")
            answer.calls.append(call)
            found.append(AnswerDelta("tool_call", "", (), piece.call, call.id, call.name, self._take_step()))
        if piece.kind == "tool_call" and piece.text:
            call = answer.calls[piece.call]
            answer.calls[piece.call] = replace(call, arguments=call.arguments + piece.text)
        if piece.text:
            found.append(AnswerDelta(piece.kind, piece.text, tokens, piece.call, step=self._take_step(), texts=texts))
        return found

    def _take_step(self) -> StepRecord | None:
        step, self._step = self._step, None
        return step


class _TokenPlaces:
    """Remembers where in the text each token begins, which decides the part of the answer that it belongs to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._length = 0
        self.unshown = ""  # text of tokens that the engine holds back or has cut off as a stop string
        self._waiting: deque[tuple[int, TokenOut, str]] = deque()

    def add(self, event: GenEvent) -> None:
        for token, text in zip(event.tokens, event.texts, strict=True):
            if not self._tokenizer.is_special(token.id):
                self._waiting.append((self._length, token, text))
                self._length += len(text)
                self.unshown += text
        self.unshown = self.unshown[len(event.text) :]

    def take(self, end: int) -> tuple[list[TokenOut], list[str]]:
        """The tokens that begin before `end` and were not taken yet, and the characters that each brought."""
        tokens, texts = [], []
        while self._waiting and self._waiting[0][0] < end:
            _, token, text = self._waiting.popleft()
            tokens.append(token)
            texts.append(text)
        return tokens, texts
