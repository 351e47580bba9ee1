"""Conversations become prompts: through templates that know tools, through those that do not, and never with a loss."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from slipstream.errors import RequestError
from slipstream.server.serving.jobs import Job, Tool, ToolChoice
from slipstream.server.serving.parsing import Splitter
from slipstream.server.serving.prompts import build_prompt, count_tokens, knows_tools, render_messages
from slipstream.text.tokenizer import Tokenizer
from tests.helpers_models import CHATML, smollm2_metadata

NATIVE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}:{{ c.function.arguments | tojson }}</tool_call>
{%- endfor %}{% endfor %}[assistant]
{%- if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% elif enable_thinking is defined %}<think>
{% endif %}"""
WEATHER = Tool("get_weather", "The weather", {"type": "object", "properties": {"city": {"type": "string"}}})
ASK = {"role": "user", "content": "Weather in Paris?"}
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "18 degrees"}


def job(*messages: dict[str, Any], **more: Any) -> Job:
    return Job("m", messages=messages, **more)


def chatml(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@cache
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata())


class TemplateOnly:
    """An LLM as far as prompts go: a real tokenizer with a template of our choice."""

    def __init__(self, template: str | None) -> None:
        self.tokenizer = smollm2_tokenizer()
        self.tokenizer.chat_template = template
        self.max_context = 8192

    def prompt_ids(self, text: str, limit: int | None = None) -> list[int]:
        return self.tokenizer.encode(text, limit=limit)


def test_developer_is_system_and_content_may_be_missing() -> None:
    text = render_messages(CHATML, job({"role": "developer", "content": "Be brief."}, ASK))
    assert text == chatml("system", "Be brief.") + chatml("user", ASK["content"]) + "<|im_start|>assistant\n"


def test_tools_are_told_in_the_system_message_where_the_template_cannot() -> None:
    assert not knows_tools(CHATML) and knows_tools(NATIVE)
    with_system = render_messages(CHATML, job({"role": "system", "content": "Be brief."}, ASK, tools=[WEATHER]))
    alone = render_messages(CHATML, job(ASK, tools=[WEATHER]))
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n") and with_system.count("<|im_start|>system") == 1
    for text in (with_system, alone):
        listed = text.split("<tools>\n")[1].split("\n</tools>")[0]
        assert json.loads(listed)["function"] == {
            "name": "get_weather",
            "description": "The weather",
            "parameters": WEATHER.parameters,
        }
        # the form that is asked for is the form that is understood
        example = "<tool_call>" + text.split("<tool_call>", 1)[1].split("</tool_call>")[0] + "</tool_call>"
        assert Splitter(tools=["the function's name"]).push(example)[0].begins == "the function's name"


def test_no_tools_are_told_where_none_may_be_called() -> None:
    for template in (CHATML, NATIVE):
        quiet = job(ASK, tools=[WEATHER], tool_choice=ToolChoice("none"))
        assert render_messages(template, quiet) == render_messages(template, job(ASK))


