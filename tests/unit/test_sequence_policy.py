"""One sequence's memory: what it learns from verified and unverified drafts, and how long it waits between probes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from slipstream.speculative.calibration import DraftOutcome
from slipstream.speculative.expected_gains import DraftCurves
from slipstream.speculative.sequence_policy import SequencePolicy, SharedRecord

from slipstream.types import Gate, Mode, Proposal, Verdict

AUTO = Gate("auto")


def sequence() -> SequencePolicy:
    return SequencePolicy(Mode("auto"), AUTO, 15, SharedRecord())


def observed(own: SequencePolicy) -> list[DraftOutcome]:
    log: list[DraftOutcome] = []

    def remember(outcomes: Sequence[DraftOutcome]) -> tuple[float, float]:
        log.extend(outcomes)
        return 1.0, 1.0

    own.calibration.learn = remember  # type: ignore[method-assign]
    return log


def test_verified_tree_teaches_along_the_accepted_path() -> None:
    own = sequence()
    log = observed(own)
    # anchor; its four children 1-4; children 5 and 6 of row 2, child 7 of row 1
    proposal = Proposal(
        (0, 10, 11, 12, 13, 20, 21, 30), (-1, 0, 0, 0, 0, 2, 2, 1), (1.0, 0.5, 0.3, 0.1, 0.05, 0.6, 0.2, 0.9)
    )
    own.learn(proposal, Verdict((0, 2), (11, 99)), (11, 99))
    assert log == [
        (0.5, 1, False, True),
        (0.3, 1, True, False),
        (0.1, 1, False, False),
        (0.6, 2, False, True),
        (0.2, 2, False, False),
    ]


def test_fully_accepted_chain_teaches_nothing_about_the_bonus() -> None:
    own = sequence()
    log = observed(own)
    own.learn(Proposal((0, 5, 6), (-1, 0, 1), (1.0, 0.9, 0.8)), Verdict((0, 1, 2), (5, 6, 7)), (5, 6, 7))
    assert log == [(0.9, 1, True, True), (0.8, 2, True, True)]


def test_shadow_is_judged_by_what_is_committed_until_its_first_miss() -> None:
    own = sequence()
    log = observed(own)
    own.shadow([5, 6, 7], [0.9, 0.8, 0.7])
    own.committed([5])
    own.committed([9, 7])
    own.committed([7])
    assert log == [(0.9, 1, True, True), (0.8, 2, False, True)]


def test_verified_proposal_drops_the_shadow() -> None:
    own = sequence()
    own.shadow([5, 6], [0.9, 0.8])
    log = observed(own)
    own.learn(Proposal((0, 8), (-1, 0), (1.0, 0.7)), Verdict((0,), (5,)), (5,))
    own.committed([5])
    assert log == [(0.7, 1, False, True)]


@pytest.mark.parametrize(
    ("outlook", "waits"),
    [
        (0.99, [4, 4, 4, 4]),
        (0.95, [8, 8, 8, 8]),
        (0.8, [16, 32, 64, 128]),
        (0.5, [16, 32, 64, 128]),
        (0.0, [16, 32, 64, 128]),
    ],
)
def test_waits_depend_on_how_far_from_paying_it_is(outlook: float, waits: list[int]) -> None:
    own = sequence()
    own.planned(7)
    own.back_off(outlook)
    found = []
    for _ in waits:
        found.append(own.tokens_to_probe)
        own.committed([1] * found[-1])
        assert own.probe_due
        own.probed(math.inf, outlook)
    assert found == waits
    own.back_off(0.0)
    assert own.tokens_to_probe >= found[-1]  # a sequence that waits already does not wait anew
    for _ in range(10):
        own.probed(math.inf, 0.0)
    assert own.tokens_to_probe == 8 * AUTO.probe
    own.paid()
    assert own.backing_off, "a probe's promise alone proves nothing"
    own.believed()
    own.paid()
    assert not own.backing_off


def test_first_draft_does_not_lengthen_the_wait() -> None:
    own = sequence()
    own.back_off(0.1)
    own.probed(math.inf, 0.1)
    own.planned(7)
    assert own.tokens_to_probe == AUTO.probe
    own.probed(math.inf, 0.1)
    assert own.tokens_to_probe == 2 * AUTO.probe


@pytest.mark.parametrize(("break_even", "due"), [(2.0, True), (2.5, False)])
def test_probe_with_enough_right_tokens_is_followed_by_another(break_even: float, due: bool) -> None:
    own = sequence()
    own.planned(7)
    for outcome in ("shadow", "verified"):
        own.paid()
        own.back_off(0.5)
        own.probed(break_even, 0.5)
        if outcome == "shadow":
            own.shadow([5, 6, 7], [0.5] * 3)
            own.committed([5, 6, 99])
        else:
            proposal = Proposal((0, 5, 6, 7), (-1, 0, 1, 2), (1.0, 0.5, 0.5, 0.5))
            own.learn(proposal, Verdict((0, 1, 2), (5, 6, 99)), (5, 6, 99))
        assert own.probe_due is due


def test_trust_that_falls_takes_the_gains_along() -> None:
    shared = SharedRecord()
    first, second = (SequencePolicy(Mode("auto"), AUTO, 15, shared) for _ in range(2))
    for gains in (first.gains, shared.gains):
        gains.blend(DraftCurves.of([0.9**slot for slot in range(1, 16)], ()), 15)
    before = first.gains.expected(7, 7, branching=False)
    for _ in range(3):
        first.learn(Proposal((0, 5), (-1, 0), (1.0, 0.9)), Verdict((0,), (9,)), (9,))
    assert first.gains.expected(7, 7, branching=False) < 0.3 * before
    assert shared.gains.expected(7, 7, branching=False) < 0.5 * before
    assert not second.gains.known  # it was made before any sequence had drafted
