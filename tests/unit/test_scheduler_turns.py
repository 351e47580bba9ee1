"""Which sequences go first and which make room: priorities, quanta, turns between prompts, and pauses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.engine.scheduler import AGEING_S, ScheduledSequence
from slipstream.errors import BusyError
from tests.unit.test_scheduler import Bench, names, spans


def urgent(bench: Bench, name: str, prompt: int, priority: int, max_tokens: int = 4) -> ScheduledSequence:
    """Adds a request of a priority of its own."""
    ticket = bench.add(name, prompt, max_tokens)
    bench.scheduler.waiting.remove(ticket)
    ticket.request = replace(ticket.request, priority=priority)
    bench.scheduler.add(ticket)
    return ticket


def at(bench: Bench, seconds: float) -> None:
    """Sets the scheduler's clock."""
    bench.now = seconds


def run(bench: Bench, steps: int = 200) -> list[str]:
    """Steps until no sequence is left; returns the ids of the requests in the order in which they ended."""
    ended: list[str] = []
    for _ in range(steps):
        before = [*bench.scheduler.running, *bench.scheduler.waiting]
        bench.step()
        after = [*bench.scheduler.running, *bench.scheduler.waiting, *bench.scheduler.paused]
        ended += [t.request.id for t in before if t not in after]
        if not bench.scheduler.busy:
            break
    return ended


def test_larger_priorities_are_admitted_first_and_within_one_who_came_first() -> None:
    bench = Bench(sequences=2)
    for name, priority in (("low", -1), ("a", 0), ("b", 0), ("high", 5), ("high too", 5)):
        urgent(bench, name, 3, priority)
    assert names(bench.scheduler.waiting) == ["high", "high too", "a", "b", "low"]
    assert run(bench) == ["high", "high too", "a", "b", "low"]


def test_nobody_yields_while_nobody_waits() -> None:
    bench = Bench(quantum=2, sequences=2)
    a, b = bench.add("a", 3, max_tokens=20), bench.add("b", 3, max_tokens=20)
    for _ in range(10):
        bench.step()
        assert bench.scheduler.running == [a, b]


def test_slots_go_round_in_quanta_and_nothing_is_prefilled_twice() -> None:
    bench = Bench(quantum=3, sequences=1)
    tickets = [bench.add(name, 5, max_tokens=9) for name in "abc"]
    seen, prefills = [], []
    while bench.scheduler.busy:
        plan = bench.step()
        prefills += spans(plan)
        seen += [chunk.sequence.request.id for chunk in plan.prefill] + names(plan.decode)
    assert "".join(seen) == "aaabbbccc" * 3
    assert prefills == [("a", 0, 5), ("b", 0, 5), ("c", 0, 5)], "who comes back goes on where it stood"
    assert all(ticket.generated == 9 for ticket in tickets)
    assert bench.table.free == bench.table.total


def test_a_yielded_sequence_keeps_its_pages_and_its_phase_says_so() -> None:
    bench = Bench(quantum=3, sequences=1)
    a = bench.add("a", 5, max_tokens=9)
    bench.add("b", 5, max_tokens=9)
    assert a.phase == "waiting"
    for _ in range(4):
        bench.step()
    assert names(bench.scheduler.running) == ["b"] and a.phase == "yielded" and a.state.pages
    assert bench.scheduler.newcomers == 0, "it does not count as waiting for a first turn"


def test_nobody_yields_to_one_who_could_not_start_for_want_of_pages() -> None:
    bench = Bench(quantum=2, sequences=1, pages=6)
    a = bench.add("a", 11, max_tokens=8)
    bench.add("large", 11, max_tokens=8)
    for _ in range(9):
        bench.step()
        assert a.where == "running" or a.generated == 8
    assert run(bench) == ["large"]


def test_those_who_hold_their_pages_pass_one_who_cannot_start() -> None:
    bench = Bench(quantum=2, sequences=1, pages=10)
    bench.add("a", 4, max_tokens=10)
    bench.add("b", 4, max_tokens=10)
    for _ in range(4):
        bench.step()
    bench.add("large", 28, max_tokens=4)
    bench.add("small", 2, max_tokens=1)
    started, decoded = [], []
    while bench.scheduler.busy:
        plan = bench.step()
        started += [name for name, start, _ in spans(plan) if start == 0]
        decoded += names(plan.decode) if not started else []
    assert "".join(decoded) == "aabb" * 4, "large is first in line, but only lacks what they hold"
    assert started == ["large", "small"], "and nobody new overtakes it"


