"""A sample of the fuzzed constraints; the verification runs 200,000."""

from __future__ import annotations

from tests.hostile.fuzz_constraints import fuzz


def test_no_constraint_ends_a_process() -> None:
    outcomes = fuzz(300, seed=7, workers=1)
    assert outcomes.total() == 300 and not outcomes["hung"], outcomes
    assert outcomes["walked"] > 100, f"too few constraints are compiled at all: {outcomes}"
