"""Constraints in which references, rules or levels lead from one to the next, at any length."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from slipstream.types import Constraint

Json = dict[str, Any]


def chained_schema(length: int, link: Callable[[Json], Json], last: Json) -> Json:
    """Definitions of which each refers to the next, in the form that `link` gives the reference."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"type": "object", "$defs": {**definitions, f"d{length}": last}, "properties": {"x": {"$ref": "#/$defs/d0"}}}


def chained_lark(length: int, name: str, link: str) -> str:
    lines = [f"{name}{i}: {link.format(f'{name}{i + 1}')}" for i in range(length)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{length}: "a"', ""])


def _properties(next_one: Json) -> Json:
    return {"type": "object", "properties": {"a": next_one}, "required": ["a"]}


SCHEMAS: dict[str, Callable[[int], Json]] = {
    "objects": lambda n: chained_schema(n, _properties, {"type": "string"}),
    "bare": lambda n: chained_schema(n, lambda ref: ref, {"type": "string"}),
    "any of": lambda n: chained_schema(n, lambda ref: {"anyOf": [ref, {"type": "integer"}]}, {"type": "string"}),
    "all of": lambda n: chained_schema(n, lambda ref: {"allOf": [ref, {"type": "object"}]}, {"type": "object"}),
    "one of": lambda n: chained_schema(n, lambda ref: {"oneOf": [ref, {"type": "null"}]}, {"type": "string"}),
    "items": lambda n: chained_schema(n, lambda ref: {"type": "array", "items": ref}, {"type": "string"}),
    "further": lambda n: chained_schema(n, lambda ref: {"additionalProperties": ref}, {"type": "object"}),
    # A check of the references does not follow this spelling; such a chain overflows the stack, which holds 1,700
    # links.
    "escaped": lambda n: json.loads(json.dumps(SCHEMAS["objects"](n + 2_000)).replace('"#/$defs', '"#/%24defs')),
}
GRAMMARS: dict[str, Callable[[int], str]] = {
    "rules": lambda n: chained_lark(n, "r", "{}"),
    "nested rules": lambda n: chained_lark(n, "r", '"a" (("b" | "c" {})* | "d")'),
    "terminals": lambda n: chained_lark(n, "T", "{}"),
    "choices of terminals": lambda n: chained_lark(n, "T", '{} | "b"'),
    "a schema inside": lambda n: f"start: %json {json.dumps(SCHEMAS['bare'](n))}\n",
}


KINDS = (*SCHEMAS, *GRAMMARS)


def chain(kind: str, length: int) -> Constraint:
    if kind in SCHEMAS:
        return Constraint("json_schema", json.dumps(SCHEMAS[kind](length)))
    return Constraint("lark", GRAMMARS[kind](length))
