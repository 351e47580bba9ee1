"""Claims against outcomes: hopeless drafters are known at once, good ones survive bad luck, change is followed."""

from __future__ import annotations

import ctypes
import random

import pytest
from slipstream.speculative.calibration import Calibration, DraftOutcome

from slipstream.kernels.cpu.native_growth import Learner
from slipstream.speculative import calibration as calibrations
from tests.native import libraries

CLAIMS = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.98, 0.999)


def test_unknown_drafter_is_believed_mostly() -> None:
    calibration = Calibration()
    for claimed in CLAIMS:
        assert 0.7 * claimed <= calibration.chance(claimed, 1) <= claimed


@pytest.mark.parametrize("claimed", [0.1, 0.4, 0.9, 0.99])
def test_hopeless_drafter_is_known_after_two_steps_whatever_it_claims(claimed: float) -> None:
    shared = Calibration()
    calibration = Calibration(shared)
    for _ in range(2):
        calibration.observe(claimed, 1, False)
    for each in CLAIMS:
        assert calibration.chance(each, 1) < 0.13
        assert shared.chance(each, 1) < 0.13
    calibration.observe(claimed, 1, False)
    assert all(calibration.chance(each, 1) < 0.1 for each in CLAIMS)
    assert all(Calibration(shared).chance(each, 1) < 0.1 for each in CLAIMS)


def test_one_miss_does_not_ruin_a_good_drafter() -> None:
    calibration = Calibration(Calibration())
    for _ in range(20):
        calibration.observe(0.9, 1, True)
    before = calibration.chance(0.9, 1)
    calibration.observe(0.9, 1, False)
    assert calibration.chance(0.9, 1) > 0.85 * before
    assert calibration.chance(0.5, 3) > 0.4


def test_first_outcome_alone_decides_nothing() -> None:
    calibration = Calibration(Calibration())
    calibration.observe(0.9, 1, False)
    assert calibration.chance(0.85, 1) > 0.25
    calibration.observe(0.9, 1, True)
    assert calibration.chance(0.85, 1) > 0.6


@pytest.mark.parametrize(("claimed", "true"), [(0.95, 0.6), (0.3, 0.8), (0.7, 0.7), (0.9, 0.95)])
def test_claims_are_corrected_bin_by_bin(claimed: float, true: float) -> None:
    rng = random.Random(3)
    calibration = Calibration(Calibration())
    found = []
    for _ in range(600):
        calibration.observe(claimed, 1, rng.random() < true)
        found.append(calibration.chance(claimed, 1))
    late = found[200:]
    assert sum(late) / len(late) == pytest.approx(true, abs=0.06)


def test_depths_are_told_apart() -> None:
    rng = random.Random(4)
    calibration = Calibration()
    for _ in range(400):
        calibration.observe(0.8, 1, rng.random() < 0.9)
        calibration.observe(0.8, 10, rng.random() < 0.4)
    assert calibration.chance(0.8, 1) > 0.8
    assert calibration.chance(0.8, 10) < 0.55


def test_change_is_followed_both_ways() -> None:
    calibration = Calibration(Calibration())
    for _ in range(200):
        calibration.observe(0.9, 1, True)
    misses = 0
    while calibration.chance(0.9, 1) > 0.2:
        calibration.observe(0.9, 1, False)
        misses += 1
    assert 2 <= misses <= 6
    for _ in range(20):
        calibration.observe(0.9, 1, False)
    hits = 0
    while calibration.chance(0.9, 1) < 0.4:
        calibration.observe(0.9, 1, True)
        hits += 1
    assert hits <= 8


def test_new_sequence_starts_from_what_the_engine_knows() -> None:
    shared = Calibration()
    for number in range(300):
        Calibration(shared).observe(0.9, 1, number % 2 == 0)
    assert Calibration(shared).chance(0.9, 1) == pytest.approx(0.5, abs=0.12)


def test_good_sequence_does_not_suffer_for_hopeless_ones() -> None:
    shared = Calibration()
    good, bad = Calibration(shared), Calibration(shared)
    for number in range(60):
        good.observe(0.9, 1, number % 10 != 0)
        if number % 3 == 0:
            bad.observe(0.9, 1, False)
    for _ in range(4):
        bad.observe(0.9, 1, False)
    assert good.chance(0.9, 1) > 0.7
    assert bad.chance(0.9, 1) < 0.1


def test_lower_ranked_misses_do_not_touch_trust() -> None:
    calibration = Calibration()
    trust = calibration.trust()
    for _ in range(40):
        calibration.observe(0.2, 1, False, leading=False)
    assert calibration.trust() == trust
    assert calibration.chance(0.2, 1) < 0.05
    assert calibration.chance(0.9, 1) > 0.7


def test_depth_once_reached_speaks_for_the_drafter() -> None:
    calibration = Calibration()
    for _ in range(2):
        calibration.observe(0.9, 1, False)
    assert calibration.trust(1) < 0.15
    assert calibration.trust(1) < calibration.trust(2) < calibration.trust(4) <= 1.0


def test_chances_stay_inside_their_limits() -> None:
    sure, hopeless = Calibration(), Calibration()
    for _ in range(2000):
        sure.observe(1.0, 1, True)
        hopeless.observe(0.0, 1, False)
    assert sure.chance(1.0, 1) <= 0.999
    assert hopeless.chance(0.0, 1) >= 0.001
    assert Calibration().chance(0.0, 1) >= 0.001


def random_outcomes(source: random.Random, count: int) -> list[DraftOutcome]:
    skill = source.choice([0.05, 0.5, 0.9])
    return [
        (
            source.random() ** source.choice([0.2, 1, 3]),
            source.randint(1, 15),
            source.random() < skill,
            source.random() < 0.7,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("compiled", libraries() or [None], ids=lambda each: each.isa if each else "none")
def test_the_compiled_learning_is_the_plain_one(compiled: object, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled is None:
        pytest.skip("no compiled kernels")
    source = random.Random(seed)
    pairs = []
    for learner in (Learner(compiled), None):  # type: ignore[arg-type]
        shared = Calibration()
        pairs.append((learner, shared, [shared, Calibration(shared), Calibration(shared)]))
    for _ in range(12):
        outcomes, who = random_outcomes(source, source.choice([0, 1, 5, 30])), source.randrange(3)
        changes: list[tuple[float, ...]] = []
        for learner, shared, sequences in pairs:
            monkeypatch.setattr(calibrations, "learner", lambda learner=learner: learner)
            changes.append(sequences[who].learn(outcomes))
            table = sequences[who].table()
            levels = range(table.trusts)
            trusts = [ctypes.c_double.from_address(table.trust + 8 * level).value for level in levels]
            says = [ctypes.c_double.from_address(table.say + 8 * level).value for level in levels if who]
            changes[-1] = (*changes[-1], *trusts, *says)
            assert sequences[who].proven == (who > 0 or shared.proven)
        assert changes[0] == pytest.approx(changes[1], rel=1e-12)
        for claimed in CLAIMS:
            for mine, theirs in zip(pairs[0][2], pairs[1][2], strict=True):
                assert mine.chance(claimed, 3) == pytest.approx(theirs.chance(claimed, 3), rel=1e-12)
    assert pairs[0][1].proven == pairs[1][1].proven
