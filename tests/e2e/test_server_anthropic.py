"""Anthropic's own client on the real server: messages, streams, tools, formats, counting and errors."""

# mypy: disable-error-code="arg-type, call-overload, list-item, union-attr, unused-ignore"

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.serving import MODEL, PERSON, WEATHER_ARGUMENTS, Server, serve

pytestmark = pytest.mark.e2e

KEY = "open-sesame"
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
COUNT = [{"role": "user", "content": "Count from one to ten in words, separated by commas."}]
WEATHER = {"name": "get_weather", "description": "The weather in a city", "input_schema": WEATHER_ARGUMENTS}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return server.anthropic(api_key=KEY)


def mode(name: str) -> dict[str, Any]:
    return {"speculative": {"mode": name}}


def raw_events(server: Server, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The name and the data of every event as the server sent it."""
    status, _, answer = server.ask("/v1/messages", {"model": MODEL, **body}, headers={"x-api-key": KEY})
    assert status == 200, answer
    blocks = [block.split("\n") for block in answer.decode().split("\n\n") if block and not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def test_a_message_with_its_numbers(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=24, messages=COUNT, system="You are brief.")
    assert message.role == "assistant" and message.model == MODEL and message.id.startswith("msg_")
    assert [block.type for block in message.content] == ["text"] and message.content[0].text
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 24
    timings = message.timings  # type: ignore[attr-defined]
    assert timings["predicted_n"] == 24 and timings["mode"] == "auto" and timings["draft"]
    counted = client.messages.count_tokens(model=MODEL, messages=COUNT, system="You are brief.")
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    blocks = [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}]
    again = client.messages.create(model=MODEL, max_tokens=24, messages=COUNT, system=blocks)
    assert again.content == message.content


def test_a_stream_is_the_same_message_in_the_documented_order(server: Server, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=20, messages=COUNT)
    with client.messages.stream(model=MODEL, max_tokens=20, messages=COUNT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    events = raw_events(server, {"max_tokens": 20, "messages": COUNT, "stream": True})
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2][1]["usage"]["output_tokens"] == 20 and events[-2][1]["timings"]["predicted_n"] == 20
    assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == text


def test_stop_sequences_and_a_begun_answer(client: anthropic.Anthropic) -> None:
    begun = [*COUNT, {"role": "assistant", "content": "One, two,"}]
    message = client.messages.create(model=MODEL, max_tokens=30, messages=begun, stop_sequences=["six", "Six"])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence in ("six", "Six")
    assert message.content[0].text.lower().startswith(" three")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools_give_the_same_calls_with_and_without_speculation(
    client: anthropic.Anthropic, choice: dict[str, str]
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 120,
        "messages": QUESTION,
        "tools": [WEATHER],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    answers = {name: client.messages.create(**asked, extra_body=mode(name)) for name in ("plain", "auto")}
    calls = {name: calls_of(answer) for name, answer in answers.items()}
    assert calls["plain"] == calls["auto"] and len(calls["auto"]) == 1
    name, arguments = calls["auto"][0]
    assert name == "get_weather" and set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert all(answer.stop_reason == "tool_use" for answer in answers.values())
    assert answers["auto"].timings["draft_n_accepted"] > 0  # type: ignore[attr-defined]
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream if event.type in ("input_json", "text")]
        final = stream.get_final_message()
    assert calls_of(final) == calls["auto"]
    assert set(kinds) == {"input_json"}, "the arguments were not streamed as they were written"


def test_a_conversation_goes_on_after_a_call(client: anthropic.Anthropic) -> None:
    first = client.messages.create(
        model=MODEL, max_tokens=120, messages=QUESTION, tools=[WEATHER], tool_choice={"type": "any"}
    )
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "18 degrees, sunny"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    turns: Any = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    after = client.messages.create(
        model=MODEL, max_tokens=30, messages=turns, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert after.stop_reason in ("end_turn", "max_tokens") and after.content[0].type == "text"
    counts = [
        client.messages.count_tokens(model=MODEL, messages=asked, tools=[WEATHER]).input_tokens
        for asked in (QUESTION, turns)
    ]
    assert results and counts[1] > counts[0] + 10


def test_a_schema_holds_with_and_without_speculation(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Describe a person as JSON."}],
        "output_config": {"format": {"type": "json_schema", "schema": PERSON}},
    }
    texts = [client.messages.create(**asked, extra_body=mode(name)).content[0].text for name in ("plain", "auto")]
    assert texts[0] == texts[1]
    person = json.loads(texts[0])
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120 and len(person["name"]) <= 20


def test_sampling_follows_its_seed(client: anthropic.Anthropic) -> None:
    def ask(seed: int, name: str) -> str:
        extra = {**mode(name), "seed": seed, "temperature": 1.0, "top_k": 40, "top_p": 0.95}
        return client.messages.create(model=MODEL, max_tokens=24, messages=COUNT, extra_body=extra).content[0].text

    assert ask(1, "plain") == ask(1, "auto") != ask(2, "auto")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"colour": "blue"}, "colour"),
        ({"container": "abc"}, "container"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool", "name": "none_such"}, "tools": [WEATHER]}, "none_such"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "'x'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"speculative": {"mode": "sideways"}}, "sideways"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    client: anthropic.Anthropic, change: dict[str, Any], named: str
) -> None:
    body: dict[str, Any] = {"max_tokens": 10, "messages": COUNT, **change}
    with pytest.raises(anthropic.BadRequestError) as refusal:
        client.messages.create(model=MODEL, max_tokens=10, messages=COUNT, extra_body=body)
    told: Any = refusal.value.body
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert named in told["error"]["message"]


def test_unknown_models_and_wrong_keys(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=10, messages=COUNT)
    assert "claude" in str(missing.value)
    for stream in (True, False):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            server.anthropic(api_key="wrong").messages.create(model=MODEL, max_tokens=10, messages=COUNT, stream=stream)
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"