def test_a_higher_priority_takes_a_slot_at_once_and_a_lower_one_never() -> None:
    bench = Bench(quantum=50, sequences=1)
    first = bench.add("first", 3, max_tokens=9)
    bench.add("second", 3, max_tokens=9)
    bench.step()
    urgent(bench, "low", 3, -1, max_tokens=2)
    urgent(bench, "high", 3, 1, max_tokens=2)
    bench.step()
    assert names(bench.scheduler.running) == ["high"] and first.phase == "yielded"
    assert names(bench.scheduler.waiting) == ["first", "second", "low"], "cut short, it keeps its place"
    assert run(bench) == ["high", "first", "second", "low"]


def test_the_lowest_priority_that_had_most_makes_room() -> None:
    bench = Bench(quantum=4, sequences=3)
    urgent(bench, "important", 3, 2, max_tokens=30)
    bench.add("old", 3, max_tokens=30)
    bench.step()
    bench.step()
    bench.add("young", 3, max_tokens=30)
    bench.step()
    urgent(bench, "newcomer", 3, 1)
    bench.step()
    assert sorted(names(bench.scheduler.running)) == ["important", "newcomer", "young"]


def test_long_prompts_use_up_their_quantum_too() -> None:
    bench = Bench(quantum=2, sequences=1, pages=64, chunk=8)
    bench.add("long", 80, max_tokens=2)
    bench.step()
    bench.step()
    bench.add("short", 3, max_tokens=2)
    assert spans(bench.step()) == [("short", 0, 3)], "16 rows are worth two tokens"
    assert run(bench) == ["short", "long"]


def test_chunks_of_prompts_take_turns() -> None:
    bench = Bench(pages=64, chunk=8, rows=8)
    bench.add("long", 40, max_tokens=1)
    bench.step()
    bench.add("second", 24, max_tokens=1)
    bench.add("short", 5, max_tokens=1)
    order = []
    while bench.scheduler.busy:
        order += [name for name, _, _ in spans(bench.step())]
    assert order == ["long", "second", "short", "long", "second", "long", "second", "long"]


def test_newcomers_do_not_starve_a_long_prompt() -> None:
    bench = Bench(pages=64, chunk=8, rows=8, sequences=3)
    long = bench.add("long", 64, max_tokens=1)
    for index in range(40):
        bench.add(f"s{index}", 8, max_tokens=1)
        bench.step()
        if long.generated:
            break
    assert long.generated == 1 and index < 3 * 8, "at least every third chunk is the long one's"


def test_decoding_goes_on_in_every_step_of_a_long_prefill_and_prefill_in_every_step_of_decoding() -> None:
    bench = Bench(pages=64, chunk=8, rows=10)
    decoder = bench.add("decoder", 4, max_tokens=40)
    bench.step()
    bench.add("long", 64, max_tokens=1)
    bench.add("other", 64, max_tokens=1)
    for _ in range(16):
        plan = bench.step()
        assert names(plan.decode) == ["decoder"], "no step without the decoder"
        assert 0 < sum(chunk.stop - chunk.start for chunk in plan.prefill) <= 8, "and bounded rows beside it"
    assert decoder.generated == 17


def test_a_paused_request_keeps_its_pages_frees_its_slot_and_goes_on() -> None:
    bench = Bench(sequences=1)
    a = bench.add("a", 5, max_tokens=6)
    bench.add("b", 5, max_tokens=2)
    bench.step()
    bench.step()
    pages = list(a.state.pages)
    bench.scheduler.pause(a)
    bench.scheduler.pause(a)
    assert (bench.scheduler.paused, a.phase, a.state.pages) == ([a], "paused", pages), "pausing twice is pausing once"
    assert run(bench) == ["b"] and not bench.scheduler.busy
    assert bench.scheduler.resume(a)
    plan = bench.step()
    assert names(plan.decode) == ["a"] and not plan.prefill and a.state.pages == pages
    assert run(bench) == ["a"]
    assert bench.table.free == bench.table.total


