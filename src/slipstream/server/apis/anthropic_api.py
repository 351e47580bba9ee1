"""Anthropic's Messages API: answers as content blocks, whole or as a stream of events, and token counts of prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json

from slipstream.server.apis import sse
from slipstream.server.apis.anthropic_schemas import MessagesRequest, PromptRequest
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.errors_http import ApiError, anthropic_body
from slipstream.server.operations.logs import note
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving import prompts
from slipstream.server.serving.answering import answering
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import AnswerDelta, Job
from slipstream.server.serving.preparing import prompt_chars

_API = "messages"
_BLOCK_KINDS = {"content": "text", "reasoning": "thinking", "tool_call": "tool_use"}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=ParsedRoute)

    @router.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answers with a message, or with `stream` with the events that make up a message."""
        job = body.job(state.settings)
        note(api=_API, user=body.metadata.user_id if body.metadata else None)
        if body.stream:
            return await sse.respond(request, _events(state, job), state.settings, _error_event)
        return JSONResponse(await sse.unless_gone(request, _message(state, job)))

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: PromptRequest, request: Request) -> Response:
        """Counts the tokens that the prompt of such a message has."""
        return JSONResponse({"input_tokens": await sse.unless_gone(request, _count(state, body.prompt_job()))})

    return router


async def _count(state: ServerState, job: Job) -> int:
    lease = await state.router.lease(job.model)
    try:
        return await lease.preparation.run(prompt_chars(job), prompts.count_tokens, lease.llm, job)
    finally:
        lease.release()


async def _message(state: ServerState, job: Job) -> dict[str, object]:
    async with answering(state, job, _API) as generation:
        blocks = _Blocks()
        async for delta in generation:
            blocks.add(delta)
        generation.raise_failure()
        return {
            **_head(generation),
            "content": blocks.finished(),
            **_stop(generation),
            "usage": _usage(generation),
            "timings": generation.answer.timings(),
        }


async def _events(state: ServerState, job: Job) -> AsyncGenerator[bytes, None]:
    async with answering(state, job, _API) as generation:
        usage = {**_usage(generation), "input_tokens": generation.prompt_tokens}
        start = {**_head(generation), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=start)
        blocks, open_block = _Blocks(), -1
        async for delta in generation:
            index = blocks.add(delta)
            if index != open_block:
                if open_block >= 0:
                    yield _event("content_block_stop", index=open_block)
                yield _event("content_block_start", index=index, content_block=blocks.begun(index))
                if index == 0:
                    yield _event("ping")
                open_block = index
            if delta.text:
                yield _event("content_block_delta", index=index, delta=_block_delta(delta))
        generation.raise_failure()
        if open_block >= 0:
            yield _event("content_block_stop", index=open_block)
        yield _event(
            "message_delta", delta=_stop(generation), usage=_usage(generation), timings=generation.answer.timings()
        )
        yield _event("message_stop")


def _event(kind: str, **fields: object) -> bytes:
    return sse.event({"type": kind, **fields}, kind)


def _error_event(error: ApiError) -> bytes:
    return sse.event(anthropic_body(error), "error")


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


def _block_delta(delta: AnswerDelta) -> dict[str, str]:
    if delta.kind == "content":
        return {"type": "text_delta", "text": delta.text}
    if delta.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": delta.text}
    return {"type": "input_json_delta", "partial_json": delta.text}


class _Blocks:
    """The content blocks of a message, in the order in which they began."""

    def __init__(self) -> None:
        self._blocks: list[tuple[AnswerDelta, list[str]]] = []  # the first delta of each block, and the block's texts

    def add(self, delta: AnswerDelta) -> int:
        """Adds a delta and returns the index of the block that it belongs to."""
        last = self._blocks[-1][0] if self._blocks else None
        if last is None or last.kind != delta.kind or (delta.kind == "tool_call" and delta.call != last.call):
            self._blocks.append((delta, []))
        self._blocks[-1][1].append(delta.text)
        return len(self._blocks) - 1

    def begun(self, index: int) -> dict[str, Any]:
        """A block as its start event announces it, without text."""
        first = self._blocks[index][0]
        kind = _BLOCK_KINDS[first.kind]
        if kind == "tool_use":
            return {"type": kind, "id": first.call_id, "name": first.name, "input": {}}
        return {"type": kind, kind: "", "signature": ""} if kind == "thinking" else {"type": kind, kind: ""}

    def finished(self) -> list[dict[str, Any]]:
        done = []
        for index, (_, texts) in enumerate(self._blocks):
            block, text = self.begun(index), "".join(texts)
            done.append(block | ({"input": _input(text)} if block["type"] == "tool_use" else {block["type"]: text}))
        return done


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; arguments that were cut off give the part that arrived."""
    with suppress(ValueError):
        value = from_json(arguments, allow_partial=True)
        if isinstance(value, dict):
            return value
    return {}
