"""How far a drafter's own probabilities can be believed: claims and outcomes, engine-wide and per sequence."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

LEAST, MOST = 0.001, 0.999
_CLAIM_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
_DEPTH_EDGES = (2, 4, 8)
_CLAIM_WEIGHT, _PARENT_WEIGHT = 4.0, 12.0  # outcomes that a bin's prior is worth: the claim, or the engine's record
_MEMORY_SHARED, _MEMORY_OWN = 0.99, 0.975  # kept of a bin's counts at each outcome: about 100 and 40 outcomes
_OWN_JUDGEMENT = 4.0  # hits after which a sequence's own trust counts more than the engine's
_CHANGE = 0.02  # how likely the drafter is to have become another between two outcomes
_UNPROVEN_CLAIM = 0.9
_TRUST_DEPTHS = 8
_SUREST = 0.9  # a miss against a perfect record is a surprise, not a proof

# Trust is a guess at which of three drafters this is: one as good as its record, a poor one, or a hopeless one.
_POOR, _HOPELESS = 0.4, 0.03
_QUALITY = (1.0, _POOR, _HOPELESS)
_POOR_POWERS = [_POOR**level for level in range(_TRUST_DEPTHS)]
_HOPELESS_POWERS = [_HOPELESS**level for level in range(_TRUST_DEPTHS)]
_SHARED_PRIOR = (0.78, 0.05, 0.17)
_OWN_PRIOR = (0.96, 0.02, 0.02)


@dataclass(slots=True)
class _Bin:
    hits: float = 0.0
    seen: float = 0.0

    def add(self, hit: bool, keep: float) -> None:
        self.hits = self.hits * keep + hit
        self.seen = self.seen * keep + 1.0


class Calibration:
    """Acceptance probabilities from the drafter's claims.

    Outcomes are counted in bins over claim and depth; a bin without outcomes follows the parent, and without a
    parent the claim itself. On top stands the trust: it is shared by all bins, and falls or rises within a few
    outcomes when nearly everything misses or hits against expectation.
    """

    def __init__(self, parent: Calibration | None = None) -> None:
        self._parent = parent
        self._keep = _MEMORY_OWN if parent else _MEMORY_SHARED
        self._prior = _OWN_PRIOR if parent else _SHARED_PRIOR
        self._belief = self._prior
        self._bins: dict[tuple[int, int], _Bin] = {}
        self._hits = 0.0
        self._proven = parent is not None

    def trust(self, depth: int = 1) -> float:
        """Expected share of the recorded acceptance that still holds at a depth, given that it was reached.

        Reaching it is itself good news: a hopeless drafter would not have come there.
        """
        sure, poor, hopeless = self._belief
        level = min(depth, _TRUST_DEPTHS) - 1
        poor *= _POOR_POWERS[level]
        hopeless *= _HOPELESS_POWERS[level]
        return (sure + poor * _POOR + hopeless * _HOPELESS) / (sure + poor + hopeless)

    @property
    def standing(self) -> float:
        """What trust, the sequence's and the engine's, leaves of a first token's recorded acceptance."""
        return self.trust() * (self._parent.trust() ** self._parent_say() if self._parent else 1.0)

    @property
    def proven(self) -> bool:
        """Whether a drafted token was ever accepted."""
        return self._proven

    def chance(self, claimed: float, depth: int) -> float:
        """How likely a drafted token is accepted once its parent was, from its claim and depth (1 is the first)."""
        return _clamp(self.trust(depth) * self._recorded(claimed, depth))

    def observe(self, claimed: float, depth: int, hit: bool, leading: bool = True) -> None:
        """One outcome, for this calibration and its parent; trust falls only when a first guess (`leading`) misses."""
        if leading or hit:
            self._judge(claimed, depth, hit)
        self._bins.setdefault(_place(claimed, depth), _Bin()).add(hit, self._keep)
        if self._parent is not None:
            self._parent.observe(claimed, depth, hit, leading)

    def _recorded(self, claimed: float, depth: int) -> float:
        prior = claimed
        if self._parent is not None:
            prior = self._parent._recorded(claimed, depth) * self._parent.trust(depth) ** self._parent_say()
        found = self._bins.get(_place(claimed, depth))
        if found is None:
            return _clamp(prior)
        weight = _PARENT_WEIGHT if self._parent else _CLAIM_WEIGHT
        return _clamp((weight * prior + found.hits) / (weight + found.seen))

    def _parent_say(self) -> float:
        """A sequence whose drafts are accepted does not suffer for what others' drafts do."""
        return 1.0 / (1.0 + self._hits / _OWN_JUDGEMENT)

    def _judge(self, claimed: float, depth: int, hit: bool) -> None:
        expected = min(self._recorded(claimed, depth), _SUREST)
        if hit:
            self._proven = True
        elif not self._proven:
            # until anything was accepted a miss speaks against the drafter, however modest its claim
            expected = max(expected, _UNPROVEN_CLAIM)
        weights = []
        for belief, prior, quality in zip(self._belief, self._prior, _QUALITY, strict=True):
            chance = max(LEAST, expected * quality)
            weights.append((belief + _CHANGE * (prior - belief)) * (chance if hit else 1.0 - chance))
        total = sum(weights)
        self._belief = (weights[0] / total, weights[1] / total, weights[2] / total)
        self._hits = self._hits * self._keep + hit


def _place(claimed: float, depth: int) -> tuple[int, int]:
    return bisect_right(_CLAIM_EDGES, claimed), bisect_right(_DEPTH_EDGES, depth)


def _clamp(chance: float) -> float:
    return min(MOST, max(LEAST, chance))
