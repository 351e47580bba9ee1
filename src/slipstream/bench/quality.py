"""Measures how well a target predicts a text in one weight format, and how far this is from another format.

The functions take the predictions of a forward, one per token; the caller runs the forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Relative difference up to which two perplexities count as equal. With a larger bound a broken format would pass, with
# a smaller one rounding alone would fail.
PERPLEXITY_BOUND = 0.005


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model predicted at the position of one token of a text."""

    log_probability: float  # natural logarithm of the probability of the token that really followed
    best: int  # the token that the model would have chosen


def perplexity(predictions: Iterable[Prediction]) -> float:
    """The exponential of the mean surprise; a model that gives each of n tokens the probability 1/n has n."""
    surprises = [-seen.log_probability for seen in predictions]
    if not surprises:
        raise ValueError("perplexity needs at least one predicted token")
    return math.exp(math.fsum(surprises) / len(surprises))


def agreement(mine: Sequence[Prediction], theirs: Sequence[Prediction]) -> float:
    """The share of positions at which both formats would have chosen the same token."""
    return sum(a.best == b.best for a, b in zip(mine, theirs, strict=True)) / len(mine)


@dataclass(frozen=True, slots=True)
class Quality:
    """A weight format compared with the reference on the same text."""

    tokens: int
    perplexity: float
    reference: float
    agreement: float

    @property
    def difference(self) -> float:
        """The difference relative to the reference; above 0 means worse."""
        return self.perplexity / self.reference - 1

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= PERPLEXITY_BOUND

    def to_json(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "perplexity": round(self.perplexity, 5),
            "reference": round(self.reference, 5),
            "difference": round(self.difference, 6),
            "agreement": round(self.agreement, 5),
            "holds": self.holds,
        }


def compare_predictions(mine: Sequence[Prediction], reference: Sequence[Prediction]) -> Quality:
    return Quality(len(mine), perplexity(mine), perplexity(reference), agreement(mine, reference))


def windows(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """The text cut into parts that are read on their own; a last part of one token predicts nothing and is left out."""
    cut = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [window for window in cut if len(window) > 1]
