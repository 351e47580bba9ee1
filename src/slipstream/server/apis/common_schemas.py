"""What the bodies of all APIs share: strict objects, bounded lists, and fields that become a job in the same way."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from slipstream.errors import RequestError
from slipstream.grammar.notations import json_object, json_schema, lark
from slipstream.server.operations.errors_http import ApiError, refuse
from slipstream.server.operations.server_state import ServerSettings
from slipstream.server.serving.jobs import Job, Tool, ToolChoice
from slipstream.types import MAX_SEED, MAX_TREE_ROWS, Constraint, Mode

MAX_TOKENS = 2**31 - 1  # the largest 32-bit integer; token ids and lengths beyond it cannot exist
MAX_STOPS = 64  # stop strings of one request; every token is compared with all of them
# Items in one list of messages, parts or calls. A validated item takes about 1 KB, so that one list takes about 10 MB
# at most; a longer list is refused.
MAX_ITEMS = 10_000
# Unknown fields of one object that validation sees. Each becomes an error, and one error suffices to refuse the object.
_SHOWN_UNKNOWN_FIELDS = 64
_TREE_ROWS = 32  # rows of a tree if the request names mode tree without a budget


class Strict(BaseModel):
    """Refuses unknown fields and converts nothing: a number in a string is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Fields that an API documents and this server does not offer. As null they mean "not given" and are dropped;
    # clients that send back objects as they got them send such nulls.
    not_offered: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _few_unknown_fields(cls, value: Any) -> Any:
        """Drops null fields that are not offered, and all unknown fields but the first `_SHOWN_UNKNOWN_FIELDS`."""
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
# Every list of a body has one of these types. The first wrong item ends its validation, because making one error takes
# as long as validating many items. `Many` also limits the length.
Many = Annotated[list[Listed], Field(fail_fast=True, max_length=MAX_ITEMS)]
Several = Annotated[list[Listed], Field(fail_fast=True)]


def at_most(count: int) -> BeforeValidator:
    """Refuses larger objects before their entries are validated; the schema's own limit is checked afterwards."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", f"has {len(value)} entries, at most {count} are allowed")
        return value

    return BeforeValidator(check)


class TextItem(Strict):
    type: str
    text: str


def text_of(content: str | Sequence[TextItem] | None, between: str = "") -> str:
    """The text of a message's content, which is a text or a list of parts, or is left out."""
    return content if isinstance(content, str) else between.join(part.text for part in content or ())


class FunctionType(Strict):
    type: Literal["function"]


class FunctionSpec(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="Calls always follow the schema")

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {}, bool(self.strict))


def named_tool(name: str, known: Iterable[str]) -> ToolChoice:
    """The choice of one tool, which must be known."""
    if name not in known:
        raise ApiError(400, f"there is no tool '{name}'", "name one of tools", param="tool_choice.name")
    return ToolChoice("required", name)


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    """A JSON schema in a field `schema`. The attribute has another name, because pydantic has a method `schema`."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    json_schema: dict[str, Any] = Field(alias="schema")


class NamedSchema(JsonSchema):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    strict: bool | None = None


def output_format(wanted: Any) -> Constraint | None:
    """What the `format` field of any API asks for; None is plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "grammar":
        return lark(wanted.grammar)
    if wanted.type == "json_object":
        return json_object()
    schema = wanted.json_schema
    return json_schema(schema.json_schema if isinstance(schema, JsonSchema) else schema)  # chat has it one level deeper


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


Model = Annotated[str, Field(min_length=1, max_length=256, description="A model of this server, or `any`")]
OptionalModel = Annotated[
    str | None, Field(min_length=1, max_length=256, description="Needed where several are served")
]
TemplateKwargs = Annotated[dict[str, Any] | None, Field(description="Extension: such as enable_thinking")]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
User = Annotated[str | None, Field(max_length=512, description="Written to the log")]

_OFTEN_EXTENSION = "Extension of Responses and Messages"
# The common fields that are no settings of an engine's request.
_NO_SETTINGS = ("model", "stream", "speculative", "priority", "timeout")


class CommonFields(Strict):
    """The fields that have the same name and the same meaning in every API that generates text."""

    model: Model
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, description="Default: the model's own, or 0 (greedy)")
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1, description="Extension")
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, description="Extension; 1 is off")
    cache_prompt: bool | None = Field(default=None, description="Extension: use and fill the prefix cache")
    speculative: Speculative | None = None
    draft_lora: str | None = Field(
        default=None, min_length=1, max_length=64, description="Extension: which variant of the drafter drafts"
    )
    priority: int | None = Field(
        default=None,
        ge=-100,
        le=100,
        description="Extension: larger values are served first; above 0 only with --allow-priority",
    )
    timeout: float | None = Field(
        default=None, gt=0, le=86400, description="Extension: the most seconds that the request may take"
    )
    top_k: int | None = Field(default=None, ge=0, le=MAX_TOKENS, description="Extension of OpenAI's APIs; 0 is off")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description=_OFTEN_EXTENSION)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description=_OFTEN_EXTENSION)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description=_OFTEN_EXTENSION)

    def to_job(self, server: ServerSettings, settings: Mapping[str, object], **more: Any) -> Job:
        """The job of this request; settings that are None are left to the defaults of the model.

        The caller gives the `settings` that have another name in each API, and as `more` the other fields of the job.
        """
        for name in ("stream_options", "include_draft_info"):
            if getattr(self, name, None) and not self.stream:
                raise refuse(name, "is only for streams", "set stream, or leave it out")
        if self.priority is not None and self.priority > 0 and not server.allow_priority:
            raise refuse(
                "priority", "may not be above 0 here", "leave it out, or start the server with --allow-priority"
            )
        said = {name: getattr(self, name) for name in CommonFields.model_fields if name not in _NO_SETTINGS}
        said |= {"mode": self.speculative and self.speculative.mode_name(), **settings}
        return Job(
            model=self.model,
            settings={name: value for name, value in said.items() if value is not None},
            priority=self.priority or 0,
            deadline_s=server.deadline(self.timeout),
            **more,
        )


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16), at_most(16)
]


class ConversationFields(CommonFields):
    """The fields that OpenAI's two APIs for conversations share."""

    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    store: Literal[False] | None = Field(
        default=None, description="Only false is accepted, because the server stores nothing"
    )
    service_tier: Literal["auto", "default"] | None = Field(
        default=None, description="Accepted without effect, because there is one tier"
    )
    metadata: Metadata | None = Field(
        default=None, description="Written to the log; the canary uses `prompt_class` to choose the expected acceptance"
    )
    safety_identifier: User = None
    chat_template_kwargs: TemplateKwargs = None
    thinking_budget: int | None = Field(
        default=None, ge=0, le=MAX_TOKENS, description="Extension: the most tokens of reasoning"
    )

    def to_job(self, server: ServerSettings, settings: Mapping[str, object], **more: Any) -> Job:
        return super().to_job(
            server,
            settings,
            parallel_tools=self.parallel_tool_calls is not False,
            thinking_budget=self.thinking_budget,
            prompt_class=(self.metadata or {}).get("prompt_class"),
            **more,
        )
