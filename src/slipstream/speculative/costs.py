"""Milliseconds of steps and drafts on this machine: curves measured at start-up and corrected by every timed step.

An estimate is the start-up curve times four factors: one for the machine, one for this size, and both again for this
kind of step at this length of context. A timing moves all four, so that it also improves the estimates of shapes that
were never timed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import IntegrityError

# docs/log.md says what the policy loses without each of these values.
# Tokens. Contexts up to this length share one slice; above it every doubling has its own. A smaller value would split
# the timings over more slices, so that each of them learns more slowly.
SHORT_CONTEXT = 512
# Rows. The doublings of the largest measured size up to this one have factors too; no step has more rows.
_FAR_SIZE = 1 << 16
# The shares of a timing's error that the factors take: those of the machine and of the size, then those of the slice
# and of the size in it. Larger shares follow noise, smaller ones leave a size that was mistimed at start-up wrong.
_GAINS = ((0.4, 0.1), (0.05, 0.05))
# Timings after which the curves are drawn again. Drawing at every timing took 100 microseconds of each step, not 12.
_REDRAWN = 5
# The share of every factor's logarithm that is kept when curves are drawn again, so half is left after 700 timings.
# Without fading, a size that was slow for a while and is no longer chosen, nor timed, would look slow for ever.
_KEPT = 0.5 ** (_REDRAWN / 700)
# One row costs at least this share of a step. Where rows are almost free, noise in the curve would otherwise make the
# rows of one sequence look dearer than those of another.
_LEAST_ROW_SHARE = 0.002

Floats = NDArray[np.float64]
Slice = tuple[Hashable, ...]  # the kind of a step or draft, and its range of contexts


class StepShape(NamedTuple):
    """What a target step's time depends on."""

    batch: int  # sequences in the step
    rows: int  # over all sequences, with their anchors
    context: int  # tokens of the longest sequence
    sampled: bool
    branching: bool  # whether some sequence verifies a tree that is not a chain


