"""What drafting may lose in bad times, and that probes wait while it has lost more."""

from __future__ import annotations

from slipstream.speculative.sequence_policy import (
    _FREE_START_TOKENS,
    _LOSS_SHARE,
    _MOST_DEBT_TOKENS,
    _SAVED_TOKENS,
    DraftDebt,
    SequencePolicy,
    SharedRecord,
)

from slipstream.types import Gate, Mode


def tokens_until_free(debt: DraftDebt) -> int:
    tokens = 0
    while debt.exceeded:
        debt.write(1)
        tokens += 1
        assert tokens < 10_000
    return tokens


def owing(tokens: float) -> DraftDebt:
    """A debt whose free start is used up, and that has lost `tokens` more."""
    debt = DraftDebt()
    debt.lose(_FREE_START_TOKENS)
    debt.lose(tokens)
    return debt


def test_a_loss_is_worked_off_at_its_share() -> None:
    debt = DraftDebt()
    debt.lose(0.99 * _FREE_START_TOKENS)
    assert not debt.exceeded, "drafting may be tried at the start"
    assert 0.9 * 0.5 / _LOSS_SHARE < tokens_until_free(owing(0.5)) < 1.02 * 0.5 / _LOSS_SHARE
    debt = owing(0.3)
    tokens_until_free(debt)
    debt.lose(0.3)
    assert 0.5 * 0.3 / _LOSS_SHARE < tokens_until_free(debt) < 0.3 / _LOSS_SHARE


def test_what_drafts_win_pays_for_drafts_that_lose() -> None:
    debt = DraftDebt()
    for _ in range(50):
        debt.lose(1.2)
        debt.win(3)
    debt.lose(_SAVED_TOKENS - 0.1)
    assert not debt.exceeded
    debt.lose(0.2)
    assert debt.exceeded, "a long good time does not pay for a long bad one"


def test_no_loss_is_too_large_to_be_forgiven() -> None:
    assert tokens_until_free(owing(1000.0)) == tokens_until_free(owing(_MOST_DEBT_TOKENS)) > 50


def test_probes_wait_while_there_is_debt() -> None:
    shared = SharedRecord()
    policy = SequencePolicy(Mode.parse("auto"), Gate.parse("auto"), 7, shared)
    policy.back_off(0.5)
    policy.committed([0] * 20)
    assert policy.probe_due
    shared.debt.lose(1000.0)
    assert not policy.probe_due
    policy.committed([0] * 1000)
    assert policy.probe_due
