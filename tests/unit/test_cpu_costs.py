"""The time of an action, taken from runs of which another process may have disturbed some or all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.cpu.cpu_blocks import CpuBlocks
from slipstream.engine.cpu.cpu_costs import TimedRun, undisturbed_ms
from slipstream.engine.cpu.cpu_executor import CpuExecutor
from tests.tiny import keep_threads, tiny_llm


def test_the_fastest_clean_run_counts_even_beside_a_disturbed_run_that_seems_faster() -> None:
    runs = [TimedRun(3.3, 6.5, True), TimedRun(3.1, 6.0, True), TimedRun(2.0, 4.0, False), TimedRun(9.0, 6.0, False)]
    assert undisturbed_ms(runs, cores=2) == pytest.approx(3.1)


def test_an_action_that_was_always_disturbed_takes_its_processor_time_per_core() -> None:
    runs = [TimedRun(10.2, 12.4, False), TimedRun(16.1, 11.0, False), TimedRun(14.2, 12.5, False)]
    assert undisturbed_ms(runs, cores=2) == pytest.approx(6.2)


def test_processor_time_that_was_booked_late_never_makes_an_action_longer_than_its_fastest_run() -> None:
    assert undisturbed_ms([TimedRun(4.0, 12.0, False), TimedRun(5.0, 11.0, False)], cores=2) == pytest.approx(4.0)


def test_every_action_is_timed_after_what_precedes_it_in_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a plain step would be timed without the target's weights in the caches, and a verify step with them."""
    ran: list[int] = []  # the rows of each step; 0 for a draft

    def noted(call: Callable[..., Any], rows: Callable[[Any], int]) -> Callable[..., Any]:
        def run(self: object, jobs: Sequence[Any]) -> Any:
            ran.append(rows(jobs[0]))
            return call(self, jobs)

        return run

    with keep_threads():
        llm = tiny_llm(tmp_path)
        monkeypatch.setattr(CpuExecutor, "forward", noted(CpuExecutor.forward, lambda work: work.rows))
        monkeypatch.setattr(CpuBlocks, "draft", noted(CpuBlocks.draft, lambda job: 0))
        llm.measure_costs()
    timed = ran[2:]  # after the prompt and the first run of the widest step
    pairs = list(zip(timed[::2], timed[1::2], strict=True))
    assert {before for before, rows in pairs if rows == 1} == {1}, "a plain step follows a plain step"
    assert {before for before, rows in pairs if rows > 1} == {0}, "a verify step follows a draft"
    assert {before for before, rows in pairs if rows == 0} == {1}, "a draft follows a step"
