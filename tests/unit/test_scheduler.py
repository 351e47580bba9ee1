"""Which sequences run, and when: admission by pages, first come first served, chunks on a fixed grid, and no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from slipstream.cache.pages import PageTable, Place
from slipstream.cache.prefix import PrefixCache
from slipstream.cache.sequence import SequenceState
from slipstream.engine.scheduler import QUANTUM_TOKENS, ScheduledSequence, Scheduler, SchedulerLimits, StepPlan
from slipstream.errors import BusyError, IntegrityError, RequestError
from slipstream.types import Request

PAGE = 4


class NoMemory:
    """Nothing lies after these pages."""

    states = None

    def copy_page(self, source: int, destination: int) -> None:
        raise AssertionError("nobody forks here")

    def move_rows(self, sources: Sequence[Place], destinations: Sequence[Place]) -> None:
        raise AssertionError("nobody proposes a tree here")

    def clear_rows(self, places: Sequence[Place]) -> None:
        raise AssertionError("nothing is spoiled here")

    def clear_pages(self, pages: Sequence[int]) -> None:
        raise AssertionError("nothing is spoiled here")


class Bench:
    """A scheduler with small pages, a clock that is set by hand, and a stand-in for the engine's commit."""

    def __init__(
        self,
        pages: int = 32,
        sequences: int = 4,
        waiting: int = 8,
        chunk: int = 8,
        rows: int = 16,
        quantum: int = QUANTUM_TOKENS,
        cache: bool = False,
    ) -> None:
        self.table = PageTable(pages)
        self.memory = NoMemory()
        self.prefix = PrefixCache(self.table, PAGE) if cache else None
        self.now = 0.0
        self.scheduler: Scheduler[ScheduledSequence] = Scheduler(
            self.table,
            self.prefix,
            PAGE,
            SchedulerLimits(sequences, waiting, chunk, rows, quantum),
            clock=lambda: self.now,
        )

    def add(
        self, name: str, prompt: int | list[int], max_tokens: int = 4, width: int = 1, *, cached: bool = True
    ) -> ScheduledSequence:
        tokens = tuple(range(prompt) if isinstance(prompt, int) else prompt)
        state = SequenceState(self.table, PAGE, self.memory, drafting=width > 1)
        request = Request(id=name, prompt_ids=tokens, max_tokens=max_tokens, cache_prompt=cached)
        ticket = ScheduledSequence(
            request, state, len(tokens) + max_tokens + width, "drafter" if width > 1 else None, max_tokens
        )
        self.scheduler.add(ticket)
        return ticket

    def step(self) -> StepPlan:
        """Admits, plans, and commits the plan with one new token for each sequence that gets one."""
        self.scheduler.admit()
        plan = self.scheduler.plan()
        for chunk in plan.prefill:
            rows, first_token = chunk.stop - chunk.start, int(chunk.last)
            chunk.sequence.state.commit(range(rows), [0] * first_token, rows * chunk.sequence.state.drafting)
            chunk.sequence.generated += first_token
        for ticket in plan.decode:
            ticket.state.commit([0], [0], int(ticket.state.drafting))
            ticket.generated += 1
        self.scheduler.check()
        for ticket in list(self.scheduler.running):
            if ticket.generated >= ticket.max_tokens:
                self.scheduler.finish(ticket)
        return plan


def spans(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request.id, chunk.start, chunk.stop) for chunk in plan.prefill]


def names(tickets: list[ScheduledSequence]) -> list[str]:
    return [ticket.request.id for ticket in tickets]


def test_pages_for_the_whole_way_are_reserved_at_admission() -> None:
    bench = Bench(pages=10)
    ticket = bench.add("a", 10, max_tokens=5, width=4)
    bench.scheduler.admit()
    assert len(ticket.state.pages) == 5 and bench.table.free == 5, "19 positions are 5 pages of 4"


def test_admission_stops_at_the_first_request_that_does_not_fit() -> None:
    bench = Bench(pages=8)
    bench.add("large", 19)
    second = bench.add("second", 11)
    bench.add("small", 3)
    bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["large"]
    assert names(list(bench.scheduler.waiting)) == ["second", "small"], "the small one does not overtake"
    assert second.state.pages == [] and bench.table.free == 2
    bench.scheduler.finish(bench.scheduler.running[0])
    bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["second", "small"]


def test_admission_stops_at_the_number_of_sequences() -> None:
    bench = Bench(sequences=2)
    for name in "abc":
        bench.add(name, 3)
    bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["a", "b"]


