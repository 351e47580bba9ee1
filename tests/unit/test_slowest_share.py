"""The slowest sequences of a batch: how they are distinguished from unlucky ones, and what they do to a batch that no
sequence joins."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from slipstream.speculative.gates import BatchGate
from slipstream.speculative.slowest_share import SlowestShare


def drawn(mean: float, luck: random.Random) -> int:
    """Tokens of a drafted step: after every one there is another with the same chance."""
    tokens = 1
    while luck.random() < 1.0 - 1.0 / mean:
        tokens += 1
    return tokens


def share_after(steps: int, means: Sequence[float], pace: SlowestShare, luck: random.Random) -> float:
    share = 1.0
    for _ in range(steps):
        share = pace.slowest_share(range(len(means)), [drawn(mean, luck) for mean in means])
    return share


@pytest.mark.parametrize("batch", [2, 16, 64])
@pytest.mark.parametrize("steps", [6, 40, 300])
def test_sequences_that_differ_by_luck_alone_are_alike(batch: int, steps: int) -> None:
    shares = []
    for seed in range(20):
        pace = SlowestShare()
        pace.restart(batch)
        shares.append(share_after(steps, [2.2] * batch, pace, random.Random(seed)))
    assert sum(shares) / len(shares) > 0.95


@pytest.mark.parametrize("steps", [40, 300])
def test_sequences_that_accept_less_are_found(steps: int) -> None:
    pace = SlowestShare()
    pace.restart(64)
    share = share_after(steps, [1.7] * 16 + [2.7] * 48, pace, random.Random(1))
    assert 1.7 / 2.45 <= share < 0.86  # what may be luck is left out


def test_where_the_others_gain_far_more_the_slowest_bear_it() -> None:
    pace = SlowestShare()
    pace.restart(64)
    assert share_after(200, [1.0] * 32 + [6.0] * 32, pace, random.Random(1)) == 0.7


def test_a_new_batch_starts_from_what_the_last_has_shown_but_not_from_its_end() -> None:
    means, luck, pace = [1.9] * 16 + [2.6] * 48, random.Random(2), SlowestShare()
    pace.restart(64)
    known = share_after(200, means, pace, luck)
    for _ in range(60):  # only the slowest sequences are left, and they are alike
        pace.slowest_share(range(16), [drawn(1.9, luck) for _ in range(16)])
    pace.restart(64)
    assert share_after(1, means, pace, luck) == pytest.approx(known, abs=0.06)
    pace.restart(64)
    assert share_after(150, [2.0] * 64, pace, luck) > 0.9, "but it learns"


def test_steps_that_gave_nothing_are_no_fault() -> None:
    pace = SlowestShare()
    pace.restart(2)
    assert pace.slowest_share([0, 1], [0, 0]) == 1.0


PLAIN, DRAFTED = 1.08, 1.95  # milliseconds of a step
LENGTH = 255


def closed_batch(gate: BatchGate, pace: SlowestShare | None, kinds: Sequence[float], luck: random.Random) -> float:
    """Milliseconds that 64 answers of the same length take from the first step to the last."""
    left, took = [LENGTH] * 64, 0.0
    if pace is not None:
        pace.restart(64)
    flying = gate.drafts(64)
    while any(left):
        ahead, here = gate.drafts(64), [place for place in range(64) if left[place]]
        counts = [drawn(kinds[place % len(kinds)], luck) if flying else 1 for place in here]
        milliseconds = (DRAFTED if flying else PLAIN) * luck.uniform(1.0, 1.05)
        took += milliseconds
        share = pace.slowest_share(here, counts) if pace is not None and flying else 1.0
        gate.observe(64, flying, 4 if flying else 1, share * sum(counts) / len(here), milliseconds)
        for place, count in zip(here, counts, strict=True):
            left[place] = max(0, left[place] - count)
        flying = ahead
    return took


@pytest.mark.parametrize("kinds", [(1.5, 2.2, 2.6), (1.3, 1.5, 3.0), (1.4, 2.5, 2.5)])
def test_a_batch_does_not_wait_for_sequences_that_drafts_make_slower(kinds: tuple[float, ...]) -> None:
    """On average a drafted step yields as much as a plain one or more, and yet the last answer comes later."""
    plain = LENGTH * PLAIN * 1.025
    rates = {}
    for heeded in (False, True):
        gate, pace, luck = BatchGate(), SlowestShare() if heeded else None, random.Random(3)
        closed_batch(gate, pace, kinds, luck)  # the first looks
        rates[heeded] = 10 * plain / sum(closed_batch(gate, pace, kinds, luck) for _ in range(10))
    assert rates[True] > max(0.93, rates[False] + 0.03), rates


def test_a_batch_whose_slowest_gain_as_well_drafts() -> None:
    gate, pace, luck = BatchGate(), SlowestShare(), random.Random(4)
    closed_batch(gate, pace, (2.6, 3.0), luck)
    assert closed_batch(gate, pace, (2.6, 3.0), luck) < 0.9 * LENGTH * PLAIN
