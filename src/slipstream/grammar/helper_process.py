"""What the processes with llguidance do: one tries new constraints, the other computes the masks of running requests.

The library recurses along references, and neither its time nor its memory can be limited from inside a process. It
therefore never runs in the process that serves requests.
"""

from __future__ import annotations

import base64
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from slipstream.errors import RequestError
from slipstream.grammar.llguidance_calls import GrammarError, compiled, on_a_stack, one_line, refusal
from slipstream.grammar.reference_bounds import check_bounds

# The library takes up to 21 KiB of stack for a reference, and a constraint may have 500 (`reference_bounds.py`).
_COMPILE_STACK_BYTES = 16 * 2**20
# A trial computes this many masks from the start of a text on; the first one includes everything the constraint forces.
_TRIAL_MASKS = 4
_REMEMBERED_GRAMMARS = 16  # grammars kept beside those in use; one may take 20 MiB
# On few cores these processes give way to the model's threads: a trial gets a tenth of such a thread's time, masks get
# a seventieth. At normal priority, a client whose grammar is refused again and again makes other requests twice as
# slow.
_TRIAL_NICENESS, _MASK_NICENESS = 10, 19

Work = Callable[..., Any]


def trial(*vocabulary: Any) -> Work:
    """Returns the function that tries constraints on a vocabulary; it raises `RequestError` for one that fails."""
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
    """Computes the first masks, each after the lowest token that the mask before allows."""
    for _ in range(_TRIAL_MASKS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if matcher.is_stopped() or not bits:
            return
        if not matcher.consume_token((bits & -bits).bit_length() - 1):
            return


def desk(*vocabulary: Any) -> Work:
    """Returns the function that keeps the grammar position of each request and computes masks."""
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
        """Returns the bits of what may follow the tokens and the path, whether the text ends there, and the work in s.

        `tokens` are those written since the last call. The result is None if the request is unknown here and `opening`
        does not describe it.
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
            began = time.process_time()  # opening is not counted, because it says nothing about the speed of masks
            place.write(tokens)
            bits, stopped = place.mask(tuple(path))
        except (GrammarError, ValueError, RuntimeError) as error:
            # the matcher may already have taken the tokens, so it is dropped and the next question opens it anew
            self._places.pop(number, None)
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
        scout = self._at(path)
        bits = scout.compute_bitmask()
        _raise_failure(scout)
        return bits, scout.is_stopped()

    def _at(self, path: tuple[int, ...]) -> LLMatcher:
        """Returns a matcher at the end of a path.

        A matcher is never rolled back, because its cached knowledge about masks would survive and would also be used
        for other texts of the same length.
        """
        known = len(self._drafted)
        if path[:known] != self._drafted or len(path) == known == 0:
            self._scout, self._drafted, known = self._matcher, (), 0
        if len(path) > known:
            if not known:
                self._scout = self._matcher.deep_copy()
            self._drafted = path
            self._scout.consume_tokens(list(path[known:]))
        try:
            _raise_failure(self._scout)
        except GrammarError:
            self._scout, self._drafted = self._matcher, ()
            raise
        return self._scout


def _raise_failure(matcher: LLMatcher) -> None:
    """Raises the matcher's error if it has one; a matcher with an error never recovers."""
    if matcher.is_error():
        raise refusal(matcher.get_error())


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
