"""A server that gets constraints and templates which crash, hang or take all memory answers 400 and goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.serving import Server, serve
from tests.hostile.chains import GRAMMARS, SCHEMAS
from tests.tiny import write_pair

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
TEMPLATE = """{%- set text = messages[-1].content -%}{%- set nine = text|length + 4 -%}
{%- if text == 'power' -%}{{ nine**(nine**8) }}
{%- elif text == 'long' -%}{{ 'a' * nine**9 }}
{%- elif text == 'slow' -%}{% for i in range(99999) %}{% endfor %}{% for i in range(99999) %}{% endfor %}done
{%- endif -%}{{ text }}"""
GROWTH_BYTES = 20 * 4 * 2**20  # 20 times the largest body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target, draft = write_pair(tmp_path_factory.mktemp("hostile"))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    with serve("--draft", str(draft), "--max-context", "512", model=str(target)) as running:
        yield running


def body(text: str = "x", **settings: Any) -> dict[str, Any]:
    return {"model": "target", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **settings}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tool(schema: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def refused(server: Server, **settings: Any) -> str:
    status, _, answer = server.ask(CHAT, body(**settings))
    assert status == 400, answer[:500]
    return str(json.loads(answer)["error"]["message"])


def helpers(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


@pytest.mark.parametrize("kind", [*SCHEMAS, *GRAMMARS])
def test_chains_are_refused_by_the_limit_they_pass(server: Server, kind: str) -> None:
    said = []
    for schema in [SCHEMAS[kind](length) for length in (1_000, 3_000) if kind in SCHEMAS]:
        said.append(refused(server, response_format=schema_format(schema)))
        said += [refused(server, tools=[tool(schema)], tool_choice=choice) for choice in ("auto", "required")]
    for grammar in [GRAMMARS[kind](length) for length in (1_000, 3_000, 10_000) if kind in GRAMMARS]:
        said.append(refused(server, response_format={"type": "grammar", "grammar": grammar}))
    limits = ("more than 500 of its", "at most 524288 are taken", "overflowed its stack")
    assert all(any(limit in message for limit in limits) for message in said), said
    assert server.process.poll() is None and server.get("/health")["status"] == "ok"


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: /(a{1000}){1000}/", "more than 80 MiB"),
        ("start: T\nT: " + " & ".join(f"/(?s:.*)a{i}.*/" for i in range(200)), "more than 80 MiB"),
        ("start: " + " | ".join(f'"a{i}"' for i in range(45_000)), "more than"),
        ("start: " + " ".join(f'"a{i}"' for i in range(50_000)), "too big"),
        ("start: " + "(" * 5_000 + '"a"' + ")" * 5_000, "too deeply nested"),
    ],
    ids=["a long word", "intersections", "choices", "symbols", "brackets"],
)
def test_what_swallows_time_or_memory_is_refused(server: Server, grammar: str, said: str) -> None:
    before = psutil.Process(server.process.pid).memory_info().rss
    # On a busy machine compiling takes more processor time, so that its limit may be met first.
    message = refused(server, response_format={"type": "grammar", "grammar": grammar})
    assert said in message or "s of processor time" in message
    assert psutil.Process(server.process.pid).memory_info().rss - before < GROWTH_BYTES


def test_levels_have_a_limit(server: Server) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(55):
        schema = {"anyOf": [schema, {"type": "integer"}]}
    assert "more than 100 levels" in refused(server, response_format=schema_format(schema))


def large_object(index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        f"field_{index}_{number}": {"type": kind, "description": "what people write about a field, in a few words"}
        for number, kind in enumerate(["string", "integer", "number", "boolean", "string"])
    }
    fields["next"] = {"anyOf": [{"$ref": f"#/$defs/Kind{(index * 7 + 1) % 200}"}, {"type": "null"}]}
    fields["others"] = {"type": "array", "items": {"$ref": f"#/$defs/Kind{(index + 1) % 200}"}}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def test_large_ones_of_honest_people_are_taken(server: Server) -> None:
    definitions = {f"Kind{index}": large_object(index) for index in range(200)}
    schema = {**large_object(0), "$defs": definitions}
    answer = server.post(CHAT, body(response_format=schema_format(schema), max_tokens=8))
    assert answer["choices"][0]["message"]["content"].startswith("{")
    tools = [
        tool({**large_object(i), "$defs": {f"Kind{j}": {"type": "string"} for j in range(200)}}, f"f{i}")
        for i in range(64)
    ]
    server.post(CHAT, body(tools=tools, tool_choice="required", max_tokens=8))


@pytest.mark.parametrize(("task", "said"), [("power", "took more than 3 s of processor time"), ("long", "256 MiB")])
def test_a_template_that_hangs_or_grows_is_refused(server: Server, task: str, said: str) -> None:
    assert f"the chat template {said}" in refused(server, text=task).replace("needed more than ", "")
    assert server.post(CHAT, body("slow"))["choices"], "a slow template within the limits was not waited for"


def test_signals_reach_a_server_whose_template_hangs_and_it_leaves_no_process(server: Server) -> None:
    """This must be the last test of this server, because it ends it."""
    server.post(CHAT, body(response_format={"type": "json_object"}))
    assert len(helpers(server)) == 3, "expected one process for templates, one that tries constraints, one for masks"
    left = helpers(server)
    with server.open_stream(CHAT, body("power", stream=True)):
        assert server.stop(signal.SIGTERM, seconds=60) == 0
    gone, alive = psutil.wait_procs(left, timeout=30)
    assert not alive and len(gone) == 3
