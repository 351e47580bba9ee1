"""How fast a drafting batch is for those of its sequences that accept least.

In a batch all sequences take part in every step. Where drafting pays on average, those with few accepted tokens may
still be slower than plain decoding would be, and a batch is done when the last of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

_SLOWEST = 4  # one of so many sequences counts
_LEAST = 0.7  # of the mean counts at least: where the others gain far more, the slowest have to bear it
_MEMORY = 64.0  # steps, after which what was seen counts half
_FULL = 0.75  # of the columns are taken: then the sequences are as different as they come
_PRIOR = 16.0  # steps that the sequences before are worth


class Pace:
    """Tokens per drafted step of every sequence, told from luck by how much sequences would differ by that alone."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._squares = 0.0  # of all numbers of tokens, on average of the sequences
        self._steps = 0.0
        self._share: float | None = None
        self._before: float | None = None

    def restart(self, columns: int) -> None:
        """Other sequences come, so many at most. Until they have shown it, they are taken to differ as the last did."""
        self._sums = [0.0] * columns
        self._squares = self._steps = 0.0
        self._before = self._share

    def slowest_share(self, places: Sequence[int], tokens: Sequence[int]) -> float:
        """Takes in what a step gave the sequences at these places; returns what the slowest have of the mean."""
        sums = self._sums
        for place, count in zip(places, tokens, strict=True):
            sums[place] += count
        self._squares += fmean([count * count for count in tokens])
        self._steps += 1.0
        if self._steps >= _MEMORY:
            self._sums = sums = [each / 2.0 for each in sums]
            self._squares, self._steps = self._squares / 2.0, self._steps / 2.0
        own = sorted([sums[place] / self._steps for place in places])
        slowest, mean = fmean(own[: -(-len(own) // _SLOWEST)]), fmean(own)
        share = 1.0 - self._real(own, mean) * (1.0 - slowest / mean) if mean else 1.0
        if self._before is not None:
            share += (self._before - share) * _PRIOR / (_PRIOR + self._steps)
        if _FULL * len(self._sums) <= len(own):
            self._share = share  # who is left in the end is no example
        return max(_LEAST, share)

    def _real(self, own: Sequence[float], mean: float) -> float:
        """What part of the differences between these averages is more than luck."""
        spread = fmean([(each - mean) ** 2 for each in own])
        if not spread or self._steps <= 1.0:
            return 0.0
        # averages of n steps spread by what sequences differ and by an n-th of what luck makes of a step
        whole = max(0.0, self._squares / self._steps - mean * mean)
        differ = (spread - whole / self._steps) / (1.0 - 1.0 / self._steps)
        return min(1.0, max(0.0, differ / spread))
