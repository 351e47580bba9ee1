"""What OpenAI's answers share: what a client says about itself, usage, timings, log-probabilities and draft marks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from slipstream.server.apis.common_schemas import CommonFields
from slipstream.server.serving.jobs import Answer, AnswerDelta
from slipstream.stats import RequestStats
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import StepRecord, TokenOut


def caller(body: CommonFields) -> dict[str, object]:
    """What a client says about itself, which is put into its request's log line and nowhere else."""
    user = getattr(body, "user", None) or getattr(body, "safety_identifier", None)
    said = {"user": user, "metadata": getattr(body, "metadata", None)}
    return {name: value for name, value in said.items() if value}


def usage(answers: Sequence[Answer], choices: int = 1) -> dict[str, object]:
    """The token counts of a response; each prompt has `choices` answers in a row, and its tokens count once."""
    prompts = [answer.stats for answer in answers[::choices]]
    prompt = sum(stats.prompt_tokens for stats in prompts)
    completion = sum(answer.stats.completion_tokens for answer in answers)
    accepted = sum(answer.stats.accepted for answer in answers)
    drafted = sum(answer.stats.drafted for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(stats.cached_tokens for stats in prompts)},
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
    return {"content": token_entries(tokens, tokenizer), "refusal": None}


def token_entries(tokens: Sequence[TokenOut], tokenizer: Tokenizer) -> list[object]:
    """The log-probabilities of each token and of the likeliest tokens at its place."""

    def entry(index: int, logprob: float | None) -> dict[str, object]:
        return {"token": tokenizer.token_text(index), "logprob": logprob, "bytes": list(tokenizer.token_bytes(index))}

    return [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(index, value) for index, value in token.top_logprobs]}
        for token in tokens
    ]


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
