"""The calls of llguidance that this package uses; they run in child processes (`helper_process.py`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Result = TypeVar("Result")

# Symbols of a grammar. A schema of 200 definitions with 10 fields each has 10,000 and 64 tools have 5,000; a grammar of
# 100,000 was seen to take 2 GB of memory.
_MOST_SYMBOLS = 50_000
# The library counts 1 to 2 KiB for a state. Schemas, tools and patterns in use stay under 5,000 states.
_MOST_LEXER_STATES = 50_000
# The work of one mask, in the library's units. A schema of 500 properties needs 5,000 items. With the library's own
# limit of 50,000 items an ambiguous grammar takes 0.6 s for a mask; with these limits it takes at most 0.2 s.
_MOST_STEP_ITEMS = 20_000
_MOST_STEP_FUEL = 100_000

_one_at_a_time = threading.Lock()


class GrammarError(Exception):
    """The library refuses a constraint; the message is the library's reason."""


def written(kind: str, source: str, before: str | None) -> str:
    """Returns a constraint in llguidance's notation, preceded by the grammar `before` if there is one."""
    if kind == "json_schema":
        answer = {"json_schema": json.loads(source)}
    elif kind == "regex":
        compiled = json.loads(LLMatcher.grammar_from_regex(source))
        answer = {"lark_grammar": compiled["grammars"][0]["lark_grammar"]}
    else:
        answer = {"lark_grammar": source}
    top = [] if before is None else [{"name": "top", "lark_grammar": before}]
    return json.dumps({"grammars": [*top, {"name": "answer", **answer}]})


def compiled(tokenizer: LLTokenizer, kind: str, source: str, before: str | None) -> LLMatcher:
    """Returns a matcher at the start of its grammar; `GrammarError` says why there is none."""
    limits = LLParserLimits(
        max_grammar_size=_MOST_SYMBOLS,
        max_lexer_states=_MOST_LEXER_STATES,
        step_max_items=_MOST_STEP_ITEMS,
        step_lexer_fuel=_MOST_STEP_FUEL,
        verbose_errors=False,
    )
    try:
        matcher = LLMatcher(tokenizer, written(kind, source, before), log_level=0, limits=limits)
        error = matcher.get_error()
    except MemoryError:
        raise
    except BaseException as failure:  # a panic in compiled code is not an Exception
        error = str(failure) or type(failure).__name__
    if error:
        raise refusal(error)
    return matcher


def one_line(error: str) -> str:
    """Returns the words of a library error as one line, without the arrows that it draws under its input."""
    lines = [line.strip() for line in error.splitlines()]
    words = [line for line in lines if line and set(line) - set("^|~- ")]
    return " ".join(words).replace(" <non-verbose/>", "")[:400]


def refusal(error: str) -> GrammarError:
    return GrammarError("no text fits it" if error.startswith("NoExtension") else error)


def on_a_stack(size_bytes: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Runs a function in a new thread with a stack of this size, and returns its result."""
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work(*arguments))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with _one_at_a_time:  # the stack size of new threads is one setting for the whole process
        before = threading.stack_size(size_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
