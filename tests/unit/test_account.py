"""What drafting may lose in bad times, and that probes wait while it has lost more."""

from __future__ import annotations

from slipstream.speculative.draft_debt import _LENT, _OWED, _SAVED, _SHARE, Account
from slipstream.speculative.sequence_policy import Memory, SequencePolicy
from slipstream.types import Gate, Mode


def tokens_until_free(account: Account) -> int:
    tokens = 0
    while account.in_debt:
        account.write(1)
        tokens += 1
        assert tokens < 10_000
    return tokens


def owing(tokens: float) -> Account:
    """Whose start is used up, and who has lost so many tokens more."""
    account = Account()
    account.lose(_LENT)
    account.lose(tokens)
    return account


def test_a_loss_is_worked_off_at_its_share() -> None:
    account = Account()
    account.lose(0.99 * _LENT)
    assert not account.in_debt, "everybody may try for a start"
    assert 0.9 * 0.5 / _SHARE < tokens_until_free(owing(0.5)) < 1.02 * 0.5 / _SHARE
    account = owing(0.3)
    tokens_until_free(account)
    account.lose(0.3)
    assert 0.5 * 0.3 / _SHARE < tokens_until_free(account) < 0.3 / _SHARE


def test_what_drafts_win_pays_for_drafts_that_lose() -> None:
    account = Account()
    for _ in range(50):
        account.lose(1.2)
        account.win(3)
    account.lose(_SAVED - 0.1)
    assert not account.in_debt
    account.lose(0.2)
    assert account.in_debt, "a long good time does not pay for a long bad one"


def test_no_loss_is_too_large_to_be_forgiven() -> None:
    assert tokens_until_free(owing(1000.0)) == tokens_until_free(owing(_OWED)) > 50


def test_probes_wait_while_there_is_debt() -> None:
    shared = Memory()
    policy = SequencePolicy(Mode.parse("auto"), Gate.parse("auto"), 7, shared)
    policy.back_off(0.5)
    policy.committed([0] * 20)
    assert policy.probe_due
    shared.account.lose(1000.0)
    assert not policy.probe_due
    policy.committed([0] * 1000)
    assert policy.probe_due
