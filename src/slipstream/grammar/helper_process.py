"""What the processes with llguidance do: one tries new constraints, the other computes the masks of running requests.

The library recurses along references, and neither its time nor its memory can be bounded from inside. So it never runs
in the process that serves.
"""

from __future__ import annotations

import base64
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from slipstream.errors import RequestError
from slipstream.grammar.llguidance_calls import GrammarError, compiled, library_tokenizer, on_a_stack, one_line, refusal
from slipstream.grammar.reference_bounds import check_bounds

# The library takes up to 21 KiB of stack for a reference.
_COMPILE_STACK_BYTES = 16 * 2**20
_MASKS = 4  # the start of a text: what a constraint forces there is all taken in at the first
_REMEMBERED_GRAMMARS = 16  # beside those in use; one may hold 20 MiB
# Where cores are few, these processes give way to the model's threads: a trial gets a tenth of what such a thread gets,
# masks a seventieth. Without it, a client whose grammar is refused again and again makes its neighbours twice as slow.
_TRIAL_NICENESS, _MASK_NICENESS = 10, 19

Work = Callable[..., Any]


def trial(*vocabulary: Any) -> Work:
    """Tries constraints on a vocabulary; raises `RequestError` where one fails."""
    os.nice(_TRIAL_NICENESS)
    tokenizer = tokenizer_of(*vocabulary)

    def attempt(kind: str, source: str, before: str | None) -> None:
        try:
            check_bounds(kind, source)
            _take_masks(on_a_stack(_COMPILE_STACK_BYTES, compiled, tokenizer, kind, source, before))
        except (GrammarError, ValueError, RecursionError) as error:
            raise RequestError(one_line(str(error))) from None

    return attempt


def _take_masks(matcher: LLMatcher) -> None:
    """The first masks, each after the lowest token that the one before allows."""
    for _ in range(_MASKS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if matcher.is_stopped() or not bits:
            return
        if not matcher.consume_token((bits & -bits).bit_length() - 1):
            return


def desk(*vocabulary: Any) -> Work:
    """Keeps the places of requests in their grammars and computes masks."""
    os.nice(_MASK_NICENESS)
    return Desk(tokenizer_of(*vocabulary)).mask


class Desk:
    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: OrderedDict[tuple[Any, ...], LLMatcher] = OrderedDict()
        self._places: dict[int, _Place] = {}

    def mask(
        self, number: int, opening: Sequence[Any] | None, tokens: list[int], path: list[int], ended: Sequence[int]
    ) -> list[Any] | None:
        """The bits of what may follow the tokens and the path, whether the text is over there, and the work that took.

        `tokens` are those written since the last call. None if the request is not known and is not opened.
        """
        for gone in ended:
            self._places.pop(gone, None)
        try:
            if opening is not None:
                self._places[number] = _Place(self._compiled(tuple(opening)).deep_copy())
                self._places[number].write(tokens)
                tokens = []
            place = self._places.get(number)
            if place is None:
                return None
            began = time.process_time()  # what opening takes says nothing about the masks
            place.write(tokens)
            bits, stopped = place.mask(tuple(path))
        except (GrammarError, ValueError, RuntimeError) as error:
            self._places.pop(number, None)  # it may have taken the tokens already; the next question opens it anew
            raise RequestError(one_line(str(error))) from None
        return [base64.b64encode(bits).decode(), stopped, time.process_time() - began]

    def _compiled(self, key: tuple[Any, ...]) -> LLMatcher:
        if key not in self._grammars:
            self._grammars[key] = on_a_stack(_COMPILE_STACK_BYTES, compiled, self._tokenizer, *key)
        self._grammars.move_to_end(key)
        if len(self._grammars) > _REMEMBERED_GRAMMARS:
            self._grammars.popitem(last=False)
        return self._grammars[key]


class _Place:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher  # behind the written text
        self._scout = matcher  # behind the written text and `_ahead`: another one wherever something is ahead
        self._ahead: tuple[int, ...] = ()

    def write(self, tokens: list[int]) -> None:
        if tokens:
            self._scout, self._ahead = self._matcher, ()
            self._matcher.consume_tokens(tokens)
            _must_live(self._matcher)

    def mask(self, path: tuple[int, ...]) -> tuple[bytes, bool]:
        scout = self._at(path)
        bits = scout.compute_bitmask()
        _must_live(scout)
        return bits, scout.is_stopped()

    def _at(self, path: tuple[int, ...]) -> LLMatcher:
        """A matcher at the end of a path. None is ever taken back: what the library found out about masks before stays
        with it, and holds for other texts of the same length as well.
        """
        known = len(self._ahead)
        if path[:known] != self._ahead or len(path) == known == 0:
            self._scout, self._ahead, known = self._matcher, (), 0
        if len(path) > known:
            if not known:
                self._scout = self._matcher.deep_copy()
            self._ahead = path
            self._scout.consume_tokens(list(path[known:]))
        try:
            _must_live(self._scout)
        except GrammarError:
            self._scout, self._ahead = self._matcher, ()
            raise
        return self._scout


def _must_live(matcher: LLMatcher) -> None:
    """A matcher that gave up stays so."""
    if matcher.is_error():
        raise refusal(matcher.get_error())


def tokenizer_of(*vocabulary: Any) -> LLTokenizer:
    source = _Vocabulary(*vocabulary)
    source.tokenizer = library_tokenizer(source, source.ends)
    return source.tokenizer


class _Vocabulary:
    """The model's tokens as llguidance asks for them: every token's bytes, and how a text is cut by rights.

    Where a grammar leaves one text only, that cut decides which tokens write it.
    """

    tokenizer: LLTokenizer

    def __init__(
        self, tokens: Sequence[str], special: Sequence[int], ends: Sequence[int], bos: int | None, backend: str | None
    ) -> None:
        """The tokens' bytes are given as Latin-1; without a `backend` texts are cut greedily."""
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids = list(special)
        self.ends = list(ends)
        self.eos_token_id = ends[0]
        self.bos_token_id = bos
        self._backend: Any = None
        if backend is not None:
            from tokenizers import Tokenizer

            self._backend = Tokenizer.from_str(backend)
            self._backend.encode_special_tokens = True  # `<|...|>` is text here

    def __call__(self, text: str) -> list[int]:
        if self._backend is None:
            return self.tokenizer.greedy_tokenize(text)
        wanted = text.encode()
        # some tokenizers put a space before a text; behind a control character it is not the text's first any more
        for lead in ("", "\x02"):
            ids: list[int] = self._backend.encode(lead + text, add_special_tokens=False).ids
            while ids and len(self._bytes(ids)) > len(wanted):
                ids = ids[1:]
            if self._bytes(ids) == wanted:
                return ids
        return []

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[index] for index in ids)
