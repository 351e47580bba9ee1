"""Damaged files never crash, hang or exhaust memory; the full number of cases runs with the verification."""

from __future__ import annotations

from tests import fuzz_formats


def test_damaged_files_load_or_are_refused() -> None:
    report = fuzz_formats.run(200, seed=1)
    assert not report.failures, "\n".join(report.failures[:10])
    assert report.cases == 200
    # Both outcomes must occur, or the damage is too heavy or too light to test anything.
    assert report.loaded > 10
    assert report.refused > 50
