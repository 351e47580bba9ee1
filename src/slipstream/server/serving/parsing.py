"""Splits a model's text, as it arrives, into reasoning, content and tool calls.

The result depends on the text alone, never on how the text was cut into pieces. Only tags and the white space around
them are left out; text in call tags that is not a valid call becomes content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.grammar.notations import CALL_CLOSE, CALL_OPEN

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"
# A call in the usual form, up to its arguments. The repetitions never go back (`*+`), so that the time is linear in the
# length of the text.
_HEADER = re.compile(
    f"[{_SPACE}]*+".join(("", "{", '"name"', ":", r'("(?:[^"\\]|\\.)*+")', ",", '"arguments"', ":", "(?={)")), re.DOTALL
)

Kind = Literal["content", "reasoning", "tool_call", "markup"]
State = Literal["start", "reasoning", "between", "content", "call", "arguments", "tail"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next stretch of the text, which ends at `end`, and the part of it that clients see as `text`.

    `begins` is the name of a tool call that begins here. Markup is not shown.
    """

    kind: Kind
    text: str
    end: int
    call: int = 0
    begins: str | None = None


class Splitter:
    """Takes the text as it arrives; `push` and `finish` return the pieces whose kind is certain by then, in order.

    With `thinking`, the text may begin with reasoning; with `opened`, the prompt ends inside the reasoning already.
    `tools` are the names of the functions that may be called; without any, call tags are ordinary content.
    """

    def __init__(self, *, thinking: bool = False, opened: bool = False, tools: Collection[str] = ()) -> None:
        self._state: State = "reasoning" if opened else "start" if thinking else "content"
        self._fresh = opened  # at the start of the reasoning, where white space is left out
        self._tools = frozenset(tools)
        self._held = ""  # text that has not been returned yet
        self._end = 0  # where in the text `_held` begins
        self._calls = 0
        self._scanner = _ArgumentScanner()
        self._pieces: list[Piece] = []
        self._over = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._run()

    def finish(self) -> list[Piece]:
        """The pieces of the text that was held back; no more text may be pushed afterwards."""
        self._over = True
        return self._run()

    def _run(self) -> list[Piece]:
        steps = {
            "start": self._look_for_reasoning,
            "reasoning": self._in_reasoning,
            "between": self._skip_space,
            "content": self._in_content,
            "call": self._in_call,
            "arguments": self._in_arguments,
            "tail": self._in_tail,
        }
        while (self._held or self._over) and steps[self._state]():
            pass
        done, self._pieces = self._pieces, []
        return done

    def _give(self, kind: Kind, length: int, text: str | None = None, *, begins: str | None = None) -> None:
        """Adds a piece of the next `length` held characters, shown as they are or as `text`."""
        raw, self._held = self._held[:length], self._held[length:]
        self._end += length
        if raw:
            shown = raw if text is None else text
            self._pieces.append(Piece(kind, shown, self._end, max(0, self._calls - 1), begins))

    def _look_for_reasoning(self) -> bool:
        rest = self._held.lstrip(_SPACE)
        if THINK_OPEN.startswith(rest) and len(rest) < len(THINK_OPEN) and not self._over:
            return False
        if rest.startswith(THINK_OPEN):
            self._give("reasoning", len(self._held) - len(rest) + len(THINK_OPEN), "")
            self._state, self._fresh = "reasoning", True
        else:
            self._state = "content"
        return True

    def _in_reasoning(self) -> bool:
        if self._fresh:
            self._give("reasoning", len(self._held) - len(self._held.lstrip(_SPACE)), "")
            self._fresh = not self._held
        found = self._held.find(THINK_CLOSE)
        if found >= 0:
            shown = self._held[:found].rstrip(_SPACE)
            self._give("reasoning", len(shown))
            self._give("reasoning", found - len(shown) + len(THINK_CLOSE), "")
            self._state = "between"
            return True
        shown = self._held if self._over else _settled(self._held, THINK_CLOSE)
        self._give("reasoning", len(shown.rstrip(_SPACE)))
        if self._over:
            self._give("reasoning", len(self._held), "")
        return False

    def _skip_space(self) -> bool:
        self._give("markup", len(self._held) - len(self._held.lstrip(_SPACE)), "")
        if not self._held:
            return False
        self._state = "content"
        return True

    def _in_content(self) -> bool:
        if not self._tools:
            self._give("content", len(self._held))
            return False
        found = self._held.find(CALL_OPEN)
        if found >= 0:
            # The white space before a call is left out with it, and it becomes content if the call is not valid.
            self._give("content", len(self._held[:found].rstrip(_SPACE)))
            self._state = "call"
            return True
        if self._over:
            self._give("content", len(self._held))
        else:
            self._give("content", len(_settled(self._held, CALL_OPEN).rstrip(_SPACE)))
        return False

    def _in_call(self) -> bool:
        """Reads up to the arguments: a call in the usual form begins at once, any other is parsed when complete."""
        start = self._held.index(CALL_OPEN) + len(CALL_OPEN)
        header = _HEADER.match(self._held, start)
        if header is not None and (name := _loads(header[1])) in self._tools:
            self._calls += 1
            self._give("tool_call", header.end(), "", begins=name)
            self._scanner, self._state = _ArgumentScanner(), "arguments"
            return True
        found = self._held.find(CALL_CLOSE, start)
        if found < 0 and not self._over:
            return False
        stop, end = (found, found + len(CALL_CLOSE)) if found >= 0 else (len(self._held), len(self._held))
        call = _whole_call(self._held[start:stop])
        if call is not None and call[0] in self._tools:
            self._calls += 1
            self._give("tool_call", end, call[1], begins=call[0])
            self._state = "between"
        else:
            # Only the tag becomes content now, because a valid call may begin after it.
            self._give("content", start)
            self._state = "content"
        return bool(self._held)

    def _in_arguments(self) -> bool:
        length, done = self._scanner.take(self._held)
        cut_off = self._over and not done
        self._give("tool_call", len(self._held) if cut_off else length)
        self._state = "tail" if done else "between" if cut_off else "arguments"
        return done and bool(self._held)

    def _in_tail(self) -> bool:
        """Reads the closing brace and tag after the arguments; any other text there becomes content."""
        rest = self._held.lstrip(_SPACE)
        if rest.startswith("}"):
            rest = rest[1:].lstrip(_SPACE)
        if rest.startswith(CALL_CLOSE):
            self._give("markup", len(self._held) - len(rest) + len(CALL_CLOSE), "")
            self._state = "between"
        elif CALL_CLOSE.startswith(rest) and not self._over:
            return False
        elif not rest:
            self._give("markup", len(self._held), "")
        else:
            self._state = "content"
        return bool(self._held)


class _ArgumentScanner:
    """Finds the end of a JSON object that arrives in pieces; if brackets do not match, it is the call's closing tag."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._broken = False

    def take(self, text: str) -> tuple[int, bool]:
        """How many characters certainly belong to the object, and whether the object ends with them."""
        for at, letter in enumerate(text):
            if self._broken:
                found = text.find(CALL_CLOSE, at)
                return (found, True) if found >= 0 else (at + len(_settled(text[at:], CALL_CLOSE)), False)
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = self._in_string
            elif letter == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                continue
            elif letter in "{[":
                self._open.append(letter)
            elif letter in "}]":
                self._broken = self._open.pop() + letter not in ("{}", "[]")
            if not self._open and not self._broken:
                return at + 1, True
        return len(text), False


def _settled(text: str, tag: str) -> str:
    """The text without its last characters if these may be the beginning of the tag."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size]
    return text


def _loads(text: str) -> Any:
    """The value of a JSON text; None if the text is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _whole_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call, with its keys in any order; arguments may be missing or a JSON string."""
    value = _loads(body)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
