"""Step and draft costs: the start-up curve, what observation makes of it, and what noise must not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import IntegrityError
from slipstream.speculative.costs import CostTable, StepShape

STEPS = {1: 14.5, 2: 16.8, 4: 18.7, 8: 25.7, 16: 39.7, 32: 76.0, 64: 160.0}
DRAFTS = {3: 8.9, 7: 9.7, 15: 13.5}


def shape(rows: int, batch: int = 1, context: int = 100, sampled: bool = False, branching: bool = False) -> StepShape:
    return StepShape(batch, rows, context, sampled, branching)


def test_start_up_curve_is_met_at_its_points_straight_between_and_extended_behind() -> None:
    table = CostTable(STEPS, DRAFTS)
    for rows, ms in STEPS.items():
        assert table.step_ms(shape(rows)) == pytest.approx(ms)
    assert table.step_ms(shape(12)) == pytest.approx((25.7 + 39.7) / 2)
    assert table.step_ms(shape(128)) == pytest.approx(160 + 64 * (160 - 76) / 32)
    for slots, ms in DRAFTS.items():
        assert table.draft_ms(1, slots, 100) == pytest.approx(ms)
    assert table.steps_ms(shape(2000)) == pytest.approx([table.step_ms(shape(rows)) for rows in range(2001)])


def test_dip_in_the_measurements_is_noise() -> None:
    table = CostTable({1: 10.0, 2: 14.0, 4: 12.0, 8: 20.0}, DRAFTS)
    times = [table.step_ms(shape(rows)) for rows in range(1, 12)]
    assert times == sorted(times)
    assert table.step_ms(shape(4)) == pytest.approx(14.0)


def test_measurements_that_cannot_be_are_refused() -> None:
    for steps, drafts in (({}, DRAFTS), ({1: 0.0}, DRAFTS), ({1: 5.0}, {3: math.nan}), ({0: 5.0}, {})):
        with pytest.raises(IntegrityError):
            CostTable(steps, drafts)


def test_without_a_drafter_drafting_is_endlessly_dear() -> None:
    table = CostTable(STEPS, {})
    assert table.draft_ms(1, 7, 0) == math.inf
    assert table.draft_ms(0, 0, 0) == 0.0
    table.observe_draft(1, 7, 0, 5.0)
    assert table.draft_ms(1, 7, 0) == math.inf


@pytest.mark.parametrize("factor", [3.0, 1.5, 0.4])
def test_lasting_change_is_followed_within_some_ten_steps(factor: float) -> None:
    table = CostTable(STEPS, DRAFTS)
    for _ in range(14):
        table.observe_step(shape(8), factor * 25.7)
        table.observe_draft(1, 7, 100, factor * 9.7)
    assert table.step_ms(shape(8)) == pytest.approx(factor * 25.7, rel=0.15)
    assert table.draft_ms(1, 7, 100) == pytest.approx(factor * 9.7, rel=0.15)


def test_one_hiccup_leaves_no_trace() -> None:
    table = CostTable(STEPS, DRAFTS)
    for _ in range(5):
        table.observe_step(shape(8), 25.7)
    table.observe_step(shape(8), 500.0)
    assert table.step_ms(shape(8)) == pytest.approx(25.7)


def test_first_hiccup_in_a_cell_is_clipped() -> None:
    table = CostTable(STEPS, DRAFTS)
    table.observe_step(shape(8), 2570.0)
    assert table.step_ms(shape(8)) < 1.25 * 25.7


def test_noise_averages_out() -> None:
    rng = random.Random(1)
    table = CostTable(STEPS, DRAFTS)
    estimates = []
    for _ in range(400):
        table.observe_step(shape(8), 30.0 * rng.lognormvariate(0, 0.1) * (4 if rng.random() < 0.03 else 1))
        estimates.append(table.step_ms(shape(8)))
    late = estimates[50:]
    assert sum(late) / len(late) == pytest.approx(30.0, rel=0.05)
    assert max(late) < 1.25 * 30.0 and min(late) > 30.0 / 1.25


def test_a_slower_machine_is_slower_for_shapes_nobody_ran() -> None:
    table = CostTable(STEPS, DRAFTS)
    for _ in range(60):
        table.observe_step(shape(8), 2 * 25.7)
    near = table.step_ms(shape(16)) / 39.7
    far = table.step_ms(shape(16, batch=8, sampled=True)) / 39.7
    assert 1.25 < far < near < 2.1


def test_cells_learn_apart() -> None:
    table = CostTable(STEPS, DRAFTS)
    for _ in range(150):
        table.observe_step(shape(8), 25.7)
        table.observe_step(shape(8, context=5000), 60.0)
        table.observe_step(shape(8, branching=True), 35.0)
        table.observe_step(shape(8, batch=4, sampled=True), 28.0)
    assert table.step_ms(shape(8)) == pytest.approx(25.7, rel=0.05)
    assert table.step_ms(shape(8, context=5000)) == pytest.approx(60.0, rel=0.05)
    assert table.step_ms(shape(8, branching=True)) == pytest.approx(35.0, rel=0.05)
    assert table.step_ms(shape(8, batch=4, sampled=True)) == pytest.approx(28.0, rel=0.05)
    # the same bucket of contexts, and a neighbour of it
    assert table.step_ms(shape(8, context=8000)) == pytest.approx(60.0, rel=0.05)


def test_rows_of_a_long_context_are_dearer() -> None:
    table = CostTable(STEPS, DRAFTS)
    short = table.row_ms(100)
    for _ in range(60):
        for rows in (4, 8, 12):
            table.observe_step(shape(rows, context=9000), 10.0 + 6.0 * rows)
    assert table.row_ms(9000) == pytest.approx(6.0, rel=0.2)
    assert table.row_ms(9000) > 2 * short


def test_rows_are_never_free_altogether() -> None:
    table = CostTable({1: 4.0, 64: 4.0}, DRAFTS)
    assert table.row_ms(100) > 0


def test_blocks_drafted_together_cost_what_rows_cost_together() -> None:
    assert CostTable({1: 4.0, 256: 4.0}, DRAFTS).draft_ms(8, 7, 0) == pytest.approx(9.7)
    assert CostTable(STEPS, DRAFTS).draft_ms(4, 7, 0) == pytest.approx(9.7 * 160 / 39.7)


def test_an_abandoned_cell_is_not_ruled_out_for_ever() -> None:
    table = CostTable(STEPS, DRAFTS)
    for _ in range(30):
        table.observe_step(shape(32), 300.0)
    spell = table.step_ms(shape(32))
    for _ in range(1500):
        table.observe_step(shape(1), 14.5)
    assert spell > 250
    assert table.step_ms(shape(32)) < 100


@given(st.lists(st.tuples(st.integers(1, 80), st.floats(0.1, 500.0)), max_size=60))
def test_more_rows_never_look_cheaper(observed: list[tuple[int, float]]) -> None:
    table = CostTable(STEPS, DRAFTS)
    for rows, ms in observed:
        table.observe_step(shape(rows), ms)
    times = [table.step_ms(shape(rows)) for rows in range(1, 90)]
    assert all(low <= high + 1e-9 for low, high in zip(times, times[1:], strict=False))
    assert all(math.isfinite(ms) and ms > 0 for ms in times)


def test_summary_shows_todays_estimates() -> None:
    table = CostTable(STEPS, DRAFTS)
    for _ in range(20):
        table.observe_step(shape(8), 50.0)
    summary = table.to_json()
    assert summary["observed_steps"] == 20
    assert summary["steps_ms"][8] == pytest.approx(table.step_ms(shape(8)), abs=1e-3)  # type: ignore[index]
    assert summary["drafts_ms"] == DRAFTS
