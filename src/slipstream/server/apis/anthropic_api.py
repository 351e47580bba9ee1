"""Anthropic's Messages API: answers as content blocks, whole or as a stream of events, and token counts of prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json

from slipstream.server.apis import sse
from slipstream.server.apis.anthropic_schemas import MessagesRequest, PromptRequest
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.logs import note
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving import prompts
from slipstream.server.serving.answering import answering
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import AnswerDelta, Job
from slipstream.server.serving.preparing import prompt_chars

_API = "messages"
# The type of the deltas of each kind of text, and the field that has the text.
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}
Event = dict[str, object]


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=ParsedRoute)

    @router.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answers with a message, or with `stream` with the events that make up a message."""
        job = body.job(state.settings)
        note(api=_API, user=body.metadata.user_id if body.metadata else None)
        if body.stream:
            return await sse.respond(request, _events(state, job), state.settings)
        return JSONResponse(await sse.unless_gone(request.receive, _message(state, job)))

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: PromptRequest, request: Request) -> Response:
        """Counts the tokens that the prompt of such a message has."""
        job = Job(body.model, **body.prompt())
        return JSONResponse({"input_tokens": await sse.unless_gone(request.receive, _count(state, job))})

    return router


async def _count(state: ServerState, job: Job) -> int:
    async with await state.router.lease(job.model) as lease:
        return await lease.preparation.run(prompt_chars(job), prompts.count_tokens, lease.llm, job)


async def _message(state: ServerState, job: Job) -> dict[str, object]:
    async with answering(state, job, _API) as running:
        generation, blocks = running, _Blocks()
        async for delta in generation:
            list(blocks.take(delta))
        running.raise_failure()
        list(blocks.close())
        return {
            **_head(generation),
            "content": blocks.done,
            **_stop(generation),
            "usage": _usage(generation),
            "timings": generation.answer.timings(),
        }


async def _events(state: ServerState, job: Job) -> AsyncGenerator[bytes, None]:
    async with answering(state, job, _API) as running:
        generation, blocks = running, _Blocks()
        usage = {**_usage(generation), "input_tokens": generation.prompt_tokens}
        start = {**_head(generation), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield sse.event({"type": "message_start", "message": start})
        async for delta in generation:
            for event in blocks.take(delta):
                yield sse.event(event)
        running.raise_failure()
        for event in blocks.close():
            yield sse.event(event)
        totals = {"usage": _usage(generation), "timings": generation.answer.timings()}
        yield sse.event({"type": "message_delta", "delta": _stop(generation), **totals})
        yield sse.event({"type": "message_stop"})


def _head(generation: Generation) -> dict[str, object]:
    return {
        "id": f"msg_{generation.request_id}",
        "type": "message",
        "role": "assistant",
        "model": generation.answer.model,
    }


def _usage(generation: Generation) -> dict[str, object]:
    answer = generation.answer
    cached = answer.stats.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer.stats.completion_tokens,
        "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
    }


def _stop(generation: Generation) -> dict[str, object]:
    answer = generation.answer
    if answer.finish_reason == "length":
        full = answer.stats.completion_tokens < generation.request.max_tokens
        reason = "model_context_window_exceeded" if full else "max_tokens"
    elif answer.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if answer.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence}


class _Blocks:
    """The content blocks of a message while they grow, and the events that report them; one block is open at a time."""

    def __init__(self) -> None:
        self._first: AnswerDelta | None = None  # the first delta of the open block
        self._text = ""
        self.done: list[dict[str, object]] = []

    def take(self, delta: AnswerDelta) -> Iterator[Event]:
        index, first = len(self.done), self._first
        if first is None or first.kind != delta.kind or first.call != delta.call:
            yield from self.close()
            self._first, self._text, index = delta, "", len(self.done)
            yield {"type": "content_block_start", "index": index, "content_block": _block(delta)}
            if index == 0:
                yield {"type": "ping"}
        if delta.text:
            self._text += delta.text
            kind, field = _DELTAS[delta.kind]
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: delta.text}}

    def close(self) -> Iterator[Event]:
        if self._first is not None:
            yield {"type": "content_block_stop", "index": len(self.done)}
            self.done.append(_block(self._first, self._text))
            self._first = None


def _block(first: AnswerDelta, text: str = "") -> dict[str, object]:
    """The block that began with `first`; its start event announces it without text."""
    if first.kind == "tool_call":
        return {"type": "tool_use", "id": first.call_id, "name": first.name, "input": _input(text)}
    if first.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; arguments that were cut off give the part that arrived."""
    with suppress(ValueError):
        value = from_json(arguments, allow_partial=True)
        if isinstance(value, dict):
            return value
    return {}