def test_only_a_paused_request_is_resumed() -> None:
    bench = Bench()
    a = bench.add("a", 5)
    assert not bench.scheduler.resume(a) and bench.scheduler.waiting == [a]
    for _ in range(2):
        bench.scheduler.pause(a)
        assert (bench.scheduler.waiting, bench.scheduler.paused) == ([], [a])
        assert bench.scheduler.resume(a) and not bench.scheduler.resume(a)
        assert (bench.scheduler.waiting, bench.scheduler.paused) == ([a], [])
    bench.step()
    assert not bench.scheduler.resume(a) and bench.scheduler.running == [a]
    assert run(bench) == ["a"]


def test_a_paused_request_loses_its_pages_only_to_one_who_can_start_with_them() -> None:
    bench = Bench(pages=8, sequences=2)
    oldest, younger = bench.add("oldest", 5, max_tokens=6), bench.add("younger", 5, max_tokens=6)
    bench.step()
    bench.step()
    for ticket in (oldest, younger):
        bench.scheduler.pause(ticket)
    holder = bench.add("holder", 3, max_tokens=4)
    bench.scheduler.admit()
    assert bench.table.free == 0
    bench.add("too large", 24, max_tokens=7)
    bench.scheduler.admit()
    assert oldest.phase == younger.phase == "paused", "their pages would not have been enough"
    bench.scheduler.waiting.clear()
    bench.add("fits", 9, max_tokens=2)
    bench.scheduler.admit()
    assert (oldest.phase, younger.phase) == ("paused-evicted", "paused"), "who was paused first pays"
    bench.scheduler.check()
    tokens = (*oldest.request.prompt_ids, 0, 0)
    assert oldest.kept_tokens == tokens and holder.where == "running"
    assert bench.scheduler.resume(oldest) and bench.scheduler.resume(younger)
    again = []
    while bench.scheduler.busy:
        again += [span for span in spans(bench.step()) if span[0] == "oldest"]
    assert again == [("oldest", 0, 6)], "all but the anchor is computed again"
    assert oldest.generated == younger.generated == 6
    assert bench.table.free == bench.table.total


def test_pages_shared_with_the_cache_and_a_runner_are_not_counted_as_reclaimable() -> None:
    bench = Bench(pages=10, sequences=3, cache=True)
    assert bench.prefix is not None
    paused = bench.add("paused", 12, max_tokens=3)
    bench.step()
    bench.step()
    bench.prefix.put(paused.state.tokens[:12], paused.state.pages, None)
    bench.add("sharer", 13, max_tokens=2)
    bench.scheduler.pause(paused)
    bench.scheduler.admit()
    assert bench.table.free == 5, "three pages of the paused one's four are the sharer's as well"
    bench.add("wants seven", [90] * 23, max_tokens=4)
    bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["sharer"] and paused.phase == "paused"
    bench.scheduler.waiting.clear()
    bench.add("wants six", [90] * 19, max_tokens=4)
    bench.scheduler.admit()
    assert names(bench.scheduler.running) == ["sharer", "wants six"] and paused.phase == "paused-evicted"


def test_a_cancelled_request_leaves_from_every_state() -> None:
    bench = Bench(quantum=1, sequences=1)
    yielded, running, paused, waiting = (bench.add(name, 5, max_tokens=9) for name in ("y", "r", "p", "w"))
    bench.step()
    bench.step()
    bench.scheduler.pause(paused)
    assert [t.phase for t in (yielded, running, paused, waiting)] == ["yielded", "decode", "paused", "waiting"]
    for ticket in (yielded, running, paused, waiting):
        ticket.cancelled = True
    assert bench.scheduler.busy
    assert len(bench.scheduler.drop_cancelled()) == 4
    assert bench.table.free == bench.table.total and not bench.scheduler.busy


