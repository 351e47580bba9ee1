"""The bodies of OpenAI's chat and completions requests, and their translation into jobs; other fields are refused."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.server.apis.common_schemas import (
    MAX_STOPS,
    MAX_TOKENS,
    CommonFields,
    ConversationFields,
    FunctionSpec,
    FunctionType,
    Many,
    NamedSchema,
    ObjectFormat,
    Several,
    Stop,
    Strict,
    TextFormat,
    TextItem,
    User,
    at_most,
    output_format,
    text_of,
)
from slipstream.server.operations.errors_http import ApiError, refuse
from slipstream.server.operations.server_state import MAX_CHOICES, ServerSettings
from slipstream.server.serving.jobs import Job, ToolChoice
from slipstream.types import MAX_SEED, Constraint

_NOT_OFFERED = (
    "audio",
    "best_of",
    "function_call",
    "functions",
    "moderation",
    "prediction",
    "prompt_cache_options",
    "prompt_cache_retention",
    "suffix",
    "verbosity",
    "web_search_options",
    "refusal",
    "annotations",
)


class TextPart(TextItem):
    type: Literal["text"]


class FunctionCall(Strict):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCallPart(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # streams number their calls, and clients send the number back


class ChatMessage(Strict):
    """What the messages of all roles share."""

    role: str
    content: str | Many[TextPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """The message in the server's own shape."""
        role = "system" if self.role == "developer" else self.role
        named = {key: getattr(self, key, None) for key in ("name", "tool_call_id")}
        given = {key: value for key, value in named.items() if value is not None}
        return {"role": role, "content": text_of(self.content), **given}


class PromptMessage(ChatMessage):
    role: Literal["system", "developer", "user"]
    content: str | Many[TextPart]


class ToolMessage(ChatMessage):
    role: Literal["tool"]
    content: str | Many[TextPart]
    tool_call_id: str


class AssistantMessage(ChatMessage):
    role: Literal["assistant"]
    reasoning_content: str | None = None
    tool_calls: Many[ToolCallPart] | None = None

    not_offered = _NOT_OFFERED

    def plain(self) -> dict[str, Any]:
        plain = super().plain()
        if self.reasoning_content:
            plain["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        return plain


Message = Annotated[PromptMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionTool(FunctionType):
    function: FunctionSpec


class NamedFunction(Strict):
    name: str


class NamedToolChoice(FunctionType):
    function: NamedFunction


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class GrammarFormat(Strict):
    """Extension: a grammar in llguidance's Lark syntax for the whole answer."""

    type: Literal["grammar"]
    grammar: str = Field(min_length=1)


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat | GrammarFormat, Field(discriminator="type")]


class StreamOptions(Strict):
    include_usage: bool | None = None


MAX_BIASES = 2048  # tokens with a bias in one request; a larger object is refused before its entries are validated
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class GenerationRequest(CommonFields):
    """The fields that chat and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES), at_most(MAX_BIASES)] | None = None
    stop: Stop | Annotated[Several[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    user: User = None
    ignore_eos: bool | None = Field(default=None, description="Extension: continue after an end-of-text token")
    include_draft_info: bool | None = Field(
        default=None, description="Extension: chunks say which tokens were drafted, and describe their step"
    )

    not_offered = _NOT_OFFERED

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @abstractmethod
    def jobs(self, server: ServerSettings) -> list[Job]:
        """One job per choice; fields that contradict each other are refused."""

    def to_job(self, server: ServerSettings, settings: Mapping[str, object], **more: Any) -> Job:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        shared = {
            "max_tokens": self.max_tokens,
            "stop": stops or None,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()} or None,
            "ignore_eos": self.ignore_eos,
        }
        return super().to_job(server, {**shared, **settings}, **more)


def with_seeds(job: Job, count: int) -> list[Job]:
    """One job per choice; the first keeps the seed, and the seeds of the others are derived from it."""
    seed = job.settings.get("seed")
    if seed is None or count == 1:
        return [job] * count
    digests = (hashlib.sha256(f"{seed}/{index}".encode()).digest() for index in range(1, count))
    seeds = [seed, *(int.from_bytes(digest[:8], "big") & MAX_SEED for digest in digests)]
    return [replace(job, settings={**job.settings, "seed": value}) for value in seeds]


class ChatRequest(GenerationRequest, ConversationFields):
    """POST /v1/chat/completions"""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    tools: Several[FunctionTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    modalities: Several[Literal["text"]] | None = Field(default=None, max_length=1)
    reasoning_effort: Literal["none"] | None = Field(
        default=None, description="`none` switches thinking off; thinking_budget limits it"
    )

    def jobs(self, server: ServerSettings) -> list[Job]:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise refuse("max_tokens", "contradicts max_completion_tokens", "give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "needs logprobs", "set logprobs to true")
        template_kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort == "none":
            if template_kwargs.get("enable_thinking"):
                raise refuse("reasoning_effort", "contradicts chat_template_kwargs.enable_thinking", "give one of them")
            template_kwargs["enable_thinking"] = False
        job = self.to_job(
            server,
            {
                "max_tokens": self.max_completion_tokens or self.max_tokens,
                "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            },
            messages=[message.plain() for message in self.messages],
            tools=[tool.function.tool() for tool in self.tools or ()],
            tool_choice=self._tool_choice(),
            format=self._format(),
            template_kwargs=template_kwargs,
        )
        return with_seeds(job, self.choices)

    def _tool_choice(self) -> ToolChoice:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ApiError(400, "two tools have the same name", "give each its own", "tools", code="invalid_value")
        choice = self.tool_choice
        if not names:
            if choice not in (None, "none", "auto"):
                raise refuse("tool_choice", "needs tools", "give tools, or leave it out")
            if self.parallel_tool_calls is not None:
                raise refuse("parallel_tool_calls", "needs tools", "give tools, or leave it out")
        if not isinstance(choice, NamedToolChoice):
            return ToolChoice(choice or "auto")
        if choice.function.name not in names:
            said = f"tool_choice names '{choice.function.name}', which is not among the tools"
            raise ApiError(400, said, param="tool_choice", code="invalid_value")
        return ToolChoice("required", choice.function.name)

    def _format(self) -> Constraint | None:
        wanted = output_format(self.response_format)
        if wanted is not None and self.tools and self.tool_choice != "none":
            said = "set tool_choice to none, or leave one out"
            raise refuse("response_format", "cannot be combined with tools", said)
        return wanted


Tokens = Annotated[Several[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(min_length=1)]

_CHOICES = Field(min_length=1, max_length=MAX_CHOICES)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: str | Tokens | Annotated[Several[str], _CHOICES] | Annotated[Several[Tokens], _CHOICES]
    echo: bool | None = Field(default=None, description="Put the prompt before the answer; not with logprobs")
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as one list; the body has one of four shapes: a text, tokens, or several of either."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]

    def jobs(self, server: ServerSettings) -> list[Job]:
        """One job per choice: all choices of the first prompt, then those of the next prompt."""
        if self.echo and self.logprobs is not None:
            raise refuse("echo", "cannot be combined with logprobs", "leave one of them out")
        if len(self.prompts) * self.choices > MAX_CHOICES:
            raise refuse("n", f"times the number of prompts is more than {MAX_CHOICES}", "send fewer at once")
        made = [self.to_job(server, {"logprobs": self.logprobs}, prompt=prompt) for prompt in self.prompts]
        return [job for one in made for job in with_seeds(one, self.choices)]