def test_chunk_borders_lie_on_an_absolute_grid() -> None:
    bench = Bench(chunk=8)
    bench.add("a", 21, max_tokens=1)
    assert [spans(bench.step()) for _ in range(3)] == [[("a", 0, 8)], [("a", 8, 16)], [("a", 16, 21)]]


def test_a_hit_in_the_middle_of_the_grid_runs_to_the_next_border() -> None:
    bench = Bench(chunk=8, cache=True)
    assert bench.prefix is not None
    pages = bench.table.allocate(3)
    bench.prefix.put(range(12), pages, None)
    bench.table.release(pages)
    ticket = bench.add("a", 21, max_tokens=1)
    assert [spans(bench.step()) for _ in range(2)] == [[("a", 12, 16)], [("a", 16, 21)]]
    assert ticket.cached_tokens == 12
    assert bench.prefix.hits == 1


def test_a_request_may_keep_out_of_the_cache() -> None:
    bench = Bench(cache=True)
    assert bench.prefix is not None
    pages = bench.table.allocate(2)
    bench.prefix.put(range(8), pages, None)
    ticket = bench.add("a", 12, cached=False)
    bench.scheduler.admit()
    assert ticket.cached_tokens == 0 and not set(ticket.state.pages) & set(pages)


def test_admission_evicts_what_it_needs_and_no_more() -> None:
    bench = Bench(pages=8, cache=True)
    assert bench.prefix is not None
    for letter in (50, 60, 70):
        pages = bench.table.allocate(2)
        bench.prefix.put([letter] * 8, pages, None)
        bench.table.release(pages)
    bench.add("a", 11, max_tokens=4)
    bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["a"]
    assert len(bench.prefix.held()) == 4 and bench.table.free == 0
    bench.scheduler.check()


def test_a_request_that_cannot_start_yet_evicts_nothing() -> None:
    bench = Bench(pages=10, cache=True)
    assert bench.prefix is not None
    for letter in (50, 60):
        pages = bench.table.allocate(2)
        bench.prefix.put([letter] * 8, pages, None)
        bench.table.release(pages)
    bench.add("running", [90] * 15, max_tokens=4)
    bench.add("waiting", [91] * 30, max_tokens=4)
    for _ in range(3):
        bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["running"]
    assert len(bench.prefix.held()) == 4, "pages it could not use anyway stay for others"
    bench.scheduler.finish(bench.scheduler.running[0])
    bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["waiting"]


def test_a_hit_that_cannot_be_admitted_gives_its_pages_back() -> None:
    bench = Bench(pages=8, cache=True)
    assert bench.prefix is not None
    pages = bench.table.allocate(2)
    bench.prefix.put(range(8), pages, None)
    bench.table.release(pages)
    bench.add("running", [90] * 11, max_tokens=4)
    bench.add("waiting", 20, max_tokens=4)
    bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["running"]
    bench.scheduler.check()


def test_every_step_has_at_least_one_chunk_and_every_decoder() -> None:
    bench = Bench(chunk=8, rows=2)
    for name in "abc":
        bench.add(name, 8, max_tokens=5)
    assert spans(bench.step()) == [("a", 0, 8)], "a chunk larger than the step still runs"
    second = bench.step()
    assert (spans(second), names(second.decode)) == ([("b", 0, 8)], ["a"])
    third = bench.step()
    assert (spans(third), names(third.decode)) == ([("c", 0, 8)], ["a", "b"])
    assert names(bench.step().decode) == ["a", "b", "c"]


def test_chunks_fill_a_step_and_beside_decoding_they_are_one_chunk_s_rows() -> None:
    bench = Bench(pages=64, sequences=6, chunk=8, rows=20)
    for name in "abc":
        bench.add(name, 8, max_tokens=9)
    assert spans(bench.step()) == [("a", 0, 8), ("b", 0, 8)], "three would be more than 20 rows"
    for name in "de":
        bench.add(name, 4)
    plan = bench.step()
    assert (spans(plan), names(plan.decode)) == ([("c", 0, 8)], ["a", "b"])
    plan = bench.step()
    assert (spans(plan), names(plan.decode)) == ([("d", 0, 4), ("e", 0, 4)], ["a", "b", "c"])


