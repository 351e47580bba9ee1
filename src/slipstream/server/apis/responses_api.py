"""POST /v1/responses: OpenAI's Responses API with text and function calls, whole or as a sequence of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from slipstream.server.apis import openai_shared as shared
from slipstream.server.apis import sse
from slipstream.server.apis.responses_schemas import ResponsesRequest
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.answering import answering
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import AnswerDelta, Job

_API = "responses"
Event = tuple[str, dict[str, object]]  # the type and the fields of an event


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=ParsedRoute)

    @router.post("/v1/responses", response_model=None, summary="Answer, with text and function calls as items")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        shared.note_caller(body.user or body.safety_identifier, body.metadata)
        job = body.job(state.settings)
        if body.stream:
            numbers = _Numbers()
            return await sse.respond(request, _events(state, job, body, numbers), state.settings, numbers.error)
        return JSONResponse(await sse.unless_gone(request, _whole(state, job, body)))

    return router


async def _whole(state: ServerState, job: Job, body: ResponsesRequest) -> dict[str, object]:
    async with answering(state, job, _API) as running:
        response, items = _Response(running, body), _Items(running, body.with_logprobs)
        async for delta in running:
            list(items.take(delta))
        list(items.close(last=True))
        running.raise_failure()
        return response.ended(items)


async def _events(
    state: ServerState, job: Job, body: ResponsesRequest, numbers: _Numbers
) -> AsyncGenerator[bytes, None]:
    async with answering(state, job, _API) as running:
        response, items = _Response(running, body), _Items(running, body.with_logprobs)
        for kind in ("response.created", "response.in_progress"):
            yield numbers.event(kind, {"response": response.in_progress()})
        async for delta in running:
            for kind, fields in items.take(delta):
                yield numbers.event(kind, fields)
        for kind, fields in items.close(last=True):
            yield numbers.event(kind, fields)
        ended = response.ended(items)
        yield numbers.event(f"response.{ended['status']}", {"response": ended})


class _Numbers:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, fields: dict[str, object]) -> bytes:
        numbered = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return sse.event(numbered, kind)

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream which could not begin, or which failed where no response object describes it."""
        return self.event("error", {"code": error.code, "message": error.message, "param": error.param})


class _Response:
    """The response object: the settings of the request as the server understood them, and the result so far."""

    def __init__(self, running: Generation, body: ResponsesRequest) -> None:
        self._running = running
        self._body = body
        self._created_at = int(time.time())

    def in_progress(self) -> dict[str, object]:
        return self._object("in_progress", [])

    def ended(self, items: _Items) -> dict[str, object]:
        answer = self._running.answer
        if answer.finish_reason in ("error", "cancelled"):
            said = answer.error or "the server ended this request before its answer was complete"
            failed = {"error": {"code": "server_error", "message": said}}
            return self._object("failed", items.done, **failed, usage=self._usage(), timings=answer.timings())
        late = answer.finish_reason == "length"
        return self._object(
            "incomplete" if late else "completed",
            items.done,
            incomplete_details={"reason": "max_output_tokens"} if late else None,
            completed_at=None if late else int(time.time()),
            usage=self._usage(),
            timings=answer.timings(),
        )

    def _usage(self) -> dict[str, object]:
        stats = self._running.answer.stats
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._running.answer.reasoning_tokens},
            "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        }

    def _object(self, status: str, output: list[dict[str, Any]], **more: object) -> dict[str, object]:
        body, request = self._body, self._running.request
        format_ = body.text.format if body.text is not None else None
        choice = body.tool_choice
        return {
            "id": f"resp_{request.id}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "model": self._running.answer.model,
            "output": output,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": {"type": "text"} if format_ is None else format_.model_dump(exclude_none=True)},
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "background": False,
            "store": False,
            "truncation": "disabled",
            "service_tier": "default",
            "metadata": body.metadata or {},
            "user": body.user,
            "usage": None,
            **more,
        }


class _Items:
    """The output items of a response while they grow, and the events that report them; one item is open at a time."""

    def __init__(self, running: Generation, with_logprobs: bool) -> None:
        self._running = running
        self._with_logprobs = with_logprobs
        self._first: AnswerDelta | None = None  # the first delta of the open item
        self._text = ""
        self._logprobs: list[Any] = []
        self.done: list[dict[str, Any]] = []

    def take(self, delta: AnswerDelta) -> Iterator[Event]:
        first = self._first
        if first is None or first.kind != delta.kind or first.call != delta.call:
            yield from self.close()
            yield from self._open(delta)
        if delta.text:
            yield self._grown(delta)

    def _open(self, delta: AnswerDelta) -> Iterator[Event]:
        self._first, self._text, self._logprobs = delta, "", []
        item = self._item("in_progress")
        if delta.kind != "tool_call":
            item["content"] = []
        yield "response.output_item.added", {"output_index": len(self.done), "item": item}
        if delta.kind != "tool_call":
            yield "response.content_part.added", {**self._place(), "part": self._part()}

    def _grown(self, delta: AnswerDelta) -> Event:
        self._text += delta.text
        if delta.kind == "tool_call":
            return "response.function_call_arguments.delta", {**self._place(), "delta": delta.text}
        if delta.kind == "reasoning":
            return "response.reasoning_text.delta", {**self._place(), "delta": delta.text}
        logprobs = self._logprob_list(delta)
        self._logprobs += logprobs
        return "response.output_text.delta", {**self._place(), "delta": delta.text, "logprobs": logprobs}

    def close(self, last: bool = False) -> Iterator[Event]:
        """Ends the open item, if there is one; only the last item can be incomplete."""
        if self._first is None:
            return
        if self._first.kind == "tool_call":
            named = {"name": self._first.name, "arguments": self._text}
            yield "response.function_call_arguments.done", {**self._place(), **named}
        else:
            text = {"text": self._text}
            if self._first.kind == "reasoning":
                yield "response.reasoning_text.done", {**self._place(), **text}
            else:
                yield "response.output_text.done", {**self._place(), **text, "logprobs": self._logprobs}
            yield "response.content_part.done", {**self._place(), "part": self._part()}
        whole = not last or self._running.answer.finish_reason == "stop"
        item, index = self._item("completed" if whole else "incomplete"), len(self.done)
        self._first = None
        self.done.append(item)
        yield "response.output_item.done", {"output_index": index, "item": item}

    def _place(self) -> dict[str, object]:
        assert self._first is not None
        place: dict[str, object] = {"item_id": self._item_id(), "output_index": len(self.done)}
        return place if self._first.kind == "tool_call" else {**place, "content_index": 0}

    def _item_id(self) -> str:
        assert self._first is not None
        prefix = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}[self._first.kind]
        return f"{prefix}_{self._running.request_id}_{len(self.done)}"

    def _item(self, status: str) -> dict[str, Any]:
        assert self._first is not None
        head = {"id": self._item_id(), "status": status}
        if self._first.kind == "content":
            return {**head, "type": "message", "role": "assistant", "content": [self._part()]}
        if self._first.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [self._part()]}
        call = {"call_id": self._first.call_id, "name": self._first.name, "arguments": self._text}
        return {**head, "type": "function_call", **call}

    def _part(self) -> dict[str, Any]:
        assert self._first is not None
        if self._first.kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}

    def _logprob_list(self, delta: AnswerDelta) -> list[Any]:
        if not self._with_logprobs:
            return []
        entries = shared.chat_logprobs(delta.tokens, self._running.tokenizer)["content"]
        return entries if isinstance(entries, list) else []
