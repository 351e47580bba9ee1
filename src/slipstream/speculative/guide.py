"""What one request may write next: masks behind the committed text and drafted paths, and the end of reasoning.

A guide answers for any drafted path behind the committed text, so that a row of a proposal is masked exactly as plain
decoding would mask it there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import RequestError
from slipstream.lazy import cached_property
from slipstream.speculative.lane import Lane
from slipstream.types import Thinking

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LIBRARY_ERRORS = (ValueError, RuntimeError)

STEP_S = 0.004  # what a guide may take of the engine's thread in a step, which takes 5 to 50 ms
_QUICK_S = 0.001  # of an answer on the engine's thread, on average: ordinary grammars take 0.01 to 0.1 ms
_AVERAGED_ANSWERS = 5
# A request may use the lane this much: an ordinary grammar takes 0.1 ms per token, a large one 5 ms.
_GRACE_S = 10.0
_TOKEN_S = 0.1

Path = tuple[int, ...]


class GuideError(Exception):
    """A grammar cannot go on; the reason in one line."""


class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def bos_id(self) -> int | None: ...
    def token_bytes(self, index: int) -> bytes: ...
    def is_special(self, index: int) -> bool: ...
    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]: ...


class Mask:
    """The tokens that may stand at one place; `only` is set where there is just one, `end` where the text is over."""

    def __init__(self, bits: bytes, vocab_size: int, end: bool = False) -> None:
        """`bits` has a bit per token, the lowest first."""
        count = int.from_bytes(bits, "little").bit_count()
        if not count:
            raise GuideError("the constraint allows no token here")
        self.end = end
        self._bits = bits
        self._vocab_size = vocab_size
        self.only = int(self.allowed.argmax()) if count == 1 else None

    @classmethod
    def single(cls, token: int, vocab_size: int) -> Mask:
        bits = bytearray(-(-vocab_size // 8))
        bits[token >> 3] = 1 << (token & 7)
        return cls(bytes(bits), vocab_size)

    def __contains__(self, token: int) -> bool:
        return bool(self._bits[token >> 3] >> (token & 7) & 1)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """A flag per token; most places are only asked about a few tokens and never need it."""
        flags = np.unpackbits(np.frombuffer(self._bits, np.uint8), count=self._vocab_size, bitorder="little")
        return flags.view(np.bool_)


class Guide:
    """What one request may write next, behind the committed text and any drafted tokens that follow it.

    The library cannot be stopped once it computes, so a guide asks it for nothing without a bound: a mask has the
    limits it was compiled with, and a token is consumed only where a mask, which has walked over it already, allows it.
    Guides that have been quick answer on the engine's thread. All others have their masks computed on a lane,
    beside the steps of other sequences, and nothing is drafted for them. One thread at a time uses a guide: while its
    mask is being computed it is not `ready`, and its sequence is in no step.
    """

    def __init__(self, start: LLMatcher | None, budget: Budget | None, vocab_size: int) -> None:
        self._matcher = start.deep_copy() if start is not None else None  # behind the committed text
        self._scout = self._matcher  # behind the committed text and `_ahead`: another one wherever something is ahead
        self._budget = budget
        self._vocab_size = vocab_size
        self._ahead: Path = ()
        self._masks: dict[Path, Mask | None] = {}  # of paths behind the committed text
        self._broken: str | None = None
        self._coming: Future[Mask | None] | None = None  # the mask behind the committed text, from the lane
        self._clock = _Clock()
        self.complete = False  # nothing but an end may follow

    def ready(self, lane: Lane) -> bool:
        """Whether a step would find the mask it needs; has it computed beside the steps if that may take long."""
        if self._coming is None and not self._masks:
            owed_s = self._clock.begin_step()
            if self.slow and (self._budget is None or self._budget.forced(()) is None):
                self._coming = lane.submit(partial(self._computed, ()), owed_s)
        return self._coming is None or (self._coming.done() and not lane.resting)

    @property
    def slow(self) -> bool:
        """Whether masks may take longer than the engine's thread should: nothing is known yet, or they did."""
        return self._matcher is not None and self._broken is None and not self._clock.quick

    def abandon(self) -> None:
        """Its request is over: a mask that nothing waits for any more is not begun."""
        if self._coming is not None:
            self._coming.cancel()

    def mask(self, path: Path = ()) -> Mask | None:
        """What may follow `path`, None if anything may; its tokens were allowed one after the other."""
        if path not in self._masks:
            coming, self._coming = self._coming, None
            try:
                if coming is not None:
                    self._masks[()] = coming.result()
                    self._clock.begin_step()  # what the lane has done cost the engine's thread nothing
                if path not in self._masks:
                    self._masks[path] = self._computed(path)
            except _LIBRARY_ERRORS as error:
                raise GuideError(f"the constraint cannot go on: {one_line(str(error))}") from None
        return self._masks[path]

    def draft_mask(self, path: Path) -> Mask | None:
        """The mask behind a drafted path, which nothing depends on: refused if this step's masks have taken long."""
        if self._clock.exhausted and path not in self._masks:
            raise GuideError("the masks of this step have taken long enough")
        return self.mask(path)

    def _computed(self, path: Path) -> Mask | None:
        forced = self._budget.forced(path) if self._budget is not None else None
        if forced is not None:
            return Mask.single(forced, self._vocab_size)
        if self._matcher is None:
            return None
        if self._broken is not None:
            raise GuideError(self._broken)
        with self._clock:
            scout = self._at(path)
            bits = scout.compute_bitmask()
        _must_live(scout)
        self._broken = self._clock.overdrawn()
        if self._broken is not None:
            raise GuideError(self._broken)
        return Mask(bits, self._vocab_size, scout.is_stopped())

    def observe(self, token: int) -> None:
        """Takes a committed token, which the mask before it has allowed."""
        self._masks.clear()
        self._clock.tokens += 1
        if self._budget is not None:
            self._budget.observe(token)
        if self._matcher is None or self._broken is not None:
            return
        self._scout, self._ahead = self._matcher, ()
        try:
            with self._clock:
                self._matcher.consume_token(token)
            _must_live(self._matcher)
            self.complete = self._matcher.is_stopped()
        except (GuideError, *_LIBRARY_ERRORS) as error:
            self._broken = one_line(str(error))

    def _at(self, path: Path) -> LLMatcher:
        """A matcher at the end of a path. None is ever taken back: what the library found out about masks before stays
        with it, and holds for other texts of the same length as well.
        """
        assert self._matcher is not None and self._scout is not None
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
        except GuideError:
            self._scout, self._ahead = self._matcher, ()
            raise
        return self._scout


