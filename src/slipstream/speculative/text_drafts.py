"""Nodes from a sequence's own text beside those of its drafter: both become one tree, priced by one estimate."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from slipstream.speculative.suffix_index import SuffixIndex
from slipstream.speculative.tree import Growth
from slipstream.types import Source

# Nodes that a text offers at most. With 31, prompts that edit a text ran 1 % slower and others up to 2 % (docs/log.md).
MOST_TEXT_NODES = 15


class Chance(Protocol):
    """The acceptance probability of a token with some claim, at some depth (from 1), from some source."""

    def __call__(self, claimed: float, depth: int, source: Source) -> float: ...


def text_growth(index: SuffixIndex, depth: int, chance: Chance, floor: float) -> Growth:
    """The continuations of a text that are at least as likely as `floor`, the likeliest first."""
    return index.grow(MOST_TEXT_NODES, depth, partial(chance, source=Source.TEXT), floor)


def merged(drafter: Growth, text: Growth, chance: Chance, nodes: int) -> Growth:
    """Returns one tree of both; a node that both have is claimed as if its two sources were independent."""
    if not text.nodes:
        return drafter
    whole = Growth(
        list(drafter.tokens),
        list(drafter.parents),
        list(drafter.chances),
        list(drafter.survivals),
        list(drafter.depths),
        [Source.DRAFTER] * len(drafter.tokens),
    )
    known = {(parent, token): row for row, (parent, token) in enumerate(zip(whole.parents, whole.tokens, strict=True))}
    rows = [0]
    for parent, token, claim in zip(text.parents[1:], text.tokens[1:], text.chances[1:], strict=True):
        row = known.get((rows[parent], token))
        if row is None:
            row = whole.add(rows[parent], token, claim, 0.0)
            whole.sources.append(Source.TEXT)
        else:
            whole.chances[row] = 1.0 - (1.0 - whole.chances[row]) * (1.0 - claim)
            whole.sources[row] = Source.BOTH
        rows.append(row)
    # Rows of the drafter alone are priced already; they change only as much as the row above them did.
    changes = [1.0] * len(drafter.tokens)
    for row in range(1, len(whole.tokens)):
        parent, source = whole.parents[row], whole.sources[row]
        if source == Source.DRAFTER:
            changes[row] = changes[parent]
            whole.survivals[row] *= changes[parent]
            continue
        survival = whole.survivals[parent] * chance(whole.chances[row], whole.depths[row], source)
        if source == Source.BOTH and whole.survivals[row]:  # the product of many small chances may be 0
            changes[row] = survival / whole.survivals[row]
        whole.survivals[row] = survival
    return ordered(whole, nodes)


def ordered(growth: Growth, nodes: int | None = None) -> Growth:
    """The same nodes, the likeliest first; a parent is always at least as likely as its children."""
    order = sorted(range(1, len(growth.tokens)), key=lambda row: (-growth.survivals[row], row))[:nodes]
    places = {0: 0} | {row: place for place, row in enumerate(order, start=1)}
    rows = [0, *order]
    return Growth(
        [growth.tokens[row] for row in rows],
        [-1, *(places[growth.parents[row]] for row in order)],
        [growth.chances[row] for row in rows],
        [growth.survivals[row] for row in rows],
        [growth.depths[row] for row in rows],
        [growth.sources[row] for row in rows],
    )
