"""Grows draft trees: chooses which drafted prefixes are worth a row of the verify step, and needs no model for it.

A block of drafts gives candidates per slot with their probabilities, which may depend on the token before. The tree
holds the nodes with the highest survival, and the most probable node is added first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.types import Proposal, Source

Calibrate = Callable[[float, int], float]  # (claimed probability, depth from 1) -> acceptance probability


@dataclass(frozen=True, slots=True)
class Branch:
    """The candidates after one token, likeliest first, and what the drafter's head keeps of the path to it."""

    tokens: Sequence[int]
    claims: Sequence[float]
    memory: object = None


class Drafts(Protocol):
    """One drafted block of one sequence."""

    @property
    def slots(self) -> int: ...
    def after(self, slot: int, previous: int, memory: object) -> Branch:
        """The candidates of `slot` after the token `previous`; slot 0 is the first proposed token."""


@dataclass(slots=True)
class Growth:
    """Nodes in the order in which they were added, so that any prefix of them is a tree; row 0 is the anchor."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    claims: list[float] = field(default_factory=lambda: [1.0])
    survivals: list[float] = field(default_factory=lambda: [1.0])
    depths: list[int] = field(default_factory=lambda: [0])
    sources: list[Source] = field(default_factory=list)  # by row; empty if all rows come from the drafter

    def add(self, parent: int, token: int, claim: float, survival: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.claims.append(claim)
        self.survivals.append(survival)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1

    @property
    def nodes(self) -> int:
        return len(self.tokens) - 1

    @property
    def straight(self) -> int:
        """How many nodes at the beginning form a chain."""
        for row, parent in enumerate(self.parents):
            if parent != row - 1:
                return row - 1
        return self.nodes

    def proposal(self, nodes: int | None = None) -> Proposal:
        """The first `nodes` nodes (all of them by default) as rows to verify."""
        rows = len(self.tokens) if nodes is None else nodes + 1
        tokens, parents = tuple(self.tokens[:rows]), tuple(self.parents[:rows])
        return Proposal(tokens, parents, tuple(self.claims[:rows]), tuple(self.sources[:rows]))


def as_claimed(claimed: float, depth: int, source: Source = Source.DRAFTER) -> float:
    """Leaves claims as they are, from whatever source."""
    return claimed


def grow_chain(drafts: Drafts, anchor: int, length: int, calibrate: Calibrate = as_claimed) -> Growth:
    """The chain of the likeliest candidates: each slot's candidates follow the token chosen before it."""
    growth = Growth([anchor])
    _extend_chain(drafts, growth, min(length, drafts.slots), calibrate)
    return growth


def _extend_chain(drafts: Drafts, growth: Growth, length: int, calibrate: Calibrate) -> list[Branch]:
    """Appends up to `length` nodes below the anchor; returns the branch at each parent."""
    branches: list[Branch] = []
    row, memory = 0, None
    for slot in range(length):
        branch = drafts.after(slot, growth.tokens[row], memory)
        if not branch.tokens:
            break
        branches.append(branch)
        claim = branch.claims[0]
        row = growth.add(row, branch.tokens[0], claim, growth.survivals[row] * calibrate(claim, slot + 1))
        memory = branch.memory
    return branches


def grow_tree(
    drafts: Drafts,
    anchor: int,
    nodes: int,
    depth: int,
    calibrate: Calibrate = as_claimed,
    seeded: bool = False,
    floor: float = 0.0,
) -> Growth:
    """At most `nodes` nodes no deeper than `depth`, the most probable first.

    A seeded tree begins with the likeliest chain, cut to `nodes`, so at least as many of its tokens are accepted as of
    that chain. No other node has a survival below `floor`.
    """
    growth = Growth([anchor])
    depth = min(depth, drafts.slots)
    heap: list[tuple[float, int, int, int, Branch]] = []  # (-survival, order, parent row, rank, siblings)
    order = itertools.count()

    def offer(parent: int, rank: int, branch: Branch, ceiling: float) -> None:
        if rank < len(branch.tokens):
            own = growth.survivals[parent] * calibrate(branch.claims[rank], growth.depths[parent] + 1)
            # Calibrated probabilities may rise with the rank, but a worse sibling must not go before a better one, so
            # a node's survival is at most that of the sibling before it.
            heapq.heappush(heap, (-min(own, ceiling), next(order), parent, rank, branch))

    def open_below(row: int, memory: object) -> None:
        if growth.depths[row] < depth:
            branch = drafts.after(growth.depths[row], growth.tokens[row], memory)
            offer(row, 0, branch, growth.survivals[row])

    if seeded:
        branches = _extend_chain(drafts, growth, min(depth, nodes), calibrate)
        for parent, branch in enumerate(branches):
            offer(parent, 1, branch, growth.survivals[parent + 1])
        if branches:
            open_below(len(branches), branches[-1].memory)
    else:
        open_below(0, None)
    while heap and growth.nodes < nodes and -heap[0][0] >= floor:
        negative, _, parent, rank, branch = heapq.heappop(heap)
        row = growth.add(parent, branch.tokens[rank], branch.claims[rank], -negative)
        offer(parent, rank + 1, branch, -negative)
        open_below(row, branch.memory)
    return growth
