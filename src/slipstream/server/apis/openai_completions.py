"""POST /v1/completions: continues one or several prompts of raw text or tokens, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from slipstream.server.apis import openai_shared as shared
from slipstream.server.apis import sse
from slipstream.server.apis.extensions import allowed_priority
from slipstream.server.apis.openai_schemas import CompletionRequest
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.errors_http import refuse
from slipstream.server.operations.server_state import MAX_CHOICES, ServerState
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import Answer, Job
from slipstream.text.tokenizer import Tokenizer

API = "completions"


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=ParsedRoute)

    @router.post("/v1/completions", response_model=None, summary="Go on from a text or tokens")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        shared.note_caller(body.user)
        jobs = to_jobs(body, state)
        if body.stream:
            return await sse.respond(request, _chunks(state, jobs, body), state.settings)
        answers = await sse.unless_gone(request, shared.answer_all(state, jobs, API))
        return JSONResponse(_whole(answers, jobs, body))

    return router


def to_jobs(body: CompletionRequest, state: ServerState) -> list[Job]:
    """One job per choice: all choices of the first prompt, then those of the next prompt."""
    shared.check_common(body)
    if body.echo and body.logprobs is not None:
        raise refuse("echo", "cannot be combined with logprobs", "leave one of them out")
    if len(body.prompts) * body.choices > MAX_CHOICES:
        raise refuse("n", f"times the number of prompts is more than {MAX_CHOICES}", "send fewer at once")
    jobs = []
    for prompt in body.prompts:
        job = Job(
            model=body.model,
            prompt=prompt,
            settings=body.settings(),
            priority=allowed_priority(body.priority, state.settings),
            deadline_s=state.settings.deadline(body.timeout),
        )
        jobs += shared.with_seeds(job, body.choices)
    return jobs


def _groups(answers: list[Answer], body: CompletionRequest) -> list[list[Answer]]:
    return [answers[start : start + body.choices] for start in range(0, len(answers), body.choices)]


def _echoed(job: Job, tokenizer: Tokenizer) -> str:
    return job.prompt if isinstance(job.prompt, str) else tokenizer.decode(list(job.prompt or ()))


def _text(answer: Answer) -> str:
    # Raw text is no conversation, so text that looks like reasoning is part of it.
    return answer.reasoning + answer.content


def _whole(running: list[Generation], jobs: list[Job], body: CompletionRequest) -> dict[str, object]:
    choices: list[dict[str, object]] = []
    for index, (one, job) in enumerate(zip(running, jobs, strict=True)):
        logprobs = None
        if body.logprobs is not None:
            logprobs = shared.CompletionLogprobs(one.tokenizer).take(one.answer.tokens, one.answer.token_texts)
        choices.append(
            {
                "index": index,
                "text": (_echoed(job, one.tokenizer) if body.echo else "") + _text(one.answer),
                "logprobs": logprobs,
                "finish_reason": shared.finish_reason(one.answer),
            }
        )
    answers = [one.answer for one in running]
    return shared.Frame("text_completion", "cmpl").body(
        answers[0].model, choices, usage=shared.usage(_groups(answers, body)), timings=shared.timings(answers)
    )


@dataclass(slots=True)
class _Choice:
    """What a stream remembers about one choice."""

    marks: shared.DraftMarks
    logprobs: shared.CompletionLogprobs
    ended: Answer | None = None


async def _chunks(state: ServerState, jobs: list[Job], body: CompletionRequest) -> AsyncGenerator[bytes, None]:
    frame = shared.Frame("text_completion", "cmpl")
    news_stream = shared.stream_all(state, jobs, API)
    choices: dict[int, _Choice] = {}
    common: dict[str, object] = {"usage": None} if body.with_usage else {}
    try:
        async for news in news_stream:
            answer, tokenizer, more = news.running.answer, news.running.tokenizer, dict(common)
            known = choices.setdefault(news.index, _Choice(shared.DraftMarks(), shared.CompletionLogprobs(tokenizer)))
            text, logprobs, reason = "", None, None
            if news.over:
                known.ended, reason = answer, shared.finish_reason(answer)
                if not body.with_usage and all(i in choices and choices[i].ended for i in range(len(jobs))):
                    more["timings"] = shared.timings(_ended(choices))
            elif news.delta is None:
                text = _echoed(jobs[news.index], tokenizer) if body.echo else ""
            else:
                text = news.delta.text
                if body.logprobs is not None:
                    logprobs = known.logprobs.take(news.delta.tokens, news.delta.texts)
                if body.include_draft_info:
                    more["slipstream"] = known.marks.mark(news.delta)
            choice = {"index": news.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            yield sse.event(frame.body(answer.model, [choice], **more))
        if body.with_usage:
            answers = _ended(choices)
            last = {"usage": shared.usage(_groups(answers, body)), "timings": shared.timings(answers)}
            yield sse.event(frame.body(answers[0].model, [], **last))
        yield sse.DONE
    finally:
        await news_stream.aclose()


def _ended(choices: dict[int, _Choice]) -> list[Answer]:
    return [ended for index in sorted(choices) if (ended := choices[index].ended) is not None]
