"""What is kept of a verified proposal: pure functions on token ids."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.types import Proposal, Verdict

NO_TOKEN = -1  # the target could not choose: its logits after this row are not numbers

NOT_CHOSEN = -2  # no token was chosen behind this drafted row, because its mask did not come in time


def children_of(proposal: Proposal) -> dict[tuple[int, int], int]:
    """The row that carries a token behind a row."""
    return {
        (parent, token): row
        for row, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True))
        if parent >= 0
    }


def accept(proposal: Proposal, chosen: Sequence[int]) -> Verdict:
    """`chosen[row]` is the target's own token after that row.

    From the anchor on, the child that carries the target's token is kept; where there is none, or nothing was chosen
    behind it, the token itself, the bonus, ends the run.
    """
    children = children_of(proposal)
    row, path = 0, [0]
    tokens: list[int] = []
    while True:
        token = chosen[row]
        if token == NO_TOKEN:
            return Verdict(tuple(path), tuple(tokens), failed=True)
        tokens.append(token)
        child = children.get((row, token))
        if child is None or chosen[child] == NOT_CHOSEN:
            return Verdict(tuple(path), tuple(tokens))
        path.append(child)
        row = child
