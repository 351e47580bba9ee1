"""A lock that is held while an engine steps, so that the interpreter does not end in the middle of a step."""

from __future__ import annotations

import atexit
import os
import threading
import weakref

# The end of the process waits so long for a running step. If the step takes longer, the process ends in its middle and
# may abort; a larger value would keep a process with a hanging step alive for longer.
_EXIT_WAIT_S = 10.0


class StepLock:
    """A lock that every step holds. The interpreter takes it for good when it ends, so that no further step begins.

    Otherwise Python would end a daemon thread inside compiled code, which aborts the process.
    """

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """Makes a new lock in a forked process, where a thread that held the old one does not exist."""
        self._lock = threading.Lock()

    def keep(self) -> None:
        """Takes the lock and never gives it back."""
        self._lock.acquire(timeout=_EXIT_WAIT_S)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[StepLock] = weakref.WeakSet()


@atexit.register
def _keep_all() -> None:
    for lock in list(_locks):
        lock.keep()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
