"""The bodies of Anthropic's Messages API and their translation into jobs; fields not declared here are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from slipstream.grammar.notations import json_schema
from slipstream.server.apis.extensions import Extensions, allowed_priority
from slipstream.server.apis.openai_schemas import MAX_STOPS, MAX_TOKENS, Many, Several, Stop, Strict
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.server_state import ServerSettings
from slipstream.server.serving.jobs import Job, Tool, ToolChoice
from slipstream.types import Constraint

# Fields that the API documents and this server does not offer. As null they mean "not given"; clients that send back
# objects as they got them send such nulls.
_NOT_OFFERED = ("container", "diagnostics", "inference_geo", "citations", "caller", "toolset_name")


def _as_parsed(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "Input should be a valid dictionary")
    return value


# A JSON object as the body's parser made it. Pydantic's own check would copy it, and it may be as large as the body.
JsonDict = Annotated[
    dict[str, Any], PlainValidator(_as_parsed), WithJsonSchema({"type": "object", "additionalProperties": True})
]


class AnthropicBlock(Strict):
    not_offered = _NOT_OFFERED


class CacheControl(Strict):
    """Accepted without effect, because prompts that begin alike always share the pages of their beginning."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(AnthropicBlock):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(AnthropicBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(AnthropicBlock):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1, max_length=256)
    input: JsonDict
    cache_control: CacheControl | None = None


class ToolResultBlock(AnthropicBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicUserMessage(Strict):
    role: Literal["user"]
    content: (
        str | Annotated[Many[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]], Field(min_length=1)]
    )


class AnthropicAssistantMessage(Strict):
    role: Literal["assistant"]
    content: (
        str
        | Annotated[
            Many[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]], Field(min_length=1)
        ]
    )


class SystemMessage(Strict):
    role: Literal["system"]
    content: str | Many[TextBlock]


Message = Annotated[AnthropicUserMessage | AnthropicAssistantMessage | SystemMessage, Field(discriminator="role")]


class CustomTool(Strict):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(default=None, description="Calls always follow the schema")
    eager_input_streaming: Literal[True] | None = Field(default=None, description="Arguments always stream")
    cache_control: CacheControl | None = None


class AutoChoice(Strict):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class AnthropicNamedChoice(Strict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(Strict):
    type: Literal["none"]


class ThinkingOn(Strict):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, le=MAX_TOKENS)
    display: Literal["summarized"] | None = None


class ThinkingAdaptive(Strict):
    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class ThinkingOff(Strict):
    type: Literal["disabled"]


class AnthropicSchemaFormat(Strict):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, serialize_by_alias=True)

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: AnthropicSchemaFormat | None = None


class Metadata(Strict):
    user_id: str | None = Field(default=None, max_length=512, description="Written to the log")
    prompt_class: str | None = Field(
        default=None, max_length=64, description="Extension: the canary uses it to choose the expected acceptance"
    )


