"""A lock that is held while an engine steps, so that the interpreter does not end in the middle of one."""

from __future__ import annotations

import atexit
import os
import threading
import weakref

_EXIT_WAIT_S = 10.0  # for a step that runs when the process ends


class StepLock:
    """Held by a step. The end of the interpreter takes it and keeps it, so that no further step begins.

    Python would end a daemon thread inside compiled code, which aborts the process.
    """

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """In a forked process: a thread that holds the lock did not survive the fork."""
        self._lock = threading.Lock()

    def keep(self) -> None:
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
