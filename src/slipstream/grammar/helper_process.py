"""What the processes with llguidance do: one tries new constraints, the other computes the masks of running requests.

The library recurses along references, and neither its time nor its memory can be limited from inside a process. It
therefore never runs in the process that serves requests.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from slipstream.errors import RequestError
from slipstream.grammar.reference_bounds import check_bounds
from slipstream.isolation import Work

# Symbols of a grammar. A schema of 200 definitions with 10 fields each has 10,000 and 64 tools have 5,000; a grammar of
# 100,000 was seen to take 2 GB of memory.
_MOST_SYMBOLS = 50_000
# The library counts 1 to 2 KiB for a state. Schemas, tools and patterns in use stay under 5,000 states.
_MOST_LEXER_STATES = 50_000
# The work of one mask, in the library's units. A schema of 500 properties needs 5,000 items. With the library's own
# limit of 50,000 items an ambiguous grammar takes 0.6 s for a mask; with these limits it takes at most 0.2 s.
_MOST_STEP_ITEMS = 20_000
_MOST_STEP_FUEL = 100_000
# The library takes up to 21 KiB of stack for a reference, and a constraint may have 500 (`reference_bounds.py`).
_COMPILE_STACK_BYTES = 16 * 2**20
# A trial computes this many masks from the start of a text on; the first one includes everything the constraint forces.
_TRIAL_MASKS = 4
_REMEMBERED_GRAMMARS = 16  # grammars kept beside those in use; one may take 20 MiB
# On few cores these processes give way to the model's threads: a trial gets a tenth of such a thread's time, masks get
# a seventieth. At normal priority, a client whose grammar is refused again and again makes other requests twice as
# slow.
_TRIAL_NICENESS, _MASK_NICENESS = 10, 19


def trial(*vocabulary: Any) -> Work:
    """Returns the function that tries constraints on a vocabulary; it raises `RequestError` for one that fails."""
    os.nice(_TRIAL_NICENESS)
    tokenizer = tokenizer_of(*vocabulary)

    def attempt(kind: str, source: str, before: str | None) -> None:
        try:
            check_bounds(kind, source)
            _take_masks(_compiled(tokenizer, kind, source, before))
        except (ValueError, RecursionError) as error:
            raise _refusal(str(error)) from None

    return attempt


def _compiled(tokenizer: LLTokenizer, kind: str, source: str, before: str | None) -> LLMatcher:
    """Returns a matcher at the start of its grammar, preceded by the grammar `before` if there is one.

    A new thread compiles the grammar, because only a new thread can have a larger stack.
    """
    usual = threading.stack_size(_COMPILE_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_compile, tokenizer, kind, source, before).result()
    finally:
        threading.stack_size(usual)


def _compile(tokenizer: LLTokenizer, kind: str, source: str, before: str | None) -> LLMatcher:
    limits = LLParserLimits(
        max_grammar_size=_MOST_SYMBOLS,
        max_lexer_states=_MOST_LEXER_STATES,
        step_max_items=_MOST_STEP_ITEMS,
        step_lexer_fuel=_MOST_STEP_FUEL,
        verbose_errors=False,
    )
    try:
        matcher = LLMatcher(tokenizer, _written(kind, source, before), log_level=0, limits=limits)
        error = matcher.get_error()
    except MemoryError:
        raise
    except BaseException as failure:  # a panic in compiled code is not an Exception
        error = str(failure) or type(failure).__name__
    if error:
        raise _refusal(error)
    return matcher


def _written(kind: str, source: str, before: str | None) -> str:
    """Returns a constraint, and the grammar `before` it, in llguidance's notation."""
    if kind == "json_schema":
        answer = {"json_schema": json.loads(source)}
    elif kind == "regex":
        answer = {"lark_grammar": json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]}
    else:
        answer = {"lark_grammar": source}
    top = [] if before is None else [{"name": "top", "lark_grammar": before}]
    return json.dumps({"grammars": [*top, {"name": "answer", **answer}]})


def _refusal(error: str) -> RequestError:
    """Returns a library error as one line, without the arrows that it draws under its input."""
    lines = [line.strip() for line in error.splitlines()]
    words = " ".join(line for line in lines if line and set(line) - set("^|~- ")).replace(" <non-verbose/>", "")[:400]
    return RequestError("no text fits it" if error.startswith("NoExtension") else words)


def _raise_failure(matcher: LLMatcher) -> None:
    """Raises the matcher's error if it has one; a matcher with an error never recovers."""
    if matcher.is_error():
        raise _refusal(matcher.get_error())


