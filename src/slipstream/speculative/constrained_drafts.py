"""Keeps drafts within a constraint: branches lose the tokens that the grammar forbids and gain the one it forces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.grammar.guide import Guide, GuideError, Mask, Path
from slipstream.kernels.cpu.ranking import SlotCandidates
from slipstream.speculative.tree import Branch, Drafts, Growth

_NONE = Branch((), ())  # a branch without any candidate, at which growing ends
Ranked = Callable[[int, Mask], SlotCandidates | None]  # returns a slot's best tokens under a mask


@dataclass(frozen=True, slots=True)
class DraftRule:
    """The rule that keeps the drafts of one block within a constraint."""

    guide: Guide
    ranked: Ranked

    def held(self, drafts: Drafts) -> Drafts:
        return GuidedDrafts(drafts, self.guide, self.ranked)

    def fits(self, growth: Growth) -> bool:
        """Whether the constraint allows all of these nodes; in running text it nearly always does."""
        paths: list[Path] = [()]
        for token, parent in zip(growth.tokens[1:], growth.parents[1:], strict=True):
            try:
                mask = self.guide.draft_mask(paths[parent])
            except GuideError:
                return False
            if mask is not None and (mask.end or token not in mask):
                return False
            paths.append((*paths[parent], token))
        return True


def allowed_part(guide: Guide, growth: Growth) -> Growth:
    """The nodes that the constraint allows, without those after forbidden ones."""
    kept = Growth(growth.tokens[:1], sources=growth.sources[:1])
    paths: dict[int, tuple[int, Path]] = {0: (0, ())}  # by row: its row among the kept ones, and the path to it
    for row in range(1, len(growth.tokens)):
        token, parent = growth.tokens[row], growth.parents[row]
        if parent not in paths:
            continue
        above, path = paths[parent]
        try:
            mask = guide.draft_mask(path)
        except GuideError:
            break
        if mask is None or (not mask.end and token in mask):
            new = kept.add(above, token, growth.claims[row], growth.survivals[row])
            kept.sources += growth.sources[row : row + 1]
            paths[row] = new, (*path, token)
    return kept


class GuidedDrafts:
    """A block of drafts filtered by a guide; each branch remembers the path to it beside the head's own memory."""

    def __init__(self, drafts: Drafts, guide: Guide, ranked: Ranked) -> None:
        """`ranked` finds allowed tokens where the mask forbids all candidates of a branch."""
        self._drafts = drafts
        self._guide = guide
        self._ranked = ranked

    @property
    def slots(self) -> int:
        return self._drafts.slots

    def after(self, slot: int, previous: int, memory: object) -> Branch:
        path: Path = ()
        inner: object = None
        if slot:
            assert isinstance(memory, tuple)
            path, inner = (*memory[0], previous), memory[1]
        branch = self._drafts.after(slot, previous, inner)
        if not branch.tokens:
            return _NONE
        try:
            mask = self._guide.draft_mask(path)
        except GuideError:
            # The masks of this step take too long, or the constraint is broken here; in that case verify reports the
            # error if the text ever comes to this path.
            return _NONE
        tokens, claims = self._kept(slot, branch, mask)
        return Branch(tokens, claims, (path, branch.memory))

    def _kept(self, slot: int, branch: Branch, mask: Mask | None) -> tuple[list[int], list[float]]:
        if mask is not None and mask.end:
            return [], []
        if mask is None:
            return list(branch.tokens), list(branch.claims)
        if mask.only is not None:
            return [mask.only], [1.0]
        pairs = [pair for pair in zip(branch.tokens, branch.claims, strict=True) if pair[0] in mask]
        if not pairs:
            return self._refilled(slot, mask)
        # The probability of forbidden tokens is divided among all other tokens, candidates or not.
        total = sum(chance for _, chance in pairs) + max(0.0, 1.0 - sum(branch.claims))
        return [token for token, _ in pairs], [min(1.0, chance / total) for _, chance in pairs]

    def _refilled(self, slot: int, mask: Mask) -> tuple[list[int], list[float]]:
        best = self._ranked(slot, mask)
        if best is None:
            return [], []
        claims = np.exp(best.scores[0].astype(np.float64))
        possible = int((claims > 0).sum())
        return best.tokens[0, :possible].tolist(), claims[:possible].tolist()
