"""OpenAI's chat and completions: a request's jobs run together, and its choices are answered whole or as a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from slipstream.server.apis import openai_shared as shared
from slipstream.server.apis import sse
from slipstream.server.apis.openai_schemas import ChatRequest, CompletionRequest, GenerationRequest
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.logs import note
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.answering import answering
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import Answer, AnswerDelta, Job
from slipstream.version import __version__

Body = TypeVar("Body", bound=GenerationRequest)
Result = TypeVar("Result")


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=ParsedRoute)

    @router.post("/v1/chat/completions", response_model=None, summary="Answer a conversation")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _ChatResponse(state, body).send(request)

    @router.post("/v1/completions", response_model=None, summary="Go on from a text or tokens")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _CompletionResponse(state, body).send(request)

    return router


@dataclass(frozen=True, slots=True)
class _News:
    """One thing that happened to a choice: it began (without a delta), it grew, or it is over."""

    index: int
    running: Generation
    delta: AnswerDelta | None = None
    over: bool = False


class _GenerationResponse(ABC, Generic[Body]):
    """The response of chat or completions to one request; a subclass knows the fields of its API's choices."""

    api: ClassVar[str]
    prefix: ClassVar[str]  # of the response's id
    kind: ClassVar[str]  # the value of OpenAI's field `object`
    chunk_kind: ClassVar[str]

    def __init__(self, state: ServerState, body: Body) -> None:
        note(**shared.caller(body))
        self.body = body
        self.jobs = body.jobs(state.settings)
        self._state = state

    @abstractmethod
    def whole_choice(self, index: int, running: Generation) -> dict[str, object]:
        """The fields of a choice whose answer is complete."""

    @abstractmethod
    def partial_choice(self, news: _News) -> dict[str, object]:
        """The fields of a choice in a chunk."""

    async def send(self, request: Request) -> Response:
        if self.body.stream:
            return await sse.respond(request, self._chunks(), self._state.settings)
        return JSONResponse(await sse.unless_gone(request.receive, self._whole()))

    async def _whole(self) -> dict[str, object]:
        """Runs all jobs together until they end; if one fails, the others are cancelled."""
        async with _together([self._answer_one(job) for job in self.jobs]) as tasks:
            ended = await asyncio.gather(*tasks)
        answers = [running.answer for running in ended]
        choices = [
            {"index": index, **self.whole_choice(index, running), "finish_reason": shared.finish_reason(running.answer)}
            for index, running in enumerate(ended)
        ]
        return {**self._head(self.kind), "model": answers[0].model, "choices": choices, **self._totals(answers)}

    async def _answer_one(self, job: Job) -> Generation:
        async with answering(self._state, job, self.api) as running:
            await running.finish()
            return running

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream: each choice's beginning, its deltas and its end, then usage if it was asked for."""
        head, with_usage = self._head(self.chunk_kind), self.body.with_usage
        marks: dict[int, shared.DraftMarks] = defaultdict(shared.DraftMarks)
        ended: dict[int, Answer] = {}
        async with aclosing(self._news()) as news_stream:
            async for news in news_stream:
                # If usage was asked for, every chunk has the field, and only the last chunk has a value in it.
                more: dict[str, object] = {"usage": None} if with_usage else {}
                answer, reason = news.running.answer, None
                if news.over:
                    ended[news.index], reason = answer, shared.finish_reason(answer)
                    if len(ended) == len(self.jobs) and not with_usage:
                        more["timings"] = shared.timings([ended[index] for index in sorted(ended)])
                elif news.delta is not None and self.body.include_draft_info:
                    more["slipstream"] = marks[news.index].mark(news.delta)
                choice = {"index": news.index, **self.partial_choice(news), "finish_reason": reason}
                yield sse.event({**head, "model": answer.model, "choices": [choice], **more})
        if with_usage:
            answers = [ended[index] for index in sorted(ended)]
            yield sse.event({**head, "model": answers[0].model, "choices": [], **self._totals(answers)})
        yield sse.DONE

    async def _news(self) -> AsyncGenerator[_News, None]:
        """Runs all jobs together and yields their news as it arrives; closing the generator cancels them."""
        # The queue needs no limit, because every answer's length has one. An engine must not wait for a slow client.
        queue: asyncio.Queue[_News | BaseException] = asyncio.Queue()
        async with _together([self._stream_one(index, job, queue) for index, job in enumerate(self.jobs)]):
            left = len(self.jobs)
            while left:
                news = await queue.get()
                if isinstance(news, BaseException):
                    raise news
                left -= news.over
                yield news

    async def _stream_one(self, index: int, job: Job, queue: asyncio.Queue[_News | BaseException]) -> None:
        try:
            async with answering(self._state, job, self.api) as running:
                queue.put_nowait(_News(index, running))
                async for delta in running:
                    queue.put_nowait(_News(index, running, delta))
                running.raise_failure()
            queue.put_nowait(_News(index, running, over=True))
        except Exception as error:
            queue.put_nowait(error)

    def _head(self, kind: str) -> dict[str, object]:
        """The fields that a whole response and every chunk of a stream have."""
        return {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "system_fingerprint": f"slipstream-{__version__}",
        }

    def _totals(self, answers: Sequence[Answer]) -> dict[str, object]:
        return {"usage": shared.usage(answers, self.body.choices), "timings": shared.timings(answers)}