def _take_masks(matcher: LLMatcher) -> None:
    """Computes the first masks, each after the lowest token that the mask before allows."""
    for _ in range(_TRIAL_MASKS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        _raise_failure(matcher)
        if matcher.is_stopped() or not bits:
            return
        if not matcher.consume_token((bits & -bits).bit_length() - 1):
            return


def desk(*vocabulary: Any) -> Work:
    """Returns the function that keeps the grammar position of each request and computes masks."""
    os.nice(_MASK_NICENESS)
    return Desk(tokenizer_of(*vocabulary)).mask


class Desk:
    """The position of each running request in its grammar, and the compiled grammars that were used last."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._start_of = lru_cache(_REMEMBERED_GRAMMARS)(partial(_compiled, tokenizer))
        self._places: dict[int, _Place] = {}

    def mask(
        self, number: int, opening: Sequence[Any] | None, tokens: list[int], path: list[int], ended: Sequence[int]
    ) -> list[Any] | None:
        """Returns the bits of what may follow the tokens and the path, whether the text ends there, and the work.

        The work is the mask's processor time in seconds. `tokens` are those written since the last call. The result is
        None if the request is unknown here and `opening` does not describe it.
        """
        for gone in ended:
            self._places.pop(gone, None)
        try:
            if opening is not None:
                self._places[number] = _Place(self._start_of(*opening).deep_copy())
                self._places[number].write(tokens)
                tokens = []
            place = self._places.get(number)
            if place is None:
                return None
            began = time.process_time()  # opening is not counted, because it says nothing about the speed of masks
            place.write(tokens)
            bits, stopped = place.mask(tuple(path))
        except (RequestError, ValueError, RuntimeError) as error:
            # the matcher may already have taken the tokens, so it is dropped and the next question opens it anew
            self._places.pop(number, None)
            raise _refusal(str(error)) from None
        return [base64.b64encode(bits).decode(), stopped, time.process_time() - began]


class _Place:
    """The position of one request in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher  # stands after the written text
        self._scout = matcher  # stands after the written text and `_drafted`; a copy whenever `_drafted` is not empty
        self._drafted: tuple[int, ...] = ()

    def write(self, tokens: list[int]) -> None:
        if tokens:
            self._scout, self._drafted = self._matcher, ()
            self._matcher.consume_tokens(tokens)
            _raise_failure(self._matcher)

    def mask(self, path: tuple[int, ...]) -> tuple[bytes, bool]:
        """Returns the bits of what may follow a path, and whether the text ends there.

        A matcher is never rolled back, because its cached knowledge about masks would survive and would also be used
        for other texts of the same length.
        """
        if path[: len(self._drafted)] != self._drafted:
            self._scout, self._drafted = self._matcher, ()
        if more := path[len(self._drafted) :]:
            if not self._drafted:
                self._scout = self._matcher.deep_copy()
            self._drafted = path
            self._scout.consume_tokens(list(more))
            _raise_failure(self._scout)
        bits = self._scout.compute_bitmask()
        _raise_failure(self._scout)
        return bits, self._scout.is_stopped()


def tokenizer_of(*vocabulary: Any) -> LLTokenizer:
    source = _Vocabulary(*vocabulary)
    source.tokenizer = LLTokenizer(TokenizerWrapper(source), n_vocab=len(source.tokens), eos_token=source.ends)
    return source.tokenizer


class _Vocabulary:
    """The model's tokens in the form that llguidance asks for: each token's bytes, and how a text is tokenised.

    Where a grammar allows only one text, that tokenisation decides which tokens write it.
    """

    tokenizer: LLTokenizer

    def __init__(
        self, tokens: Sequence[str], special: Sequence[int], ends: Sequence[int], bos: int | None, backend: str | None
    ) -> None:
        """`tokens` holds the tokens' bytes as Latin-1 text. Without a `backend`, texts are split greedily."""
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids = list(special)
        self.ends = list(ends)
        self.eos_token_id = ends[0]
        self.bos_token_id = bos
        self._backend: Any = None
        if backend is not None:
            from tokenizers import Tokenizer

            self._backend = Tokenizer.from_str(backend)
            self._backend.encode_special_tokens = True  # treats `<|...|>` as ordinary text

    def __call__(self, text: str) -> list[int]:
        if self._backend is None:
            return self.tokenizer.greedy_tokenize(text)
        wanted = text.encode()
        # some tokenizers add a space at the start of a text; after a control character the text is not at the start
        for lead in ("", "\x02"):
            ids: list[int] = self._backend.encode(lead + text, add_special_tokens=False).ids
            while ids and len(self._bytes(ids)) > len(wanted):
                ids = ids[1:]
            if self._bytes(ids) == wanted:
                return ids
        return []

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[index] for index in ids)
