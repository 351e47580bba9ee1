"""The time of an action, taken from runs of which another process may have disturbed some or all."""

from __future__ import annotations

import pytest

from slipstream.engine.cpu.cpu_costs import TimedRun, undisturbed_ms


def test_the_fastest_clean_run_counts_even_beside_a_disturbed_run_that_seems_faster() -> None:
    runs = [TimedRun(3.3, 6.5, True), TimedRun(3.1, 6.0, True), TimedRun(2.0, 4.0, False), TimedRun(9.0, 6.0, False)]
    assert undisturbed_ms(runs, cores=2) == pytest.approx(3.1)


def test_an_action_that_was_always_disturbed_takes_its_processor_time_per_core() -> None:
    runs = [TimedRun(10.2, 12.4, False), TimedRun(16.1, 11.0, False), TimedRun(14.2, 12.5, False)]
    assert undisturbed_ms(runs, cores=2) == pytest.approx(6.2)


def test_processor_time_that_was_booked_late_never_makes_an_action_longer_than_its_fastest_run() -> None:
    assert undisturbed_ms([TimedRun(4.0, 12.0, False), TimedRun(5.0, 11.0, False)], cores=2) == pytest.approx(4.0)
