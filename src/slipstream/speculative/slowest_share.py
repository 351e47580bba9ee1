"""The speed of a drafting batch as seen by the sequences that accept the fewest tokens.

In a batch all sequences take part in every step. Even where drafting pays on average, the sequences with few accepted
tokens may be slower than with plain decoding, and a batch is finished only when its last sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

# docs/log.md tells what was tried for the policy; a value below without a figure was chosen by hand.

# A fourth of the sequences count as the slowest. In a simulation of 64 answers this gave 0.97 of plain decoding's speed
# where the mean gave 0.87. A smaller part is noise, a larger one hides slow texts.
_SLOWEST_PART = 4
# The slowest count as at least this share of the mean. If the other sequences gain far more, the batch may draft
# although the slowest sequences lose by it.
_LEAST_SHARE = 0.7
_MEMORY_STEPS = 64.0  # After this many steps all counts are halved, so that older steps count less.
# A share is remembered for the next batch only while at least this part of the columns is occupied, because the last
# sequences of a batch are no example for the next one.
_FULL_SHARE = 0.75
_PRIOR_STEPS = 16.0  # The share that the batch before had counts as this many steps.


class SlowestShare:
    """Counts tokens per drafted step of every sequence, and separates real differences of sequences from luck."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._squares = 0.0  # sum over steps of the mean squared number of tokens
        self._steps = 0.0
        self._share: float | None = None
        self._before: float | None = None

    def restart(self, columns: int) -> None:
        """Starts anew for at most `columns` other sequences, which are first assumed to differ as the last ones did."""
        self._sums = [0.0] * columns
        self._squares = self._steps = 0.0
        self._before = self._share

    def slowest_share(self, places: Sequence[int], tokens: Sequence[int]) -> float:
        """Takes in a step's tokens of the sequences at these places; returns the slowest ones' share of the mean."""
        sums = self._sums
        for place, count in zip(places, tokens, strict=True):
            sums[place] += count
        self._squares += fmean([count * count for count in tokens])
        self._steps += 1.0
        if self._steps >= _MEMORY_STEPS:
            self._sums = sums = [each / 2.0 for each in sums]
            self._squares, self._steps = self._squares / 2.0, self._steps / 2.0
        own = sorted([sums[place] / self._steps for place in places])
        slowest, mean = fmean(own[: -(-len(own) // _SLOWEST_PART)]), fmean(own)
        share = 1.0 - self._real(own, mean) * (1.0 - slowest / mean) if mean else 1.0
        if self._before is not None:
            share += (self._before - share) * _PRIOR_STEPS / (_PRIOR_STEPS + self._steps)
        if _FULL_SHARE * len(self._sums) <= len(own):
            self._share = share
        return max(_LEAST_SHARE, share)

    def _real(self, own: Sequence[float], mean: float) -> float:
        """The part of the differences between these averages that luck does not explain."""
        spread = fmean([(each - mean) ** 2 for each in own])
        if not spread or self._steps <= 1.0:
            return 0.0
        # The variance of averages over n steps is the real variance between sequences plus 1/n of a step's variance.
        whole = max(0.0, self._squares / self._steps - mean * mean)
        differ = (spread - whole / self._steps) / (1.0 - 1.0 / self._steps)
        return min(1.0, max(0.0, differ / spread))
