"""What is kept of a verified proposal: pure functions on token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slipstream.types import Verdict


def accept_chain(proposed: Sequence[int], sampled: Sequence[int]) -> Verdict:
    """`sampled[j]` is the target's own token after row j (row 0 is the anchor, row j the j-th proposal).

    The proposals that agree are kept, and the first token the target chose itself, the bonus, comes along.
    """
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == sampled[accepted]:
        accepted += 1
    return Verdict(accepted, (*proposed[:accepted], sampled[accepted]))


def cut_verdict(verdict: Verdict, stop_ids: Collection[int], room: int) -> tuple[Verdict, bool]:
    """Ends a committed run at its first stop token (kept) or after `room` tokens; says whether a stop token ended it."""
    tokens = verdict.tokens[:room]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return Verdict(min(verdict.accepted, index + 1), tokens[: index + 1]), True
    return Verdict(min(verdict.accepted, len(tokens)), tokens), False
