"""The server's own types: each API turns its requests into jobs and answers into its responses.

Neither jobs nor answers use the field names of an API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.errors import SlipstreamError
from slipstream.grammar.notations import Tool, ToolChoice
from slipstream.stats import RequestStats
from slipstream.types import Constraint, FinishReason, StepRecord, TokenOut

JsonObject = Mapping[str, Any]


class DeadlineError(SlipstreamError):
    """The request took longer than it was allowed to."""


@dataclass(frozen=True, slots=True)
class Job:
    """One generation as a client asked for it: a conversation to answer, or raw text or tokens to continue.

    `settings` are keywords of `LLM.request`: sampling, max_tokens, stop, seed, mode, gate, draft_lora,
    logit_bias, cache_prompt.
    """

    model: str
    messages: Sequence[JsonObject] | None = None  # the roles are system, user, assistant and tool; content is text
    continues: bool = False  # the last message is the beginning of the answer
    prompt: str | Sequence[int] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tools: bool = True  # if False, the answer ends with its first call
    format: Constraint | None = None  # the form of the whole answer
    template_kwargs: Mapping[str, object] = field(default_factory=dict)  # for the chat template: enable_thinking, ...
    thinking_budget: int | None = None  # tokens of reasoning after which the engine writes the end tag
    priority: int = 0  # requests with larger values are served first
    deadline_s: float | None = None
    prompt_class: str | None = None  # from metadata.prompt_class; selects the tau that the canary expects

    @property
    def written_messages(self) -> list[dict[str, Any]] | None:
        """The conversation as logs and recordings have it: arguments of calls are JSON text, whatever the API is."""
        return None if self.messages is None else [_written(message) for message in self.messages]


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """Text of one kind that one engine step adds to an answer, and the tokens that completed this text.

    A tool call begins with a delta that has its `call_id` and `name`; its arguments follow as text.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    tokens: Sequence[TokenOut] = ()
    call: int = 0  # the index of the tool call in the answer
    call_id: str = ""
    name: str = ""
    step: StepRecord | None = None
    texts: Sequence[str] = ()  # the characters that each of the tokens brought


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON as the model wrote it


@dataclass(slots=True)
class Answer:
    """A whole answer; it is filled while it streams, and it is complete once `finish_reason` is set."""

    model: str  # the name that `any` was resolved to, never `any` itself
    mode: str
    draft: str | None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenOut] = field(default_factory=list)  # of the content, if the request asked for log-probabilities
    token_texts: list[str] = field(default_factory=list)  # the characters that each of these tokens brought
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None  # the stop string that ended the answer
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    reasoning_tokens: int = 0

    def timings(self) -> dict[str, object]:
        """The extension that every API's response carries: where the time went and what speculation did."""
        stats = self.stats
        return {
            "prompt_n": stats.prompt_tokens - stats.cached_tokens,
            "prompt_ms": round(stats.ttft_ms, 3),
            "cached_n": stats.cached_tokens,
            "predicted_n": stats.completion_tokens,
            "predicted_ms": round(stats.decode_ms, 3),
            "predicted_per_second": round(stats.tokens_per_second, 3),
            "draft_n": stats.drafted,
            "draft_n_accepted": stats.accepted,
            "accepted_by_source": stats.accepted_by_source,
            "tau": round(stats.tau, 4),
            "accepted_per_position": stats.to_json()["accepted_per_position"],
            "mode": self.mode,
            "draft": self.draft,
            "draft_lora": stats.draft_lora,
        }


def _written(message: JsonObject) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return dict(message) if not calls else {**message, "tool_calls": [_written_call(call) for call in calls]}


def _written_call(call: JsonObject) -> dict[str, Any]:
    function = call.get("function")
    arguments = function.get("arguments", "") if isinstance(function, Mapping) else ""
    if not isinstance(function, Mapping) or isinstance(arguments, str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
