"""Confidence intervals for a ratio of two speeds, from a bootstrap over the prompts that both were measured on.

A speed is tokens over their cost, which is milliseconds, or verify steps (then the speed is tau).
"""

from __future__ import annotations

from collections.abc import Sequence

Sample = tuple[int, float]  # the tokens decoded for one prompt, and their cost

RESAMPLES = 4000  # draws of the bootstrap; fewer make the ends of an interval noisier, more only take longer
_SEED = 0  # it is fixed, so that the same measurements always give the same report
_POWERS = (1, -1, -1, 1)  # the exponent of each side's speed in the ratio
_TAIL_PERCENT = 2.5  # percent left out at each end, which makes 95 % intervals


def ratio(*sides: Sequence[Sample]) -> float | None:
    """The first side's speed over the second's, each from sums over all prompts; None if nothing was decoded.

    With four sides it is the ratio of two ratios: (1 / 2) / (3 / 4).
    """
    result = 1.0
    for samples, power in zip(sides, _POWERS, strict=False):
        tokens, cost = (sum(column) for column in zip(*samples, strict=True)) if samples else (0, 0.0)
        if not tokens or not cost:
            return None
        result *= (tokens / cost) ** power
    return result


def ratio_interval(*sides: Sequence[Sample]) -> tuple[float, float] | None:
    """The middle 95 % of the ratio over resampled prompts; None for fewer than two prompts, which cannot vary.

    A prompt is drawn with the samples of all sides, because a prompt that is easy for one side is mostly easy for all.
    """
    count = len(sides[0])
    if count < 2:
        return None
    # numpy is imported here, because `--help` must not wait for it.
    import numpy as np

    draws = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    sums = [draws @ np.asarray(samples, dtype=np.float64) for samples in sides]
    decoded = np.all(np.concatenate(sums, axis=1) > 0, axis=1)
    if not decoded.any():
        return None
    ratios = np.ones(int(decoded.sum()))
    for side, power in zip(sums, _POWERS, strict=False):
        tokens, cost = side[decoded].T
        ratios *= (tokens / cost) ** power
    low, high = np.percentile(ratios, [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    return float(low), float(high)
