"""The body of OpenAI's Responses API and its translation into a job; fields not declared here are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from slipstream.server.apis.common_schemas import (
    MAX_TOKENS,
    ConversationFields,
    FunctionSpec,
    FunctionType,
    Many,
    NamedSchema,
    ObjectFormat,
    Several,
    Strict,
    TextFormat,
    TextItem,
    User,
    named_tool,
    output_format,
    text_of,
)
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.server_state import ServerSettings
from slipstream.server.serving.jobs import Job, ToolChoice

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


class ResponsesTextPart(TextItem):
    type: Literal["input_text", "output_text"]
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


class ReasoningPart(TextItem):
    type: Literal["reasoning_text"]


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


class ResponsesFunctionTool(FunctionSpec, FunctionType):
    not_offered = _NOT_OFFERED


class ResponsesNamedChoice(FunctionType):
    name: str


class ResponsesSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


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


class ResponsesRequest(ConversationFields):
    """POST /v1/responses"""

    input: str | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    tools: Several[ResponsesFunctionTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedChoice | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Several[Literal["message.output_text.logprobs"]] | None = Field(default=None, max_length=1)
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["disabled"] | None = Field(default=None, description="A prompt that does not fit is refused")
    user: User = None
    prompt_cache_key: str | None = Field(default=None, max_length=512, description="One cache serves all requests")
    background: Literal[False] | None = None

    not_offered = _NOT_OFFERED

    @property
    def with_logprobs(self) -> bool:
        return bool(self.include) or self.top_logprobs is not None

    def job(self, server: ServerSettings) -> Job:
        template_kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort is not None:
            template_kwargs["enable_thinking"] = False
        return self.to_job(
            server,
            {
                "max_tokens": self.max_output_tokens,
                "logprobs": (self.top_logprobs or 0) if self.with_logprobs else None,
            },
            messages=to_messages(self.instructions, self.input),
            tools=[tool.tool() for tool in self.tools or ()],
            tool_choice=self._choice(),
            format=output_format(self.text and self.text.format),
            template_kwargs=template_kwargs,
        )

    def _choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, ResponsesNamedChoice):
            return named_tool(self.tool_choice.name, [tool.name for tool in self.tools or ()])
        if self.tool_choice == "required" and not self.tools:
            raise ApiError(400, "'tool_choice' asks for a call without tools", "give tools", param="tool_choice")
        return ToolChoice(self.tool_choice or "auto")


def to_messages(instructions: str | None, given: str | list[InputItem]) -> list[dict[str, Any]]:
    """The conversation in the server's own shape; reasoning and calls become part of their assistant turn."""
    told: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*told, {"role": "user", "content": given}]
    names: dict[str, str] = {}  # the tool of each call so far, by the call's id
    for item in given:
        last: dict[str, Any] = told[-1] if told else {"role": None}
        if isinstance(item, MessageItem):
            text = text_of(item.content)
            if item.role == "assistant" and "reasoning_content" in last and not last["content"]:
                last["content"] = text
            else:
                told.append({"role": item.role, "content": text})
        elif isinstance(item, ReasoningItem):
            told.append({"role": "assistant", "content": "", "reasoning_content": text_of(item.content)})
        elif isinstance(item, FunctionCallItem):
            if last["role"] != "assistant":
                last = {"role": "assistant", "content": ""}
                told.append(last)
            names[item.call_id] = item.name
            last.setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
            )
        elif item.call_id not in names:
            raise ApiError(
                400,
                f"the function_call_output for '{item.call_id[:80]}' has no function_call before it",
                "send the call as well: nothing is stored here",
                param="input",
            )
        else:
            named = {"tool_call_id": item.call_id, "name": names[item.call_id]}
            told.append({"role": "tool", **named, "content": text_of(item.output)})
    return told
