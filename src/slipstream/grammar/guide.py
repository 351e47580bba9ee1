"""What one request may write next: masks after the committed text and after drafted paths, and the end of reasoning.

A guide answers for any drafted path after the committed text, so that a row of a proposal gets exactly the mask that
plain decoding would get at that place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial, reduce
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import RequestError
from slipstream.grammar.mask_lane import Allowed, GuideError, Lane, Matcher, Path
from slipstream.lazy import cached_property
from slipstream.types import Thinking

# The engine's thread waits this long in a step for the masks of one request's drafts. A mask takes 0.7 ms on two cores,
# a step 4 ms and more. Every request of the step waits too: with 4 ms, one constrained request made the others twice as
# slow.
DRAFTS_WAIT_S = 0.001
# The drafts of one step get masks until these took this much work in all; an answer that took no more counts as quick.
# A short step lasts about as long.
STEP_S = 0.004
# A step waits for a guide only if its answers take at most this much work on average; ordinary grammars take 0.1 ms.
_QUICK_S = 0.001
_AVERAGED_ANSWERS = 5  # about so many answers count in the average
# A request ends with an error if its guide takes more work than this: 10 s and another 0.1 s per token. An ordinary
# grammar takes 0.1 ms per token, a large one 5 ms.
GRACE_S = 10.0
GRACE_TOKEN_S = 0.1


class Vocabulary(Protocol):
    """What this package needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def bos_id(self) -> int | None: ...
    def token_bytes(self, index: int) -> bytes: ...
    def is_special(self, index: int) -> bool: ...
    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]: ...
    def serialized(self) -> str | None:
        """Returns the tokenizer for another process; None lets that process split texts greedily."""


class Mask:
    """The tokens allowed at one place. `only` is set if there is just one, `end` if the text is complete there."""

    def __init__(self, bits: bytes, vocab_size: int, end: bool = False) -> None:
        """`bits` has one bit per token, the lowest first."""
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
        """A flag per token. It is computed on demand, because most masks are asked about a few tokens only."""
        flags = np.unpackbits(np.frombuffer(self._bits, np.uint8), count=self._vocab_size, bitorder="little")
        return flags.view(np.bool_)


class Guide:
    """What one request may write next, after the committed text and any drafted tokens that follow it.

    Masks come from another process through a lane, and the engine's thread waits for them only briefly. While the mask
    after the committed text is missing, the request's sequence is left out of the steps. If the mask after a drafted
    path is missing, that draft is not kept. Nothing is drafted for a guide whose masks are slow.
    """

    def __init__(self, matcher: Matcher | None, lane: Lane, budget: Budget | None, vocab_size: int) -> None:
        self.matcher = matcher
        self._lane = lane
        self._budget = budget
        self._vocab_size = vocab_size
        self._written: list[int] = []
        # by path after the committed text: the masks (or errors) that are known, and those that the lane is computing
        self._masks: dict[Path, Mask | GuideError | None] = {}
        self._requested: dict[Path, Future[Allowed]] = {}
        self._clock = _Clock()
        self.complete = False  # whether only an end token may follow

    @property
    def slow(self) -> bool:
        """Whether masks may take longer than a step should wait: they did before, or none has been computed yet."""
        return self.matcher is not None and not self._clock.quick

    def ready(self) -> bool:
        """Whether a step would find the mask it needs. If nothing has asked for that mask yet, it is requested here."""
        self._clock.begin_step()
        return self._find_next()

    @property
    def settled(self) -> bool:
        """Whether the mask after the committed text is known."""
        return () in self._masks

    def knows(self, path: Path) -> bool:
        """Whether the mask after a drafted path is known, or arrives while a step may wait."""
        return self._find(path, patient=True)

    def mask(self, path: Path = ()) -> Mask | None:
        """Returns what may follow `path`, or None if anything may. It waits until the mask is known."""
        self._find(path, patient=None)
        found = self._masks[path]
        if isinstance(found, GuideError):
            raise found
        return found

    def draft_mask(self, path: Path) -> Mask | None:
        """Returns the mask after a drafted path. It raises `GuideError` if the masks of this step take too long.

        A draft can be dropped without changing the text, so a step does not wait long for its mask.
        """
        exhausted = self._clock.exhausted(self._lane.shared)
        if path not in self._masks and (exhausted or not self.knows(path)):
            raise GuideError("the masks of this step take too long")
        return self.mask(path)

    def observe(self, token: int) -> None:
        """Takes a committed token, which the mask before it allows."""
        self._written.append(token)
        self._clock.tokens += 1
        if self._budget is not None:
            self._budget.observe(token)
        self._masks = {path[1:]: found for path, found in self._masks.items() if path[:1] == (token,)}
        for path in [path for path in self._requested if path[:1] != (token,)]:
            self._requested.pop(path).cancel()
        self._requested = {path[1:]: future for path, future in self._requested.items()}
        self._find_next()

    def abandon(self) -> None:
        """Ends the guide when its request is over, and cancels masks that have not been started."""
        for future in self._requested.values():
            future.cancel()
        if self.matcher is not None:
            self._lane.submit(self.matcher.close)

    def _find_next(self) -> bool:
        """Whether the mask after the committed text is known; notes whether the text has to end there."""
        found = self._find((), patient=not self.slow)
        mask = self._masks.get(())
        self.complete = bool(self._written) and isinstance(mask, Mask) and mask.end
        return found

    def _find(self, path: Path, patient: bool | None) -> bool:
        """Whether the mask after a path is known, or becomes known while the step may wait.

        `patient` False does not wait, True waits within the step's patience, and None waits until the mask is known.
        """
        if path in self._masks:
            return True
        forced = self._budget.forced(path) if self._budget is not None else None
        if forced is not None:
            self._masks[path] = Mask.single(forced, self._vocab_size)
        elif self.matcher is None:
            self._masks[path] = None
        else:
            if path not in self._requested:
                work = partial(self.matcher, tuple(self._written), path)
                self._requested[path] = self._lane.submit(work, urgent=not self.slow)
            future = self._requested[path]
            began = time.monotonic()
            try:
                answer = self._lane.result(future, patient)
                self._clock.add(answer.work_s)
                self._masks[path] = Mask(answer.bits, self._vocab_size, answer.stopped)
            except TimeoutError:
                if patient and future.running():
                    self._clock.waited_in_vain()
                return False
            except GuideError as error:
                self._masks[path] = error
            finally:
                self._clock.waited_s += time.monotonic() - began
            del self._requested[path]
        return True


