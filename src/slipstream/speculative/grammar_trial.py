"""What the process that tries constraints does with each: everything that could go wrong in the server."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLTokenizer

from slipstream.errors import RequestError
from slipstream.speculative.grammar_bounds import check_bounds
from slipstream.speculative.grammar_library import GrammarError, compiled, library_tokenizer, on_a_stack, refusal

MIB = 2**20
# Smaller than what the server gives the same work, so that what ends well here ends well there: it compiles on 64 MiB,
# and its engine's thread has 8 MiB (2 MiB where the system sets no limit).
_COMPILE_STACK_BYTES = 16 * MIB
_MASK_STACK_BYTES = MIB
_MASKS = 4  # the start of a text: what a constraint forces there is all taken in at the first

Trial = Callable[[str, str, str | None], int]


def trial(tokens: Sequence[str], special: Sequence[int], ends: Sequence[int], bos: int | None) -> Trial:
    """Tries constraints on a vocabulary, whose bytes are given as Latin-1, and says how many bytes one holds."""
    vocabulary = _Vocabulary(tokens, special, ends, bos)
    vocabulary.tokenizer = tokenizer = library_tokenizer(vocabulary, ends)

    def attempt(kind: str, source: str, before: str | None) -> int:
        try:
            check_bounds(kind, source)
            held_bytes = _held_bytes()
            matcher = on_a_stack(_COMPILE_STACK_BYTES, compiled, tokenizer, kind, source, before)
            held_bytes = _held_bytes() - held_bytes
            on_a_stack(_MASK_STACK_BYTES, _masks, matcher)
            on_a_stack(_MASK_STACK_BYTES, _dropped, [matcher])
        except (GrammarError, ValueError, RecursionError) as error:
            raise RequestError(str(error)) from None
        return held_bytes

    return attempt


def _masks(matcher: LLMatcher) -> None:
    """The first masks, each after the lowest token that the one before allows."""
    scout = matcher.deep_copy()
    for _ in range(_MASKS):
        bits = int.from_bytes(scout.compute_bitmask(), "little")
        if scout.is_error():
            raise refusal(scout.get_error())
        if scout.is_stopped() or not bits:
            return
        if not scout.consume_token((bits & -bits).bit_length() - 1):
            return


def _dropped(matchers: list[LLMatcher]) -> None:
    matchers.clear()


class _Vocabulary:
    """The tokens of the server's tokenizer; texts are cut greedily, which masks do not depend on."""

    tokenizer: LLTokenizer

    def __init__(self, tokens: Sequence[str], special: Sequence[int], ends: Sequence[int], bos: int | None) -> None:
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids = list(special)
        self.eos_token_id = ends[0]
        self.bos_token_id = bos

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.greedy_tokenize(text)


class _Heap(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]


def _held_bytes() -> int:
    """What is allocated now, by glibc's own count; where there is none, what is resident."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    library.mallinfo2.restype = _Heap
    heap: _Heap = library.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)
