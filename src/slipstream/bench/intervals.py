"""How sure a ratio of two speeds is: a bootstrap over the prompts both were measured on."""

from __future__ import annotations

from collections.abc import Sequence

Sample = tuple[int, float]  # tokens decoded for one prompt, and the milliseconds they took

RESAMPLES = 4000
_SEED = 0  # a report of the same measurements says the same
_TAIL_PERCENT = 2.5


def ratio(mine: Sequence[Sample], theirs: Sequence[Sample]) -> float | None:
    """Tokens a second of the one over the other's, each from sums over all prompts; None if nothing was decoded."""
    speeds = []
    for samples in (mine, theirs):
        tokens, milliseconds = (sum(column) for column in zip(*samples, strict=True)) if samples else (0, 0.0)
        if not tokens or not milliseconds:
            return None
        speeds.append(tokens / milliseconds)
    return speeds[0] / speeds[1]


def ratio_interval(mine: Sequence[Sample], theirs: Sequence[Sample]) -> tuple[float, float] | None:
    """The middle 95 % of the ratio over resampled prompts; None for fewer than two prompts, which vary in nothing.

    A prompt is drawn with both its samples: what makes it easy for one side mostly makes it easy for the other.
    """
    if len(mine) < 2:
        return None
    # Imported here: `--help` must not wait for it.
    import numpy as np

    count = len(mine)
    draws = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    sums = [draws @ np.asarray(samples, dtype=np.float64) for samples in (mine, theirs)]
    decoded = np.all(np.concatenate(sums, axis=1) > 0, axis=1)
    if not decoded.any():
        return None
    (my_tokens, my_time), (their_tokens, their_time) = (side[decoded].T for side in sums)
    ratios = (my_tokens / my_time) / (their_tokens / their_time)
    low, high = np.percentile(ratios, [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    return float(low), float(high)
