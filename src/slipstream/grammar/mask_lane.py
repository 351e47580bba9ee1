"""A thread beside the engine's thread that waits for masks, and the connection to the process that computes them."""

from __future__ import annotations

import base64
import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.errors import SlipstreamError
from slipstream.isolation import MIB, Helper, Limits, OverrunError

Result = TypeVar("Result")
Path = tuple[int, ...]

# Every mask has the limits with which its grammar was compiled and takes at most 0.2 s, but some grammars evade those
# limits and never end. Their process is then killed, and the grammars of other requests are opened again in the next
# process. Opening a grammar costs as much as its trial, so both have the same limits.
MASK_LIMITS = Limits(cpu_s=2, memory_bytes=80 * MIB, answer_bytes=MIB, growth_bytes=256 * MIB)
# The engine's thread waits this long in a step for the masks of all requests together. One mask takes 0.2 ms, and more
# on a busy machine. Above 0.1 s, one mask that never ends would visibly delay the other requests.
STEP_PATIENCE_S = 0.05
_MAX_WAIT_S = 0.02  # the longest sleep of the engine's thread, because it must look at its commands regularly


class GuideError(Exception):
    """A grammar cannot continue; the message gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow a text: one bit per token, whether the text is over, and the processor time of the answer."""

    bits: bytes
    stopped: bool
    work_s: float


class Lane:
    """One thread with its queue, and the time that the engine's thread may wait for it. Every engine has its own lane.

    Work that is not urgent counts as slow. After each piece of slow work the next one waits for as long as that piece
    took, because slow masks read much memory and slow down the model's steps. There is no such pause while the engine
    has nothing else to do.

    The thread starts with the first mask, and again in a forked process. It is a daemon thread, so the interpreter does
    not wait for it when it ends.
    """

    def __init__(self) -> None:
        self._process = 0  # id of the process in which the thread runs
        self._line = _Line()
        self._order = itertools.count()
        self._patience_s = STEP_PATIENCE_S
        self.shared = False  # whether the running step has several sequences, which then all wait for a mask

    def submit(self, work: Callable[[], Result], urgent: bool = True) -> Future[Result]:
        """Queues work behind what was submitted before; work that is not urgent goes behind all urgent work."""
        if self._process != os.getpid():
            self._start()
        future: Future[Result] = Future()
        self._line.put((not urgent, next(self._order), future, work))
        return future

    def begin_step(self) -> None:
        self._patience_s = STEP_PATIENCE_S

    def begin_forward(self, sequences: int) -> None:
        """Says that the engine is about to run the model; from now on there are pauses between pieces of slow work."""
        self._line.idle = False
        self.shared = sequences > 1

    def result(self, future: Future[Result], patient: bool | None) -> Result:
        """Returns the outcome of some work, or raises TimeoutError.

        `patient` False does not wait, True waits within the step's patience, and None waits until the work is done.
        """
        if patient is None:
            return future.result()
        began = time.monotonic()
        try:
            return future.result(self._patience_s if patient else 0.0)
        finally:
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began))

    def wait(self) -> None:
        """Sleeps until some work is done, at most `_MAX_WAIT_S`; only an engine without other work may call this."""
        self._line.let_slow_work_start()
        self._line.finished.wait(_MAX_WAIT_S)
        self._line.finished.clear()

    def _start(self) -> None:
        self._process, self._line = os.getpid(), _Line()
        threading.Thread(target=_serve, args=(self._line,), name="masks", daemon=True).start()
        weakref.finalize(self, self._line.put, (True, next(self._order), None, None))


_Item = tuple[bool, int, Future[Any] | None, Callable[[], Any] | None]


class _Line:
    """The work that waits for a lane's thread. The thread refers only to it, so the lane itself can be dropped."""

    def __init__(self) -> None:
        self.idle = False  # whether the engine has nothing to do until some work is done
        self.finished = threading.Event()
        self._changed = threading.Condition()
        self._items: list[_Item] = []  # a heap: urgent work comes first, then work that was submitted earlier

    def put(self, item: _Item) -> None:
        with self._changed:
            heapq.heappush(self._items, item)
            self._changed.notify()

    def let_slow_work_start(self) -> None:
        """Ends the pause between two pieces of slow work, because the engine is idle."""
        with self._changed:
            self.idle = True
            self._changed.notify()

    def take(self, rested_at: float) -> _Item:
        """Waits for work and returns it; slow work is returned from `rested_at` on, or while the engine is idle."""
        with self._changed:
            while True:
                slow = bool(self._items) and self._items[0][0]
                rest_s = rested_at - time.monotonic() if slow and not self.idle else 0.0
                if self._items and rest_s <= 0:
                    return heapq.heappop(self._items)
                self._changed.wait(rest_s if self._items else None)


def _serve(line: _Line) -> None:
    rested_at = 0.0  # when the next piece of slow work may start
    while True:
        slow, _, future, work = line.take(rested_at)
        if future is None or work is None:
            return
        began, work_s = time.monotonic(), 0.0
        if future.set_running_or_notify_cancel():
            try:
                result = work()
                work_s = result.work_s if isinstance(result, Allowed) else 0.0
                future.set_result(result)
            except BaseException as error:
                work_s = time.monotonic() - began
                future.set_exception(error)
        if slow:
            rested_at = time.monotonic() + work_s
        del future, work
        line.finished.set()


_numbers = itertools.count()  # each request with a grammar takes the next number


class Matcher:
    """One request's grammar in the process that computes masks; the process gets it when the first mask is asked for.

    Only the lane's thread calls it, because a call may take long.
    """

    def __init__(self, process: Helper, opening: tuple[str, str, str | None], ended: list[int]) -> None:
        """`opening` is the kind of the constraint, its text, and the grammar of the reasoning before it.

        `ended` has the numbers of requests that the process may forget; all matchers of a process share it.
        """
        self._process = process
        self._opening = opening
        self._ended = ended
        self._number = next(_numbers)
        self._known_tokens = 0  # how many of the written tokens the process knows

    def __call__(self, written: Sequence[int], path: Path) -> Allowed:
        """Returns what may follow the written tokens and a drafted path; raises `GuideError` if nothing may."""
        try:
            answer = self._ask(None, written[self._known_tokens :], path)
            if answer is None:  # the process is new, or does not know this request
                answer = self._ask(self._opening, written, path)
        except OverrunError as error:
            raise GuideError(f"the grammar takes too long: computing what may follow {error} (simplify it)") from None
        except SlipstreamError as error:
            raise GuideError(f"the constraint cannot go on: {error.message}") from None
        except Exception as error:  # any failure must end this request only
            raise GuideError(f"the constraint cannot go on: {type(error).__name__}: {error}") from error
        self._known_tokens = len(written)
        bits, stopped, work_s = answer
        return Allowed(base64.b64decode(bits), stopped, work_s)

    def _ask(self, opening: Sequence[Any] | None, tokens: Sequence[int], path: Path) -> Any:
        ended = self._ended.copy()
        self._ended.clear()
        return self._process(self._number, opening, list(tokens), path, ended)

    def close(self) -> None:
        self._ended.append(self._number)
