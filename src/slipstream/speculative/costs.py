"""Milliseconds of steps and drafts on this machine: curves measured at start-up and refreshed by every timed step.

An estimate is the start-up curve times factors for the machine as a whole, the kind of step, its context and its
rows. A timing moves all of its factors a little, so a timing of one shape also improves the estimates of shapes that
were never timed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping
from itertools import accumulate
from typing import NamedTuple

from slipstream.errors import IntegrityError

# Tokens. Contexts up to this length share one bucket; above it every doubling has its own. A smaller
# value would split the timings over more buckets, so that each bucket learns more slowly.
SHORT_CONTEXT = 512
# Rows or slots at which a curve has factors of its own; it is a straight line between them.
_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
# docs/log.md holds the measurements behind the policy; figures about a single value are repeated below.
_CLIP = math.log(2.0)  # A timing counts as at most twice and at least half of what was expected.
# The share of a timing's error that each factor takes: the machine's, the kind's, and that of kind and context. Larger
# shares follow noise, smaller ones follow a change of the machine's speed too slowly.
_GAINS = (0.08, 0.03, 0.03)
_KNOT_GAINS = (0.02, 0.02, 0.02)  # The same shares for the factors of single knots.
_LESSONS = 16  # A careful measurement counts as this many timings.
_USUAL_SIZES = 24  # Lists of times are computed up to at least this many rows, so that most steps find them complete.
_STALE = 5  # Timings after which the curves are computed again; computing them takes time as well.
# The share of every factor but the machine's that is kept at each timing (half is left after 400). Without fading, one
# slow spell could keep a shape from being chosen ever again, and so from being timed again.
_FADING = 0.5 ** (1 / 400)
_LEAST_UNIT = 1e-60  # The factors are scaled anew before their common unit gets this close to underflow.
# One row costs at least this share of a step. Where rows are almost free, noise in the curve would otherwise make the
# rows of one sequence look more expensive than those of another.
_LEAST_ROW_SHARE = 0.002

Slice = tuple[Hashable, int]


class StepShape(NamedTuple):
    """What a target step's time depends on."""

    batch: int  # sequences in the step
    rows: int  # over all sequences, with their anchors
    context: int  # tokens of the longest sequence
    sampled: bool
    branching: bool  # whether some sequence verifies a tree that is not a chain


