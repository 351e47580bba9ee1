"""The bodies of Anthropic's Messages API and their translation into jobs; fields not declared here are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from slipstream.server.apis.common_schemas import (
    MAX_STOPS,
    MAX_TOKENS,
    CommonFields,
    JsonSchema,
    Many,
    Model,
    Several,
    Stop,
    Strict,
    TemplateKwargs,
    TextItem,
    named_tool,
    output_format,
    text_of,
)
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.server_state import ServerSettings
from slipstream.server.serving.jobs import Job, Tool, ToolChoice

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


class TextBlock(AnthropicBlock, TextItem):
    type: Literal["text"]
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


class AnthropicSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class OutputConfig(Strict):
    format: AnthropicSchemaFormat | None = None


class Metadata(Strict):
    user_id: str | None = Field(default=None, max_length=512, description="Written to the log")
    prompt_class: str | None = Field(
        default=None, max_length=64, description="Extension: the canary uses it to choose the expected acceptance"
    )


class PromptRequest(Strict):
    """POST /v1/messages/count_tokens: the fields that decide the prompt; `MessagesRequest` has them too."""

    model: Model
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
    chat_template_kwargs: TemplateKwargs = None

    not_offered = _NOT_OFFERED

    def prompt(self) -> dict[str, Any]:
        """The fields of a job that decide its prompt."""
        messages = to_messages(self.system, self.messages)
        thinking, kwargs = self.thinking, dict(self.chat_template_kwargs or {})
        if thinking is not None:
            kwargs["enable_thinking"] = thinking.type != "disabled"
        return {
            "messages": messages,
            "continues": messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
            "tools": [
                Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
                for tool in self.tools or ()
            ],
            "tool_choice": self._choice(),
            "parallel_tools": not getattr(self.tool_choice, "disable_parallel_tool_use", False),
            "format": output_format(self.output_config and self.output_config.format),
            "template_kwargs": kwargs,
            "thinking_budget": thinking.budget_tokens if isinstance(thinking, ThinkingOn) else None,
        }

    def _choice(self) -> ToolChoice:
        chosen = self.tool_choice
        if chosen is None or chosen.type == "none":
            return ToolChoice("auto" if chosen is None else "none")
        if not self.tools:
            raise ApiError(400, "'tool_choice' was given without tools", "give tools as well", param="tool_choice")
        if isinstance(chosen, AnthropicNamedChoice):
            return named_tool(chosen.name, [tool.name for tool in self.tools])
        return ToolChoice("auto" if chosen.type == "auto" else "required")


class MessagesRequest(PromptRequest, CommonFields):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: Several[Stop] | None = Field(default=None, max_length=MAX_STOPS)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="Accepted without effect, because there is one tier"
    )

    def job(self, server: ServerSettings) -> Job:
        settings = {"max_tokens": self.max_tokens, "stop": tuple(self.stop_sequences or ()) or None}
        prompt_class = self.metadata.prompt_class if self.metadata is not None else None
        return self.to_job(server, settings, prompt_class=prompt_class, **self.prompt())

    @model_validator(mode="after")
    def _budget_leaves_room(self) -> MessagesRequest:
        if isinstance(self.thinking, ThinkingOn) and self.thinking.budget_tokens >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        return self


def to_messages(system: str | list[TextBlock] | None, messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation in the server's own shape; consecutive turns of the same role become one turn."""
    told: list[dict[str, Any]] = []  # while turns are added, the content of each is a list of texts
    if system:
        _add(told, "system", text_of(system, "\n\n"))
    names: dict[str, str] = {}  # the tool of each call so far, by the call's id
    for message in messages:
        if isinstance(message, AnthropicAssistantMessage):
            _add_assistant(told, message.content, names)
        elif isinstance(message, SystemMessage):
            _add(told, "system", text_of(message.content, "\n\n"))
        else:
            _add_user(told, message.content, names)
    return [{**turn, "content": "\n\n".join(filter(None, turn["content"]))} for turn in told]


def _add(told: list[dict[str, Any]], role: str, text: str) -> dict[str, Any]:
    last = told[-1] if told else None
    if last is not None and last["role"] == role and "tool_calls" not in last:
        last["content"].append(text)
        return last
    told.append({"role": role, "content": [text]})
    return told[-1]


def _add_user(
    told: list[dict[str, Any]], content: str | list[TextBlock | ToolResultBlock], names: dict[str, str]
) -> None:
    for block in [TextBlock(type="text", text=content)] if isinstance(content, str) else content:
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
        text = text_of(block.content, "\n\n")
        named = {"tool_call_id": block.tool_use_id, "name": names[block.tool_use_id]}
        told.append({"role": "tool", **named, "content": [f"Error: {text}" if block.is_error else text]})


def _add_assistant(
    told: list[dict[str, Any]], content: str | list[TextBlock | ThinkingBlock | ToolUseBlock], names: dict[str, str]
) -> None:
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    turn = _add(told, "assistant", text_of([block for block in blocks if isinstance(block, TextBlock)]))
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
