"""The body of OpenAI's Responses API and its translation into a job; fields not declared here are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from slipstream.grammar.notations import json_object, json_schema
from slipstream.server.apis.extensions import Extensions, allowed_priority
from slipstream.server.apis.openai_schemas import MAX_TOKENS, Many, Metadata, ObjectFormat, Several, Strict, TextFormat
from slipstream.server.operations.errors_http import ApiError, refuse
from slipstream.server.operations.server_state import ServerSettings
from slipstream.server.serving.jobs import Job, Tool, ToolChoice
from slipstream.types import Constraint

# Fields that the API documents and this server does not offer. As null they mean "not given"; clients that send back
# objects as they got them send such nulls.
_NOT_OFFERED = (
    "access_programs",
    "background",
    "caller",
    "context_management",
    "conversation",
    "encrypted_content",
    "image",
    "max_tool_calls",
    "moderation",
    "namespace",
    "output_schema",
    "allowed_callers",
    "async",
    "phase",
    "previous_response_id",
    "prompt",
    "prompt_cache_options",
    "prompt_cache_retention",
    "summary",
    "generate_summary",
    "context",
    "mode",
    "verbosity",
)


class Item(Strict):
    """Fields that clients send back with items of earlier responses; the server does not use them."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    not_offered = _NOT_OFFERED


class ResponsesTextPart(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Several[Any] | None = Field(default=None, max_length=0)
    logprobs: Many[Any] | None = None  # clients send these back with an answer; the server does not use them


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[ResponsesTextPart]
    phase: Literal["final_answer"] | None = None


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class FunctionOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[ResponsesTextPart]


class ReasoningPart(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Several[Any] = Field(default_factory=list, max_length=0)
    content: Many[ReasoningPart] | None = None


def _item_type(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return kind if isinstance(kind, str) else ""


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class ResponsesFunctionTool(Strict):
    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="Calls always follow the schema")

    not_offered = _NOT_OFFERED


class ResponsesNamedChoice(Strict):
    type: Literal["function"]
    name: str


class ResponsesSchemaFormat(Strict):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, serialize_by_alias=True)

    type: Literal["json_schema"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: Annotated[TextFormat | ObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")] | None = None

    not_offered = _NOT_OFFERED


class Reasoning(Strict):
    effort: Literal["none"] | None = Field(
        default=None, description="`none` switches thinking off; thinking_budget limits it"
    )

    not_offered = _NOT_OFFERED


class ResponsesStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Extensions):
    """POST /v1/responses"""

    model: str = Field(min_length=1, max_length=256, description="A model of this server, or `any`")
    input: str | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    tools: Several[ResponsesFunctionTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Several[Literal["message.output_text.logprobs"]] | None = Field(default=None, max_length=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: Literal[False] | None = Field(
        default=None, description="Only false is accepted, because the server stores nothing"
    )
    truncation: Literal["disabled"] | None = Field(default=None, description="A prompt that does not fit is refused")
    service_tier: Literal["auto", "default"] | None = Field(
        default=None, description="Accepted without effect, because there is one tier"
    )
    metadata: Metadata | None = Field(
        default=None, description="Written to the log; the canary uses `prompt_class` to choose the expected acceptance"
    )
    user: str | None = Field(default=None, max_length=512, description="Written to the log")
    safety_identifier: str | None = Field(default=None, max_length=512, description="Written to the log")
    prompt_cache_key: str | None = Field(default=None, max_length=512, description="One cache serves all requests")
    background: Literal[False] | None = None
    thinking_budget: int | None = Field(
        default=None, ge=0, le=MAX_TOKENS, description="Extension: the most tokens of reasoning"
    )

    not_offered = _NOT_OFFERED

    @property
    def with_logprobs(self) -> bool:
        return bool(self.include) or self.top_logprobs is not None

    def sampling(self) -> dict[str, object]:
        said = super().sampling()
        if self.max_output_tokens is not None:
            said["max_tokens"] = self.max_output_tokens
        if self.with_logprobs:
            said["logprobs"] = self.top_logprobs or 0
        return said

    def job(self, settings: ServerSettings) -> Job:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "is only for streams", "set stream, or leave it out")
        kwargs: dict[str, object] = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort is not None:
            kwargs["enable_thinking"] = False
        return Job(
            model=self.model,
            messages=to_messages(self.instructions, self.input),
            settings=self.sampling(),
            tools=[
                Tool(tool.name, tool.description or "", tool.parameters or {}, bool(tool.strict))
                for tool in self.tools or ()
            ],
            tool_choice=self._choice(),
            parallel_tools=self.parallel_tool_calls is not False,
            format=self._format(),
            template_kwargs=kwargs,
            thinking_budget=self.thinking_budget,
            priority=allowed_priority(self.priority, settings),
            deadline_s=settings.deadline(self.timeout),
            prompt_class=(self.metadata or {}).get("prompt_class"),
        )

    def _choice(self) -> ToolChoice:
        names = [tool.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, ResponsesNamedChoice):
            if self.tool_choice.name not in names:
                raise ApiError(
                    400, f"there is no tool '{self.tool_choice.name}'", "name one of tools", param="tool_choice.name"
                )
            return ToolChoice("required", self.tool_choice.name)
        if self.tool_choice == "required" and not names:
            raise ApiError(400, "'tool_choice' asks for a call without tools", "give tools", param="tool_choice")
        return ToolChoice(self.tool_choice or "auto")

    def _format(self) -> Constraint | None:
        wanted = self.text.format if self.text is not None else None
        if isinstance(wanted, ResponsesSchemaFormat):
            return json_schema(wanted.json_schema)
        return json_object() if isinstance(wanted, ObjectFormat) else None


def to_messages(instructions: str | None, given: str | list[InputItem]) -> list[dict[str, Any]]:
    """The conversation in the server's own shape; reasoning and calls become part of their assistant turn."""
    told: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*told, {"role": "user", "content": given}]
    names: dict[str, str] = {}
    for item in given:
        if isinstance(item, MessageItem):
            _add_message(told, item)
        elif isinstance(item, ReasoningItem):
            thoughts = "".join(part.text for part in item.content or ())
            told.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        elif isinstance(item, FunctionCallItem):
            names[item.call_id] = item.name
            _turn(told).setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
            )
        else:
            told.append(_output_message(item, names))
    return told


def _add_message(told: list[dict[str, Any]], item: MessageItem) -> None:
    text = _text(item.content)
    if item.role == "assistant" and told and "reasoning_content" in told[-1] and not told[-1]["content"]:
        told[-1]["content"] = text
    else:
        told.append({"role": item.role, "content": text})


def _turn(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn at the end of the conversation; a new one is added if the last turn is another role's."""
    if not told or told[-1]["role"] != "assistant":
        told.append({"role": "assistant", "content": ""})
    return told[-1]


def _output_message(item: FunctionOutputItem, names: dict[str, str]) -> dict[str, Any]:
    if item.call_id not in names:
        raise ApiError(
            400,
            f"the function_call_output for '{item.call_id[:80]}' has no function_call before it",
            "send the call as well: nothing is stored here",
            param="input",
        )
    return {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": _text(item.output)}


def _text(content: str | list[ResponsesTextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
