"""What a body may hold: counted before it is parsed, parsed once, and refused at its first fault."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError

from slipstream.server.apis.anthropic_schemas import MessagesRequest, PromptRequest
from slipstream.server.apis.draft_lora_api import AddRequest
from slipstream.server.apis.openai_schemas import ChatRequest, CompletionRequest
from slipstream.server.apis.responses_schemas import ResponsesRequest
from slipstream.server.apis.text_api import DetokenizeRequest, TokenizeRequest
from slipstream.server.app import APIS, create_app
from slipstream.server.operations.bodies import (
    MAX_JSON_STRUCTURE,
    MAX_JSON_VALUES,
    ParsedRoute,
    check_json,
    outside_of_strings,
)
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.server_state import ServerSettings, ServerState
from slipstream.server.serving.router import ModelRouter

MODELS: list[type[BaseModel]] = [
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    PromptRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AddRequest,
]


def counted(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        check_json(body)
    assert caught.value.status == 400
    return caught.value.message


def test_what_a_body_holds_is_bounded() -> None:
    def values(count: int) -> bytes:
        return b"[" + b",".join([b"0"] * count) + b"]"

    def objects(count: int) -> bytes:
        return b"[" + b",".join([b"{}"] * count) + b"]"

    def keys(count: int) -> bytes:
        return json.dumps({f"{index}\\": "{[:," for index in range(count)}).encode()

    assert len(check_json(values(MAX_JSON_VALUES + 1))) == MAX_JSON_VALUES + 1  # one comma less
    assert f"more than {MAX_JSON_VALUES} values" in counted(values(MAX_JSON_VALUES + 2))
    assert len(check_json(objects(MAX_JSON_STRUCTURE - 1))) == MAX_JSON_STRUCTURE - 1  # the list itself counts
    assert f"more than {MAX_JSON_STRUCTURE} objects, lists and keys" in counted(objects(MAX_JSON_STRUCTURE))
    assert len(check_json(keys(MAX_JSON_STRUCTURE - 1))) == MAX_JSON_STRUCTURE - 1
    assert "keys" in counted(keys(MAX_JSON_STRUCTURE))


def test_a_long_program_is_not_many_values() -> None:
    program = 'if (a[0] == "\\\\") { call({"x": [1, 2, 3]}, \'"\', "\\""); }\n' * 50_000
    assert program.count(",") + program.count("{") > MAX_JSON_STRUCTURE
    assert check_json(json.dumps({"content": program}).encode()) == {"content": program}


def test_marks_are_counted_outside_of_strings_wherever_the_pieces_end() -> None:
    chance = random.Random(3)
    for _ in range(12):
        strings = ["".join(chance.choices('ab"\\{[,:', k=chance.randrange(40))) for _ in range(9_000)]
        body = json.dumps(strings).encode()
        outside = b"".join(outside_of_strings(body))
        assert outside.replace(b" ", b"") == b"[" + b"," * 8_999 + b"]"


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (r"\ud83d\ude00", True),
        (r"\\ud83d", True),
        (r"\ud83d", False),
        (r"\ude00", False),
        (r"\ud83d\\\ude00", False),
        (r"\ud83d\ud83d\ude00", False),
        (r"\ud83d\ude00\ude00", False),
        (r"\\\ud83d", False),
        (r"\\\\ud83d", True),
        (r"\uD83D\uDE00", True),
        (r"\u00e9\ud83dx", False),
    ],
)
def test_half_characters_are_found(text: str, whole: bool) -> None:
    body = f'{{"a": "{text}"}}'.encode()
    if whole:
        assert check_json(body) == json.loads(body)
        check_json(body)["a"].encode()
    else:
        assert "surrogate" in counted(body)


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """Every list in a schema of pydantic's core."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for part in schema.values():
            yield from lists(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from lists(part)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_list_is_left_at_its_first_fault(model: type[BaseModel]) -> None:
    found = list(lists(model.__pydantic_core_schema__))
    assert found or model in (TokenizeRequest, AddRequest)
    assert all(schema.get("fail_fast") for schema in found)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_thousands_of_unknown_fields_are_a_few_errors(model: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({f"unknown{index}": None for index in range(50_000)})
    unknown = [error for error in caught.value.errors() if error["type"] == "extra_forbidden"]
    assert 1 <= len(unknown) <= 64
    with pytest.raises(ValidationError) as caught:
        # fields that may be null are dropped, and must not hide the one that is refused
        model.model_validate({**dict.fromkeys(("functions", "audio", "container", "prompt_cache_retention")), "x": 1})
    assert ("x",) in [error["loc"] for error in caught.value.errors()]


@pytest.mark.parametrize("field", ["metadata", "logit_bias"])
def test_objects_are_bounded_before_their_entries_are_checked(field: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], field: {f"x{i}": [] for i in range(50_000)}}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    assert [error["type"] for error in caught.value.errors()] == ["too_long"]


def application() -> TestClient:
    state = ServerState(ServerSettings(), ModelRouter([]), Metrics(), phase="ready")
    return TestClient(create_app(state), base_url="http://localhost")


def test_a_body_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    loads = json.loads

    def counting(text: Any, **options: Any) -> Any:
        parsed.append(len(text))
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", counting)
    body = json.dumps({"model": "none", "messages": [{"role": "user", "content": "x" * 100_000}]})
    answer = application().post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 404 and parsed[0] == len(body)
    assert [size for size in parsed if size > 1000] == [len(body)]


def test_every_api_takes_parsed_bodies() -> None:
    state = ServerState(ServerSettings(), ModelRouter([]), Metrics(), phase="ready")
    found: list[Any] = [route for api in APIS for route in api(state).routes]
    shown = {route.path.replace(":path}", "}") for route in found if route.include_in_schema}
    assert shown == set(create_app(state).openapi()["paths"])
    assert all(isinstance(route, ParsedRoute) for route in found if route.include_in_schema)


def test_the_longest_complaint_is_about_what_was_meant() -> None:
    part = {"type": "text", "text": "a"}
    messages = [{"role": "user", "content": [part] * 10_001}]
    answer = application().post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert answer.status_code == 400 and "at most 10000 items" in answer.json()["error"]["message"]
