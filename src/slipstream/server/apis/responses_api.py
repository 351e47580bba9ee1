"""POST /v1/responses: OpenAI's Responses API with text and function calls, whole or as a sequence of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from itertools import count

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from slipstream.server.apis import openai_shared as shared
from slipstream.server.apis import sse
from slipstream.server.apis.responses_schemas import ResponsesRequest
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.logs import note
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.answering import answering
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import AnswerDelta, Job

_API = "responses"
Event = tuple[str, dict[str, object]]  # the type and the fields of an event
# How the id of an item begins, and what its events and its content part are called.
_NAMES = {
    "content": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
    "tool_call": ("fc", "function_call_arguments"),
}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=ParsedRoute)

    @router.post("/v1/responses", response_model=None, summary="Answer, with text and function calls as items")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        note(**shared.caller(body))
        job = body.job(state.settings)
        if not body.stream:
            return JSONResponse(await sse.unless_gone(request.receive, _whole(state, job, body)))
        numbers = count()

        def failed(error: ApiError) -> bytes:
            """The last event of a stream that could not begin, or whose failure no response object describes."""
            return _numbered(numbers, "error", {"code": error.code, "message": error.message, "param": error.param})

        return await sse.respond(request, _events(state, job, body, numbers), state.settings, failed)

    return router


async def _whole(state: ServerState, job: Job, body: ResponsesRequest) -> dict[str, object]:
    async with answering(state, job, _API) as running:
        response = _Response(running, body)
        async for delta in running:
            list(response.take(delta))
        list(response.close(last=True))
        running.raise_failure()
        return response.ended()


async def _events(
    state: ServerState, job: Job, body: ResponsesRequest, numbers: Iterator[int]
) -> AsyncGenerator[bytes, None]:
    async with answering(state, job, _API) as running:
        response = _Response(running, body)
        for kind in ("response.created", "response.in_progress"):
            yield _numbered(numbers, kind, {"response": response.shown("in_progress")})
        async for delta in running:
            for event in response.take(delta):
                yield _numbered(numbers, *event)
        for event in response.close(last=True):
            yield _numbered(numbers, *event)
        ended = response.ended()
        yield _numbered(numbers, f"response.{ended['status']}", {"response": ended})


def _numbered(numbers: Iterator[int], kind: str, fields: dict[str, object]) -> bytes:
    return sse.event({"type": kind, "sequence_number": next(numbers), **fields})


class _Response:
    """A response while its items grow, and the events that report them; one item is open at a time."""

    def __init__(self, running: Generation, body: ResponsesRequest) -> None:
        self._running = running
        self._body = body
        self._created_at = int(time.time())
        self._open: _Item | None = None
        self._done: list[dict[str, object]] = []  # the items that are over

    def take(self, delta: AnswerDelta) -> Iterator[Event]:
        item = self._open
        if item is None or item.first.kind != delta.kind or item.first.call != delta.call:
            yield from self.close()
            item = self._open = _Item(delta, self._running.request_id, len(self._done))
            yield from item.added()
        if delta.text:
            tokens = delta.tokens if self._body.with_logprobs and delta.kind == "content" else ()
            yield item.grown(delta.text, shared.token_entries(tokens, self._running.tokenizer))

    def close(self, last: bool = False) -> Iterator[Event]:
        """Ends the open item, if there is one; only the last item can be incomplete."""
        if self._open is not None:
            whole = not last or self._running.answer.finish_reason == "stop"
            item, self._open = self._open, None
            self._done.append(item.shown("completed" if whole else "incomplete"))
            yield from item.ended()
            yield "response.output_item.done", {"output_index": item.index, "item": self._done[-1]}

    def ended(self) -> dict[str, object]:
        answer, stats = self._running.answer, self._running.answer.stats
        status, more = "completed", dict[str, object]()
        if answer.finish_reason in ("error", "cancelled"):
            said = answer.error or "the server ended this request before its answer was complete"
            status, more = "failed", {"error": {"code": "server_error", "message": said}}
        elif answer.finish_reason == "length":
            status, more = "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
        else:
            more = {"completed_at": int(time.time())}
        usage = {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        }
        return self.shown(status, **more, usage=usage, timings=answer.timings())

    def shown(self, status: str, **more: object) -> dict[str, object]:
        """The response object: the settings of the request as the server understood them, and the result so far."""
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
            "output": self._done,
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


class _Item:
    """One output item while it grows. Text is in the item's only content part; a call has arguments and no parts."""

    def __init__(self, first: AnswerDelta, request_id: str, index: int) -> None:
        self.first = first
        self.index = index
        prefix, self._name = _NAMES[first.kind]
        self._id = f"{prefix}_{request_id}_{index}"
        self._text = ""
        self._logprobs: list[object] = []

    def added(self) -> Iterator[Event]:
        item = self.shown("in_progress")
        if self.first.kind == "tool_call":
            yield "response.output_item.added", {"output_index": self.index, "item": item}
        else:
            yield "response.output_item.added", {"output_index": self.index, "item": {**item, "content": []}}
            yield self._event("content_part.added", part=self._part())

    def grown(self, text: str, logprobs: list[object]) -> Event:
        self._text += text
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if self.first.kind == "content" else {}
        return self._event(f"{self._name}.delta", delta=text, **more)

    def ended(self) -> Iterator[Event]:
        if self.first.kind == "tool_call":
            yield self._event(f"{self._name}.done", name=self.first.name, arguments=self._text)
            return
        more = {"logprobs": self._logprobs} if self.first.kind == "content" else {}
        yield self._event(f"{self._name}.done", text=self._text, **more)
        yield self._event("content_part.done", part=self._part())

    def shown(self, status: str) -> dict[str, object]:
        head: dict[str, object] = {"id": self._id, "status": status}
        if self.first.kind == "content":
            return {**head, "type": "message", "role": "assistant", "content": [self._part()]}
        if self.first.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [self._part()]}
        call = {"call_id": self.first.call_id, "name": self.first.name, "arguments": self._text}
        return {**head, "type": "function_call", **call}

    def _part(self) -> dict[str, object]:
        part: dict[str, object] = {"type": self._name, "text": self._text}
        return part if self.first.kind == "reasoning" else {**part, "annotations": [], "logprobs": [*self._logprobs]}

    def _event(self, name: str, /, **fields: object) -> Event:
        place: dict[str, object] = {"item_id": self._id, "output_index": self.index}
        if self.first.kind != "tool_call":
            place["content_index"] = 0
        return f"response.{name}", {**place, **fields}
