"""Constraints in the forms that clients use: a JSON schema, any JSON object, a pattern, a grammar, or tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.errors import RequestError
from slipstream.types import Constraint

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
# The most calls in one answer that must call a tool: a model that cannot stop calling would otherwise never end.
_MOST_CALLS = 16
# JSON may have one space, or a new line with its indentation, between its parts. If more were allowed, a model could
# write blanks until its tokens run out.
_BLANKS = {"whitespace_pattern": r"( |\n[ \t]{0,16})"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema; an empty one allows any object
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools may, must or must not be called; with a `name`, only that tool may be called."""

    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


def json_schema(schema: Mapping[str, Any]) -> Constraint:
    """Constrains a text to JSON that fits the schema."""
    return Constraint("json_schema", _schema_text(_with_blanks(schema)))


def json_object() -> Constraint:
    """Constrains a text to any JSON object."""
    return json_schema({"type": "object"})


def lark(grammar: str) -> Constraint:
    """Constrains a text to a grammar in the Lark dialect that llguidance reads."""
    return Constraint("lark", grammar)


def regex(pattern: str) -> Constraint:
    """Constrains a text to match a pattern from its first to its last character."""
    return Constraint("regex", pattern)


def tool_constraint(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True) -> Constraint | None:
    """Returns the constraint of an answer that may or must call tools; None if nothing is constrained.

    A call is `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>` with arguments that fit the schema.
    If no call is required, any text may be written too, but a `<tool_call>` must be followed by a call. A named tool is
    called once; without `parallel` every answer ends with its first call.
    """
    if not tools or choice.kind == "none":
        return None
    allowed = [tool for tool in tools if choice.name is None or tool.name == choice.name]
    if not allowed:
        raise RequestError(f"no tool is called '{choice.name}'", "choose one of the request's tools")
    names = [tool.name for tool in allowed]
    if len(set(names)) < len(names):
        raise RequestError("two tools have the same name", "name every tool differently")
    must = choice.kind == "required" or choice.name is not None
    once = not parallel or choice.name is not None
    functions = [f"function_{index}: {_call_rule(tool)}" for index, tool in enumerate(allowed)]
    rules = [
        *(_required_call_rules(once) if must else _optional_call_rules(once)),
        f"body: {' | '.join(f'function_{index}' for index in range(len(allowed)))}",
        *functions,
    ]
    return Constraint("lark", "\n".join(rules) + "\n")


def _required_call_rules(once: bool) -> list[str]:
    further = "" if once else rf' ("\n" call){{0,{_MOST_CALLS - 1}}}'
    return [f"start: call{further}", rf'call: "{CALL_OPEN}\n" body "\n{CALL_CLOSE}"']


def _optional_call_rules(once: bool) -> list[str]:
    return [
        "start: TEXT | call" if once else "start: call* TEXT",
        rf'call: before "\n" body "\n{CALL_CLOSE}"',
        f'before[suffix="{CALL_OPEN}"]: TEXT',
        "TEXT: /(?s:.*)/",
    ]


def _call_rule(tool: Tool) -> str:
    """Returns the rule of one tool's call; its schema stays a document of its own, so that its references are valid."""
    head = json.dumps(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    schema = tool.parameters if tool.parameters else {"type": "object"}
    if schema.get("type", "object") != "object":
        raise RequestError(f"the parameters of tool '{tool.name}' are not an object", "give them type object")
    return f'{head} %json {_schema_text({"type": "object", **_with_blanks(schema)})} "}}"'


def _with_blanks(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": _BLANKS}


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON: {error}", "use objects, lists, strings and numbers") from None
