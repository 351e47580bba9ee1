"""A real matcher that can be stopped, slowed down and looked at, put under the guide of a request."""

from __future__ import annotations

import threading
import time
from typing import Any

from slipstream.engine.llm import LLM
from slipstream.types import Request

PATIENCE_S = 20.0  # how long a closed gate holds a mask before it gives up, so that a faulty engine ends its test


class Watch:
    """What all copies of one matcher share."""

    def __init__(self, burn_s: float = 0.0) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.burn_s = burn_s  # of work that every mask takes
        self.began = threading.Event()  # some mask was begun
        self.gave_up = False  # a closed gate was waited for until patience ended
        self.threads: list[str] = []  # that computed a mask, in order
        self.masks: dict[tuple[int, ...], bytes] = {}  # by the tokens before it
        self.using = threading.Lock()


class WatchedMatcher:
    """Passes everything on; insists on one thread at a time, and on a mask that has allowed what is consumed."""

    def __init__(self, matcher: Any, watch: Watch, written: tuple[int, ...] = ()) -> None:
        self._matcher = matcher
        self._watch = watch
        self._written = written

    def deep_copy(self) -> WatchedMatcher:
        with self._alone():
            return WatchedMatcher(self._matcher.deep_copy(), self._watch, self._written)

    def compute_bitmask(self) -> bytes:
        watch = self._watch
        with self._alone():
            watch.threads.append(threading.current_thread().name)
            watch.began.set()
            if not watch.gate.wait(PATIENCE_S):
                watch.gave_up = True
                watch.gate.set()
            until = time.thread_time() + watch.burn_s
            while time.thread_time() < until:
                pass
            bits: bytes = self._matcher.compute_bitmask()
            watch.masks[self._written] = bits
            return bits

    def consume_token(self, token: int) -> bool:
        return self.consume_tokens([token])

    def consume_tokens(self, tokens: list[int]) -> bool:
        with self._alone():
            for token in tokens:
                bits = self._watch.masks.get(self._written)
                assert bits is not None and bits[token >> 3] >> (token & 7) & 1, "consumed before a mask allowed it"
                self._written = (*self._written, token)
            return bool(self._matcher.consume_tokens(tokens))

    def is_error(self) -> bool:
        return bool(self._matcher.is_error())

    def get_error(self) -> str:
        return str(self._matcher.get_error())

    def is_stopped(self) -> bool:
        return bool(self._matcher.is_stopped())

    def _alone(self) -> _Alone:
        return _Alone(self._watch.using)


class _Alone:
    def __init__(self, using: threading.Lock) -> None:
        self._using = using

    def __enter__(self) -> None:
        assert self._using.acquire(blocking=False), "two threads use the matchers of one guide"

    def __exit__(self, *exc: object) -> None:
        self._using.release()


def add_watched(llm: LLM, request: Request, burn_s: float = 0.0, *, closed: bool = False) -> Watch:
    """Queues a constrained request whose masks are watched, and wait for a gate if it is closed."""
    watch = Watch(burn_s)
    if closed:
        watch.gate.clear()
    llm.engine.add(request)
    guide = llm.engine._sessions[request.id].sampler.guide
    assert guide is not None
    guide._matcher = guide._scout = WatchedMatcher(guide._matcher, watch)  # type: ignore[assignment]
    return watch