class _Curve:
    """One start-up curve and its factors; a size is a number of rows or slots."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self.sizes = sorted(measured)
        knots, times = list(self.sizes), _rising(np.array([measured[size] for size in self.sizes])).tolist()
        slope = (times[-1] - times[-2]) / (knots[-1] - knots[-2]) if len(knots) > 1 else 0.0
        while knots[-1] < _FAR_SIZE:
            times.append(times[-1] + slope * knots[-1])
            knots.append(2 * knots[-1])
        self._knots, self._base = knots, np.array(times)
        self._factors: dict[Slice, Floats] = {}  # logarithms: the common factor's, then one for every knot
        self._errors: dict[tuple[Slice, int], float] = {}  # logarithms, of the last timing
        self._drawn: dict[Slice, list[float]] = {}  # times of all sizes from 0
        self.observed = 0

    def upto(self, where: Slice, most: int) -> list[float]:
        """The times of all sizes from 0 to at least `most`."""
        drawn = self._drawn.get(where)
        if drawn is None or len(drawn) <= most:
            logs = self._logs(()) + self._logs(where)
            times = _rising(self._base * np.exp(logs[0] + logs[1:]))
            # Most questions are about one sequence, which has at most 64 rows, and are answered by one drawing.
            drawn = self._drawn[where] = np.interp(np.arange(max(most, 64) + 1), self._knots, times).tolist()
        return drawn

    def at(self, where: Slice, size: int) -> float:
        return self.upto(where, size)[size]

    def observe(self, where: Slice, size: int, ms: float) -> None:
        before, now = self._errors.get((where, size), 0.0), self._error(where, size, ms)
        self._errors[where, size] = now
        # Two timings in a row have to agree that an estimate is wrong, so a single slow step leaves no trace.
        agreed = sorted((0.0, before, now))[1]
        self._move((), size, agreed, *_GAINS[0])
        self._move(where, size, agreed, *_GAINS[1])
        self.observed += 1
        if not self.observed % _REDRAWN:
            self._drawn.clear()
            for factors in self._factors.values():
                factors *= _KEPT

    def teach(self, where: Slice, size: int, ms: float) -> None:
        self._move(where, size, self._error(where, size, ms), 0.5, 0.5)
        self._drawn.clear()

    def _error(self, where: Slice, size: int, ms: float) -> float:
        """The logarithm of a time over what the factors say now, before curves are made to rise."""
        (left, share), (right, other) = self._around(size)
        shared, own = self._logs(()), self._logs(where)
        low, high = (self._base[k] * math.exp(shared[0] + own[0] + shared[k + 1] + own[k + 1]) for k in (left, right))
        return math.log(ms / (share * low + other * high))

    def _move(self, level: Slice, size: int, error: float, common: float, own: float) -> None:
        """Moves a level's factors; the two knots around the size take part by their nearness to it."""
        logs, around = self._logs(level), self._around(size)
        spread = sum(share * share for _, share in around)
        logs[0] += common * error
        for place, share in around:
            logs[place + 1] += own * error * share / spread

    def _around(self, size: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """The places of the two knots around a size, and how near it is to each of them."""
        right = min(max(bisect_left(self._knots, size), 1), len(self._knots) - 1)
        low, high = self._knots[right - 1], self._knots[right]
        part = min(max((size - low) / (high - low), 0.0), 1.0)
        return (right - 1, 1.0 - part), (right, part)

    def _logs(self, level: Slice) -> Floats:
        logs = self._factors.get(level)
        if logs is None:
            logs = self._factors[level] = np.zeros(len(self._knots) + 1)
        return logs


class CostTable:
    """Milliseconds of target steps and draft passes, estimated for every shape and refreshed by observation.

    `steps` maps rows to the time of a greedy step of one sequence on a short context that verifies a chain. `drafts`
    maps slots to the time of drafting one block with that many slots through the output head. Without `drafts` the
    estimate for drafting is infinite, so that nothing is drafted.
    """

    def __init__(self, steps: Mapping[int, float], drafts: Mapping[int, float]) -> None:
        if not steps:
            raise IntegrityError("the cost table has no measured steps", "measure at least a step of one row")
        for size, ms in [*steps.items(), *drafts.items()]:
            if size < 1 or not (math.isfinite(ms) and ms > 0):
                raise IntegrityError(f"measured {ms} ms for size {size}", "sizes and times must be above zero")
        self._steps = _Curve(steps)
        self._drafts = _Curve(drafts) if drafts else None
        self._block_rows = max(drafts, default=0) + 1

    def step_ms(self, shape: StepShape) -> float:
        return self._steps.at(_step_slice(shape), shape.rows)

    def steps_ms(self, shape: StepShape) -> list[float]:
        """`step_ms` for 0 rows up to the shape's rows; it is a list because a choice compares many widths."""
        return self._steps.upto(_step_slice(shape), shape.rows)

    def draft_ms(self, blocks: int, slots: int, context: int) -> float:
        if blocks < 1 or slots < 1:
            return 0.0
        if self._drafts is None:
            return math.inf
        return self._drafts.at(_draft_slice(blocks, context), slots) * self._growth(blocks)

    def observe_step(self, shape: StepShape, ms: float) -> None:
        if math.isfinite(ms) and ms > 0 and shape.rows > 0:
            self._steps.observe(_step_slice(shape), shape.rows, ms)

    def teach(self, shape: StepShape, ms: float) -> None:
        """Takes in a careful measurement of one kind of step, which says nothing about the machine or other kinds."""
        self._steps.teach(_step_slice(shape), shape.rows, ms)

    def observe_draft(self, blocks: int, slots: int, context: int, ms: float) -> None:
        if self._drafts is not None and math.isfinite(ms) and ms > 0 and blocks > 0 and slots > 0:
            self._drafts.observe(_draft_slice(blocks, context), slots, ms / self._growth(blocks))

    def row_ms(self, context: int, batch: int = 1, sampled: bool = False) -> float:
        """The milliseconds of one more row, measured between 4 and 12 rows at that context."""
        where = _step_slice(StepShape(batch, 1, context, sampled, branching=False))
        few, many = self._steps.at(where, 4), self._steps.at(where, 12)
        return max((many - few) / 8, _LEAST_ROW_SHARE * few)

    def to_json(self) -> dict[str, object]:
        """The current estimates for one short greedy sequence, at the sizes that were measured at start-up."""
        steps = {rows: round(self.step_ms(StepShape(1, rows, 0, False, False)), 3) for rows in self._steps.sizes}
        sizes = self._drafts.sizes if self._drafts else []
        return {
            "steps_ms": steps,
            "drafts_ms": {slots: round(self.draft_ms(1, slots, 0), 3) for slots in sizes},
            "observed_steps": self._steps.observed,
            "observed_drafts": self._drafts.observed if self._drafts else 0,
        }

    def _growth(self, blocks: int) -> float:
        """How much longer several blocks take than one: the factor is taken from target steps of as many rows."""
        if blocks == 1:
            return 1.0
        alone, together = (
            self.step_ms(StepShape(1, count * self._block_rows, 0, sampled=False, branching=False))
            for count in (1, blocks)
        )
        return together / alone


def _step_slice(shape: StepShape) -> Slice:
    return _doublings(shape.batch), shape.sampled, shape.branching, _context_range(shape.context)


def _draft_slice(blocks: int, context: int) -> Slice:
    return _doublings(blocks), _context_range(context)


def _doublings(count: int) -> int:
    return (max(1, count) - 1).bit_length()


def _context_range(context: int) -> int:
    return max(0, _doublings(context) - _doublings(SHORT_CONTEXT))


def _rising(times: Floats) -> Floats:
    """The times without dips: less work never takes longer, and a disturbance makes times longer, never shorter."""
    return np.minimum.accumulate(times[::-1])[::-1]
