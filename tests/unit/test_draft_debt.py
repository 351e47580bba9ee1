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


def tokens_until_free(account: DraftDebt) -> int:
    tokens = 0
    while account.exceeded:
        account.write(1)
        tokens += 1
        assert tokens < 10_000
    return tokens


def owing(tokens: float) -> DraftDebt:
    """Whose start is used up, and who has lost so many tokens more."""
    account = DraftDebt()
    account.lose(_FREE_START_TOKENS)
    account.lose(tokens)
    return account


def test_a_loss_is_worked_off_at_its_share() -> None:
    account = DraftDebt()
    account.lose(0.99 * _FREE_START_TOKENS)
    assert not account.exceeded, "everybody may try for a start"
    assert 0.9 * 0.5 / _LOSS_SHARE < tokens_until_free(owing(0.5)) < 1.02 * 0.5 / _LOSS_SHARE
    account = owing(0.3)
    tokens_until_free(account)
    account.lose(0.3)
    assert 0.5 * 0.3 / _LOSS_SHARE < tokens_until_free(account) < 0.3 / _LOSS_SHARE


def test_what_drafts_win_pays_for_drafts_that_lose() -> None:
    account = DraftDebt()
    for _ in range(50):
        account.lose(1.2)
        account.win(3)
    account.lose(_SAVED_TOKENS - 0.1)
    assert not account.exceeded
    account.lose(0.2)
    assert account.exceeded, "a long good time does not pay for a long bad one"


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
