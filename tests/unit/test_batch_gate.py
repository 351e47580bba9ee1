"""The gate of a batch settles on the quicker way and keeps an eye on the other."""

import pytest

from slipstream.speculative.batch_gate import BatchGate


def drive(gate: BatchGate, batch: int, steps: int, plain: tuple[int, float], drafted: tuple[int, float]) -> list[bool]:
    chosen = []
    for _ in range(steps):
        drafts = gate.drafts(batch)
        chosen.append(drafts)
        gate.observe(batch, drafts, *(drafted if drafts else plain))
    return chosen


@pytest.mark.parametrize(("drafted", "wins"), [((40, 0.007), False), ((40, 0.002), True)])
def test_the_quicker_way_wins(drafted: tuple[int, float], wins: bool) -> None:
    chosen = drive(BatchGate(), 16, 1000, (16, 0.0014), drafted)
    assert {True, False} == set(chosen[:20])
    share = sum(chosen[50:]) / len(chosen[50:])
    assert share > 0.95 if wins else share < 0.05


def test_it_notices_when_drafts_become_worth_it() -> None:
    gate = BatchGate()
    drive(gate, 4, 300, (4, 0.001), (4, 0.002))
    assert sum(drive(gate, 4, 600, (4, 0.001), (12, 0.0012))[400:]) > 150


def test_one_long_step_decides_nothing() -> None:
    gate = BatchGate()
    drive(gate, 1, 30, (1, 0.001), (4, 0.0012))
    gate.observe(1, True, 4, 2.0)
    assert sum(drive(gate, 1, 60, (1, 0.001), (4, 0.0012))) > 50


def test_batches_are_judged_apart() -> None:
    gate = BatchGate()
    drive(gate, 1, 60, (1, 0.001), (4, 0.0012))
    drive(gate, 64, 60, (64, 0.004), (160, 0.04))
    assert sum(drive(gate, 1, 40, (1, 0.001), (4, 0.0012))) > 30
    assert sum(drive(gate, 64, 40, (64, 0.004), (160, 0.04))) < 10
