"""What one drafted block offers: per slot the best candidates and how likely each is behind a given token."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.speculative.tree import Branch

_NONE = Branch((), ())


class HeadWalk(Protocol):
    """A drafter's heads on one block, asked token by token."""

    def first_state(self) -> object: ...
    def correct(self, slot: int, previous: int, state: Any) -> tuple[NDArray[np.float32], Any]: ...
    def confidence(self, slot: int, previous: int) -> float | None: ...


class BlockDrafts:
    """Candidates [slots, K] of one sequence, likeliest first; a head makes them depend on the token before.

    A head is asked within these candidates only: what is not among them is taken to keep its probability.
    """

    def __init__(
        self, scores: Tensor, count: int, scale: float = 1.0, min_confidence: float = 0.0
    ) -> None:
        best = scores.topk(min(count, scores.shape[-1]), dim=-1)
        self.tokens: NDArray[np.int64] = best.indices.numpy()
        total = scores.logsumexp(dim=-1, keepdim=True)
        self._scores: NDArray[np.float32] = (best.values - total).numpy()
        self._chances: NDArray[np.float32] = np.exp(self._scores)
        self._rest = np.maximum(0.0, 1.0 - self._chances.sum(axis=1))
        self._walk: HeadWalk | None = None
        self._scale = scale
        self._min_confidence = min_confidence
        self._ready: dict[tuple[int, int], Branch] = {}
        self.broken = False  # a head answered with numbers that are none; nothing is offered there

    def bind(self, walk: HeadWalk) -> None:
        """Gives the block the heads' walk, which is made from the candidates."""
        self._walk = walk

    @property
    def slots(self) -> int:
        return self.tokens.shape[0]

    def after(self, slot: int, previous: int, memory: object) -> Branch:
        if self._walk is None:
            previous = 0  # without a head all parents have the same children
        # a branch without memory depends on nothing else, and the chain and the tree both pass through it
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
        state = walk.first_state() if slot == 0 else memory
        correction, state = walk.correct(slot, previous, state)
        corrected = self._scores[slot].astype(np.float64) + self._scale * correction
        if not np.isfinite(correction).all() or (confidence is not None and not np.isfinite(confidence)):
            self.broken = True
            return _NONE
        shift = max(0.0, float(corrected.max()))  # a low temperature may lift a correction out of exp's range
        weights = np.exp(corrected - shift)
        branch = self._branch(slot, weights / (weights.sum() + self._rest[slot] * np.exp(-shift)), state)
        return branch if confidence is None or not branch.tokens else _trusting(branch, confidence)

    def _branch(self, slot: int, chances: NDArray[np.floating], state: object) -> Branch:
        order = np.argsort(-chances, kind="stable")
        ranked = chances[order]
        possible = int((ranked > 0).sum())
        return Branch(self.tokens[slot, order[:possible]].tolist(), ranked[:possible].tolist(), state)


def _trusting(branch: Branch, confidence: float) -> Branch:
    """The first candidate's probability as the confidence head has it; the others share what it leaves."""
    left = 1.0 - branch.chances[0]
    share = (1.0 - confidence) / left if left > 0 else 0.0
    others = [min(confidence, chance * share) for chance in branch.chances[1:]]
    return Branch(branch.tokens, [confidence, *others], branch.memory)