def test_prompts_take_a_quarter_of_the_time_beside_decoding() -> None:
    bench = Bench(pages=128, chunk=8)
    decoder = bench.add("decoder", 4, max_tokens=400)
    bench.step()
    long = bench.add("long", 64, max_tokens=1)
    seconds = {True: 0.0, False: 0.0}  # of steps with prompts, and without
    while not long.generated:
        plan = bench.step()
        assert names(plan.decode) == ["decoder"], "no step without the decoder"
        took = 0.15 if plan.prefill else 0.01
        bench.scheduler.took(plan, took)
        seconds[bool(plan.prefill)] += took
    assert seconds[True] == pytest.approx(8 * 0.15)
    assert seconds[False] == pytest.approx(7 * 0.45, rel=0.1), (
        "three times as long alone as each of the chunks before it took"
    )
    assert decoder.generated > 300


def test_prompts_that_are_alone_wait_for_nothing() -> None:
    bench = Bench(pages=64, chunk=8)
    bench.add("decoder", 4, max_tokens=2)
    bench.step()
    long = bench.add("long", 64, max_tokens=1)
    for _ in range(8):
        bench.scheduler.took(bench.step(), 0.15)
    assert long.generated == 1, "the decoder has ended beside the first chunk"


def test_idle_time_is_owed_to_nothing() -> None:
    bench = Bench(pages=64, chunk=8)
    bench.add("decoder", 4, max_tokens=2)
    bench.step()
    bench.add("brief", 4, max_tokens=1)
    bench.scheduler.took(bench.step(), 0.15)
    bench.now += 3600
    bench.add("decoder", 4, max_tokens=20)
    bench.scheduler.took(bench.step(), 0.15)
    bench.add("late", 8, max_tokens=1)
    assert spans(bench.step()) == [("late", 0, 8)]


def test_a_later_prompt_does_not_slip_past_one_that_did_not_fit() -> None:
    bench = Bench(chunk=8, rows=12)
    bench.add("a", 8)
    bench.add("b", 8)
    bench.add("c", 2)
    assert spans(bench.step()) == [("a", 0, 8)]


def test_room_is_what_may_still_be_emitted() -> None:
    bench = Bench()
    ticket = bench.add("a", 4, max_tokens=4, width=4)
    rooms = []
    while bench.scheduler.running or bench.scheduler.waiting:
        rooms.append((ticket.prefilling, ticket.room))
        bench.step()
    assert rooms == [(True, 4), (False, 3), (False, 2), (False, 1)], "the last token ends the request"
    assert ticket.room == 0


def test_cancelled_requests_leave_from_either_queue_with_their_pages() -> None:
    bench = Bench(sequences=1)
    running, waiting, stays = (bench.add(name, 6) for name in "abc")
    bench.step()
    assert (bench.scheduler.running, bench.scheduler.waiting) == ([running], [waiting, stays])
    running.cancelled = waiting.cancelled = True
    assert names(bench.scheduler.drop_cancelled()) == ["a", "b"]
    assert bench.table.free == bench.table.total
    assert list(bench.scheduler.waiting) == [stays] and bench.scheduler.running == []
    assert bench.scheduler.drop_cancelled() == []


def test_a_request_that_could_never_run_is_refused_with_a_hint() -> None:
    bench = Bench(pages=8)
    with pytest.raises(RequestError, match="needs 33 cached positions, the cache holds 32") as refused:
        bench.scheduler.check_fits(33)
    assert "lower max_tokens" in refused.value.hint
    bench.scheduler.check_fits(32)


def test_a_full_queue_is_refused() -> None:
    bench = Bench(waiting=2)
    bench.add("a", 3)
    bench.add("b", 3)
    with pytest.raises(BusyError, match="2 requests are waiting already") as refused:
        bench.add("c", 3)
    assert refused.value.retry_after_s > 0
    bench.scheduler.admit()
    bench.add("c", 3)


def test_check_finds_a_leaked_page_and_a_page_of_nobody() -> None:
    bench = Bench()
    ticket = bench.add("a", 6)
    bench.step()
    bench.scheduler.check()
    leaked = bench.table.allocate(1)
    with pytest.raises(IntegrityError):
        bench.scheduler.check()
    bench.table.release(leaked)
    bench.scheduler.check()
    bench.table.release(ticket.state.pages[-1:])
    with pytest.raises(IntegrityError):
        bench.scheduler.check()


def test_everybody_finishes_and_every_page_comes_back() -> None:
    bench = Bench(pages=12, sequences=3, rows=8)
    for index in range(8):
        bench.add(f"r{index}", 3 + 5 * (index % 4), max_tokens=1 + index % 3, width=1 + index % 2)
    for _ in range(60):
        bench.step()
    assert not bench.scheduler.running and not bench.scheduler.waiting
    assert bench.table.free == bench.table.total


def test_the_scheduler_imports_no_torch() -> None:
    code = "import sys, slipstream.engine.scheduler; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
