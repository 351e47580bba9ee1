"""Chat templates render as transformers renders them, and fail in one sentence."""

# mypy: disable-error-code="str-unpack, unused-ignore"

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.errors import ConfigError, RequestError
from slipstream.text.chat_template import render
from slipstream.text.tokenizer import Tokenizer
from tests.helpers_models import smollm2_metadata

# This template has the features of published Qwen3 ones: namespaces, reversed loops, tools, string methods, thinking.
QWEN3_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" and message.content is string %}
        {%- set ns.seen = true %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' }}{% generation %}{{ content }}{% endgeneration %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson(indent=2) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role == "note" %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
USER = {"role": "user", "content": 'What is <b>2 & 2</b>? "é" 日本'}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief.\n"}, USER],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour"}, {"role": "user", "content": "Sure?"}],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2, "ü": "<&>"}}]},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "four"},
        {"role": "note", "content": "ignored"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <numbers> & 'such' é"}}]


def oracle(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=template, **kwargs)
    return str(rendered[0])


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_equals_transformers(messages: list[dict[str, Any]], prompt: bool) -> None:
    template = Tokenizer.from_gguf(smollm2_metadata()).chat_template
    assert template
    assert render(template, messages, add_generation_prompt=prompt) == oracle(
        template, messages, add_generation_prompt=prompt
    )


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}])
def test_a_qwen3_template_equals_transformers(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, extra: dict[str, Any]
) -> None:
    ours = render(QWEN3_LIKE, messages, tools=tools, **extra)
    assert ours == oracle(QWEN3_LIKE, messages, tools=tools, add_generation_prompt=True, **extra)
    assert ours.endswith("<think>\n\n</think>\n\n" if extra else "<|im_start|>assistant\n")


def test_special_tokens_and_dates_reach_the_template() -> None:
    template = "{{ bos_token }}{{ strftime_now('%Y')|length }}{{ messages|length }}{{ eos_token }}"
    assert render(template, [USER], bos_token="<s>", eos_token="</s>") == "<s>41</s>"


def test_a_model_without_a_template_is_explained() -> None:
    with pytest.raises(RequestError, match="no chat template .*raw prompt"):
        render(None, [USER])


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{% if %}", ConfigError, "syntax error in line 1"),
        ("{{ raise_exception('roles must alternate') }}", RequestError, "roles must alternate"),
        ("{{ messages[7].content.strip() }}", RequestError, "refuses these messages"),
        ("{{ 1 / 0 }}", RequestError, "division by zero"),
        ("{{ ''.__class__.__mro__ }}", RequestError, "unsafe"),
        ("{{ messages.append(1) }}", RequestError, "unsafe"),
        ("{{ messages.clear() }}", RequestError, "unsafe"),
    ],
)
def test_template_errors_are_one_sentence(template: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        render(template, [USER])
    assert "\n" not in str(caught.value)
