"""A real matcher that tests can stop, slow down and observe, and that the guide of a request uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from slipstream.engine.llm import LLM
from slipstream.grammar.guide import Guide
from slipstream.grammar.mask_lane import Allowed, Matcher, Path
from slipstream.types import Request

# Seconds for which a closed gate holds a mask before it gives up, so that a faulty engine still ends its test.
PATIENCE_S = 20.0


class Watch:
    """The state that all copies of one matcher share."""

    def __init__(self, burn_s: float = 0.0) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.burn_s = burn_s  # seconds of work that every mask takes
        self.began = threading.Event()  # is set when a mask is begun
        self.gave_up = False  # whether waiting for a closed gate took longer than PATIENCE_S
        self.paths: list[Path] = []  # the paths whose masks were asked for, in order
        self.using = threading.Lock()


class WatchedMatcher(Matcher):
    """Passes questions on to the real matcher, and checks that only one thread at a time asks."""

    def __init__(self, matcher: Matcher, watch: Watch) -> None:
        self._matcher = matcher
        self._watch = watch

    def __call__(self, written: Sequence[int], path: Path) -> Allowed:
        watch = self._watch
        with _Alone(watch.using):
            watch.paths.append(path)
            watch.began.set()
            if not watch.gate.wait(PATIENCE_S):
                watch.gave_up = True
                watch.gate.set()
            time.sleep(watch.burn_s)
            answer = self._matcher(written, path)
            return replace(answer, work_s=answer.work_s + watch.burn_s)

    def close(self) -> None:
        self._matcher.close()


class _Alone:
    def __init__(self, using: threading.Lock) -> None:
        self._using = using

    def __enter__(self) -> None:
        assert self._using.acquire(blocking=False), "two threads use the matchers of one guide"

    def __exit__(self, *exc: object) -> None:
        self._using.release()


def add_watched(llm: LLM, request: Request, burn_s: float = 0.0, *, closed: bool = False) -> Watch:
    """Queues a constrained request whose masks are observed; if `closed`, they wait for a gate."""
    watch = Watch(burn_s)
    if closed:
        watch.gate.clear()
    llm.engine.add(request)
    guide = llm.engine.sequences[request.id].sampler.guide
    assert guide is not None
    watch_guide(guide, watch)
    return watch


def watch_guide(guide: Guide, watch: Watch) -> None:
    assert guide.matcher is not None
    guide.matcher = WatchedMatcher(guide.matcher, watch)
