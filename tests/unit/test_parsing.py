"""Text is split into reasoning, content and tool calls the same way however it is cut, and nothing is lost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.server.serving.parsing import Piece, Splitter

TOOLS = ("get_weather", "add")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@dataclass
class Parts:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)


def gather(pieces: list[Piece]) -> Parts:
    parts = Parts()
    for piece in pieces:
        if piece.begins is not None:
            assert piece.call == len(parts.calls)
            parts.calls.append([piece.begins, ""])
        if piece.kind == "content":
            parts.content += piece.text
        elif piece.kind == "reasoning":
            parts.reasoning += piece.text
        elif piece.kind == "tool_call":
            parts.calls[piece.call][1] += piece.text
        else:
            assert piece.text == ""
    return parts


def split(texts: list[str], *, thinking: bool = False, opened: bool = False, tools: tuple[str, ...] = TOOLS) -> Parts:
    splitter = Splitter(thinking=thinking, opened=opened, tools=tools)
    pieces = [piece for text in texts for piece in splitter.push(text)] + splitter.finish()
    check_cover("".join(texts), pieces)
    return gather(pieces)


def check_cover(text: str, pieces: list[Piece]) -> None:
    """The pieces cover the text in order, and what is not shown of it is tags, space and the frame of calls."""
    start = 0
    for piece in pieces:
        raw, start = text[start : piece.end], piece.end
        if piece.begins is not None:
            assert raw.strip().startswith("<tool_call>")
        elif piece.text != raw:
            assert piece.text == "" and piece.kind in ("reasoning", "markup")
            assert re.fullmatch(r"\s*(<think>|</think>|\}?\s*</tool_call>|\}|)\s*", raw), raw
    assert start == len(text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello there. ", "Hello there. ", []),
        (CALL, "", [["get_weather", '{"city": "Paris"}']]),
        (f"Let me look.\n\n{CALL}\n", "Let me look.", [["get_weather", '{"city": "Paris"}']]),
        (
            f"{CALL}\n{CALL.replace('get_weather', 'add')} so",
            "so",
            [["get_weather", '{"city": "Paris"}'], ["add", '{"city": "Paris"}']],
        ),
        (
            '<tool_call>{"name":"add","arguments":{"a":[1,{"b":"}]"}],"c":"\\"}"}}</tool_call>',
            "",
            [["add", '{"a":[1,{"b":"}]"}],"c":"\\"}"}']],
        ),
        # the closing tag inside a string is part of the string
        (
            '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [["add", '{"a": "</tool_call>"}']],
        ),
        # other orders of the keys, no arguments, arguments as a string, a call that was not closed
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [["add", '{"a": 1}']]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [["add", "{}"]]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["add", '{"a": 1}']]),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}', "", [["add", '{"a": 1}']]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [["add", '{"a": 1}']]),
        # cut off in the middle of its arguments
        ('<tool_call>{"name": "add", "arguments": {"a": "on', "", [["add", '{"a": "on']]),
        # no calls at all: they stay what they are
        ("<tool_call>add 1 and 2</tool_call> ok", "<tool_call>add 1 and 2</tool_call> ok", []),
        (
            'a\n<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            'a\n<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            [],
        ),
        ("one <tool_cal two", "one <tool_cal two", []),
        ("<tool_call>", "<tool_call>", []),
        (f"<tool_call>oops {CALL}", "<tool_call>oops", [["get_weather", '{"city": "Paris"}']]),
        # brackets that do not match end with the tag
        ('<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call>x', "x", [["add", '{"a": [1}}']]),
        # what was not asked for after the arguments is not lost
        ('<tool_call>{"name": "add", "arguments": {}, "id": 7}</tool_call>', ', "id": 7}</tool_call>', [["add", "{}"]]),
    ],
)
def test_tool_calls(text: str, content: str, calls: list[list[str]]) -> None:
    for pieces in ([text], list(text)):
        found = split(pieces)
        assert (found.content, found.calls) == (content, calls)


def test_without_tools_every_text_is_content() -> None:
    text = f"  <think>a</think>\n{CALL}  "
    assert split(list(text), tools=()) == Parts(content=text)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm, so\n</think>\n\nFour", False, "hm, so", "Four"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("hm\n</think>\n\nFour ", True, "hm", "Four "),
        ("never ends\n", True, "never ends", ""),
        ("<think></think>x", False, "", "x"),
        (" plain <think>no</think>", False, "", " plain <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("a </thinker></think> b", True, "a </thinker>", "b"),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        found = split(pieces, thinking=True, opened=opened)
        assert (found.reasoning, found.content) == (reasoning, content)


def test_a_call_in_the_reasoning_is_reasoning() -> None:
    found = split(list(f"<think>{CALL}</think>{CALL}"), thinking=True)
    assert found.reasoning == CALL and len(found.calls) == 1


def test_arguments_stream_as_they_arrive() -> None:
    splitter = Splitter(tools=TOOLS)
    begun = gather(splitter.push('ok <tool_call>{"name": "add", "arguments": {"a": '))
    assert begun.content == "ok" and begun.calls == [["add", '{"a": ']]
    assert [piece.text for piece in splitter.push("12, ")] == ["12, "]
    assert [piece.text for piece in splitter.push('"b": 3}')] == ['"b": 3}']
    assert not any(piece.text for piece in splitter.push("}</tool_call>") + splitter.finish())


FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", ',
    '"arguments": ',
    '{"a": 1}',
    '{"a": [',
    "}",
    "]",
    '"',
    "\\",
    "{",
    " ",
    "\n",
    "word",
    "é日",
    "<",
    "</",
    '"name"',
    ":",
    "tool_call>",
    CALL,
    '"parameters": {}',
]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_cutting_gives_the_same(text: str, cuts: list[int], thinking: bool, opened: bool, tools: bool) -> None:
    names = TOOLS if tools else ()
    opened = opened and thinking
    whole = split([text], thinking=thinking, opened=opened, tools=names)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert split(pieces, thinking=thinking, opened=opened, tools=names) == whole
    assert split(list(text), thinking=thinking, opened=opened, tools=names) == whole
    letters = [letter for letter in text if not letter.isspace()]
    if not tools and not thinking:
        assert whole.content == text
    if tools and "<tool_call>" not in text and not thinking:
        assert [letter for letter in whole.content if not letter.isspace()] == letters
