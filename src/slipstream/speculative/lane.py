"""A thread beside the engine's for masks that may take long, and a rest that keeps costly sequences from the steps."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# A grammar's state moves on under the interpreter lock, on the engine's thread. Sequences whose grammar is slow at that
# wait this many times as long before their next step, so that all of them together take a fifth of the time at most.
_REST_PER_SECOND = 4.0
# Where cores are few, the lane's thread gets a tenth of what a thread of the model gets. It holds the interpreter lock
# for microseconds at a time; with a larger number it could hold up other threads while it waits for a core.
_NICENESS = 10
_MAX_WAIT_S = 0.02  # for the engine's thread, which must look at its commands now and then


class Lane:
    """One thread and its queue; every engine has its own.

    The thread only starts where a request has a grammar. It is no daemon: a thread inside a library must not meet the
    end of the interpreter. A mask has limits of its own, so that the process waits for less than a second.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="masks", initializer=_give_way)
        self._finished = threading.Event()
        self._rests_until = 0.0

    def submit(self, work: Callable[[], T], owed_s: float) -> Future[T]:
        """Does the work behind what was submitted before; `owed_s` is what its sequence has just cost the engine."""
        self._rests_until = max(self._rests_until, time.monotonic()) + _REST_PER_SECOND * owed_s
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self._finished.set())
        return future

    @property
    def resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def wait(self) -> None:
        """Sleeps until some work is done or the rest is over, for a moment at most."""
        rest = self._rests_until - time.monotonic()
        self._finished.wait(min(_MAX_WAIT_S, rest) if rest > 0 else _MAX_WAIT_S)
        self._finished.clear()


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere it is the whole process that would become nicer
        os.nice(_NICENESS)