class _Clock:
    """What one guide has cost: processor time of the mask process, and time that the engine's thread waited.

    Only the processor time decides whether a grammar is slow, so that a busy machine does not make grammars look slow.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._spent_s = 0.0
        self.waited_s = 0.0  # how long the engine's thread has waited in this step
        self._step_s = 0.0  # processor time of this step's masks
        self._average_s = 0.0
        self._quick = 0  # quick answers in a row
        self._needed = 1  # how many quick answers in a row are needed before the engine's thread waits again

    def add(self, seconds: float) -> None:
        """Adds the work of an answer; raises `GuideError` if the guide has taken more than its request may."""
        self._spent_s += seconds
        self._step_s += seconds
        self._average_s += (seconds - self._average_s) / _AVERAGED_ANSWERS
        if seconds <= STEP_S:
            self._quick += 1
        else:
            self.waited_in_vain()
        if self._spent_s > GRACE_S + GRACE_TOKEN_S * self.tokens:
            raise GuideError(
                f"the grammar takes too long: {self._spent_s:.0f} s of work for {self.tokens} tokens (simplify it)"
            )

    def waited_in_vain(self) -> None:
        """Notes that a slow answer has held up a step.

        Doubling `_needed` keeps such steps rare, however the slow answers are spread over the text.
        """
        self._quick, self._needed = 0, 2 * self._needed

    def begin_step(self) -> None:
        self.waited_s = self._step_s = 0.0

    @property
    def quick(self) -> bool:
        return self._quick >= self._needed and self._average_s <= _QUICK_S

    def exhausted(self, shared: bool) -> bool:
        """Whether this step's drafts get no more masks; in a `shared` step other sequences wait too."""
        return self._step_s > STEP_S or (shared and self.waited_s > DRAFTS_WAIT_S)


@dataclass(frozen=True, slots=True)
class _Reasoning:
    """How far the reasoning of a text is: it has not begun, is going on, is being ended, or is over."""

    phase: str  # before, inside, ending, over
    spent: int = 0  # tokens of the reasoning or, while it is being ended, of the end tag
    tail: bytes = b""  # the end of the text that may still become a tag


class Budget:
    """Ends the reasoning when its budget is spent, by forcing the tokens of the end tag one by one."""

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
        """Returns the only token that may follow a path, or None if the budget forces none there."""
        return self._forced(reduce(self._after, path, self._now))

    def _forced(self, state: _Reasoning) -> int | None:
        if state.phase == "ending":
            return self._end_tokens[state.spent]
        # a tag after half of a character would be unreadable, so the reasoning may first finish that character
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
    """Returns the end of a text, long enough to recognise a tag or an unfinished character."""
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
