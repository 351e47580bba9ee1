"""OpenAI's own client on /v1/responses: text, streams, function calls, formats, log-probabilities and errors."""

# mypy: disable-error-code="unused-ignore"

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.e2e.serving import MODEL, PERSON, WEATHER_ARGUMENTS, Server

pytestmark = pytest.mark.e2e

COUNT = "Count from one to ten in words, separated by commas."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "strict": True,
    "parameters": WEATHER_ARGUMENTS,
}


@pytest.fixture(scope="module")
def server(default_server: Server) -> Server:
    return default_server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.openai()


def mode(name: str) -> dict[str, Any]:
    return {"speculative": {"mode": name}}


def test_a_response_with_its_numbers(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=COUNT, instructions="You are brief.", max_output_tokens=24)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens" and response.output[0].type == "message"
    assert response.output_text and response.usage is not None and response.usage.output_tokens == 24
    assert response.timings["predicted_n"] == 24 and response.store is False  # type: ignore[attr-defined]
    items: Any = [
        {"role": "developer", "content": "You are brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": COUNT}]},
    ]
    again = client.responses.create(model=MODEL, input=items, max_output_tokens=24)
    assert again.output_text == response.output_text
    assert again.usage is not None and again.usage.input_tokens == response.usage.input_tokens


def test_a_stream_in_the_documented_order(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=COUNT, max_output_tokens=20)
    events = list(client.responses.create(model=MODEL, input=COUNT, max_output_tokens=20, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    last: Any = events[-1]
    assert "".join(getattr(event, "delta", "") for event in events) == whole.output_text == last.response.output_text
    assert last.response.usage.output_tokens == 20 and last.response.timings["predicted_n"] == 20
    assert last.response.output[0].id == events[2].item.id  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_calls_are_the_same_with_and_without_speculation(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "What is the weather in Paris?",
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_output_tokens": 120,
        "parallel_tool_calls": False,
    }
    answers = {name: client.responses.create(**asked, extra_body=mode(name)) for name in ("plain", "auto")}
    calls = {name: [(item.name, item.arguments) for item in answer.output] for name, answer in answers.items()}
    assert calls["plain"] == calls["auto"] and len(calls["auto"]) == 1
    assert set(json.loads(calls["auto"][0][1])) == {"city", "unit"} and answers["auto"].status == "completed"
    assert answers["auto"].timings["draft_n_accepted"] > 0  # type: ignore[attr-defined]
    events: Any = list(client.responses.create(**asked, stream=True))
    names = [event.type for event in events]
    order = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert list(dict.fromkeys(names)) == [
        "response.created",
        "response.in_progress",
        *(f"response.{name}" for name in order),
        "response.completed",
    ]
    written = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert written == calls["auto"][0][1] == events[-1].response.output[0].arguments
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output[0].arguments == written  # type: ignore[union-attr]


def test_a_conversation_goes_on_after_a_call(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(
        model=MODEL,
        input=turns,
        tools=[WEATHER],
        tool_choice="required",
        max_output_tokens=120,
        parallel_tool_calls=False,
    )
    call: Any = first.output[0]
    turns = [*turns, *first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}]
    after = client.responses.create(model=MODEL, input=turns, tools=[WEATHER], tool_choice="none", max_output_tokens=30)
    assert after.output[0].type == "message" and after.output_text
    assert after.usage is not None and first.usage is not None


def test_a_schema_holds_with_and_without_speculation(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "Describe a person as JSON.",
        "max_output_tokens": 100,
        "text": {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}},
    }
    texts = [client.responses.create(**asked, extra_body=mode(name)).output_text for name in ("plain", "auto")]
    assert texts[0] == texts[1] and set(json.loads(texts[0])) == {"name", "age"}


def test_log_probabilities_are_those_of_plain_decoding(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": COUNT,
        "max_output_tokens": 16,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    parts: list[Any] = [
        client.responses.create(**asked, extra_body=mode(name)).output[0].content[0] for name in ("plain", "auto")
    ]
    told = [[(entry.token, round(entry.logprob, 3)) for entry in part.logprobs] for part in parts]
    assert told[0] == told[1] and "".join(token for token, _ in told[0]) == parts[0].text
    assert all(len(entry.top_logprobs) == 2 for entry in parts[1].logprobs)
    streamed = [
        (entry.token, round(entry.logprob, 3))
        for event in client.responses.create(**asked, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == told[0]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"background": True}, "background"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"colour": "blue"}, "colour"),
        ({"speculative": {"mode": "chain", "budget": 8}}, "speculative.budget"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(model=MODEL, input=COUNT, max_output_tokens=5, extra_body=change)
    assert refusal.value.param == param


def test_errors_of_a_stream_come_as_a_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt", input="x", stream=True)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(model=MODEL, input="word " * 20000, stream=True)
    assert "context" in refusal.value.message
