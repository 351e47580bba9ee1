"""The official OpenAI client on a real server: chat, streams, tools, formats, log-probabilities, refusals."""

# mypy: disable-error-code="arg-type, index, unused-ignore, var-annotated"

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.serving import MODEL, Server, serve

pytestmark = pytest.mark.e2e

ASK = [{"role": "user", "content": "Name three colours and say why you like each."}]
PLAIN = {"speculative": {"mode": "plain"}}
CHAIN = {"speculative": {"mode": "chain"}}
TREE = {"speculative": {"mode": "tree", "budget": 16}}
ENDLESS = {"ignore_eos": True}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--max-sequences", "2", "--max-queue", "6") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.openai(timeout=120)


def chat(client: OpenAI, extra: dict[str, Any] | None = None, **settings: Any) -> Any:
    settings = {"model": MODEL, "messages": ASK, "max_tokens": 24, **settings}
    return client.chat.completions.create(**settings, extra_body=extra)


def gathered(chunks: Any) -> tuple[str, list[Any], list[Any]]:
    """The content, the log-probabilities and all chunks of a stream."""
    text, logprobs, seen = "", [], []
    for chunk in chunks:
        seen.append(chunk)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            logprobs += choice.logprobs.content if choice.logprobs else []
    return text, logprobs, seen


def test_a_chat_has_text_usage_and_timings(client: OpenAI) -> None:
    answer = chat(client, CHAIN)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert choice.message.role == "assistant" and len(choice.message.content) > 20
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    timings = answer.timings
    assert timings["predicted_n"] == 24 and timings["mode"] == "chain" and timings["draft"]
    details = answer.usage.completion_tokens_details
    assert timings["draft_n"] > 0
    assert details.accepted_prediction_tokens == timings["draft_n_accepted"]
    assert details.rejected_prediction_tokens == timings["draft_n"] - timings["draft_n_accepted"]
    assert timings["prompt_n"] + timings["cached_n"] == answer.usage.prompt_tokens


def test_every_mode_writes_the_same_text(client: OpenAI) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}):
        plain = chat(client, PLAIN, **sampling)
        assert plain.timings["draft_n"] == 0 and plain.timings["draft"] is None
        for extra in (CHAIN, TREE, {"speculative": {"mode": "auto"}}):
            answer = chat(client, extra, **sampling)
            assert answer.choices[0].message.content == plain.choices[0].message.content, extra


def test_a_stream_says_what_a_whole_answer_says(client: OpenAI) -> None:
    whole = chat(client, CHAIN)
    text, _, chunks = gathered(chat(client, CHAIN, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert last.timings["predicted_n"] == 24 and last.timings["draft_n"] > 0
    # A step that keeps several drafted tokens sends one chunk.
    assert len(chunks) < 24 + 3 or last.timings["tau"] == 1.0


def test_without_usage_asked_for_the_last_chunk_has_the_timings(server: Server) -> None:
    lines = server.stream_lines(
        "/v1/chat/completions", {"model": MODEL, "messages": ASK, "max_tokens": 4, "stream": True}
    )
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["timings"]["predicted_n"] == 4
    assert not any("timings" in chunk for chunk in chunks[:-1])
    assert not any("usage" in chunk or "slipstream" in chunk for chunk in chunks)


def test_logprobs_are_those_of_plain_decoding_however_they_come(client: OpenAI) -> None:
    wanted = {"logprobs": True, "top_logprobs": 3, "temperature": 0.7, "seed": 3}
    plain = chat(client, PLAIN, **wanted).choices[0]
    expected = plain.logprobs.content
    assert len(expected) == 24 and all(len(token.top_logprobs) == 3 for token in expected)
    assert bytes(byte for token in expected for byte in token.bytes).decode() == plain.message.content
    for extra in (CHAIN, TREE):
        whole = chat(client, extra, **wanted).choices[0].logprobs.content
        assert whole == expected, extra
        _, streamed, _ = gathered(chat(client, extra, **wanted, stream=True))
        assert streamed == expected, extra
    # Greedy text has the likeliest token at every position.
    greedy = chat(client, CHAIN, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert all(token.token == token.top_logprobs[0].token for token in greedy)


def test_completions_in_every_shape(client: OpenAI) -> None:
    def complete(prompt: Any, **settings: Any) -> Any:
        return client.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 8, **settings})

    text = "The capital of France is"
    one = complete(text)
    assert one.object == "text_completion" and "Paris" in one.choices[0].text
    ids = client.post("/../tokenize", body={"content": text}, cast_to=object)["tokens"]
    assert complete(ids).choices[0].text == one.choices[0].text
    both = complete([text, "Two plus two is"], n=2, temperature=0.9, seed=1)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage.prompt_tokens == one.usage.prompt_tokens + complete("Two plus two is").usage.prompt_tokens
    assert complete(text, echo=True).choices[0].text == text + one.choices[0].text
    streamed = list(complete(text, stream=True, logprobs=2))
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == one.choices[0].text
    whole = complete(text, logprobs=2).choices[0].logprobs
    assert "".join(whole.tokens) == one.choices[0].text
    assert [one.choices[0].text[offset] for offset in whole.text_offset] == [token[0] for token in whole.tokens]
    assert all(len(top) == 2 for top in whole.top_logprobs)
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices and chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole, name), name


