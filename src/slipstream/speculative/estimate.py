"""How likely a drafted token is accepted: the drafter's claim, corrected by what came of such claims before.

Outcomes are counted for the engine, for a kind of requests (a draft variant, sampled or greedy) and for one request. A
level without outcomes follows the level above it, and the engine's level follows the claims themselves.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slipstream.kernels.cpu.native_growth import CalibrationTable
from slipstream.lazy import cached_property
from slipstream.types import Source

# Acceptance probabilities stay within these bounds, because 0 or 1 would make the products over a path useless.
LEAST, MOST = 0.001, 0.999
# The edges of the bins in which outcomes are counted, by claimed probability and by depth. Claims near 1 have finer
# bins, because the products over a deep draft depend on them most.
_CLAIM_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
_DEPTH_EDGES = (2, 4, 8)
_SOURCE_BINS = (len(_CLAIM_EDGES) + 1) * (len(_DEPTH_EDGES) + 1)
_SOURCES = tuple(Source)  # walking through the enumeration itself takes ten times as long
_BINS = len(_SOURCES) * _SOURCE_BINS
# The accepted tokens that the level above counts for: in a bin of a kind or of the engine, and for a whole request. A
# smaller number follows luck, a larger one follows a bad drafter or an easy text too late.
_BIN_WEIGHT, _REQUEST_WEIGHT = 6.0, 20.0
# The share of its counts that a bin, and a request, keeps at each new outcome: about 1000 and 30 outcomes count.
_BIN_KEEP, _REQUEST_KEEP = 0.999, 0.97

Factors = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_CLAIMS, _DEPTHS = np.array(_CLAIM_EDGES), np.array(_DEPTH_EDGES, np.float64)


class DraftOutcome(NamedTuple):
    """What came of one verified token; depth 1 is the first drafted token."""

    claimed: float
    depth: int
    hit: bool
    source: Source = Source.DRAFTER


class Record:
    """What came of the claims of an engine or of a kind of requests, by source, claim and depth."""

    def __init__(self, above: Record | None = None) -> None:
        self._above = above
        self._hits, self._claimed = [0.0] * _BINS, [0.0] * _BINS
        self.factors = array("d", [1.0] * _BINS)  # for each bin, how many tokens were accepted for one that was claimed

    def add(self, place: int, claimed: float, hit: bool) -> None:
        self._hits[place] = _BIN_KEEP * self._hits[place] + hit
        self._claimed[place] = _BIN_KEEP * self._claimed[place] + claimed
        if self._above is not None:
            self._above.add(place, claimed, hit)
        self._update(place)

    def update(self) -> None:
        """Takes over what the level above has learnt from other kinds of requests."""
        for place in range(_BINS):
            self._update(place)

    def _update(self, place: int) -> None:
        above = _BIN_WEIGHT * (self._above.factors[place] if self._above is not None else 1.0)
        self.factors[place] = (self._hits[place] + above) / (self._claimed[place] + _BIN_WEIGHT)


class Estimate:
    """Acceptance probabilities of one request's drafted tokens."""

    def __init__(self, kind: Record) -> None:
        kind.update()
        self._kind = kind
        self._hits, self._expected = [0.0] * len(_SOURCES), [0.0] * len(_SOURCES)
        self._factors = kind.factors[:]  # those of the kind times the request's own
        self._stale = False

    def own_factor(self, source: Source = Source.DRAFTER) -> float:
        """How many tokens of a source were accepted in this request for one that its kind's record expected."""
        return (self._hits[source] + _REQUEST_WEIGHT) / (self._expected[source] + _REQUEST_WEIGHT)

    def chance(self, claimed: float, depth: int, source: Source = Source.DRAFTER) -> float:
        """The probability that a drafted token is accepted if its parent was; depth 1 is the first drafted token."""
        return _bounded(claimed * self._current()[_place(claimed, depth, source)])

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Takes in outcomes of verified drafts."""
        factors, own = self._current(), [self.own_factor(source) for source in _SOURCES]
        for claimed, depth, hit, source in outcomes:
            place = _place(claimed, depth, source)
            expected = _bounded(claimed * factors[place] / own[source])
            self._hits[source] = _REQUEST_KEEP * self._hits[source] + hit
            self._expected[source] = _REQUEST_KEEP * self._expected[source] + expected
            self._kind.add(place, claimed, hit)
        self._stale = bool(outcomes) or self._stale

    def table(self, source: Source = Source.DRAFTER) -> CalibrationTable:
        """What `chance` reads, for one source in compiled code and on a GPU; it is valid until the next outcome."""
        self._current()
        return self._tables[source]

    def _current(self) -> array[float]:
        if self._stale:
            for kind, own, source in zip(*self._arrays, _SOURCES, strict=True):
                np.multiply(kind, self.own_factor(source), out=own)
            self._stale = False
        return self._factors

    @cached_property
    def _arrays(self) -> tuple[Factors, Factors]:
        """The factors of the kind and of this request, a row for each source."""
        rows = len(_SOURCES), _SOURCE_BINS
        return np.frombuffer(self._kind.factors).reshape(rows), np.frombuffer(self._factors).reshape(rows)

    @cached_property
    def _tables(self) -> list[CalibrationTable]:
        edges = len(_CLAIM_EDGES), len(_DEPTH_EDGES), _CLAIMS.ctypes.data, _DEPTHS.ctypes.data
        return [CalibrationTable(*edges, LEAST, MOST, row.ctypes.data) for row in self._arrays[1]]


def _bounded(chance: float) -> float:
    return LEAST if chance < LEAST else MOST if chance > MOST else chance


def _place(claimed: float, depth: int, source: Source) -> int:
    claim, level = bisect_right(_CLAIM_EDGES, claimed), bisect_right(_DEPTH_EDGES, depth)
    return source * _SOURCE_BINS + claim * (len(_DEPTH_EDGES) + 1) + level
