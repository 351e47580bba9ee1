"""Decides which rows of a verified proposal are kept, with pure functions on token ids."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.types import Proposal, Verdict

NO_TOKEN = -1  # The target could not choose a token, because its logits after this row are NaN or infinite.

NOT_CHOSEN = -2  # No token was chosen after this drafted row, because its grammar mask did not come in time.


def children_of(proposal: Proposal) -> dict[tuple[int, int], int]:
    """Maps (row, token) to the row that carries this token as a child of that row."""
    return {
        (parent, token): row
        for row, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True))
        if parent >= 0
    }


def accept(proposal: Proposal, chosen: Sequence[int]) -> Verdict:
    """The kept path and the committed tokens; `chosen[row]` is the target's own token after that row.

    From the anchor on, the child that carries the target's token is kept. The path ends where there is no such child,
    or where no token was chosen after that child. The target's token at this place is the bonus.
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