def test_choices_have_seeds_of_their_own_that_follow_from_the_seed(client: OpenAI) -> None:
    sampling = {"temperature": 1.0, "seed": 11}
    three = [choice.message.content for choice in chat(client, n=3, **sampling).choices]
    assert three[0] == chat(client, **sampling).choices[0].message.content
    assert len(set(three)) == 3
    streamed = ["", "", ""]
    for chunk in chat(client, n=3, **sampling, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == three


def test_stop_ends_before_its_text(client: OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    stop = whole.split()[5]
    for given in (stop, ["never written", stop]):
        choice = chat(client, CHAIN, stop=given).choices[0]
        assert choice.message.content == whole[: whole.index(stop)]
        assert choice.finish_reason == "stop"


def test_a_bias_can_forbid_and_force_tokens(client: OpenAI) -> None:
    first = chat(client, logprobs=True, max_tokens=1).choices[0].logprobs.content[0].token
    ids = client.post("/../tokenize", body={"content": first}, cast_to=object)["tokens"]
    banned = chat(client, CHAIN, logit_bias={str(ids[0]): -100}).choices[0].message.content
    assert not banned.startswith(first)
    assert banned == chat(client, PLAIN, logit_bias={str(ids[0]): -100}).choices[0].message.content
    forced = chat(client, CHAIN, logit_bias={str(ids[0]): 100}, max_tokens=3).choices[0].message.content
    assert forced == first * 3


def test_a_schema_holds_in_every_mode(client: OpenAI) -> None:
    wanted = {
        "messages": [{"role": "user", "content": "Describe a person named Ada."}],
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    }
    plain = chat(client, PLAIN, **wanted).choices[0]
    person = json.loads(plain.message.content)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int) and 0 <= person["age"] <= 120
    assert plain.finish_reason == "stop"
    assert chat(client, **wanted).choices[0].message.content == plain.message.content
    text, _, _ = gathered(chat(client, CHAIN, **wanted, stream=True))
    assert text == plain.message.content
    with pytest.raises(openai.BadRequestError):
        chat(
            client,
            **{
                **wanted,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "no such type"}},
                },
            },
        )


def test_tools_are_called_alike_whole_and_streamed(client: OpenAI) -> None:
    wanted: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 80,
    }
    plain = chat(client, PLAIN, **wanted).choices[0]
    assert plain.finish_reason == "tool_calls"
    call = plain.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
    auto = chat(client, **wanted).choices[0].message.tool_calls
    assert [one.function for one in auto] == [call.function]
    name, written, calls = "", "", set()
    for chunk in chat(client, CHAIN, **wanted, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            calls.add(part.id)
            name += part.function.name or ""
            written += part.function.arguments or ""
    assert (name, written) == ("get_weather", call.function.arguments)
    assert len(calls - {None}) == 1
    # The conversation goes on with the result of the call.
    after = [
        *wanted["messages"],
        plain.message,
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"},
    ]
    assert chat(client, messages=after, tools=[WEATHER]).usage.prompt_tokens > 50
    named = chat(client, **{**wanted, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}})
    assert named.choices[0].message.tool_calls[0].function.name == "get_weather"
    free = chat(client, **{**wanted, "tool_choice": "none", "max_tokens": 8})
    assert free.choices[0].message.tool_calls is None