class PromptRequest(Strict):
    """POST /v1/messages/count_tokens: the fields that decide the prompt; `MessagesRequest` has them too."""

    model: str = Field(min_length=1, max_length=256, description="A model of this server, or `any`")
    messages: Many[Message] = Field(min_length=1)
    system: str | Many[TextBlock] | None = None
    tools: Several[CustomTool] | None = Field(default=None, max_length=128)
    tool_choice: Annotated[AutoChoice | AnthropicNamedChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = Field(
        default=None, description="Accepted without effect, because there is one speed"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Extension: such as enable_thinking")

    not_offered = _NOT_OFFERED

    def prompt_job(self) -> Job:
        messages = to_messages(self.system, self.messages)
        return Job(
            model=self.model,
            messages=messages,
            continues=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
            tools=[
                Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
                for tool in self.tools or ()
            ],
            tool_choice=self._choice(),
            parallel_tools=not getattr(self.tool_choice, "disable_parallel_tool_use", False),
            format=self._format(),
            template_kwargs=self._template_kwargs(),
            thinking_budget=self.thinking.budget_tokens if isinstance(self.thinking, ThinkingOn) else None,
        )

    def _choice(self) -> ToolChoice:
        chosen = self.tool_choice
        if chosen is None or chosen.type == "none":
            return ToolChoice("auto" if chosen is None else "none")
        names = [tool.name for tool in self.tools or ()]
        if not names:
            raise ApiError(400, "'tool_choice' was given without tools", "give tools as well", param="tool_choice")
        if isinstance(chosen, AnthropicNamedChoice):
            if chosen.name not in names:
                raise ApiError(400, f"there is no tool '{chosen.name}'", "name one of tools", param="tool_choice.name")
            return ToolChoice("required", chosen.name)
        return ToolChoice("auto" if chosen.type == "auto" else "required")

    def _format(self) -> Constraint | None:
        wanted = self.output_config.format if self.output_config is not None else None
        return None if wanted is None else json_schema(wanted.json_schema)

    def _template_kwargs(self) -> dict[str, object]:
        kwargs: dict[str, object] = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            kwargs["enable_thinking"] = self.thinking.type != "disabled"
        return kwargs


class MessagesRequest(PromptRequest, Extensions):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: Several[Stop] | None = Field(default=None, max_length=MAX_STOPS)
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="Accepted without effect, because there is one tier"
    )

    def job(self, settings: ServerSettings) -> Job:
        return replace(
            self.prompt_job(),
            settings=self.sampling(),
            priority=allowed_priority(self.priority, settings),
            deadline_s=settings.deadline(self.timeout),
            prompt_class=self.metadata.prompt_class if self.metadata is not None else None,
        )

    def sampling(self) -> dict[str, object]:
        said: dict[str, object] = {**super().sampling(), "max_tokens": self.max_tokens}
        if self.stop_sequences:
            said["stop"] = tuple(self.stop_sequences)
        return said

    @model_validator(mode="after")
    def _budget_leaves_room(self) -> MessagesRequest:
        if isinstance(self.thinking, ThinkingOn) and self.thinking.budget_tokens >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        return self


def to_messages(system: str | list[TextBlock] | None, messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation in the server's own shape; consecutive turns of the same role become one turn."""
    told: list[dict[str, Any]] = []  # while turns are added, the content of each is a list of texts
    if system:
        _add(told, "system", _joined(system))
    names: dict[str, str] = {}  # the tool of each call so far, by the call's id
    for message in messages:
        if isinstance(message, SystemMessage):
            _add(told, "system", _joined(message.content))
        elif isinstance(message, AnthropicUserMessage):
            _add_user(told, message, names)
        else:
            _add_assistant(told, message, names)
    return [{**turn, "content": "\n\n".join(filter(None, turn["content"]))} for turn in told]


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


def _add(told: list[dict[str, Any]], role: str, text: str) -> dict[str, Any]:
    last = told[-1] if told else None
    if last is not None and last["role"] == role and "tool_calls" not in last:
        last["content"].append(text)
        return last
    told.append({"role": role, "content": [text]})
    return told[-1]


def _add_user(told: list[dict[str, Any]], message: AnthropicUserMessage, names: dict[str, str]) -> None:
    if isinstance(message.content, str):
        _add(told, "user", message.content)
        return
    for block in message.content:
        if isinstance(block, TextBlock):
            _add(told, "user", block.text)
            continue
        if block.tool_use_id not in names:
            raise ApiError(
                400,
                f"the tool_result for '{block.tool_use_id[:80]}' has no tool_use before it",
                "send the assistant's message with the call as well",
                param="messages",
            )
        text = _joined(block.content or "")
        told.append(
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "name": names[block.tool_use_id],
                "content": [f"Error: {text}" if block.is_error else text],
            }
        )


def _add_assistant(told: list[dict[str, Any]], message: AnthropicAssistantMessage, names: dict[str, str]) -> None:
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    turn = _add(told, "assistant", text)
    thoughts = "\n\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if thoughts:
        turn["reasoning_content"] = thoughts
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
        names |= {call.id: call.name for call in calls}
