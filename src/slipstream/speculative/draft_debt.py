"""Keeps what drafting loses in bad times within a share of all time, in tokens that plain decoding would make."""

from __future__ import annotations

_SHARE = 0.006  # of all tokens may be lost
_LENT = 12.0  # tokens for a start, when nobody knows anything yet
_SAVED = 4.0  # tokens of what drafting has won in good times that are kept for bad ones
_OWED = 1.0  # tokens at most: some time everybody may look again
_KEPT = 0.999  # of what was written and lost, from token to token: in time losses are forgiven and savings forgotten


class Account:
    """All requests of a kind share one, so that many short answers do not all pay for the same lesson."""

    def __init__(self) -> None:
        self._written = 0.0
        self._lost = -_LENT

    @property
    def in_debt(self) -> bool:
        """Whether drafting has lost more than its share: who does not expect it to pay waits before trying again."""
        return self._lost > _SHARE * self._written

    def write(self, tokens: int) -> None:
        """So many tokens were written, in whatever way."""
        kept = _KEPT**tokens
        self._written = kept * self._written + tokens
        self._lost *= kept

    def lose(self, tokens: float) -> None:
        """A draft took the time of so many plain tokens."""
        self._lost = min(_OWED, self._lost + tokens)

    def win(self, tokens: int) -> None:
        """So many drafted tokens were right."""
        self._lost = min(self._lost, max(-_SAVED, self._lost - tokens))