def test_roles_and_parts_mean_the_same(client: OpenAI) -> None:
    system = [{"role": "system", "content": "Answer like a pirate."}, *ASK]
    developer = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Answer like "}, {"type": "text", "text": "a pirate."}],
        },
        *ASK,
    ]
    answers = [chat(client, messages=messages) for messages in (system, developer)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].choices[0].message.content != chat(client).choices[0].message.content


def test_draft_info_marks_the_text_it_comes_with(server: Server) -> None:
    def ask(mode: str) -> tuple[list[Any], list[bool]]:
        chunks = server.events(
            "/v1/chat/completions",
            {
                "model": MODEL,
                "messages": ASK,
                "max_tokens": 32,
                "stream": True,
                "include_draft_info": True,
                "speculative": {"mode": mode},
            },
        )
        marked = [chunk for chunk in chunks if "slipstream" in chunk]
        for chunk in marked:
            text = "".join(token["text"] for token in chunk["slipstream"]["tokens"])
            assert text == chunk["choices"][0]["delta"]["content"]
        return chunks, [token["drafted"] for chunk in marked for token in chunk["slipstream"]["tokens"]]

    chunks, drafted = ask("chain")
    assert sum(drafted) == chunks[-1]["timings"]["draft_n_accepted"] > 0
    steps = [chunk["slipstream"]["step"] for chunk in chunks if chunk.get("slipstream", {}).get("step")]
    assert sum(step["accepted"] for step in steps) >= sum(drafted)
    assert all(step["drafted"] > 0 and step["choice"].startswith("chain") for step in steps)
    assert not any(ask("plain")[1])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"one": 1}}, "logit_bias.one"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"store": True}, "store"),
        ({"best_of": 2}, "best_of"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"made_up": 1}, "made_up"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"speculative": {"mode": "warp"}}, "speculative.mode"),
        ({"speculative": {"mode": "auto", "width": 4}}, "speculative.width"),
        ({"speculative": {"mode": "chain", "budget": 4}}, "speculative.budget"),
        ({"speculative": {"mode": "chain", "depth": 4}}, "speculative.depth"),
        ({"timeout": 0}, "timeout"),
        ({"include_draft_info": True}, "include_draft_info"),
        ({"stream": "yes"}, "stream"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_taken_is_refused_by_name(client: OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, extra_body={"max_tokens": 4, **changes})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param.split(".")[0].split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": ASK}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_completions_refuse_by_name_too(client: OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", extra_body={"max_tokens": 4, **changes})
    assert caught.value.param == param


def test_errors_have_the_classes_clients_know(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-5")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as too_long:
        chat(client, messages=[{"role": "user", "content": "word " * 9000}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[10**8], max_tokens=2)
    answer = chat(client, model="any", max_tokens=2)
    assert answer.model == MODEL


def test_a_request_ends_at_its_deadline(server: Server, client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        chat(client, {"timeout": 0.4, **ENDLESS}, max_tokens=4000)
    assert caught.value.status_code == 504
    lines = server.stream_lines(
        "/v1/chat/completions",
        {"model": MODEL, "messages": ASK, "max_tokens": 4000, "stream": True, "timeout": 1.0, **ENDLESS},
    )
    last = json.loads(lines[-1])
    assert "time is up" in last["error"]["message"] and len(lines) > 1
    server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: Server, stream: bool) -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 4000, "stream": stream, **ENDLESS}
    raw = server.open_stream("/v1/chat/completions", body)
    if stream:
        assert b"200 OK" in raw.recv(200)
    deadline = time.monotonic() + 20
    while not server.busy() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.busy()
    raw.close()
    server.wait_idle(5)


def test_a_full_queue_is_a_rate_limit(server: Server, client: OpenAI) -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 4000, "stream": True, **ENDLESS}
    readers: list[Any] = []
    caught: openai.RateLimitError | None = None
    try:
        # Two run and six may wait; a request that has had a turn makes room for one more, so there may be a few more.
        while caught is None and len(readers) < 60:
            readers.append(server.open_stream("/v1/chat/completions", body))
            if b" 429 " not in readers[-1].recv(200):
                continue
            try:
                chat(client, max_tokens=2)
            except openai.RateLimitError as error:
                caught = error
        assert caught is not None and len(readers) > 6
        assert int(caught.response.headers["retry-after"]) >= 1
        assert caught.code == "queue_full"
    finally:
        for raw in readers:
            raw.close()
    server.wait_idle()
    assert chat(client, max_tokens=2).usage.completion_tokens == 2
