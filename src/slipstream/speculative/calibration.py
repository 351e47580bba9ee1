"""Turns a drafter's own probabilities into acceptance probabilities, from the outcomes of earlier claims.

One calibration is shared by all requests of a kind, and each sequence has its own on top of it.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from slipstream.kernels.cpu.native_growth import CalibrationTable, learner

# Acceptance probabilities stay within these bounds: 0 or 1 would make products and logarithms useless.
LEAST, MOST = 0.001, 0.999
# The edges of the bins in which outcomes are counted, by claimed probability and by depth. Claims near 1 have finer
# bins, because the products over a deep draft depend on them most.
_CLAIM_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
_DEPTH_EDGES = (2, 4, 8)
_PLACES = (len(_CLAIM_EDGES) + 1) * (len(_DEPTH_EDGES) + 1)
# docs/log.md holds the measurements behind the policy; figures about a single value are repeated below.

# How many outcomes a bin's prior counts for: the claim itself for the shared bins, the shared record for a sequence's
# bins. With smaller values a few outcomes decide, with larger ones a bad drafter is believed for too long; 4 and 6
# instead of 16 made no difference beyond 1 %.
_CLAIM_WEIGHT, _PARENT_WEIGHT = 16.0, 40.0
# The share of a bin's counts that is kept at each outcome: shared bins remember about 300 outcomes, own ones about 40.
_MEMORY_SHARED, _MEMORY_OWN = 0.997, 0.975
_OWN_JUDGEMENT = 4.0  # After this many accepted tokens a sequence's own trust counts more than the shared trust.
_CHANGE = 0.02  # The probability that the drafter's quality changes between two outcomes; it lets trust recover.
_UNPROVEN_CLAIM = 0.9  # Until a first token was accepted, a miss is judged as if at least this much had been claimed.
_TRUST_DEPTHS = 8  # Trust is computed for this many depths; deeper tokens use the last of them.
_SUREST = 0.9  # Outcomes are judged against at most this expectation, so that one miss never disproves a record.

# Trust is a belief about which of three drafters this is: one as good as its record, a poor one whose tokens are
# accepted 0.4 times as often, or a hopeless one (0.03 times). The priors are the beliefs before any outcome, in that
# order.
_POOR, _HOPELESS = 0.4, 0.03
_POOR_POWERS = [_POOR**level for level in range(_TRUST_DEPTHS)]
_HOPELESS_POWERS = [_HOPELESS**level for level in range(_TRUST_DEPTHS)]
_SHARED_PRIOR = (0.78, 0.05, 0.17)
_OWN_PRIOR = (0.96, 0.02, 0.02)

# Compiled code reads the edges, the priors, and the rules in the order of the C++ structure SlipRule.
_CLAIMS, _DEPTHS = array("d", _CLAIM_EDGES), array("d", _DEPTH_EDGES)
_SHARED_PRIORS, _OWN_PRIORS = array("d", _SHARED_PRIOR), array("d", _OWN_PRIOR)
_RULES = array("d", (_POOR, _HOPELESS, _CHANGE, _UNPROVEN_CLAIM, _SUREST, _OWN_JUDGEMENT))
_HITS, _PROVEN = 3, 4  # The state holds these two values behind the three beliefs.

# One outcome: the claimed probability, its depth, whether the token was accepted, whether it was the first guess.
DraftOutcome = tuple[float, int, bool, bool]


class Calibration:
    """Acceptance probabilities from the drafter's claims.

    Outcomes are counted in bins over claim and depth. A bin without outcomes follows the parent's bin, and without a
    parent the claim itself. All bins share one trust, a factor that falls or rises within a few outcomes when nearly
    everything misses or hits against expectation.
    """

    def __init__(self, parent: Calibration | None = None) -> None:
        self._parent = parent
        self._keep = _MEMORY_OWN if parent else _MEMORY_SHARED
        self._weight = _PARENT_WEIGHT if parent else _CLAIM_WEIGHT
        self._prior = _OWN_PRIORS if parent else _SHARED_PRIORS
        # the three beliefs, the fading count of accepted tokens, and whether any token was ever accepted
        self._state = array("d", (*self._prior, 0.0, float(parent is not None)))
        self._bins = array("d", bytes(2 * 8 * _PLACES))  # fading counts of hits and outcomes, two values per bin
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
        """The expected share of the recorded acceptance that still holds at a depth which the text has reached.

        Reaching a depth raises the trust, because a hopeless drafter would hardly have come there.
        """
        sure, poor, hopeless = self._state[:_HITS]
        level = (depth if depth < _TRUST_DEPTHS else _TRUST_DEPTHS) - 1
        poor *= _POOR_POWERS[level]
        hopeless *= _HOPELESS_POWERS[level]
        return (sure + poor * _POOR + hopeless * _HOPELESS) / (sure + poor + hopeless)

    def table(self) -> CalibrationTable:
        """Everything that `chance` depends on, in the layout of compiled code; it is valid until the next outcome."""
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
        """The factor that own and shared trust together leave of a first token's recorded acceptance."""
        return self.trust() * (self._parent.trust() ** self._parent_say() if self._parent else 1.0)

    @property
    def proven(self) -> bool:
        """Whether a drafted token was ever accepted."""
        return bool(self._state[_PROVEN])

    def chance(self, claimed: float, depth: int) -> float:
        """The probability that a drafted token is accepted if its parent was; depth 1 is the first drafted token."""
        place = _place(claimed, depth)
        if self._parent is not None:
            claimed = self._inherited(self._parent._recorded(claimed, place), depth)
        return min(MOST, max(LEAST, self.trust(depth) * self._recorded(claimed, place)))

    def learn(self, outcomes: Sequence[DraftOutcome]) -> tuple[float, float]:
        """Takes in outcomes in order; returns the factors by which its own and its parent's `standing` changed."""
        compiled = learner()
        if compiled is not None:
            return compiled.observe(self._table, array("d", [number for outcome in outcomes for number in outcome]))
        return self.learn_plainly(outcomes)

    def learn_plainly(self, outcomes: Sequence[DraftOutcome]) -> tuple[float, float]:
        """`learn` without compiled code."""
        parent = self._parent or self
        own, shared = self.standing, parent.standing
        for outcome in outcomes:
            self.observe(*outcome)
        return self.standing / own, parent.standing / shared

    def observe(self, claimed: float, depth: int, hit: bool, leading: bool = True) -> None:
        """Takes in one outcome, also for the parent; trust falls only when a first guess (`leading`) misses."""
        place, parent, judged = _place(claimed, depth), self._parent, leading or hit
        if parent is not None:
            shared = parent._recorded(claimed, place)
            claimed = self._inherited(shared, depth)
            parent._take(place, hit, shared if judged else None)
        self._take(place, hit, self._recorded(claimed, place) if judged else None)

    def _take(self, place: int, hit: bool, recorded: float | None) -> None:
        """Counts an outcome; `recorded` is the expected acceptance, or None if the outcome must not affect trust."""
        if recorded is not None:
            self._judge(recorded, hit)
        bins, keep = self._bins, self._keep
        bins[place] = bins[place] * keep + hit
        bins[place + 1] = bins[place + 1] * keep + 1.0

    def _recorded(self, prior: float, place: int) -> float:
        """The acceptance that the outcomes of a bin indicate, mixed with `prior`, the estimate without them."""
        seen = self._bins[place + 1]
        if seen:
            prior = (self._weight * prior + self._bins[place]) / (self._weight + seen)
        return LEAST if prior < LEAST else MOST if prior > MOST else prior

    def _inherited(self, shared: float, depth: int) -> float:
        """The shared record's acceptance as far as this sequence follows it."""
        assert self._parent is not None
        return shared * self._parent.trust(depth) ** self._parent_say()

    def _parent_say(self) -> float:
        """The weight of the shared trust: it falls with this sequence's hits, because then its own record counts."""
        return 1.0 / (1.0 + self._state[_HITS] / _OWN_JUDGEMENT)

    def _judge(self, recorded: float, hit: bool) -> None:
        expected = recorded if recorded < _SUREST else _SUREST
        state, prior = self._state, self._prior
        if hit:
            state[_PROVEN] = 1.0
        elif not state[_PROVEN] and expected < _UNPROVEN_CLAIM:
            # Until any token was accepted, a miss counts against the drafter even if it claimed little.
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
    """The index of the bin in which a claim's hits are counted; the count of its outcomes follows it."""
    claim = bisect_right(_CLAIM_EDGES, claimed)
    return 2 * (claim * (len(_DEPTH_EDGES) + 1) + bisect_right(_DEPTH_EDGES, depth))
