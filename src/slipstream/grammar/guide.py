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
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import RequestError
from slipstream.grammar.mask_lane import Allowed, GuideError, Lane, Matcher, Path
from slipstream.lazy import cached_property
from slipstream.types import Thinking

# The engine's thread waits this long in a step for the masks of one request's drafts. A mask takes 0.7 ms on two cores,
# a step 4 ms and more. All requests wait along: with 4 ms, one constrained request made the others twice as slow.
DRAFTS_WAIT_S = 0.001
STEP_S = 0.004  # of work for an answer that is still quick
_QUICK_S = 0.001  # of work for an answer, on average, that a step is held up for: ordinary grammars take 0.1 ms
_AVERAGED_ANSWERS = 5
# A request may take this much work: an ordinary grammar takes 0.1 ms per token, a large one 5 ms.
_GRACE_S = 10.0
_TOKEN_S = 0.1


class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def bos_id(self) -> int | None: ...
    def token_bytes(self, index: int) -> bytes: ...
    def is_special(self, index: int) -> bool: ...
    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]: ...
    def serialized(self) -> str | None:
        """The tokenizer for another process; None: texts are cut greedily there."""


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

    Masks come from another process by way of a lane, and the engine's thread waits for one only for a moment. Where the
    mask behind the committed text takes longer, the request's sequence is in no step until the mask is there. Where one
    behind a drafted path does, that draft is not kept. Nothing is drafted for a guide whose masks are slow.
    """

    def __init__(self, matcher: Matcher | None, lane: Lane, budget: Budget | None, vocab_size: int) -> None:
        self.matcher = matcher
        self._lane = lane
        self._budget = budget
        self._vocab_size = vocab_size
        self._written: list[int] = []
        # of paths behind the committed text: what is known, and what the lane was asked for
        self._masks: dict[Path, Mask | GuideError | None] = {}
        self._coming: dict[Path, Future[Allowed]] = {}
        self._clock = _Clock()
        self.complete = False  # nothing but an end may follow

    @property
    def slow(self) -> bool:
        """Whether masks may take longer than a step should: nothing is known yet, or they did."""
        return self.matcher is not None and not self._clock.quick

    def ready(self) -> bool:
        """Whether a step would find the mask it needs; has it computed if nothing has asked for it yet."""
        self._clock.begin_step()
        return self._note_end(self._find((), patient=not self.slow))

    @property
    def settled(self) -> bool:
        """Whether the mask behind the committed text is there."""
        return () in self._masks

    def knows(self, path: Path) -> bool:
        """Whether the mask behind a drafted path is there, or comes within a moment."""
        return self._find(path, patient=True)

    def mask(self, path: Path = ()) -> Mask | None:
        """What may follow `path`, None if anything may; waits for it as long as that takes."""
        self._find(path, patient=None)
        found = self._masks[path]
        if isinstance(found, GuideError):
            raise found
        return found

    def draft_mask(self, path: Path) -> Mask | None:
        """The mask behind a drafted path, which nothing depends on: refused if this step's masks take long."""
        if path not in self._masks and (self._clock.exhausted or not self.knows(path)):
            raise GuideError("the masks of this step take long enough")
        return self.mask(path)

    def observe(self, token: int) -> None:
        """Takes a committed token, which the mask before it has allowed."""
        self._written.append(token)
        self._clock.tokens += 1
        if self._budget is not None:
            self._budget.observe(token)
        self._masks = {path[1:]: found for path, found in self._masks.items() if path[:1] == (token,)}
        for path in [path for path in self._coming if path[:1] != (token,)]:
            self._coming.pop(path).cancel()
        self._coming = {path[1:]: future for path, future in self._coming.items()}
        self._note_end(self._find((), patient=not self.slow))

    def abandon(self) -> None:
        """Its request is over: a mask that nothing waits for any more is not begun."""
        for future in self._coming.values():
            future.cancel()
        if self.matcher is not None:
            self._lane.submit(self.matcher.close)

    def _note_end(self, found: bool) -> bool:
        mask = self._masks.get(())
        self.complete = bool(self._written) and isinstance(mask, Mask) and mask.end
        return found

    def _find(self, path: Path, patient: bool | None) -> bool:
        """Whether what is behind a path is known, or comes within what a step may wait; None waits until it does."""
        if path in self._masks:
            return True
        forced = self._budget.forced(path) if self._budget is not None else None
        if forced is not None:
            self._masks[path] = Mask.single(forced, self._vocab_size)
        elif self.matcher is None:
            self._masks[path] = None
        else:
            if path not in self._coming:
                work = partial(self.matcher, tuple(self._written), path)
                self._coming[path] = self._lane.submit(work, urgent=not self.slow)
            future = self._coming[path]
            began = time.monotonic()
            try:
                self._masks[path] = self._taken(self._lane.result(future, patient))
            except TimeoutError:
                if patient and future.running():
                    self._clock.waited_in_vain()
                return False
            except GuideError as error:
                self._masks[path] = error
            finally:
                self._clock.waited_s += time.monotonic() - began
            del self._coming[path]
        return True

    def _taken(self, answer: Allowed) -> Mask:
        self._clock.add(answer.work_s)
        self._clock.check()
        return Mask(answer.bits, self._vocab_size, answer.stopped)


class _Clock:
    """What one guide has cost in processor time of its process, and the engine's thread in time spent waiting.

    A grammar is slow by its own work alone, so that a busy machine makes no grammar slow.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._spent_s = 0.0
        self.waited_s = 0.0  # by the engine's thread in this step
        self._average_s = 0.0
        self._quick = 0  # quick answers in a row
        self._needed = 1  # of those, until the engine's thread waits for the guide

    def add(self, seconds: float) -> None:
        self._spent_s += seconds
        self._average_s += (seconds - self._average_s) / _AVERAGED_ANSWERS
        if seconds <= STEP_S:
            self._quick += 1
        else:
            self.waited_in_vain()

    def waited_in_vain(self) -> None:
        """A slow answer after quick ones has held up a step; doubling makes these few, however they are spread."""
        self._quick, self._needed = 0, 2 * self._needed

    def begin_step(self) -> None:
        self.waited_s = 0.0

    @property
    def quick(self) -> bool:
        return self._quick >= self._needed and self._average_s <= _QUICK_S

    @property
    def exhausted(self) -> bool:
        """Whether the step's drafts have had their share."""
        return self.waited_s > DRAFTS_WAIT_S

    def check(self) -> None:
        """Ends a request whose guide keeps taking long."""
        if self._spent_s > _GRACE_S + _TOKEN_S * self.tokens:
            raise GuideError(
                f"the grammar takes too long: {self._spent_s:.0f} s of work for {self.tokens} tokens (simplify it)"
            )


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
