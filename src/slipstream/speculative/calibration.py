"""How far a drafter's own probabilities can be believed: claims and outcomes, engine-wide and per sequence."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from slipstream.kernels.cpu.native_growth import CalibrationTable, learner

LEAST, MOST = 0.001, 0.999
_CLAIM_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
_DEPTH_EDGES = (2, 4, 8)
_PLACES = (len(_CLAIM_EDGES) + 1) * (len(_DEPTH_EDGES) + 1)
_CLAIM_WEIGHT, _PARENT_WEIGHT = 16.0, 40.0  # outcomes that a bin's prior is worth: the claim, or the engine's record
_MEMORY_SHARED, _MEMORY_OWN = 0.997, 0.975  # kept of a bin's counts at each outcome: about 300 and 40 outcomes
_OWN_JUDGEMENT = 4.0  # hits after which a sequence's own trust counts more than the engine's
_CHANGE = 0.02  # how likely the drafter is to have become another between two outcomes
_UNPROVEN_CLAIM = 0.9
_TRUST_DEPTHS = 8
_SUREST = 0.9  # a miss against a perfect record is a surprise, not a proof

# Trust is a guess at which of three drafters this is: one as good as its record, a poor one, or a hopeless one.
_POOR, _HOPELESS = 0.4, 0.03
_POOR_POWERS = [_POOR**level for level in range(_TRUST_DEPTHS)]
_HOPELESS_POWERS = [_HOPELESS**level for level in range(_TRUST_DEPTHS)]
_SHARED_PRIOR = (0.78, 0.05, 0.17)
_OWN_PRIOR = (0.96, 0.02, 0.02)

# what compiled code reads: the edges, the priors, and the rules in the order of SlipRule
_CLAIMS, _DEPTHS = array("d", _CLAIM_EDGES), array("d", _DEPTH_EDGES)
_SHARED_PRIORS, _OWN_PRIORS = array("d", _SHARED_PRIOR), array("d", _OWN_PRIOR)
_RULES = array("d", (_POOR, _HOPELESS, _CHANGE, _UNPROVEN_CLAIM, _SUREST, _OWN_JUDGEMENT))
_HITS, _PROVEN = 3, 4  # places in a state, behind the three beliefs

Outcome = tuple[float, int, bool, bool]  # the claim, its depth, whether it was right, whether it was the first guess


class Calibration:
    """Acceptance probabilities from the drafter's claims.

    Outcomes are counted in bins over claim and depth; a bin without outcomes follows the parent, and without a
    parent the claim itself. On top stands the trust: it is shared by all bins, and falls or rises within a few
    outcomes when nearly everything misses or hits against expectation.
    """

    def __init__(self, parent: Calibration | None = None) -> None:
        self._parent = parent
        self._keep = _MEMORY_OWN if parent else _MEMORY_SHARED
        self._weight = _PARENT_WEIGHT if parent else _CLAIM_WEIGHT
        self._prior = _OWN_PRIORS if parent else _SHARED_PRIORS
        # the beliefs, accepted tokens (fading), and whether there ever were any
        self._state = array("d", (*self._prior, 0.0, float(parent is not None)))
        self._bins = array("d", bytes(2 * 8 * _PLACES))  # hits and outcomes of every place, fading
        self._trusts = (ctypes.c_double * _TRUST_DEPTHS)()
        self._says = (ctypes.c_double * _TRUST_DEPTHS)()
        self._table = CalibrationTable(
            len(_CLAIMS),
            len(_DEPTHS),
            _TRUST_DEPTHS,
            _address(_CLAIMS),
            _address(_DEPTHS),
            LEAST,
            MOST,
            _CLAIM_WEIGHT,
            _PARENT_WEIGHT,
            _address(self._bins),
            _address(parent._bins) if parent else None,
            ctypes.addressof(self._trusts),
            ctypes.addressof(self._says),
            _address(self._state),
            _address(parent._state) if parent else None,
            _address(self._prior),
            _address(parent._prior) if parent else None,
            self._keep,
            parent._keep if parent else 0.0,
            _address(_RULES),
        )

    def trust(self, depth: int = 1) -> float:
        """Expected share of the recorded acceptance that still holds at a depth, given that it was reached.

        Reaching it is itself good news: a hopeless drafter would not have come there.
        """
        sure, poor, hopeless = self._state[:_HITS]
        level = (depth if depth < _TRUST_DEPTHS else _TRUST_DEPTHS) - 1
        poor *= _POOR_POWERS[level]
        hopeless *= _HOPELESS_POWERS[level]
        return (sure + poor * _POOR + hopeless * _HOPELESS) / (sure + poor + hopeless)

    def table(self) -> CalibrationTable:
        """All that `chance` depends on, as compiled code reads it; good until the next outcome."""
        compiled = learner()
        if compiled is not None:
            compiled.refresh(self._table)
            return self._table
        depths = range(1, _TRUST_DEPTHS + 1)
        self._trusts[:] = [self.trust(depth) for depth in depths]
        if self._parent is not None:
            say = self._parent_say()
            self._says[:] = [self._parent.trust(depth) ** say for depth in depths]
        return self._table

    @property
    def standing(self) -> float:
        """What trust, the sequence's and the engine's, leaves of a first token's recorded acceptance."""
        return self.trust() * (self._parent.trust() ** self._parent_say() if self._parent else 1.0)

    @property
    def proven(self) -> bool:
        """Whether a drafted token was ever accepted."""
        return bool(self._state[_PROVEN])

    def chance(self, claimed: float, depth: int) -> float:
        """How likely a drafted token is accepted once its parent was, from its claim and depth (1 is the first)."""
        place = _place(claimed, depth)
        if self._parent is not None:
            claimed = self._inherited(self._parent._recorded(claimed, place), depth)
        return min(MOST, max(LEAST, self.trust(depth) * self._recorded(claimed, place)))

    def learn(self, outcomes: Sequence[Outcome]) -> tuple[float, float]:
        """Takes in outcomes one after the other; returns how the standings changed, its own and the parent's."""
        compiled = learner()
        if compiled is not None:
            return compiled.observe(self._table, array("d", [number for outcome in outcomes for number in outcome]))
        return self.learn_plainly(outcomes)

    def learn_plainly(self, outcomes: Sequence[Outcome]) -> tuple[float, float]:
        """`learn` without compiled code."""
        parent = self._parent or self
        own, shared = self.standing, parent.standing
        for outcome in outcomes:
            self.observe(*outcome)
        return self.standing / own, parent.standing / shared

    def observe(self, claimed: float, depth: int, hit: bool, leading: bool = True) -> None:
        """One outcome, for this calibration and its parent; trust falls only when a first guess (`leading`) misses."""
        place, parent, judged = _place(claimed, depth), self._parent, leading or hit
        if parent is not None:
            shared = parent._recorded(claimed, place)
            claimed = self._inherited(shared, depth)
            parent._take(place, hit, shared if judged else None)
        self._take(place, hit, self._recorded(claimed, place) if judged else None)

    def _take(self, place: int, hit: bool, recorded: float | None) -> None:
        """Counts an outcome; where it says something about trust, `recorded` is what was to be expected."""
        if recorded is not None:
            self._judge(recorded, hit)
        bins, keep = self._bins, self._keep
        bins[place] = bins[place] * keep + hit
        bins[place + 1] = bins[place + 1] * keep + 1.0

    def _recorded(self, prior: float, place: int) -> float:
        """The acceptance that a place's outcomes speak for, on top of what is known without them."""
        seen = self._bins[place + 1]
        if seen:
            prior = (self._weight * prior + self._bins[place]) / (self._weight + seen)
        return LEAST if prior < LEAST else MOST if prior > MOST else prior

    def _inherited(self, shared: float, depth: int) -> float:
        """What the engine's record says to a sequence."""
        assert self._parent is not None
        return shared * self._parent.trust(depth) ** self._parent_say()

    def _parent_say(self) -> float:
        """A sequence whose drafts are accepted does not suffer for what others' drafts do."""
        return 1.0 / (1.0 + self._state[_HITS] / _OWN_JUDGEMENT)

    def _judge(self, recorded: float, hit: bool) -> None:
        expected = recorded if recorded < _SUREST else _SUREST
        state, prior = self._state, self._prior
        if hit:
            state[_PROVEN] = 1.0
        elif not state[_PROVEN] and expected < _UNPROVEN_CLAIM:
            # until anything was accepted a miss speaks against the drafter, however modest its claim
            expected = _UNPROVEN_CLAIM
        good, weak, none = expected, max(LEAST, expected * _POOR), max(LEAST, expected * _HOPELESS)
        if not hit:
            good, weak, none = 1.0 - good, 1.0 - weak, 1.0 - none
        sure = (state[0] + _CHANGE * (prior[0] - state[0])) * good
        poor = (state[1] + _CHANGE * (prior[1] - state[1])) * weak
        hopeless = (state[2] + _CHANGE * (prior[2] - state[2])) * none
        total = sure + poor + hopeless
        state[0], state[1], state[2] = sure / total, poor / total, hopeless / total
        state[_HITS] = state[_HITS] * self._keep + hit


def _address(numbers: array[float]) -> int:
    return numbers.buffer_info()[0]


def _place(claimed: float, depth: int) -> int:
    """Where a claim's hits are counted; its outcomes stand behind them."""
    claim = bisect_right(_CLAIM_EDGES, claimed)
    return 2 * (claim * (len(_DEPTH_EDGES) + 1) + bisect_right(_DEPTH_EDGES, depth))
