"""POST /v1/chat/completions: OpenAI's chat API, whole or streamed, with tools, formats and log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from slipstream.grammar.notations import json_object, json_schema, lark
from slipstream.server.apis import openai_shared as shared
from slipstream.server.apis import sse
from slipstream.server.apis.extensions import allowed_priority
from slipstream.server.apis.openai_schemas import (
    AssistantMessage,
    ChatRequest,
    GrammarFormat,
    Message,
    NamedToolChoice,
    SchemaFormat,
    TextFormat,
    ToolMessage,
    text_of,
)
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.errors_http import ApiError, refuse
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import Answer, AnswerDelta, Job, Tool, ToolChoice
from slipstream.types import Constraint

API = "chat"


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=ParsedRoute)

    @router.post("/v1/chat/completions", response_model=None, summary="Answer a conversation")
    async def chat(body: ChatRequest, request: Request) -> Response:
        shared.note_caller(body.user or body.safety_identifier, body.metadata)
        jobs = shared.with_seeds(to_job(body, state), body.choices)
        if body.stream:
            return await sse.respond(request, _chunks(state, jobs, body), state.settings)
        answers = await sse.unless_gone(request, shared.answer_all(state, jobs, API))
        return JSONResponse(_whole(answers, body))

    return router


def to_job(body: ChatRequest, state: ServerState) -> Job:
    """Translates a request into a job; fields that contradict each other are refused."""
    shared.check_common(body)
    _check_lengths(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "needs logprobs", "set logprobs to true")
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        if template_kwargs.get("enable_thinking"):
            raise refuse("reasoning_effort", "contradicts chat_template_kwargs.enable_thinking", "give one of them")
        template_kwargs["enable_thinking"] = False
    return Job(
        model=body.model,
        messages=[_message(message) for message in body.messages],
        settings=body.settings(),
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        parallel_tools=body.parallel_tool_calls is not False,
        format=_format(body),
        template_kwargs=template_kwargs,
        thinking_budget=body.thinking_budget,
        priority=allowed_priority(body.priority, state.settings),
        deadline_s=state.settings.deadline(body.timeout),
        prompt_class=(body.metadata or {}).get("prompt_class"),
    )


def _check_lengths(body: ChatRequest) -> None:
    asked = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(asked) > 1:
        raise refuse("max_tokens", "contradicts max_completion_tokens", "give one of them")


def _message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.reasoning_content:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain


def _tools(body: ChatRequest) -> list[Tool]:
    tools = [
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters or {},
            strict=bool(tool.function.strict),
        )
        for tool in body.tools or ()
    ]
    if len({tool.name for tool in tools}) < len(tools):
        raise ApiError(400, "two tools have the same name", "give each its own", param="tools", code="invalid_value")
    return tools


def _tool_choice(body: ChatRequest) -> ToolChoice:
    names = [tool.function.name for tool in body.tools or ()]
    if not names:
        for field, idle in (("tool_choice", (None, "none", "auto")), ("parallel_tool_calls", (None,))):
            if getattr(body, field) not in idle:
                raise refuse(field, "needs tools", "give tools, or leave it out")
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            raise ApiError(
                400,
                f"tool_choice names '{choice.function.name}', which is not among the tools",
                param="tool_choice",
                code="invalid_value",
            )
        return ToolChoice("required", choice.function.name)
    return ToolChoice(choice or "auto")


def _format(body: ChatRequest) -> Constraint | None:
    wanted = body.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    if body.tools and body.tool_choice != "none":
        raise refuse("response_format", "cannot be combined with tools", "set tool_choice to none, or leave one out")
    if isinstance(wanted, SchemaFormat):
        return json_schema(wanted.json_schema.json_schema)
    if isinstance(wanted, GrammarFormat):
        return lark(wanted.grammar)
    return json_object()


def _whole(answers: list[Generation], body: ChatRequest) -> dict[str, object]:
    frame = shared.Frame("chat.completion", "chatcmpl")
    plain = [running.answer for running in answers]
    return frame.body(
        plain[0].model,
        [_choice(index, running, body) for index, running in enumerate(answers)],
        usage=shared.usage([plain]),
        timings=shared.timings(plain),
    )


def _choice(index: int, running: Generation, body: ChatRequest) -> dict[str, object]:
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
        "index": index,
        "message": message,
        "logprobs": shared.chat_logprobs(answer.tokens, running.tokenizer) if body.logprobs else None,
        "finish_reason": shared.finish_reason(answer),
    }


async def _chunks(state: ServerState, jobs: list[Job], body: ChatRequest) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream: each choice's role, its deltas and its end, then usage if it was asked for."""
    frame = shared.Frame("chat.completion.chunk", "chatcmpl")
    news_stream = shared.stream_all(state, jobs, API)
    marks: dict[int, shared.DraftMarks] = {}
    ended: dict[int, Answer] = {}
    # If usage was asked for, every chunk has the field, and only the last chunk has a value in it.
    common: dict[str, object] = {"usage": None} if body.with_usage else {}
    try:
        async for news in news_stream:
            answer, more = news.running.answer, dict(common)
            delta: dict[str, object] = {}
            reason, logprobs = None, None
            if news.over:
                ended[news.index] = answer
                reason = shared.finish_reason(answer)
                if len(ended) == len(jobs) and not body.with_usage:
                    more["timings"] = shared.timings([ended[index] for index in sorted(ended)])
            elif news.delta is None:
                delta = {"role": "assistant", "content": ""}
            else:
                delta = _delta(news.delta)
                if body.logprobs and news.delta.kind == "content":
                    logprobs = shared.chat_logprobs(news.delta.tokens, news.running.tokenizer)
                if body.include_draft_info:
                    more["slipstream"] = marks.setdefault(news.index, shared.DraftMarks()).mark(news.delta)
            choice = {"index": news.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            yield sse.event(frame.body(answer.model, [choice], **more))
        if body.with_usage:
            answers = [ended[index] for index in sorted(ended)]
            last = {"usage": shared.usage([answers]), "timings": shared.timings(answers)}
            yield sse.event(frame.body(answers[0].model, [], **last))
        yield sse.DONE
    finally:
        await news_stream.aclose()


def _delta(delta: AnswerDelta) -> dict[str, object]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    call: dict[str, object] = {"index": delta.call, "function": {"arguments": delta.text}}
    if delta.call_id:
        call |= {"id": delta.call_id, "type": "function", "function": {"name": delta.name, "arguments": delta.text}}
    return {"tool_calls": [call]}
