"""The engine's thread: events in order, commands from any thread, bounded queue, and an end that all requests see."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine.engine import Engine
from slipstream.engine.llm import LLM
from slipstream.errors import BusyError, EngineFailedError, RequestError, StaleEpochError
from slipstream.server.serving.worker import EngineWorker
from slipstream.types import GenEvent
from tests.tiny import VOCAB, ask, assert_idle, mixed_requests, prompt, tiny_llm

pytestmark = pytest.mark.usefixtures("threads")
WAIT_S = 20.0


class Reader:
    """Gathers a request's events; `gate` holds the engine's thread up at every one of them."""

    def __init__(self) -> None:
        self.events: list[GenEvent] = []
        self.over = threading.Event()
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, event: GenEvent) -> None:
        assert not self.over.is_set(), "an event after the last one"
        self.events.append(event)
        self.begun.set()
        if event.finish_reason is not None:
            self.over.set()
        assert self.gate.wait(WAIT_S)

    @property
    def ids(self) -> list[int]:
        return [token.id for event in self.events for token in event.tokens]

    def last(self) -> GenEvent:
        assert self.over.wait(WAIT_S), "no end came"
        return self.events[-1]


@pytest.fixture
def served(folder: Path) -> LLM:
    return tiny_llm(folder, weight_format="int8", max_sequences=2, max_waiting=3)


@pytest.fixture
def worker(served: LLM) -> Iterator[EngineWorker]:
    made = EngineWorker(served, "tiny")
    made.start()
    yield made
    made.stop(WAIT_S)


def pause(worker: EngineWorker, name: str) -> list[int]:
    """Pauses a request as soon as possible; the list then gets the epoch that resumes it."""
    epochs: list[int] = []
    worker.pause_at(name, 0, lambda epoch, _: epochs.append(epoch))
    return epochs


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def test_requests_of_many_threads_give_the_texts_they_give_alone(folder: Path) -> None:
    llm = tiny_llm(folder, weight_format="int8")
    requests = mixed_requests("chain")[:5]
    expected = [llm.run([request])[0] for request in requests]
    worker = EngineWorker(llm, "tiny")
    worker.start()
    readers = [Reader() for _ in requests]
    threads = [
        threading.Thread(target=worker.submit, args=(request, reader))
        for request, reader in zip(requests, readers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for reader, alone in zip(readers, expected, strict=True):
        assert reader.last().finish_reason == alone.finish_reason and reader.ids == alone.token_ids
        assert "".join(event.text for event in reader.events) == alone.text
        assert reader.last().stats is not None
    assert worker.stop(WAIT_S) and worker.failure is None
    assert_idle(llm)


def test_an_idle_worker_sleeps(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    worker.submit(ask("r", prompt(5), max_tokens=3), reader)
    reader.last()
    steps: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (steps.append(1), step(engine))[1])
    before = time.process_time()
    time.sleep(0.2)
    assert not steps and time.process_time() - before < 0.1
    other = Reader()
    worker.submit(ask("s", prompt(5), max_tokens=3), other)
    assert other.last().finish_reason == "length" and steps


def test_what_can_never_run_is_refused_to_the_caller(worker: EngineWorker) -> None:
    for request in (ask("r", (VOCAB,)), ask("r", prompt(600)), ask("r", prompt(5), mode="chain:200")):
        with pytest.raises(RequestError):
            worker.submit(request, Reader())
    held, reader = Reader(), Reader()
    held.gate.clear()
    worker.submit(ask("r", prompt(5)), held)
    with pytest.raises(RequestError, match="'r' is running already"):
        worker.submit(ask("r", prompt(5)), reader)
    held.gate.set()
    assert held.last().finish_reason == "length" and not reader.events


def test_a_full_queue_is_refused_with_a_time_to_come_back(worker: EngineWorker) -> None:
    readers = [Reader() for _ in range(5)]
    readers[0].gate.clear()
    worker.submit(ask("r0", prompt(5)), readers[0])
    assert readers[0].begun.wait(WAIT_S)
    for index in (1, 2, 3):
        worker.submit(ask(f"r{index}", prompt(5)), readers[index])
    assert worker.snapshot().waiting == 3
    with pytest.raises(BusyError, match="3 requests are waiting for 'tiny' already") as busy:
        worker.submit(ask("r4", prompt(5)), readers[4])
    assert 1 <= busy.value.retry_after_s <= 60
    readers[0].gate.set()
    assert all(reader.last().finish_reason == "length" for reader in readers[:4])
    worker.submit(ask("r4", prompt(5)), readers[4])
    assert readers[4].last().finish_reason == "length"


def test_who_waits_for_the_next_turn_counts_in_the_queue(served: LLM, worker: EngineWorker) -> None:
    served.engine.scheduler.limits = replace(served.engine.scheduler.limits, quantum=1)
    readers = [Reader() for _ in range(6)]
    readers[0].gate.clear()
    readers[1].gate.clear()
    worker.submit(ask("r0", prompt(5)), readers[0])
    assert readers[0].begun.wait(WAIT_S)
    for index in (1, 2, 3):
        worker.submit(ask(f"r{index}", prompt(5)), readers[index])
    readers[0].gate.set()
    assert readers[1].begun.wait(WAIT_S)
    # two have slots, one is new in line, and the first has had its turn and stands there again
    assert worker.snapshot().waiting == 1
    worker.submit(ask("r4", prompt(5)), readers[4])
    with pytest.raises(BusyError):
        worker.submit(ask("r5", prompt(5)), readers[5])
    readers[1].gate.set()
    assert all(reader.last().finish_reason == "length" for reader in readers[:5])


def test_who_was_let_in_is_not_refused_after_a_pause(worker: EngineWorker) -> None:
    readers = [Reader() for _ in range(6)]
    readers[0].gate.clear()
    worker.submit(ask("r0", prompt(5)), readers[0])
    assert readers[0].begun.wait(WAIT_S)
    for index in (1, 2, 3):
        worker.submit(ask(f"r{index}", prompt(5)), readers[index])
    epochs = [pause(worker, f"r{index}") for index in (1, 2, 3)]
    readers[0].gate.set()
    readers[0].last()
    until(lambda: all(epochs) and worker.snapshot().waiting == 0)
    readers[4].gate.clear()
    worker.submit(ask("r4", prompt(5)), readers[4])
    assert readers[4].begun.wait(WAIT_S)
    for index, (epoch,) in zip((1, 2, 3), epochs, strict=True):
        worker.resume(f"r{index}", epoch)
    worker.submit(ask("r5", prompt(5)), readers[5])
    readers[4].gate.set()
    assert [reader.last().finish_reason for reader in readers] == ["length"] * 6


def test_paused_requests_count_among_the_open_ones(worker: EngineWorker) -> None:
    readers = {f"r{index}": Reader() for index in range(6)}
    epochs = {}
    for name in list(readers)[:5]:  # two slots and a line of three
        worker.check_room(preparing=0)
        worker.submit(ask(name, prompt(5)), readers[name])
        epochs[name] = pause(worker, name)
        until(lambda: [slot.phase for slot in worker.snapshot().slots] == ["paused"] * len(epochs))
    assert worker.snapshot().waiting == 0, "nothing stands in line"
    for refuse in (lambda: worker.check_room(preparing=0), lambda: worker.submit(ask("r5", prompt(5)), readers["r5"])):
        with pytest.raises(BusyError, match="5 requests of 'tiny' are open already, paused ones included"):
            refuse()
    worker.cancel("r0")
    assert readers["r0"].last().finish_reason == "cancelled"
    worker.check_room(preparing=0)
    with pytest.raises(BusyError):
        worker.check_room(preparing=1)  # one is on its way already
    worker.submit(ask("r5", prompt(5)), readers["r5"])
    for name in list(readers)[1:5]:
        worker.resume(name, *epochs[name])
    assert all(reader.last().finish_reason == "length" for name, reader in readers.items() if name != "r0")


def test_cancelling_frees_everything_at_the_next_step(worker: EngineWorker) -> None:
    reader = Reader()
    reader.gate.clear()
    worker.submit(ask("r", prompt(100), mode="plain", max_tokens=300), reader)
    assert reader.begun.wait(WAIT_S)
    seen = len(reader.events)
    assert worker.cancel("r")
    reader.gate.set()
    assert reader.last().finish_reason == "cancelled" and len(reader.events) == seen + 1
    assert not worker.cancel("r") and not worker.cancel("nobody")
    assert worker.snapshot().slots == []


def test_a_paused_request_resumes_to_the_same_text_and_stale_epochs_are_refused(worker: EngineWorker) -> None:
    request = ask("whole", prompt(20), mode="tree:16", max_tokens=60)
    whole, reader, other = Reader(), Reader(), Reader()
    worker.submit(request, whole)
    whole.last()
    reader.gate.clear()
    worker.submit(ask("r", prompt(20), mode="tree:16", max_tokens=60), reader)
    assert reader.begun.wait(WAIT_S)
    pause(worker, "r")
    reader.gate.set()
    worker.submit(ask("other", prompt(5)), other)
    other.last()
    count = len(reader.events)
    (slot,) = worker.snapshot().slots
    assert (slot.request_id, slot.phase, slot.paused, slot.epoch) == ("r", "paused", True, 1)
    again = pause(worker, "r")
    until(lambda: again == [1])
    assert [each.epoch for each in worker.snapshot().slots] == [1], "a second pause is the same pause"
    assert 0 < slot.generated == len(reader.ids) < slot.max_tokens == 60 and slot.mode == "tree:16"
    with pytest.raises(StaleEpochError, match="at epoch 1, not 7"):
        worker.resume("r", 7)
    with pytest.raises(StaleEpochError, match="at epoch 1, not 0"):
        worker.cancel("r", epoch=0)
    assert len(reader.events) == count
    worker.resume("r", 1)
    with pytest.raises(StaleEpochError):
        worker.resume("r", 1)
    assert reader.last().finish_reason == "length" and reader.ids == whole.ids
    with pytest.raises(StaleEpochError, match="does not run"):
        pause(worker, "r")


def test_a_request_pauses_by_itself_where_it_was_told_to(worker: EngineWorker) -> None:
    whole, reader = Reader(), Reader()
    worker.submit(ask("whole", prompt(20), mode="plain", max_tokens=30), whole)
    whole.last()
    stops: list[tuple[int, int, int]] = []

    def paused(epoch: int, generated: int) -> None:
        stops.append((epoch, generated, len(reader.ids)))

    reader.gate.clear()
    worker.submit(ask("r", prompt(20), mode="plain", max_tokens=30), reader)
    worker.pause_at("r", 7, paused)
    reader.gate.set()
    until(lambda: len(stops) == 1)
    worker.pause_at("r", 12, paused)
    worker.resume("r", 1)
    until(lambda: len(stops) == 2)
    worker.resume("r", 2)
    assert reader.last().finish_reason == "length" and reader.ids == whole.ids
    assert stops == [(1, 7, 7), (2, 12, 12)]


def test_a_held_request_takes_part_in_no_step_and_keeps_its_epoch(worker: EngineWorker) -> None:
    whole, reader, other = Reader(), Reader(), Reader()
    worker.submit(ask("whole", prompt(20), mode="chain", max_tokens=30), whole)
    whole.last()
    reader.gate.clear()
    worker.submit(ask("r", prompt(20), mode="chain", max_tokens=30), reader)
    assert reader.begun.wait(WAIT_S)
    worker.hold("r", True)
    worker.hold("r", True)
    epochs = pause(worker, "r")
    reader.gate.set()
    worker.submit(ask("other", prompt(5)), other)
    other.last()
    seen = len(reader.events)
    worker.resume("r", *epochs)
    assert worker.snapshot().slots[0].paused is False
    late = Reader()
    worker.submit(ask("late", prompt(5)), late)
    late.last()
    assert len(reader.events) == seen, "resumed, but still held"
    worker.hold("r", False)
    assert reader.last().finish_reason == "length" and reader.ids == whole.ids
    worker.hold("r", True)
    assert not worker.cancel("r")


def test_a_sink_that_fails_costs_its_own_request_only(worker: EngineWorker, caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()

    def broken(event: GenEvent) -> None:
        raise OSError("the reader is gone")

    worker.submit(ask("broken", prompt(5), max_tokens=300), broken)
    worker.submit(ask("r", prompt(5)), reader)
    assert reader.last().finish_reason == "length"
    until(lambda: not worker.snapshot().slots)
    assert worker.alive and any("request broken" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("error", [RuntimeError("out of order"), SystemExit(3)])
def test_a_step_that_fails_for_everybody_is_told_to_everybody(
    worker: EngineWorker, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    readers = [Reader() for _ in range(4)]
    readers[0].gate.clear()
    for index, reader in enumerate(readers):
        if index == 3:
            assert readers[0].begun.wait(WAIT_S)
        worker.submit(ask(f"r{index}", prompt(5), max_tokens=300), reader)

    def failing(engine: Engine) -> list[GenEvent]:
        raise error

    monkeypatch.setattr(Engine, "step", failing)
    readers[0].gate.set()
    for reader in readers:
        last = reader.last()
        assert last.finish_reason == "error" and last.error is not None and type(error).__name__ in last.error
    worker.thread.join(WAIT_S)
    assert not worker.alive and worker.failure is not None and str(error) in worker.failure
    with pytest.raises(EngineFailedError, match=type(error).__name__):
        worker.submit(ask("late", prompt(5)), Reader())
    assert not worker.cancel("r0")


def test_a_thread_killed_from_outside_is_noticed(worker: EngineWorker) -> None:
    reader = Reader()
    reader.gate.clear()
    worker.submit(ask("r", prompt(5), max_tokens=300), reader)
    assert reader.begun.wait(WAIT_S) and worker.thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.thread.ident), ctypes.py_object(SystemExit))
    reader.gate.set()
    assert reader.last().finish_reason == "error"
    worker.thread.join(WAIT_S)
    assert not worker.alive and worker.failure == "SystemExit"


def test_a_question_is_answered_between_steps_or_refused_when_the_engine_ends(
    worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.ask(lambda: threading.current_thread() is worker.thread)
    with pytest.raises(ZeroDivisionError):
        worker.ask(lambda: 1 // 0)
    begun, waits, gate = threading.Event(), threading.Event(), threading.Event()
    found: list[BaseException] = []
    result = Future.result

    def wait_for_an_answer() -> None:
        with pytest.raises(EngineFailedError) as refused:
            worker.ask(threading.current_thread)
        found.append(refused.value)

    def dies(event: GenEvent) -> None:
        begun.set()
        assert gate.wait(WAIT_S)
        if event.finish_reason is None:
            raise SystemExit

    worker.submit(ask("r", prompt(5), max_tokens=300), dies)
    assert begun.wait(WAIT_S)
    monkeypatch.setattr(Future, "result", lambda answer, timeout: (waits.set(), result(answer, timeout))[1])
    asking = threading.Thread(target=wait_for_an_answer)
    asking.start()
    assert waits.wait(WAIT_S)
    gate.set()
    asking.join(5)
    assert found and "ended: SystemExit" in str(found[0]), "it does not wait for its time to be up"


def test_stopping_cancels_what_runs_and_what_is_paused(folder: Path) -> None:
    llm: LLM = tiny_llm(folder, weight_format="int8", max_sequences=1)
    worker = EngineWorker(llm, "tiny")
    worker.start()
    running, paused = Reader(), Reader()
    worker.submit(ask("paused", prompt(5), max_tokens=300), paused)
    assert paused.begun.wait(WAIT_S)
    pause(worker, "paused")
    running.gate.clear()
    worker.submit(ask("r", prompt(5), max_tokens=40), running)
    assert running.begun.wait(WAIT_S)
    stopping = threading.Thread(target=worker.stop, args=(WAIT_S,))
    stopping.start()
    until(lambda: not worker.alive)
    with pytest.raises(EngineFailedError, match="asked to stop"):
        worker.submit(ask("late", prompt(5)), Reader())
    running.gate.set()
    stopping.join(WAIT_S)
    assert not worker.thread.is_alive() and worker.failure is None
    assert running.last().finish_reason == paused.last().finish_reason == "cancelled"
    assert_idle(llm)
