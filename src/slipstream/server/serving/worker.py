"""The one thread that owns an engine: it takes commands between steps, and it sleeps while there is no work."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from slipstream.engine.llm import LLM
from slipstream.engine.snapshots import LineSnapshot, SequenceSnapshot
from slipstream.errors import BusyError, EngineFailedError, RequestError, SlipstreamError, StaleEpochError
from slipstream.types import GenEvent, Request

T = TypeVar("T")
Sink = Callable[[GenEvent], None]
PauseSink = Callable[[int, int], None]  # called with the epoch of the pause and the number of tokens written so far
_log = logging.getLogger("slipstream.worker")
# The shortest and the longest time that a refused client is told to wait. With a shorter one, clients would ask again
# before anything can have ended; with a longer one, they would stay away from a line that is empty again.
_RETRY_LIMITS_S = (1.0, 60.0)
# The weight of the past in the moving average of the time between two ends of requests: about the last five ends count.
# A larger weight follows changes too slowly, a smaller one lets single requests decide.
_PAST_WEIGHT = 0.8


@dataclass(frozen=True, slots=True)
class SlotInfo(SequenceSnapshot):
    """How far one request has come, and what the worker knows about its pauses."""

    epoch: int
    paused: bool
    seconds: float  # since the request was submitted


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """An engine at one moment; `waiting` counts requests that have never had a slot."""

    slots: list[SlotInfo]
    waiting: int
    pages_used: int
    pages_cached: int  # of the used pages, those that the prefix cache remembers; running requests may share them
    pages_total: int
    max_sequences: int
    max_waiting: int


@dataclass(slots=True)
class _Open:
    """An open request: where its events go, and whether it should run, be paused or be held.

    A caller changes these fields at once and does not wait; the engine follows them between two steps.
    """

    sink: Sink
    submitted_at: float = field(default_factory=time.monotonic)
    generated: int = 0
    epoch: int = 0  # rises with every pause; a call that resumes the request must name the current one
    paused: bool = False
    held: bool = False  # its client reads too slowly; this is not a pause, so the client need not resume the request
    pause_at: int | None = None
    on_pause: PauseSink | None = None


class EngineWorker:
    """Runs requests from any thread; sinks are called on the engine's thread, in order, and must not block.

    A request's last event is always delivered. If the thread ends unexpectedly, that event is an error with the reason.
    """

    def __init__(self, llm: LLM, name: str) -> None:
        self.name = name
        self.failure: str | None = None
        self.thread = threading.Thread(target=self._main, name=f"engine-{name}", daemon=True)
        self._engine = llm.engine
        self._config = llm.config
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], object]] = deque()
        self._open: dict[str, _Open] = {}
        self._questions: set[Future[Any]] = set()  # questions of other threads that are not answered yet
        self._arriving = 0  # requests that were submitted but are not added to the engine yet
        self._line = LineSnapshot(0, 0)  # the engine's line after the last step or command
        self._stopping = False
        self._last_end = 0.0
        self._end_interval_s = _RETRY_LIMITS_S[0]

    @property
    def alive(self) -> bool:
        """Whether the worker takes requests and runs them."""
        return self.thread.is_alive() and self.failure is None and not self._stopping

    def start(self) -> None:
        self.thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request; raises in the caller's thread if the request could never run or finds no room."""
        self._require_alive()
        self._engine.check(request)
        with self._wake:
            if request.id in self._open:
                raise RequestError(f"a request '{request.id}' is running already", "give every request its own id")
            self.check_room()
            self._open[request.id] = _Open(sink)
            self._arriving += 1
            self._tell(partial(self._add, request))

    def check_room(self, preparing: int = 0) -> None:
        """Refuses a request that would find no room now, before its prompt is prepared.

        `preparing` is the number of requests whose prompts are being prepared.
        """
        with self._wake:
            self._require_alive()
            # Requests that wait for their next turn count too; otherwise a full line could grow without end.
            waiting, limit = self._arriving + self._line.waiting, self._config.max_waiting
            # Paused requests stand in no line, but each keeps its prompt and its answer in memory.
            opened = len(self._open) + preparing
            if waiting >= limit:
                said = f"{waiting} requests are waiting for '{self.name}' already"
            elif opened >= limit + self._config.max_sequences:
                said = f"{opened} requests of '{self.name}' are open already, paused ones included"
            else:
                return
            low, high = _RETRY_LIMITS_S
            # By then, about half of the line has probably got a slot; a client that comes sooner may be refused again.
            raise BusyError(said, retry_after_s=min(high, max(low, self._end_interval_s * waiting / 2)))

    def cancel(self, request_id: str, epoch: int | None = None) -> bool:
        """Ends a request at the next step, also a paused one; returns False if it is over already.

        If an epoch is given, it must be the current one.
        """
        with self._wake:
            if request_id not in self._open:
                return False
            self._known(request_id, epoch)
            self._tell(partial(self._engine.cancel, request_id))
            return True

    def pause_at(self, request_id: str, tokens: int, on_pause: PauseSink) -> None:
        """Pauses a request after the step in which it reaches `tokens` tokens; the pause frees its slot.

        The request keeps its pages until other requests cannot start without them. `on_pause` is called on the engine's
        thread, after the sink has got that step's event.
        """
        with self._wake:
            known = self._known(request_id)
            known.pause_at, known.on_pause = tokens, on_pause
            self._tell(partial(self._pause_if_due, request_id, known))

    def resume(self, request_id: str, epoch: int) -> None:
        """Resumes a paused request; if the engine is exact, its text is the same as without the pause."""
        with self._wake:
            known = self._known(request_id, epoch)
            if not known.paused:
                raise StaleEpochError("the request is not paused", "it was resumed already, or never stopped")
            known.paused = False
            self._tell(partial(self._follow, request_id, known))

    def hold(self, request_id: str, held: bool) -> None:
        """Keeps a request out of the steps while its client reads too slowly; the epoch does not change."""
        with self._wake:
            known = self._open.get(request_id)
            if known is not None and known.held != held:
                known.held = held
                self._tell(partial(self._follow, request_id, known))

    def knows(self, request_id: str) -> bool:
        """Whether the request is open on this engine."""
        return request_id in self._open

    def snapshot(self) -> WorkerSnapshot:
        """How far every request is. It does not wait for a step to end, so its numbers may come from two steps."""
        now, seen, slots = time.monotonic(), self._engine.snapshot(), []
        for sequence in seen.sequences:
            known = self._open.get(sequence.request_id)
            if known is not None and sequence.phase != "waiting":
                slots.append(
                    SlotInfo(
                        **asdict(sequence), epoch=known.epoch, paused=known.paused, seconds=now - known.submitted_at
                    )
                )
        waiting = self._arriving + self._line.newcomers
        limits = self._config.max_sequences, self._config.max_waiting
        return WorkerSnapshot(slots, waiting, seen.pages_used, seen.pages_cached, seen.pages_total, *limits)

    def ask(self, question: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Calls `question` on the engine's thread between two steps and returns its answer; it blocks until then."""
        answer: Future[T] = Future()

        def find() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        with self._wake:
            self._require_alive()
            self._questions.add(answer)
            self._tell(find)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise EngineFailedError(f"the engine of '{self.name}' does not answer", "try again") from None
        finally:
            with self._wake:
                self._questions.discard(answer)

    def stop(self, timeout_s: float) -> bool:
        """Refuses new requests, cancels the open ones and waits for the end of the thread; returns whether it is over.

        With a short `timeout_s`, the step of a slow engine may still run.
        """
        with self._wake:
            self._stopping = True
            for request_id in self._open:
                self._tell(partial(self._engine.cancel, request_id))
            self._wake.notify_all()
        if self.thread.ident is None:
            self._end(None)
            return True
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _require_alive(self) -> None:
        if not self.alive:
            reason = self.failure or ("it was asked to stop" if self._stopping else "its thread does not run")
            raise EngineFailedError(f"the engine of '{self.name}' takes no requests: {reason}", "try again")

    def _known(self, request_id: str, epoch: int | None = None) -> _Open:
        known = self._open.get(request_id)
        if known is None:
            raise StaleEpochError("the request does not run", "it has ended, or never began")
        if epoch is not None and epoch != known.epoch:
            raise StaleEpochError(f"the request is at epoch {known.epoch}, not {epoch}")
        return known

    def _tell(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wake.notify_all()

    # The methods below run on the engine's thread.

    def _main(self) -> None:
        failure: str | None = "the engine's thread was ended from outside"
        try:
            while self._obey():
                events = self._engine.step()
                self._count_line()
                for event in events:
                    self._deliver(event)
            failure = None
        except BaseException as error:  # whatever ends this thread, open requests must get an error
            failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            _log.error("the engine of '%s' failed", self.name, exc_info=error)
        finally:
            self._end(failure)

    def _obey(self) -> bool:
        """Carries out commands and sleeps until there is a step to do; returns False when the thread should end."""
        while True:
            with self._wake:
                while not self._commands and not self._engine.busy:
                    if self._stopping and not self._open:
                        return False
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            if self._engine.busy:
                return True

    def _add(self, request: Request) -> None:
        refused: str | None = None
        try:
            self._engine.add(request)
        except Exception as error:
            refused = str(error)
            if not isinstance(error, SlipstreamError):
                _log.error("request %s could not be set up", request.id, exc_info=error)
        with self._wake:
            self._arriving -= 1
            self._count_line()
        if refused is not None:
            self._deliver(GenEvent(request.id, [], "", "error", error=refused))

    def _count_line(self) -> None:
        self._line = self._engine.line()

    def _follow(self, request_id: str, known: _Open) -> None:
        """Pauses or resumes a request in the engine, as its `paused` and `held` demand by now."""
        if self._open.get(request_id) is known:
            stop = known.paused or known.held
            (self._engine.pause if stop else self._engine.resume)(request_id)
            self._count_line()

    def _deliver(self, event: GenEvent) -> None:
        known = self._open.get(event.request_id)
        if known is None:
            return
        known.generated += len(event.tokens)
        if event.finish_reason is not None:
            self._note_end()
            with self._wake:
                del self._open[event.request_id]
        if not _passed_on(known, event):
            self._engine.cancel(event.request_id)
        if event.finish_reason is None:
            self._pause_if_due(event.request_id, known)

    def _pause_if_due(self, request_id: str, known: _Open) -> None:
        with self._wake:
            if known.pause_at is None or known.generated < known.pause_at or self._open.get(request_id) is not known:
                return
            tell, known.on_pause, known.pause_at = known.on_pause, None, None
            if not known.paused:
                known.paused, known.epoch = True, known.epoch + 1
                self._tell(partial(self._follow, request_id, known))
            epoch, generated = known.epoch, known.generated
        try:
            if tell is not None:
                tell(epoch, generated)
        except Exception as error:
            _log.error("the pause sink of request %s failed", request_id, exc_info=error)

    def _note_end(self) -> None:
        now = time.monotonic()
        if self._last_end and self._line.waiting:
            self._end_interval_s = _PAST_WEIGHT * self._end_interval_s + (1 - _PAST_WEIGHT) * (now - self._last_end)
        self._last_end = now

    def _end(self, failure: str | None) -> None:
        """Ends every open request and question with an error that says why the thread ended."""
        with self._wake:
            self.failure = failure
            self._stopping = True
            left, self._open = self._open, {}
            self._commands.clear()
            self._arriving, self._line = 0, LineSnapshot(0, 0)
            unanswered = [question for question in self._questions if not question.done()]
        reason = f"the engine of '{self.name}' ended: {failure or 'it was asked to stop'}"
        for question in unanswered:
            question.set_exception(EngineFailedError(reason, "try again"))
        for request_id, known in left.items():
            _passed_on(known, GenEvent(request_id, [], "", "error", error=reason))


def _passed_on(known: _Open, event: GenEvent) -> bool:
    """Whether the sink has taken an event; one that fails gets no further events."""
    try:
        known.sink(event)
    except Exception as error:
        _log.error("the sink of request %s failed; the request is cancelled", event.request_id, exc_info=error)
        known.sink = lambda event: None
        return False
    return True
