"""A thread beside the engine's that waits for masks, and what one request knows of its grammar in another process."""

from __future__ import annotations

import base64
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from slipstream.errors import SlipstreamError
from slipstream.isolation import MIB, Helper, Limits, OverrunError

Result = TypeVar("Result")
Path = tuple[int, ...]

# A mask has the limits its grammar was compiled with and takes 0.2 s at most, but some grammars pass by these limits
# and never end. The process then ends, and other requests have theirs opened again in the next one.
_LIMITS = Limits(cpu_s=1, memory_bytes=80 * MIB, answer_bytes=MIB, growth_bytes=256 * MIB)
_MAX_WAIT_S = 0.02  # for the engine's thread, which must look at its commands now and then


class GuideError(Exception):
    """A grammar cannot go on; the reason in one line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What may follow a text: a bit per token, whether the text is over, and the processor time that took."""

    bits: bytes
    stopped: bool
    work_s: float


class Matcher(Protocol):
    """One request's grammar. Belongs to the lane's thread, where it may take its time."""

    def __call__(self, written: Sequence[int], path: Path) -> Answer:
        """What may follow the written tokens and a drafted path behind them; `GuideError` says why nothing may."""

    def close(self) -> None: ...


class Lane:
    """One thread and its queue; every engine has its own. The thread starts with the first mask."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._finished = threading.Event()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Does the work behind what was submitted before."""
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self._finished.set())
        return future

    def wait(self) -> None:
        """Sleeps until some work is done, for a moment at most."""
        self._finished.wait(_MAX_WAIT_S)
        self._finished.clear()


class MaskProcess:
    """The process that computes the masks of one engine's requests."""

    def __init__(self, vocabulary: Callable[[], Sequence[Any]]) -> None:
        self.helper = Helper(
            "slipstream.speculative.grammar_process:desk", _LIMITS, vocabulary, "process that computes masks"
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

    def __call__(self, written: Sequence[int], path: Path) -> Answer:
        try:
            answer = self._ask(None, written[self._told :], path)
            if answer is None:  # a new process, or one that has never heard of this request
                answer = self._ask(self._opening, written, path)
        except OverrunError as error:
            raise GuideError(f"the grammar takes too long: computing what may follow {error} (simplify it)") from None
        except SlipstreamError as error:
            raise GuideError(f"the constraint cannot go on: {error.message}") from None
        self._told = len(written)
        bits, stopped, work_s = answer
        return Answer(base64.b64decode(bits), stopped, work_s)

    def _ask(self, opening: Sequence[Any] | None, tokens: Sequence[int], path: Path) -> Any:
        ended, self._process.ended = self._process.ended, []
        return self._process.helper(self._number, opening, list(tokens), path, ended)

    def close(self) -> None:
        self._process.ended.append(self._number)
