"""How well a target predicts a text in one weight format, and how far that is from another format.

The functions take what a forward left behind, one line per predicted token; running the forward is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BOUND = 0.005  # perplexities closer than this relative to each other count as the same


@dataclass(frozen=True, slots=True)
class Prediction:
    """One token of a text as the model saw it coming."""

    log_probability: float  # of the token that really came, natural logarithm
    best: int  # the token the model would have chosen


def perplexity(predictions: Iterable[Prediction]) -> float:
    """The exponential of the mean surprise; a model that gives every token of a vocabulary of n 1/n has n."""
    surprises = [-seen.log_probability for seen in predictions]
    if not surprises:
        raise ValueError("perplexity needs at least one predicted token")
    return math.exp(math.fsum(surprises) / len(surprises))


def agreement(mine: Sequence[Prediction], theirs: Sequence[Prediction]) -> float:
    """The share of positions at which both would have chosen the same token."""
    return sum(a.best == b.best for a, b in zip(mine, theirs, strict=True)) / len(mine)


@dataclass(frozen=True, slots=True)
class Quality:
    """A weight format against the reference on the same text."""

    tokens: int
    perplexity: float
    reference: float
    agreement: float

    @property
    def difference(self) -> float:
        """Relative to the reference; above 0 is worse."""
        return self.perplexity / self.reference - 1

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= BOUND

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
    """The text cut into stretches that are read on their own; a last one too short to predict anything is left out."""
    cut = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [window for window in cut if len(window) > 1]
