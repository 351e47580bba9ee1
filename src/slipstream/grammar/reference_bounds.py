"""Limits how deep a constraint's references go, because llguidance recurses along them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from itertools import zip_longest
from typing import Any

from slipstream.errors import RequestError

# A reference takes up to 21 KiB of the library's stack if its schema has a few levels, and a trial's stack has 16 MiB.
# Schemas of 200 definitions that all refer to each other need fewer than 200.
MOST_REFERENCES = 500
# The library reads at most 128 levels of JSON, and the text around a schema takes a few of them.
MOST_LEVELS = 100

# Every alternative matches whatever follows its first character, so that the scan takes time linear in the text's
# length.
_SKIPPED = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*+|/(?:\\.|[^/\\\n])*+/?|%json\b\s*+')
_RULE = re.compile(r"^[ \t]*+[?!]*+([A-Za-z_]\w*+)[^:\n|]*+:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*+")


def check_bounds(kind: str, source: str) -> None:
    """Refuses a constraint whose references or levels go too deep; the library reports all other faults."""
    if kind == "json_schema":
        _check_schema(json.loads(source))
    elif kind == "lark":
        _check_lark(source)


def _check_schema(schema: Any) -> None:
    level, todo = 0, [schema]
    while todo:
        level += 1
        if level > MOST_LEVELS:
            raise RequestError(f"it has more than {MOST_LEVELS} levels", "nest it less")
        todo = [child for value in todo for child in _children(value) if isinstance(child, dict | list)]
    _check_chain("references", _schema_references(schema), "")


def _children(value: Any, without: Collection[str] = ()) -> list[Any]:
    if isinstance(value, dict):
        return [child for key, child in value.items() if key not in without]
    return value if isinstance(value, list) else []


def _schema_references(schema: Any) -> dict[str, list[str]]:
    """Maps each reference to the references inside what it names; the name of the schema itself is ''."""
    graph: dict[str, list[str]] = {}
    todo = [""]
    while todo:
        name = todo.pop()
        if name not in graph:
            graph[name] = list(_references(_at(schema, name)))
            todo += graph[name]
    return graph


def _references(part: Any) -> Iterator[str]:
    todo = [part]
    while todo:
        value = todo.pop()
        found = value.get("$ref") if isinstance(value, dict) else None
        if isinstance(found, str) and found.startswith("#"):
            yield found[1:]
        todo += _children(value, without=("$defs", "definitions"))


def _at(schema: Any, pointer: str) -> Any:
    """Returns what a JSON pointer names, or None if there is nothing."""
    part = schema
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isdecimal() and len(key) < 10 and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def _check_lark(source: str) -> None:
    text, schemas = _without_literals(source)
    for schema in schemas:
        _check_schema(schema)
    rules = list(_RULE.finditer(text))
    graph: dict[str, list[str]] = {}
    for rule, following in zip_longest(rules, rules[1:]):
        end = following.start() if following is not None else len(text)
        graph.setdefault(rule[1], []).extend(_NAME.findall(text, rule.end(), end))
    _check_chain("rules", graph, "start")


def _without_literals(source: str) -> tuple[str, list[Any]]:
    """Returns a grammar without its strings, patterns, comments and schemas, and the schemas."""
    kept: list[str] = []
    schemas: list[Any] = []
    done = 0
    while found := _SKIPPED.search(source, done):
        kept.append(source[done : found.start()])
        done = found.end()
        if found[0].startswith("%json"):
            try:
                schema, done = json.JSONDecoder().raw_decode(source, done)
            except (ValueError, RecursionError):
                continue  # the library will report what is wrong with it
            schemas.append(schema)
    return " ".join([*kept, source[done:]]), schemas


def _check_chain(things: str, graph: dict[str, list[str]], start: str) -> None:
    """Walks through a graph as the library does, depth first and each name once, and refuses too deep a path."""
    seen = {start}
    path = [iter(graph.get(start, ()))]
    while path:
        name = next((name for name in path[-1] if name in graph and name not in seen), None)
        if name is None:
            path.pop()
            continue
        seen.add(name)
        path.append(iter(graph[name]))
        if len(path) > MOST_REFERENCES:
            raise RequestError(f"more than {MOST_REFERENCES} of its {things} lead from one to the next", "use fewer")