class _Clock:
    """What one guide has cost. A grammar is judged by the work of its thread, because a busy machine makes none slow;
    what the engine's thread has lost in a step is time.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._spent_s = 0.0
        self._step_s = 0.0  # of work
        self._step_time_s = 0.0
        self._average_s = 0.0
        self._quick = 0  # answers in a row that took less than a step's share
        self._needed = 1  # of those, until the guide answers on the engine's thread
        self._began = (0.0, 0.0)

    def __enter__(self) -> None:
        self._began = (time.thread_time(), time.perf_counter())

    def __exit__(self, *exc: object) -> None:
        seconds = time.thread_time() - self._began[0]
        self._spent_s += seconds
        self._step_s += seconds
        self._step_time_s += time.perf_counter() - self._began[1]
        self._average_s += (seconds - self._average_s) / _AVERAGED_ANSWERS
        if seconds <= STEP_S:
            self._quick += 1
        else:
            # a slow answer after quick ones has held up a step; doubling makes these few, however they are spread
            self._quick, self._needed = 0, 2 * self._needed

    def begin_step(self) -> float:
        """Starts a step's account and returns how long the one before has kept the engine's thread."""
        kept_s, self._step_time_s, self._step_s = self._step_time_s, 0.0, 0.0
        return kept_s

    @property
    def quick(self) -> bool:
        return self._quick >= self._needed and self._average_s <= _QUICK_S

    @property
    def exhausted(self) -> bool:
        """Whether the step has had its share of the engine's thread."""
        return self._step_s > STEP_S

    def overdrawn(self) -> str | None:
        """Why the request may not go on, if its guide keeps taking long."""
        if self._spent_s <= _GRACE_S + _TOKEN_S * self.tokens:
            return None
        return f"the grammar takes too long: {self._spent_s:.0f} s of work for {self.tokens} tokens (simplify it)"


