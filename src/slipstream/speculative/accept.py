"""What is kept of a verified proposal: pure functions on token ids."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.types import Verdict


def accept_chain(proposed: Sequence[int], sampled: Sequence[int]) -> Verdict:
    """`sampled[j]` is the target's own token after row j (row 0 is the anchor, row j the j-th proposal).

    The proposals that agree are kept, and the first token the target chose itself, the bonus, comes along.
    """
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == sampled[accepted]:
        accepted += 1
    return Verdict(accepted, (*proposed[:accepted], sampled[accepted]))
