"""A model whose template makes it think, in every API: reasoning apart from the answer, limited, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serving import Server, serve
from tests.tiny import write_pair

pytestmark = pytest.mark.e2e

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
)
BUDGET = 7  # this pair writes one letter per token, also in the closing tag
ASK: Any = [{"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinker")
    target, draft = write_pair(folder)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    with serve("--draft", str(draft), "--max-context", "512", model=str(target)) as running:
        yield running


def test_chat(server: Server) -> None:
    body: dict[str, Any] = {"model": "target", "messages": ASK, "max_tokens": 40, "thinking_budget": BUDGET}
    answers = [server.post("/v1/chat/completions", {**body, "speculative": {"mode": m}}) for m in ("plain", "chain")]
    messages = [answer["choices"][0]["message"] for answer in answers]
    assert messages[0] == messages[1] and messages[0]["reasoning_content"] and "think" not in messages[0]["content"]
    used = answers[0]["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert used == BUDGET + len("</think>")
    events = server.events("/v1/chat/completions", {**body, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == messages[0][name]
    silent = server.post(
        "/v1/chat/completions",
        {"model": "target", "messages": ASK, "max_tokens": 20, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert "reasoning_content" not in silent["choices"][0]["message"] and silent["choices"][0]["message"]["content"]


def test_messages(server: Server) -> None:
    client = server.anthropic()
    asked: dict[str, Any] = {
        "model": "target",
        "max_tokens": 40,
        "messages": ASK,
        "thinking": {"type": "enabled", "budget_tokens": BUDGET},
    }
    message = client.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == BUDGET + len("</think>")
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream if event.type in ("thinking", "text")]
        final = stream.get_final_message()
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"thinking", "text"}
    blocks = [[block.model_dump(exclude={"parsed_output"}) for block in m.content] for m in (final, message)]
    assert blocks[0] == blocks[1]
    turns = [*ASK, {"role": "assistant", "content": message.content}, *ASK]
    assert client.messages.create(**{**asked, "messages": turns}).content


def test_responses(server: Server) -> None:
    client = server.openai()
    body: dict[str, Any] = {"thinking_budget": BUDGET}
    whole = client.responses.create(model="target", input="Why?", max_output_tokens=40, extra_body=body)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    events: Any = list(
        client.responses.create(model="target", input="Why?", max_output_tokens=40, extra_body=body, stream=True)
    )
    thought: Any = whole.output[0]
    streamed = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert streamed == thought.content[0].text == events[-1].response.output[0].content[0].text
    assert events[-1].response.output_text == whole.output_text
    turns: Any = [*ASK, *whole.output, *ASK]
    assert client.responses.create(model="target", input=turns, max_output_tokens=5).output


def test_a_format_begins_after_the_reasoning(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answers = [
        server.post(
            "/v1/chat/completions",
            {
                "model": "target",
                "messages": ASK,
                "max_tokens": 100,
                "thinking_budget": BUDGET,
                "speculative": {"mode": name},
                "response_format": {"type": "json_schema", "json_schema": {"name": "pick", "schema": schema}},
            },
        )["choices"][0]["message"]
        for name in ("plain", "chain")
    ]
    assert answers[0] == answers[1] and answers[0]["reasoning_content"]
    assert json.loads(answers[0]["content"])["a"] in (1, 2)