def _must_live(matcher: LLMatcher) -> None:
    """A matcher that gave up stays so."""
    if matcher.is_error():
        raise GuideError(f"the constraint cannot go on: {one_line(matcher.get_error())}")


def one_line(error: str) -> str:
    """The library draws arrows under what it dislikes; people get a sentence."""
    lines = [line.strip() for line in error.splitlines()]
    words = [line for line in lines if line and set(line) - set("^|~- ")]
    return " ".join(words).replace(" <non-verbose/>", "")[:400]


@dataclass(frozen=True, slots=True)
class _Reasoning:
    """How far the reasoning of a text is: before it (0 or more tokens written), inside, being ended, or over."""

    phase: str  # before, inside, ending, over
    spent: int = 0  # tokens inside, or of the end tag as it is written
    tail: bytes = b""  # as much of the text as may still become a tag


class Budget:
    """Ends reasoning after its budget: the tokens of the end tag are forced one by one."""

    def __init__(self, thinking: Thinking, vocabulary: Vocabulary) -> None:
        assert thinking.budget is not None
        self._budget = thinking.budget
        self._start, self._end = thinking.start.encode(), thinking.end.encode()
        self._end_tokens = vocabulary.encode(thinking.end, add_bos=False)
        self._bytes = vocabulary.token_bytes
        self._now = _Reasoning("inside" if thinking.opened else "before")
        if not self._end_tokens:
            raise RequestError(f"the tag '{thinking.end}' has no tokens", "name the tag that ends reasoning")

    def observe(self, token: int) -> None:
        self._now = self._after(self._now, token)

    def forced(self, path: Sequence[int]) -> int | None:
        """The one token that may follow a path, or None if the budget has no say there."""
        state = self._now
        for token in path:
            state = self._after(state, token)
        return self._forced(state)

    def _forced(self, state: _Reasoning) -> int | None:
        if state.phase == "ending":
            return self._end_tokens[state.spent]
        # half a character would make the tag unreadable; its other half may still come
        due = state.phase == "inside" and state.spent >= self._budget and not _mid_character(state.tail)
        return self._end_tokens[0] if due else None

    def _after(self, state: _Reasoning, token: int) -> _Reasoning:
        if state.phase == "over":
            return state
        forced = self._forced(state)
        if forced is not None:
            written = (state.spent if state.phase == "ending" else 0) + 1
            return _Reasoning("over") if written == len(self._end_tokens) else _Reasoning("ending", written)
        text = state.tail + self._bytes(token)
        if state.phase == "before":
            _, found, rest = text.partition(self._start)
            return _Reasoning("inside", 0, rest) if found else _Reasoning("before", 0, _kept(text, self._start))
        if self._end in text:
            return _Reasoning("over")
        return _Reasoning("inside", state.spent + 1, _kept(text, self._end))


def _kept(text: bytes, tag: bytes) -> bytes:
    """The end of a text, long enough to find a tag in it or half a character."""
    return text[-max(3, len(tag) - 1) :]


def _mid_character(tail: bytes) -> bool:
    """Whether the bytes end inside a UTF-8 character."""
    for back in range(1, min(3, len(tail)) + 1):
        byte = tail[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
