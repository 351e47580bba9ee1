"""What OpenAI's chat and completions answers share: several choices, usage, log-probabilities and draft marks."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slipstream.server.apis.openai_schemas import GenerationRequest
from slipstream.server.operations import logs
from slipstream.server.operations.errors_http import refuse
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.answering import answering
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import Answer, AnswerDelta, Job
from slipstream.stats import RequestStats
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import MAX_SEED, StepRecord, TokenOut
from slipstream.version import __version__

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Frame:
    """The fields that every chunk and answer of one response shares; the model's name is known later."""

    kind: str  # the value of OpenAI's field `object`
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)

    def body(self, model: str, choices: list[dict[str, object]], **more: object) -> dict[str, object]:
        return {
            "id": f"{self.prefix}-{self.tag}",
            "object": self.kind,
            "created": self.created,
            "model": model,
            "system_fingerprint": f"slipstream-{__version__}",
            "choices": choices,
            **more,
        }


def check_common(body: GenerationRequest) -> None:
    """Refuses fields that only streams use, because otherwise they would be ignored without a word."""
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "is only for streams", "set stream, or leave it out")
    if body.include_draft_info and not body.stream:
        raise refuse("include_draft_info", "is only for streams", "set stream, or leave it out")


def note_caller(user: str | None, metadata: Mapping[str, str] | None = None) -> None:
    """Puts what a client says about itself into the request's log line, and nowhere else."""
    if user:
        logs.note(user=user)
    if metadata:
        logs.note(metadata=dict(metadata))


def with_seeds(job: Job, count: int) -> list[Job]:
    """One job per choice; the first keeps the seed, and the seeds of the others are derived from it."""
    seed = job.settings.get("seed")
    if seed is None or count == 1:
        return [job] * count
    seeds = [seed, *(_derived(seed, index) for index in range(1, count))]
    return [replace(job, settings={**job.settings, "seed": value}) for value in seeds]


def _derived(seed: object, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") & MAX_SEED


async def answer_all(state: ServerState, jobs: Sequence[Job], api: str) -> list[Generation]:
    """Runs all jobs together until they end; if one fails, the others are cancelled."""
    return await _together([_answer_one(state, job, api) for job in jobs])


async def _answer_one(state: ServerState, job: Job, api: str) -> Generation:
    async with answering(state, job, api) as running:
        await running.finish()
        return running


async def _together(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class News:
    """One thing that happened to a choice: it began (without a delta), it grew, or it is over."""

    index: int
    running: Generation
    delta: AnswerDelta | None = None
    over: bool = False


async def stream_all(state: ServerState, jobs: Sequence[Job], api: str) -> AsyncGenerator[News, None]:
    """Runs all jobs together and yields their news as it arrives; closing the generator cancels them."""
    queue: asyncio.Queue[News | BaseException] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_stream_one(state, job, api, index, queue)) for index, job in enumerate(jobs)]
    left = len(tasks)
    try:
        while left:
            news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            left -= news.over
            yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream_one(
    state: ServerState, job: Job, api: str, index: int, queue: asyncio.Queue[News | BaseException]
) -> None:
    # The queue needs no limit, because every answer has one, and an engine must not wait for a slow reader.
    try:
        async with answering(state, job, api) as running:
            queue.put_nowait(News(index, running))
            async for delta in running:
                queue.put_nowait(News(index, running, delta))
            running.raise_failure()
        queue.put_nowait(News(index, running, over=True))
    except Exception as error:
        queue.put_nowait(error)


def usage(groups: Sequence[Sequence[Answer]]) -> dict[str, object]:
    """The token counts of a response; `groups` are the answers to each prompt, and each prompt counts once."""
    answers = [answer for group in groups for answer in group]
    prompt = sum(group[0].stats.prompt_tokens for group in groups)
    completion = sum(answer.stats.completion_tokens for answer in answers)
    accepted = sum(answer.stats.accepted for answer in answers)
    drafted = sum(answer.stats.drafted for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(group[0].stats.cached_tokens for group in groups)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.reasoning_tokens for answer in answers),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings(answers: Sequence[Answer]) -> dict[str, object]:
    """The timings of one answer, or the sums over several answers, whose rates are then averages."""
    if len(answers) == 1:
        return answers[0].timings()
    total = RequestStats(draft_lora=answers[0].stats.draft_lora)
    for answer in answers:
        total.add(answer.stats)
    return replace(answers[0], stats=total).timings()


def finish_reason(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return "length"
    return "tool_calls" if answer.calls else "stop"


def chat_logprobs(tokens: Sequence[TokenOut], tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "content": [
            {
                **_token_entry(token.id, token.logprob, tokenizer),
                "top_logprobs": [_token_entry(index, value, tokenizer) for index, value in token.top_logprobs],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _token_entry(index: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, object]:
    return {"token": tokenizer.token_text(index), "logprob": logprob, "bytes": list(tokenizer.token_bytes(index))}


class CompletionLogprobs:
    """Log-probabilities in the older shape: parallel lists, with the place in the text where each token begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, tokens: Sequence[TokenOut], texts: Sequence[str]) -> dict[str, object]:
        """The next tokens of the choice; `texts` are the characters that each of them brought."""
        offsets = []
        for brought in texts:
            offsets.append(self._offset)
            self._offset += len(brought)
        text = self._tokenizer.token_text
        return {
            "tokens": [text(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{text(index): value for index, value in token.top_logprobs} for token in tokens],
            "text_offset": offsets,
        }


class DraftMarks:
    """Tells which characters of a stream were drafted; the pieces of each delta join to exactly its text."""

    def __init__(self) -> None:
        self._origins: deque[tuple[int, bool]] = deque()  # characters of a token not shown yet; was it drafted?
        self._last = False

    def mark(self, delta: AnswerDelta) -> dict[str, object]:
        for token, brought in zip(delta.tokens, delta.texts, strict=True):
            if brought:
                self._origins.append((len(brought), token.drafted))
        pieces, rest = [], delta.text
        while rest:
            length, drafted = self._origins.popleft() if self._origins else (len(rest), self._last)
            if length > len(rest):
                self._origins.appendleft((length - len(rest), drafted))
            pieces.append({"text": rest[:length], "drafted": drafted})
            rest, self._last = rest[length:], drafted
        return {"tokens": pieces, "step": None if delta.step is None else _step_numbers(delta.step)}


def _step_numbers(step: StepRecord) -> dict[str, object]:
    return {
        "drafted": step.proposal.nodes,
        "depth": step.proposal.depth,
        "accepted": step.verdict.accepted,
        "committed": len(step.verdict.tokens),
        **step.decision.to_json(),
        "draft_ms": round(step.draft_ms, 3),
        "verify_ms": round(step.verify_ms, 3),
    }
