"""The bodies of OpenAI's chat and completions requests with extensions; fields not declared here are refused."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from slipstream.errors import RequestError
from slipstream.server.operations.errors_http import ApiError, refuse
from slipstream.server.operations.server_state import MAX_CHOICES
from slipstream.types import MAX_SEED, MAX_TREE_ROWS, Mode

MAX_TOKENS = 2**31 - 1  # the largest 32-bit integer; token ids and lengths beyond it cannot exist
MAX_STOPS = 64  # stop strings of one request; every token is compared with all of them
MAX_ITEMS = 10_000  # of a list of messages, parts or calls; a validated item takes about a kilobyte
# Unknown fields that validation sees. It is more than any list of fields that may be null, so that at least one field
# is left to refuse.
_SHOWN_UNKNOWN_FIELDS = 64
_TREE_ROWS = 32  # rows of a tree if the request names mode tree without a budget

# Fields that OpenAI documents and this server does not offer. As null they mean "not given"; clients that send back
# objects as they got them send such nulls.
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


class Strict(BaseModel):
    """Refuses unknown fields and converts nothing: a number in a string is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    not_offered: ClassVar[tuple[str, ...]] = ()  # unknown fields that are dropped where they are null

    @model_validator(mode="before")
    @classmethod
    def _few_unknown_fields(cls, value: Any) -> Any:
        """Drops most of very many unknown fields: each would become an error, and one error is enough to refuse."""
        if not isinstance(value, dict):
            return value
        if cls.not_offered:
            value = {key: item for key, item in value.items() if item is not None or key not in cls.not_offered}
        if len(value) <= len(cls.model_fields) + _SHOWN_UNKNOWN_FIELDS:
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = itertools.islice((key for key in value if key not in known), _SHOWN_UNKNOWN_FIELDS)
        return {key: value[key] for key in (*(known & value.keys()), *unknown)}


Listed = TypeVar("Listed")
# Every list of a body has one of these types. Its first wrong item ends the validation, because an error takes as
# long as many valid items.
Many = Annotated[list[Listed], Field(fail_fast=True, max_length=MAX_ITEMS)]
Several = Annotated[list[Listed], Field(fail_fast=True)]


def at_most(count: int) -> BeforeValidator:
    """Refuses larger objects before their entries are validated; the schema's own limit is checked afterwards."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", f"has {len(value)} entries, at most {count} are allowed")
        return value

    return BeforeValidator(check)


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | Many[TextPart]


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class FunctionCall(Strict):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCallPart(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # streams number their calls, and clients send the number back


class InstructionMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Many[ToolCallPart] | None = None
    name: str | None = None

    not_offered = _NOT_OFFERED


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionSpec(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Strict):
    name: str


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaBody(Strict):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, serialize_by_alias=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: SchemaBody


class GrammarFormat(Strict):
    """Extension: a grammar in llguidance's Lark syntax for the whole answer."""

    type: Literal["grammar"]
    grammar: str = Field(min_length=1)


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat | GrammarFormat, Field(discriminator="type")]


class StreamOptions(Strict):
    include_usage: bool | None = None


class Speculative(Strict):
    """Extension: how this request speculates. A chain has a `width`, a tree a `budget`, both in verified rows."""

    mode: str = Field(default="auto", max_length=32, description="plain, chain, tree, auto, or chain:8, tree:32 ...")
    width: int | None = Field(default=None, ge=2, le=MAX_TREE_ROWS)
    budget: int | None = Field(default=None, ge=2, le=MAX_TREE_ROWS)

    def mode_name(self) -> str:
        """The engine's name of the mode; a width or budget that belongs to another mode is refused."""
        for name, kind in (("width", "chain"), ("budget", "tree")):
            if getattr(self, name) is not None and self.mode != kind:
                raise refuse(f"speculative.{name}", f"belongs to mode {kind}", "leave it out, or change the mode")
        rows = {"chain": self.width, "tree": self.budget or _TREE_ROWS}.get(self.mode)
        try:
            return str(Mode.parse(self.mode if rows is None else f"{self.mode}:{rows}"))
        except RequestError as error:
            said = f"'speculative.mode': {error.message}"
            raise ApiError(400, said, error.hint, param="speculative.mode", code="invalid_value") from None


MAX_BIASES = 2048  # tokens with a bias in one request; a larger object is refused before its entries are validated
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
DraftLora = Annotated[
    str, Field(min_length=1, max_length=64, description="Extension: which variant of the drafter drafts")
]


# The settings that a request of every API may have; seed, top_k and two penalties are described by each API itself.
_SAMPLING = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "cache_prompt",
    "draft_lora",
)


class CommonFields(Strict):
    """The fields that have the same name and the same meaning in every API."""

    temperature: float | None = Field(default=None, ge=0, le=2, description="Default: the model's own, or 0 (greedy)")
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1, description="Extension")
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, description="Extension; 1 is off")
    cache_prompt: bool | None = Field(default=None, description="Extension: use and fill the prefix cache")
    speculative: Speculative | None = None
    draft_lora: DraftLora | None = None
    priority: int | None = Field(
        default=None,
        ge=-100,
        le=100,
        description="Extension: larger values are served first; above 0 only with --allow-priority",
    )
    timeout: float | None = Field(
        default=None, gt=0, le=86400, description="Extension: the most seconds that the request may take"
    )

    def sampling(self) -> dict[str, object]:
        """The fields of `_SAMPLING` that were given, as settings of an engine's request."""
        said = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.speculative is not None:
            said["mode"] = self.speculative.mode_name()
        return said


class GenerationRequest(CommonFields):
    """The fields that chat and completions share."""

    model: str = Field(min_length=1, max_length=256, description="A model of this server, or `any`")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES), at_most(MAX_BIASES)] | None = None
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: Stop | Annotated[Several[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    user: str | None = Field(default=None, max_length=512, description="Written to the log")
    top_k: int | None = Field(default=None, ge=0, le=MAX_TOKENS, description="Extension; 0 is off")
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

    def settings(self) -> dict[str, object]:
        """The fields that were given, as settings of an engine's request; the model's defaults fill in the others."""
        said = {**self.sampling(), "max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos}
        said["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop) if self.stop else None
        if self.logit_bias:
            said["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return {name: value for name, value in said.items() if value is not None}


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16), at_most(16)
]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Several[FunctionTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = Field(
        default=None, description="Written to the log; the canary uses `prompt_class` to choose the expected acceptance"
    )
    safety_identifier: str | None = Field(default=None, max_length=512, description="Written to the log")
    store: Literal[False] | None = Field(
        default=None, description="Only false is accepted, because the server stores nothing"
    )
    modalities: Several[Literal["text"]] | None = Field(default=None, max_length=1)
    service_tier: Literal["auto", "default"] | None = Field(
        default=None, description="Accepted without effect, because there is one tier"
    )
    reasoning_effort: Literal["none"] | None = Field(
        default=None, description="`none` switches thinking off; thinking_budget limits it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Extension: such as enable_thinking")
    thinking_budget: int | None = Field(
        default=None, ge=0, le=MAX_TOKENS, description="Extension: the most tokens of reasoning"
    )

    def settings(self) -> dict[str, object]:
        said = super().settings()
        if self.max_completion_tokens is not None:
            said["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            said["logprobs"] = self.top_logprobs or 0
        return said


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

    def settings(self) -> dict[str, object]:
        said = super().settings()
        if self.logprobs is not None:
            said["logprobs"] = self.logprobs
        return said