class _Curve:
    """One start-up curve and its factors; a slice is (kind, context bucket), and x is the number of rows or slots."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        sizes = sorted(measured)
        # More work never takes less time, so a dip in the measured curve is noise.
        times = list(accumulate((measured[size] for size in sizes), max))
        self.sizes = sizes
        self.knots = sorted({*sizes, *_KNOTS})
        self._base = [_line(sizes, times, knot) for knot in self.knots]
        self._machine = 0.0
        # By level (the machine, a kind, or a kind and context): the level's own factor and then those of its knots, as
        # logarithms in a unit that fades with every timing.
        self._factors: dict[Hashable, list[float]] = {}
        self._unit = 1.0
        self._recent: dict[tuple[Slice, int], deque[float]] = {}
        self._times: dict[Slice, list[float]] = {}  # times at the knots, kept for a few timings
        self._listed: dict[Slice, list[float]] = {}  # times at all sizes from 0 on, kept as long
        self.observed = 0

    def at(self, where: Slice, x: int) -> float:
        times = self._times.get(where)
        if times is None:
            times = self._times[where] = self._estimate(where)
        return _line(self.knots, times, x)

    def upto(self, where: Slice, most: int) -> list[float]:
        """The times of all sizes from 0 to at least `most`."""
        listed = self._listed.get(where)
        if listed is None or len(listed) <= most:
            self.at(where, most)
            listed = self._listed[where] = _every(self.knots, self._times[where], max(most, _USUAL_SIZES))
        return listed

    def observe(self, where: Slice, x: int, ms: float) -> None:
        recent = self._recent.setdefault((where, x), deque(maxlen=3))
        recent.append(ms)
        # The median of three is used: a single slow step leaves no trace, and a lasting change arrives one timing
        # later.
        typical = sorted(recent)[(len(recent) - 1) // 2]
        error = math.log(typical / self.at(where, x))
        error = max(-_CLIP, min(_CLIP, error))
        self.observed += 1
        self._unit *= _FADING
        if self._unit < _LEAST_UNIT:
            self._factors = {level: [self._unit * log for log in logs] for level, logs in self._factors.items()}
            self._unit = 1.0
        shares = self._shares(x)
        spread = sum(share * share for _, share in shares)
        for level, gain, knot_gain in zip(_levels(where), _GAINS, _KNOT_GAINS, strict=True):
            logs = self._logs(level)
            if level:
                logs[0] += gain * error / self._unit
            else:
                self._machine += gain * error  # the machine's own factor does not fade
            for place, share in shares:
                logs[place + 1] += knot_gain * error * share / spread / self._unit
        if not self.observed % _STALE:
            self._times.clear()
            self._listed.clear()

    def _estimate(self, where: Slice) -> list[float]:
        """Times at the knots, made non-decreasing: halfway between the running maximum and the running minimum."""
        unit = self._unit
        logs = [unit * (a + b + c) for a, b, c in zip(*map(self._logs, _levels(where)), strict=True)]
        common = self._machine + logs[0]
        raw = [base * math.exp(common + log) for base, log in zip(self._base, logs[1:], strict=True)]
        if raw == sorted(raw):
            return raw
        below = accumulate(raw, max)
        above = list(accumulate(reversed(raw), min))
        return [(low + high) / 2 for low, high in zip(below, reversed(above), strict=True)]

    def _shares(self, x: int) -> list[tuple[int, float]]:
        """The places of the knots around x, and the share of x that each of them stands for."""
        right = bisect_left(self.knots, x)
        if right == len(self.knots):
            return [(right - 1, 1.0)]
        if self.knots[right] == x or right == 0:
            return [(right, 1.0)]
        low, high = self.knots[right - 1], self.knots[right]
        part = (x - low) / (high - low)
        return [(right - 1, 1.0 - part), (right, part)]

    def _logs(self, level: Hashable) -> list[float]:
        logs = self._factors.get(level)
        if logs is None:
            logs = self._factors[level] = [0.0] * (len(self.knots) + 1)
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
        """Takes in a careful measurement with far more weight than the timing of a single step has."""
        for _ in range(_LESSONS):
            self.observe_step(shape, ms)

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
    return (_doublings(shape.batch), shape.sampled, shape.branching), _context_bucket(shape.context)


def _draft_slice(blocks: int, context: int) -> Slice:
    return (_doublings(blocks),), _context_bucket(context)


def _levels(where: Slice) -> tuple[Hashable, Hashable, Hashable]:
    return (), where[0], where


def _doublings(count: int) -> int:
    return (max(1, count) - 1).bit_length()


def _context_bucket(context: int) -> int:
    return 0 if context <= SHORT_CONTEXT else _doublings(context) - _doublings(SHORT_CONTEXT)


def _line(sizes: list[int], times: list[float], x: int) -> float:
    """Straight lines between the points; the first time before them, and the last slope after them."""
    if x <= sizes[0] or len(sizes) == 1:
        return times[0]
    right = min(bisect_left(sizes, x), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    return times[right - 1] + (times[right] - times[right - 1]) * (x - low) / (high - low)


def _every(sizes: list[int], times: list[float], most: int) -> list[float]:
    """`_line` at every size from 0 to `most`."""
    values = [times[0]] * (sizes[0] + 1)
    for place in range(1, len(sizes)):
        if len(values) > most:
            break
        low, high = sizes[place - 1], sizes[place]
        end = most if place == len(sizes) - 1 else high
        slope = (times[place] - times[place - 1]) / (high - low)
        values += [times[place - 1] + slope * ahead for ahead in range(1, end - low + 1)]
    return values
