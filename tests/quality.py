"""Measures how well a target predicts a text in one weight format, how far this is from another format, and how long
steps take.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.engine.block_scoring import ScratchSequence, text_logits
from slipstream.models.decoder import Decoder

_CONTEXT = 64  # tokens after which steps are timed
_LEAST_SECONDS = 0.3  # each number of rows is timed so long; with less, a median rests on few steps

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


def predictions(target: Decoder, ids: Sequence[int], chunk: int = 256) -> Iterator[Prediction]:
    """Yields the prediction of every token but the first."""
    position = 0
    for logits in text_logits(target, ids, chunk):
        following = torch.tensor(ids[position + 1 : position + 1 + len(logits)])
        known = logits[: len(following)]
        chosen = torch.log_softmax(known.double(), dim=-1).gather(1, following[:, None])[:, 0]
        yield from map(Prediction, chosen.tolist(), known.argmax(dim=-1).tolist())
        position += len(logits)


@torch.inference_mode()
def row_times(target: Decoder, rows: Sequence[int]) -> dict[int, float]:
    """Returns the median milliseconds of greedy steps by their rows, all with logits, after a short context."""
    scratch = ScratchSequence(target, [1] * (_CONTEXT + 1), _CONTEXT + max(rows))
    scratch.run(scratch.state.tokens[:_CONTEXT], 0)
    scratch.state.commit(range(_CONTEXT), [], 0)

    def step(count: int) -> float:
        began = time.perf_counter()
        scratch.run([1] * count, count).argmax(dim=-1).tolist()
        return 1e3 * (time.perf_counter() - began)

    times: dict[int, list[float]] = {count: [] for count in rows}
    until = time.perf_counter() + _LEAST_SECONDS * len(rows)
    # The widths take turns, so that a busy moment of the machine hits all of them.
    while time.perf_counter() < until or len(times[rows[0]]) < 3:
        for count in rows:
            step(count)  # a first step, not counted, replaces what the last width left in the processor's caches
            times[count].append(step(count))
    return {count: statistics.median(seen) for count, seen in times.items()}
