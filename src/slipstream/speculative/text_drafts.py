"""Joins nodes from a sequence's own text and those of its drafter in one tree, priced by one estimate."""

from __future__ import annotations

from typing import Protocol

from slipstream.speculative.tree import Growth
from slipstream.types import Source

# Nodes that a text offers at most. With 31, prompts that edit a text ran 1 % slower and others up to 2 % (docs/log.md).
MOST_TEXT_NODES = 15


class Chance(Protocol):
    """The acceptance probability of a token with some claim, at some depth (from 1), from some source."""

    def __call__(self, claimed: float, depth: int, source: Source) -> float: ...


def merged(drafter: Growth, text: Growth, chance: Chance, nodes: int) -> Growth:
    """One tree of both, with at most `nodes` nodes.

    The drafter's nodes stay as they are. If a row has children from the drafter, the text's claims for further children
    are multiplied by the probability that those of the drafter leave.
    """
    if not text.nodes:
        return drafter
    whole = Growth(
        list(drafter.tokens),
        list(drafter.parents),
        list(drafter.claims),
        list(drafter.survivals),
        list(drafter.depths),
        [Source.DRAFTER] * len(drafter.tokens),
    )
    left, known = [1.0] * len(whole.tokens), dict[tuple[int, int], int]()
    for row in range(1, len(whole.tokens)):
        left[whole.parents[row]] -= whole.claims[row]
        known[whole.parents[row], whole.tokens[row]] = row
    rows = [0]
    for above, token, claimed in zip(text.parents[1:], text.tokens[1:], text.claims[1:], strict=True):
        parent = rows[above]
        if (parent, token) not in known:
            claim = claimed * max(0.0, left[parent]) if parent < len(left) else claimed
            survival = chance(claim, whole.depths[parent] + 1, Source.TEXT)
            known[parent, token] = whole.add(parent, token, claim, whole.survivals[parent] * survival)
            whole.sources.append(Source.TEXT)
        rows.append(known[parent, token])
    return ordered(whole, nodes)


def ordered(growth: Growth, nodes: int | None = None) -> Growth:
    """The same nodes, the likeliest first; a parent is always at least as likely as its children."""
    order = sorted(range(1, len(growth.tokens)), key=lambda row: (-growth.survivals[row], row))[:nodes]
    places = {0: 0} | {row: place for place, row in enumerate(order, start=1)}
    rows = [0, *order]
    return Growth(
        [growth.tokens[row] for row in rows],
        [-1, *(places[growth.parents[row]] for row in order)],
        [growth.claims[row] for row in rows],
        [growth.survivals[row] for row in rows],
        [growth.depths[row] for row in rows],
        [growth.sources[row] for row in rows],
    )