@asynccontextmanager
async def _together(work: Sequence[Coroutine[Any, Any, Result]]) -> AsyncIterator[list[asyncio.Task[Result]]]:
    """Runs coroutines as tasks; those that still run when the block is left are cancelled."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _ChatResponse(_GenerationResponse[ChatRequest]):
    api, prefix = "chat", "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def whole_choice(self, index: int, running: Generation) -> dict[str, object]:
        answer = running.answer
        message: dict[str, object] = {
            "role": "assistant",
            "content": answer.content or (None if answer.calls else ""),
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        return {
            "message": message,
            "logprobs": shared.chat_logprobs(answer.tokens, running.tokenizer) if self.body.logprobs else None,
        }

    def partial_choice(self, news: _News) -> dict[str, object]:
        if news.delta is None:
            return {"delta": {} if news.over else {"role": "assistant", "content": ""}, "logprobs": None}
        shown = self.body.logprobs and news.delta.kind == "content"
        logprobs = shared.chat_logprobs(news.delta.tokens, news.running.tokenizer) if shown else None
        return {"delta": _delta(news.delta), "logprobs": logprobs}


def _delta(delta: AnswerDelta) -> dict[str, object]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    call: dict[str, object] = {"index": delta.call, "function": {"arguments": delta.text}}
    if delta.call_id:
        call |= {"id": delta.call_id, "type": "function", "function": {"name": delta.name, "arguments": delta.text}}
    return {"tool_calls": [call]}


class _CompletionResponse(_GenerationResponse[CompletionRequest]):
    api, prefix = "completions", "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, state: ServerState, body: CompletionRequest) -> None:
        super().__init__(state, body)
        self._logprobs: dict[int, shared.CompletionLogprobs] = {}  # of each choice of a stream, by its index

    def whole_choice(self, index: int, running: Generation) -> dict[str, object]:
        answer, logprobs = running.answer, None
        if self.body.logprobs is not None:
            logprobs = shared.CompletionLogprobs(running.tokenizer).take(answer.tokens, answer.token_texts)
        # The model continues raw text here, so text that looks like reasoning belongs to the answer.
        return {"text": self._echo(index, running) + answer.reasoning + answer.content, "logprobs": logprobs}

    def partial_choice(self, news: _News) -> dict[str, object]:
        if news.delta is None:
            return {"text": "" if news.over else self._echo(news.index, news.running), "logprobs": None}
        logprobs = None
        if self.body.logprobs is not None:
            told = self._logprobs.setdefault(news.index, shared.CompletionLogprobs(news.running.tokenizer))
            logprobs = told.take(news.delta.tokens, news.delta.texts)
        return {"text": news.delta.text, "logprobs": logprobs}

    def _echo(self, index: int, running: Generation) -> str:
        if not self.body.echo:
            return ""
        prompt = self.jobs[index].prompt
        return prompt if isinstance(prompt, str) else running.tokenizer.decode(list(prompt or ()))
