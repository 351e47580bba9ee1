"""A thread beside the engine's that waits for masks, and what one request knows of its grammar in another process."""

from __future__ import annotations

import base64
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import PriorityQueue
from typing import Any, Protocol, TypeVar

from slipstream.errors import SlipstreamError
from slipstream.isolation import MIB, Helper, Limits, OverrunError

Result = TypeVar("Result")
Path = tuple[int, ...]

# A mask has the limits its grammar was compiled with and takes 0.2 s at most, but some grammars pass by these limits
# and never end. The process then ends, and the grammars of other requests are opened again in the next one.
# Opening takes as much as the trial of a constraint, so it has the same limits.
_LIMITS = Limits(cpu_s=2, memory_bytes=80 * MIB, answer_bytes=MIB, growth_bytes=256 * MIB)
# Of the engine's thread in a step, for the masks of all requests: one takes 0.2 ms, more on a busy machine. Above
# 0.1 s a mask that never ends would be noticed by its neighbours.
STEP_PATIENCE_S = 0.05
_MAX_WAIT_S = 0.02  # for the engine's thread, which must look at its commands now and then
_LOOK_S = 0.002  # the lane's thread looks this often whether quick work has come while slow work rests


class GuideError(Exception):
    """A grammar cannot go on; the reason in one line."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow a text: a bit per token, whether the text is over, and the processor time that took."""

    bits: bytes
    stopped: bool
    work_s: float


class Matcher(Protocol):
    """One request's grammar. Belongs to the lane's thread, where it may take its time."""

    def __call__(self, written: Sequence[int], path: Path) -> Allowed:
        """What may follow the written tokens and a drafted path behind them; `GuideError` says why nothing may."""

    def close(self) -> None: ...


class Lane:
    """One thread and its queue, and how long the engine's thread may wait for it; every engine has its own.

    Work that is not urgent is slow. After each piece of it the next one rests for as long as that piece took, because
    slow masks read much memory and slow down the model's steps. If the engine has nothing else to do, nothing rests.

    The thread starts with the first mask, and once more in a forked process. It is a daemon: the end of the interpreter
    does not wait for it.
    """

    def __init__(self) -> None:
        self._process = 0  # the one that the thread belongs to
        self._queue: PriorityQueue[_Item] = PriorityQueue()
        self._order = itertools.count()
        self._finished = threading.Event()
        self._idle = threading.Event()  # the engine has nothing to do until some work is done
        self._patience_s = STEP_PATIENCE_S

    def submit(self, work: Callable[[], Result], urgent: bool = True) -> Future[Result]:
        """Does the work behind what was submitted before; what is not urgent, behind everything that is."""
        if self._process != os.getpid():
            self._start()
        future: Future[Result] = Future()
        self._queue.put((not urgent, next(self._order), future, work))
        return future

    def begin_step(self) -> None:
        self._patience_s = STEP_PATIENCE_S

    def begin_forward(self) -> None:
        """The engine is about to run the model: slow work rests from now on."""
        self._idle.clear()

    def result(self, future: Future[Result], patient: bool | None) -> Result:
        """The outcome of a work: at once or not at all, within the step's patience, or (None) whenever it comes."""
        if patient is None:
            return future.result()
        began = time.monotonic()
        try:
            return future.result(self._patience_s if patient else 0.0)
        finally:
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began))

    def wait(self) -> None:
        """Sleeps until some work is done, for a moment at most; only an engine without other work may call this."""
        self._idle.set()
        self._finished.wait(_MAX_WAIT_S)
        self._finished.clear()

    def _start(self) -> None:
        self._process, self._queue = os.getpid(), PriorityQueue()
        self._finished, self._idle = threading.Event(), threading.Event()
        arguments = self._queue, self._finished, self._idle
        threading.Thread(target=_serve, args=arguments, name="masks", daemon=True).start()
        weakref.finalize(self, self._queue.put, (True, next(self._order), None, None))


_Item = tuple[bool, int, Future[Any] | None, Callable[[], Any] | None]


def _serve(queue: PriorityQueue[_Item], finished: threading.Event, idle: threading.Event) -> None:
    rested_at = 0.0  # when slow work may go on
    while True:
        slow, order, future, work = queue.get()
        if future is None or work is None:
            return
        if slow and time.monotonic() < rested_at and not idle.is_set():
            queue.put((slow, order, future, work))
            idle.wait(_LOOK_S)
            continue
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
        finished.set()


class MaskProcess:
    """The process that computes the masks of one engine's requests."""

    def __init__(self, vocabulary: Callable[[], Sequence[Any]]) -> None:
        self.helper = Helper(
            "slipstream.grammar.helper_process:desk", _LIMITS, vocabulary, "process that computes masks"
        )
        self.ended: list[int] = []  # requests that the process may forget
        self._numbers = itertools.count()

    def open(self, kind: str, source: str, before: str | None) -> Matcher:
        """A request's place in a grammar, at its start; the process hears of it with the first mask."""
        return _RemoteMatcher(self, next(self._numbers), (kind, source, before))


class _RemoteMatcher:
    def __init__(self, process: MaskProcess, number: int, opening: tuple[str, str, str | None]) -> None:
        self._process = process
        self._number = number
        self._opening = opening
        self._told = 0  # of the written tokens, how many the process knows

    def __call__(self, written: Sequence[int], path: Path) -> Allowed:
        try:
            answer = self._ask(None, written[self._told :], path)
            if answer is None:  # a new process, or one that has never heard of this request
                answer = self._ask(self._opening, written, path)
        except OverrunError as error:
            raise GuideError(f"the grammar takes too long: computing what may follow {error} (simplify it)") from None
        except SlipstreamError as error:
            raise GuideError(f"the constraint cannot go on: {error.message}") from None
        except Exception as error:  # whatever it is, it must end this request only
            raise GuideError(f"the constraint cannot go on: {type(error).__name__}: {error}") from error
        self._told = len(written)
        bits, stopped, work_s = answer
        return Allowed(base64.b64decode(bits), stopped, work_s)

    def _ask(self, opening: Sequence[Any] | None, tokens: Sequence[int], path: Path) -> Any:
        ended, self._process.ended = self._process.ended, []
        return self._process.helper(self._number, opening, list(tokens), path, ended)

    def close(self) -> None:
        self._process.ended.append(self._number)
