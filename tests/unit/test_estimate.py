"""Claims against outcomes: they are corrected where they are wrong, level by level, and change is followed."""

from __future__ import annotations

import ctypes
import math
import random

import pytest

from slipstream.speculative.estimate import LEAST, MOST, DraftOutcome, Estimate, Record

CLAIMS = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.98, 0.999)


def taught(estimate: Estimate, claimed: float, true: float, times: int, depth: int = 1, seed: int = 3) -> None:
    rng = random.Random(seed)
    for _ in range(times):
        estimate.learn([DraftOutcome(claimed, depth, rng.random() < true)])


@pytest.mark.parametrize("depth", [1, 3, 9])
def test_claims_are_taken_as_they_are_while_nothing_is_known(depth: int) -> None:
    estimate = Estimate(Record(Record()))
    assert [estimate.chance(claimed, depth) for claimed in CLAIMS] == list(CLAIMS)


@pytest.mark.parametrize(
    ("claimed", "true"), [(0.95, 0.6), (0.3, 0.8), (0.7, 0.7), (0.9, 0.95), (0.99, 0.0), (0.04, 0.04), (0.5, 1.0)]
)
@pytest.mark.parametrize("requests", [1, 20])
def test_claims_are_corrected_to_the_true_rate(claimed: float, true: float, requests: int) -> None:
    kind, found = Record(Record()), []
    rng = random.Random(3)
    for _ in range(requests):
        estimate = Estimate(kind)
        for _ in range(1200 // requests):
            estimate.learn([DraftOutcome(claimed, 1, rng.random() < true)])
            found.append(estimate.chance(claimed, 1))
    late = found[300:]
    assert sum(late) / len(late) == pytest.approx(true, abs=0.05)
    assert Estimate(kind).chance(claimed, 1) == pytest.approx(true, abs=0.1)


def test_claims_and_depths_are_told_apart() -> None:
    kind, rng = Record(Record()), random.Random(4)
    rates = {(0.8, 1): 0.9, (0.8, 10): 0.4, (0.3, 1): 0.1}
    estimate = Estimate(kind)
    for _ in range(600):
        estimate.learn([DraftOutcome(claimed, depth, rng.random() < true) for (claimed, depth), true in rates.items()])
    for (claimed, depth), true in rates.items():
        assert Estimate(kind).chance(claimed, depth) == pytest.approx(true, abs=0.1)


@pytest.mark.parametrize("claimed", [0.4, 0.9, 0.99])
def test_a_hopeless_drafter_is_known_soon(claimed: float) -> None:
    kind = Record(Record())
    estimate = Estimate(kind)
    taught(estimate, claimed, 0.0, 30)
    assert estimate.chance(claimed, 1) < 0.2 * claimed
    assert Estimate(kind).chance(claimed, 1) < 0.45 * claimed, "and the next request begins with that"


def test_one_miss_does_not_ruin_a_good_drafter() -> None:
    estimate = Estimate(Record(Record()))
    taught(estimate, 0.9, 1.0, 20)
    before = estimate.chance(0.9, 1)
    taught(estimate, 0.9, 0.0, 1)
    assert 0.85 * before < estimate.chance(0.9, 1) < before


def test_a_change_is_followed_both_ways() -> None:
    estimate = Estimate(Record(Record()))
    taught(estimate, 0.9, 1.0, 200)
    high = estimate.chance(0.9, 1)
    taught(estimate, 0.9, 0.0, 40)
    low = estimate.chance(0.9, 1)
    taught(estimate, 0.9, 1.0, 40)
    assert high > 0.9 and low < 0.5 and estimate.chance(0.9, 1) > 1.5 * low


def test_a_level_without_outcomes_follows_the_one_above_it() -> None:
    engine = Record()
    kind, other_kind = Record(engine), Record(engine)
    taught(Estimate(kind), 0.9, 0.3, 300)
    for follower in (Estimate(kind), Estimate(other_kind), Estimate(Record(engine))):
        assert follower.chance(0.9, 1) == pytest.approx(0.3, abs=0.1)
        assert follower.own_factor() == 1.0
        assert follower.chance(0.9, 9) == 0.9, "depths without outcomes are left alone"


def test_a_kind_departs_from_its_engine_and_a_request_from_its_kind() -> None:
    engine = Record()
    greedy, sampled = Record(engine), Record(engine)
    for seed in range(40):  # many requests, so that a single one's factor has little to do with it
        taught(Estimate(greedy), 0.9, 0.9, 10, seed=seed)
        taught(Estimate(sampled), 0.9, 0.3, 10, seed=seed)
    assert Estimate(greedy).chance(0.9, 1) > 0.75
    assert Estimate(sampled).chance(0.9, 1) < 0.45
    bad = Estimate(greedy)
    taught(bad, 0.9, 0.0, 25)
    assert bad.own_factor() < 0.7
    assert bad.chance(0.9, 1) < 0.6 * Estimate(greedy).chance(0.9, 1)
    assert bad.chance(0.5, 1) < 0.8 * Estimate(greedy).chance(0.5, 1), "what a request has shown holds for all claims"


def test_a_good_request_does_not_suffer_for_hopeless_ones() -> None:
    kind = Record(Record())
    good, bad = Estimate(kind), Estimate(kind)
    for number in range(240):
        good.learn([DraftOutcome(0.9, 1, number % 10 != 0)])
        if number % 3 == 0:
            bad.learn([DraftOutcome(0.9, 1, False)])
    assert good.chance(0.9, 1) > 0.7
    assert bad.chance(0.9, 1) < 0.4


def test_a_request_has_its_own_part_in_what_its_kind_shows() -> None:
    """The factor of a request is about what its kind leaves unexplained: one that is as good as its kind has none."""
    kind = Record(Record())
    taught(Estimate(kind), 0.9, 0.45, 600)
    usual = Estimate(kind)
    taught(usual, 0.9, 0.45, 200, seed=5)
    assert usual.own_factor() == pytest.approx(1.0, abs=0.15)


def test_no_outcome_changes_nothing() -> None:
    kind = Record(Record())
    estimate = Estimate(kind)
    taught(estimate, 0.7, 0.4, 20)
    before = [estimate.chance(claimed, 2) for claimed in CLAIMS]
    estimate.learn([])
    assert [estimate.chance(claimed, 2) for claimed in CLAIMS] == before


def test_outcomes_count_alike_in_one_lesson_and_in_many() -> None:
    rng = random.Random(6)
    outcomes = [DraftOutcome(0.8, 1 + number % 3, rng.random() < 0.5) for number in range(3)]
    together, apart = Estimate(Record()), Estimate(Record())
    together.learn(outcomes)
    for outcome in outcomes:
        apart.learn([outcome])
    for depth in (1, 2, 3):
        assert together.chance(0.8, depth) == pytest.approx(apart.chance(0.8, depth), rel=0.02)


def test_chances_stay_inside_their_bounds() -> None:
    sure, hopeless = Estimate(Record(Record())), Estimate(Record(Record()))
    taught(sure, 1.0, 1.0, 2000)
    taught(hopeless, 0.0, 0.0, 2000)
    taught(hopeless, 1.0, 0.0, 2000)
    taught(sure, 0.0, 1.0, 2000)
    for estimate in (sure, hopeless):
        for claimed in (0.0, *CLAIMS, 1.0):
            chance = estimate.chance(claimed, 1)
            assert math.isfinite(chance) and LEAST <= chance <= MOST
    assert sure.chance(1.0, 1) == MOST and hopeless.chance(1.0, 1) < 0.01


def test_the_table_for_compiled_code_follows_what_was_learnt() -> None:
    """`test_native_growth` compares what compiled code makes of it; here its memory must stay where it is."""
    estimate = Estimate(Record())
    table = estimate.table()
    count = (table.claims + 1) * (table.depths + 1)
    factors = (ctypes.c_double * count).from_address(table.factors)
    assert list(factors) == [1.0] * count
    taught(estimate, 0.9, 0.0, 5)
    assert estimate.table().factors == table.factors
    assert min(factors) == pytest.approx(estimate.chance(0.9, 1) / 0.9)
