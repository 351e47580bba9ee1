"""What one drafted block offers: the best candidates per slot, and how likely each one is after a given token."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.kernels.cpu.native_growth import MOST_ROWS, CandidateBlock, CompiledWalk, grower
from slipstream.kernels.cpu.native_library import address
from slipstream.kernels.rows import CHAIN, SEEDED_TREE
from slipstream.lazy import cached_property
from slipstream.speculative.constrained_drafts import DraftRule
from slipstream.speculative.estimate import Estimate
from slipstream.speculative.tree import Branch, Growth, as_claimed, grow_chain, grow_tree

_NONE = Branch((), ())  # a branch without any candidate, at which growing ends


class HeadWalk(Protocol):
    """A drafter's heads on one block; they are asked token by token, with the state None before the first."""

    def correct(self, slot: int, previous: int, state: Any) -> tuple[NDArray[np.float32], Any]: ...
    def confidence(self, slot: int, previous: int) -> float | None: ...


class BlockDrafts:
    """Candidates [slots, K] of one sequence, likeliest first; a head makes them depend on the token before.

    `scores` are the candidates' log-probabilities. A head corrects these candidates only: every other token is
    assumed to keep its probability.
    """

    def __init__(
        self, tokens: NDArray[np.int64], scores: NDArray[np.float32], scale: float = 1.0, min_confidence: float = 0.0
    ) -> None:
        self.tokens: NDArray[np.int64] = np.ascontiguousarray(tokens, np.int64)
        self._scores: NDArray[np.float32] = np.ascontiguousarray(scores, np.float32)
        self._walk: HeadWalk | None = None
        self._compiled: CompiledWalk | None = None
        self._scale = scale
        self._min_confidence = min_confidence
        self._ready: dict[tuple[int, int], Branch] = {}
        self.rule: DraftRule | None = None  # the rule that keeps drafts within a constraint, if the request has one
        self.broken = False  # whether a head returned NaN or infinity; nothing is offered at such a place

    def bind(self, walk: HeadWalk, compiled: CompiledWalk | None = None) -> None:
        """Sets the heads' walk, which is built from the candidates, and its form in compiled code if there is one."""
        self._walk, self._compiled = walk, compiled

    @property
    def slots(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def _chances(self) -> NDArray[np.float64]:
        return np.exp(self._scores.astype(np.float64))

    @cached_property
    def _rest(self) -> NDArray[np.float64]:
        return np.maximum(0.0, 1.0 - self._chances.sum(axis=1))

    def grow(
        self, anchor: int, shape: int, nodes: int, depth: int, estimate: Estimate | None = None, floor: float = 0.0
    ) -> Growth:
        """At most `nodes` nodes no deeper than `depth`, in a shape that grow_chain or grow_tree defines."""
        compiled = grower()
        if compiled is None or (self._walk is not None and self._compiled is None) or self.slots >= MOST_ROWS:
            return self.grow_plainly(anchor, shape, nodes, depth, estimate, floor)
        table = estimate.table() if estimate is not None else None
        nodes_grown, broken = compiled.grow(self.block(), table, anchor, shape, nodes, depth, floor)
        self.broken = self.broken or broken
        grown = Growth(*nodes_grown.lists())
        if self.rule is not None and not self.rule.fits(grown):
            return self.grow_plainly(anchor, shape, nodes, depth, estimate, floor)
        return grown

    def grow_plainly(
        self, anchor: int, shape: int, nodes: int, depth: int, estimate: Estimate | None = None, floor: float = 0.0
    ) -> Growth:
        """`grow` without compiled code, for any head and any constraint."""
        calibrate = estimate.chance if estimate is not None else as_claimed
        drafts = self if self.rule is None else self.rule.held(self)
        if shape == CHAIN:
            return grow_chain(drafts, anchor, min(nodes, depth), calibrate)
        return grow_tree(drafts, anchor, nodes, depth, calibrate, shape == SEEDED_TREE, floor)

    def block(self) -> CandidateBlock:
        """The candidates in the layout that compiled code reads; the memory it points to belongs to this object."""
        head = self._compiled
        return CandidateBlock(
            *self.tokens.shape,
            address(self.tokens),
            address(self._scores),
            head.tables_at if head else None,
            head.confidence_at if head else None,
            self._scale,
            self._min_confidence,
        )

    def after(self, slot: int, previous: int, memory: object) -> Branch:
        if self._walk is None:
            previous = 0  # without a head all parents have the same children
        # A branch without memory depends only on slot and token. It is kept, because a chain and a tree may share it.
        found = self._ready.get((slot, previous)) if memory is None else None
        if found is None:
            walk = self._walk
            plain = self._chances[slot]
            found = self._walked(walk, slot, previous, memory) if walk else self._branch(slot, plain, None)
            if found.memory is None:
                self._ready[slot, previous] = found
        return found

    def _walked(self, walk: HeadWalk, slot: int, previous: int, memory: object) -> Branch:
        confidence = walk.confidence(slot, previous)
        if confidence is not None and confidence < self._min_confidence:
            return _NONE
        correction, state = walk.correct(slot, previous, memory)
        corrected = self._scores[slot].astype(np.float64) + self._scale * correction
        if not np.isfinite(correction).all() or (confidence is not None and not np.isfinite(confidence)):
            self.broken = True
            return _NONE
        shift = max(0.0, float(corrected.max()))  # a low temperature may lift a correction out of the range of exp
        weights = np.exp(corrected - shift)
        branch = self._branch(slot, weights / (weights.sum() + self._rest[slot] * np.exp(-shift)), state)
        return branch if confidence is None or not branch.tokens else _trusting(branch, confidence)

    def _branch(self, slot: int, claims: NDArray[np.floating], state: object) -> Branch:
        order = np.argsort(-claims, kind="stable")
        ranked = claims[order]
        possible = int((ranked > 0).sum())
        return Branch(self.tokens[slot, order[:possible]].tolist(), ranked[:possible].tolist(), state)


def _trusting(branch: Branch, confidence: float) -> Branch:
    """Gives the first candidate the probability of the confidence head; the others share the remainder."""
    left = 1.0 - branch.claims[0]
    share = (1.0 - confidence) / left if left > 0 else 0.0
    others = [min(confidence, chance * share) for chance in branch.claims[1:]]
    return Branch(branch.tokens, [confidence, *others], branch.memory)