def test_calls_and_results_as_text_where_the_template_cannot_show_them() -> None:
    text = render_messages(CHATML, job(ASK, CALLED, RESULT, {**RESULT, "content": "sunny"}))
    assert (
        chatml("assistant", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>')
        in text
    )
    results = "<tool_response>\n18 degrees\n</tool_response>\n<tool_response>\nsunny\n</tool_response>"
    assert chatml("user", results) in text


def test_calls_and_results_reach_a_template_that_knows_them() -> None:
    text = render_messages(NATIVE, job(ASK, CALLED, RESULT, tools=[WEATHER]))
    assert text.startswith("<tools>{") and '<tool_call>get_weather:{"city": "Paris"}</tool_call>' in text
    assert "[assistant]<tool_call>" in text and "[tool]18 degrees" in text


def test_arguments_that_are_no_json_are_shown_as_they_were_written() -> None:
    broken = {**CALLED, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{oops"}}]}
    assert '"arguments": "{oops"' in render_messages(CHATML, job(ASK, broken))


def test_an_answer_that_is_begun_is_continued() -> None:
    begun = {"role": "assistant", "content": "It is"}
    text = render_messages(CHATML, job(ASK, begun, continues=True))
    assert text == chatml("user", ASK["content"]) + "<|im_start|>assistant\nIt is"
    assert render_messages(CHATML, job(ASK, begun)).endswith(chatml("assistant", "It is") + "<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("kwargs", "thinking", "opened"),
    [({}, True, False), ({"enable_thinking": True}, True, True), ({"enable_thinking": False}, False, False)],
)
def test_what_the_prompt_says_about_reasoning(kwargs: dict[str, object], thinking: bool, opened: bool) -> None:
    prompt = build_prompt(TemplateOnly(NATIVE), job(ASK, template_kwargs=kwargs))  # type: ignore[arg-type]
    assert (prompt.thinking, prompt.opened) == (thinking, opened)


def test_what_would_have_no_effect_is_refused() -> None:
    plain = TemplateOnly(CHATML)
    without = build_prompt(plain, job(ASK))  # type: ignore[arg-type]
    assert build_prompt(plain, job(ASK, template_kwargs={"enable_thinking": False})) == without  # type: ignore[arg-type]
    always = TemplateOnly("{{ messages[0].content }}<think>{# </think> #}")
    assert build_prompt(always, job(ASK, template_kwargs={"enable_thinking": True})).opened  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="enable_thinking"):
        build_prompt(always, job(ASK, template_kwargs={"enable_thinking": False}))  # type: ignore[arg-type]
    plain = TemplateOnly(CHATML)
    for more, named in (
        ({"template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        ({"template_kwargs": {"colour": 1}}, "colour"),
        ({"template_kwargs": {"messages": []}}, "messages"),
        ({"thinking_budget": 8}, "thinking budget"),
    ):
        with pytest.raises(RequestError, match=named):
            build_prompt(plain, job(ASK, **more))  # type: ignore[arg-type]


def test_raw_prompts_are_taken_as_they_are() -> None:
    llm = TemplateOnly(None)
    assert build_prompt(llm, Job("m", prompt=[1, 2, 3])).ids == [1, 2, 3]  # type: ignore[arg-type]
    assert build_prompt(llm, Job("m", prompt="Hello")).ids == llm.tokenizer.encode("Hello")  # type: ignore[arg-type]
    for wrong in (Job("m"), replace(job(ASK), prompt="x")):
        with pytest.raises(RequestError, match="either"):
            build_prompt(llm, wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no chat template"):
        build_prompt(llm, job(ASK))  # type: ignore[arg-type]


def test_a_prompt_may_fill_the_context_but_for_one_token_and_no_more() -> None:
    llm: Any = TemplateOnly(CHATML)
    fits, too_long = "word " * 8190, "word " * 8191
    assert len(build_prompt(llm, Job("m", prompt=fits)).ids) == 8191
    assert len(build_prompt(llm, Job("m", prompt=[5] * 8191)).ids) == 8191
    around = len(build_prompt(llm, job({"role": "user", "content": ""})).ids)
    said = {"role": "user", "content": "word " * (8190 - around)}
    assert len(build_prompt(llm, job(said)).ids) == 8191
    for prompt in (too_long, [5] * 8192, "7" * 4_000_000):
        with pytest.raises(RequestError, match="tokens, the context holds 8192"):
            build_prompt(llm, Job("m", prompt=prompt))
    with pytest.raises(RequestError, match="more than 8191 tokens, the context holds 8192"):
        build_prompt(llm, job({**said, "content": said["content"] + "word word"}))


def test_a_conversation_that_is_far_too_long_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[object] = []
    monkeypatch.setattr("slipstream.server.serving.prompts.render", lambda *a, **k: rendered.append(a) or "")
    llm: Any = TemplateOnly(CHATML)
    turns = [{"role": "user", "content": "7" * 100}] * 100
    with pytest.raises(RequestError, match="the context holds"):
        build_prompt(llm, job(*turns))
    assert not rendered
    # what a template may leave out does not count
    build_prompt(llm, job({"role": "user", "content": " " * 10**6}, {"role": "assistant", "content": "7" * 10**5}, ASK))
    assert rendered


def test_counting_has_no_limit_but_memory() -> None:
    llm: Any = TemplateOnly(CHATML)
    text = "some plain words " * 10_000
    around = count_tokens(llm, job({"role": "user", "content": ""}))
    assert count_tokens(llm, job({"role": "user", "content": text})) == around + len(llm.tokenizer.encode(text))
    with pytest.raises(RequestError, match="no word or line ends"):
        count_tokens(llm, job({"role": "user", "content": "x" * 300_000}))


def test_many_results_are_told_in_time_that_grows_with_their_size() -> None:
    seconds = []
    for count in (500, 8000):
        began = time.process_time()
        text = render_messages(CHATML, job(ASK, CALLED, *[{**RESULT, "content": "x" * 500}] * count))
        seconds.append(time.process_time() - began)
        assert text.count("<tool_response>") == count
    assert seconds[1] < 64 * seconds[0] + 0.05, "16 times as many"