def test_the_queue_is_bounded_for_newcomers_only() -> None:
    bench = Bench(quantum=1, sequences=1, waiting=2)
    a = bench.add("a", 3)
    bench.step()
    bench.add("b", 3)
    bench.step()
    bench.add("c", 3)
    bench.add("d", 3)
    assert a.phase == "yielded"
    with pytest.raises(BusyError):
        bench.add("e", 3)
    bench.scheduler.pause(a)
    assert bench.scheduler.resume(a), "it stood in no line of newcomers"


def flood(bench: Bench, waiter: ScheduledSequence, priority: int, step_s: float, steps: int) -> int:
    """Keeps two requests of a larger priority in line at every step; returns the step in which the waiter got a slot.

    -1: it never did.
    """
    for step in range(steps):
        at(bench, step * step_s)
        while len(bench.scheduler.waiting) < 3:
            urgent(bench, f"{priority} at {step}, {len(bench.scheduler.waiting)}", 3, priority)
        bench.step()
        if waiter.where == "running":
            return step
    return -1


@pytest.mark.parametrize(("priority", "levels"), [(1, 1), (5, 5), (20, 20)])
def test_a_stream_of_larger_priorities_does_not_keep_a_request_waiting_for_ever(priority: int, levels: int) -> None:
    bench = Bench(quantum=4, sequences=1)
    at(bench, 0.0)
    waiter = urgent(bench, "patient", 3, 0, max_tokens=3)
    step_s = AGEING_S / 10
    served = flood(bench, waiter, priority, step_s, steps=10 * levels + 20)
    assert 10 * levels <= served <= 10 * levels + 14, "it passes requests that come so much later, and no others"


def test_who_came_in_by_waiting_keeps_its_slot_for_a_quantum() -> None:
    bench = Bench(quantum=4, sequences=1)
    at(bench, 0.0)
    waiter = urgent(bench, "patient", 3, 0, max_tokens=12)
    assert flood(bench, waiter, 3, AGEING_S / 10, steps=60) > 0
    for _ in range(3):
        bench.step()
        assert waiter.where == "running", "the requests it has passed cannot take the slot at once"
    bench.step()
    assert waiter.phase == "yielded", "after its quantum it waits again"
    urgent(bench, "top", 3, 100)
    bench.step()
    assert names(bench.scheduler.running) == ["top"], "a priority that its wait does not reach goes first as ever"


def test_a_prompt_in_a_slot_ages_too() -> None:
    bench = Bench(quantum=50, sequences=2, chunk=4, rows=4)
    at(bench, 0.0)
    patient = urgent(bench, "patient", 6, 0, max_tokens=1)
    first = []
    for step in range(60):
        at(bench, step * AGEING_S / 10)
        if len(bench.scheduler.running) + len(bench.scheduler.waiting) < 2:
            urgent(bench, f"large {step}", 4, 2, max_tokens=1)
        first += [step for name, _, _ in spans(bench.step()) if name == "patient"]
    assert patient.generated == 1 and len(first) == 2
    assert first[-1] <= 44, "prompts of a larger priority had every step until it had waited as long as they count more"


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_much_earlier() -> None:
    bench = Bench(pages=128, chunk=4, rows=4)
    long = bench.add("long", 100, max_tokens=1)
    for _ in range(3):
        bench.step()
    bench.now += 2 * AGEING_S
    bench.add("short", 8, max_tokens=1)
    assert [name for _ in range(4) for name, _, _ in spans(bench.step())].count("short") == 2
    assert not long.generated


def test_a_request_that_cannot_start_is_not_tried_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(pages=12, sequences=4, cache=True)
    assert bench.prefix is not None
    tried: list[int] = []
    walk = bench.prefix.evictable
    monkeypatch.setattr(bench.prefix, "evictable", lambda enough=None: (tried.append(1), walk(enough))[1])
    runs = bench.add("runs", 5, max_tokens=20)
    bench.step()
    large = bench.add("large", [7] * 25, max_tokens=8)
    for _ in range(15):
        bench.step()
        assert large.where == "waiting"
    assert len(tried) == 1, "nothing came free meanwhile"
    bench.scheduler.pause(runs)
    bench.step()
    assert large.where == "running" and runs.phase == "paused-evicted", "what is paused can give its pages"
    assert bench.scheduler.resume(runs)
    while bench.scheduler.busy:
        bench.step()
    assert runs.generated == 20 and large.generated == 8
