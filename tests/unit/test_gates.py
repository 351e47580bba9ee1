"""The published gates close when they should, stay closed, and never earlier."""

from __future__ import annotations

import pytest

from slipstream.speculative.gates import EmaGate, EntropyGate
from slipstream.types import Gate


def test_ema_follows_the_published_average() -> None:
    gate = EmaGate(Gate("ema"))
    gate.observe(committed=3, step_ms=30.0, plain_ms=10.0)
    assert gate.ema == pytest.approx(0.5 * 2.0 + 0.5 * 1.0)
    gate.observe(committed=1, step_ms=20.0, plain_ms=10.0)
    assert gate.ema == pytest.approx(0.5 * 1.5 + 0.5 * 0.5)


def test_ema_closes_after_sustained_loss_and_stays_closed() -> None:
    gate = EmaGate(Gate("ema", margin=1.0, sustain=3, warmup=2))
    opened = []
    for _ in range(6):
        gate.observe(1, 40.0, 10.0)
        opened.append(gate.open)
    # the average is 1.125 and 0.69 in the warm-up, then below 1 three times
    assert opened == [True, True, True, True, False, False]
    gate.observe(16, 10.0, 10.0)
    assert not gate.open


def test_ema_forgets_a_short_loss() -> None:
    gate = EmaGate(Gate("ema", sustain=2, warmup=0))
    for committed in (1, 1, 30, 1, 1):
        gate.observe(committed, 40.0, 10.0)
    assert gate.open


@pytest.mark.parametrize(("margin", "stays"), [(0.4, True), (0.6, False)])
def test_ema_margin_is_what_it_is_compared_with(margin: float, stays: bool) -> None:
    gate = EmaGate(Gate("ema", margin=margin))
    for _ in range(20):
        gate.observe(1, 20.0, 10.0)
    assert gate.open is stays


def test_entropy_needs_patience_below_the_floor() -> None:
    gate = EntropyGate(Gate("entropy", floor=0.9, hard=0.45, patience=2))
    for top1 in (0.8, 0.95, 0.8, 0.9):
        gate.observe(top1)
        assert gate.open
    gate.observe(0.89)
    assert gate.open
    gate.observe(0.89)
    assert not gate.open
    gate.observe(1.0)
    assert not gate.open


def test_entropy_closes_at_once_below_hard() -> None:
    gate = EntropyGate(Gate("entropy", hard=0.45, patience=5))
    gate.observe(0.45)
    assert gate.open
    gate.observe(0.44)
    assert not gate.open


def test_traces_show_the_numbers_of_the_rule() -> None:
    ema, entropy = EmaGate(Gate("ema", margin=1.2)), EntropyGate(Gate("entropy"))
    ema.observe(1, 20.0, 10.0)
    assert entropy.reading == "top-1 unknown, thresholds 0.9 and 0.45"
    entropy.observe(0.4)
    assert (ema.reading, entropy.reading) == ("ema 1.25, threshold 1.2", "top-1 0.40, thresholds 0.9 and 0.45")
