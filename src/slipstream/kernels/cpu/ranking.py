"""Which tokens score best: rankings of logits with and without seeded noise, by compiled kernels or by torch.

The answer for a row depends only on that row, its position and the seed, not on the rows beside it or the number of
threads. The compiled kernels therefore cut rows into stretches of a fixed size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kernels.cpu.native_library import Library, address, library, threads
from slipstream.kernels.noise import gumbel_rows

NO_BEST = -1  # the token of a row that has none, because its logits are not finite or all are masked
LEAST_TEMPERATURE = 1e-30  # dividing logits by less could leave the range of fp32
_REMEMBERED_NOISE = 64  # rows of noise that are cached, because drafting and verify need the same rows

Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


class SlotCandidates(NamedTuple):
    """The K likeliest tokens of each drafted slot, best first; a score of -inf marks an empty place."""

    tokens: Ids
    scores: Floats  # log-probabilities

    @classmethod
    def of(cls, ranked: tuple[Floats, Ids, Floats]) -> SlotCandidates | None:
        """Converts a result of `top_scores` or `noisy_top`; returns None if some row is not finite."""
        values, ids, total = ranked
        return cls(ids, values - total[:, None]) if all(map(math.isfinite, total.tolist())) else None


def best_tokens(logits: Tensor) -> tuple[Ids, Flags]:
    """Returns the token of the largest logit per row (the lowest id among equals), and whether the row is usable.

    A row is usable if it holds no NaN and no +inf and leaves at least one token possible; otherwise its token is
    NO_BEST.
    """
    return _ranking(logits).best_tokens(logits)


def top_scores(scores: Tensor, count: int, temperature: float = 1.0) -> tuple[Floats, Ids, Floats]:
    """Returns the `count` largest scores / temperature of each row in falling order, their tokens, and the logsumexp.

    Among equals the lowest id comes first. Places that no finite score fills hold -inf and token 0. A row that is not
    usable (see `best_tokens`) has NaN for values and logsumexp. There are no more columns than tokens.
    """
    return _ranking(scores).top_scores(scores, _bounded(scores, count), max(temperature, LEAST_TEMPERATURE))


def noisy_best(
    logits: Tensor, positions: Sequence[int], seed: int, temperature: float, floors: Floats | None = None
) -> tuple[Ids, Flags]:
    """Returns the token with the largest logit / temperature + noise(seed, position, token) per row, and its usability.

    `positions[row]` is the position that the token will have. Tokens whose scaled logit is below the row's floor are
    left out.
    """
    return _ranking(logits).noisy_best(logits, positions, seed, max(temperature, LEAST_TEMPERATURE), floors)


def noisy_top(
    logits: Tensor, positions: Sequence[int], seed: int, temperature: float, count: int, floors: Floats | None = None
) -> tuple[Floats, Ids, Floats]:
    """Does what `top_scores` does for the sums that `noisy_best` compares; the logsumexp is over the returned scores.

    Other tokens are left out of it, because drawing all of their noise takes three times as long as the ranking.
    """
    temperature = max(temperature, LEAST_TEMPERATURE)
    return _ranking(logits).noisy_top(logits, positions, seed, temperature, _bounded(logits, count), floors)


def _bounded(scores: Tensor, count: int) -> int:
    return max(1, min(count, scores.shape[-1]))


class NativeRanking:
    """The compiled rankings of one instruction set; rows are fp32 and are copied only if they are not contiguous."""

    def __init__(self, compiled: Library) -> None:
        rows, noise = "piii", "pufp"  # logits, rows, vocabulary, threads; positions, seed, temperature, floors
        self._best_tokens = compiled.function("slip_best_tokens", f"{rows}pp")
        self._top_scores = compiled.function("slip_top_scores", f"{rows}fippp")
        self._noisy_best = compiled.function("slip_noisy_best", f"{rows}{noise}pp")
        self._noisy_top = compiled.function("slip_noisy_top", f"{rows}{noise}ippp")

    def best_tokens(self, logits: Tensor) -> tuple[Ids, Flags]:
        return self._best(self._best_tokens, logits)

    def top_scores(self, scores: Tensor, count: int, temperature: float) -> tuple[Floats, Ids, Floats]:
        return self._top(self._top_scores, scores, count, temperature)

    def noisy_best(
        self, logits: Tensor, positions: Sequence[int], seed: int, temperature: float, floors: Floats | None = None
    ) -> tuple[Ids, Flags]:
        places, least = _per_row(positions, floors, logits.shape[0])
        floor = None if least is None else least.ctypes.data
        return self._best(self._noisy_best, logits, places.ctypes.data, seed, temperature, floor)

    def noisy_top(
        self,
        logits: Tensor,
        positions: Sequence[int],
        seed: int,
        temperature: float,
        count: int,
        floors: Floats | None = None,
    ) -> tuple[Floats, Ids, Floats]:
        places, least = _per_row(positions, floors, logits.shape[0])
        floor = None if least is None else least.ctypes.data
        return self._top(self._noisy_top, logits, count, places.ctypes.data, seed, temperature, floor)

    def _best(self, kernel: Any, logits: Tensor, *settings: Any) -> tuple[Ids, Flags]:
        logits, rows, vocab = _prepared(logits)
        ids, usable = np.empty(rows, np.int64), np.empty(rows, np.bool_)
        kernel(logits.data_ptr(), rows, vocab, threads(), *settings, address(ids), address(usable))
        return ids, usable

    def _top(self, kernel: Any, scores: Tensor, count: int, *settings: Any) -> tuple[Floats, Ids, Floats]:
        scores, rows, vocab = _prepared(scores)
        values, ids = np.empty((rows, count), np.float32), np.empty((rows, count), np.int64)
        total, here = np.empty(rows, np.float32), (scores.data_ptr(), rows, vocab, threads())
        kernel(*here, *settings, count, address(values), address(ids), address(total))
        return values, ids, total


def _prepared(scores: Tensor) -> tuple[Tensor, int, int]:
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        scores = scores.float().contiguous()
    return scores, scores.shape[0], scores.shape[1]


def _per_row(positions: Sequence[int], floors: Floats | None, rows: int) -> tuple[Ids, Floats | None]:
    if len(positions) != rows or (floors is not None and floors.shape != (rows,)):
        raise ValueError(f"{rows} rows need as many positions and floors")
    return np.array(positions, np.int64), None if floors is None else np.ascontiguousarray(floors, np.float32)


class TorchRanking:
    """The same rankings in torch, for devices and machines without compiled ones."""

    def best_tokens(self, logits: Tensor) -> tuple[Ids, Flags]:
        usable = _usable(logits)
        # on a CPU numpy is twelve times as fast, and torch does not define which of several equal values it returns
        ids = logits.numpy().argmax(axis=-1) if logits.device.type == "cpu" else logits.argmax(dim=-1).cpu().numpy()
        return np.where(usable, ids, NO_BEST), usable

    def top_scores(self, scores: Tensor, count: int, temperature: float) -> tuple[Floats, Ids, Floats]:
        table = (scores / temperature).float().cpu()
        usable = _usable(table)
        # torch's logsumexp splits the sum of a single long row over its threads, so that its last bit depends on the
        # batch
        total = (table.amax(dim=-1) - torch.log_softmax(table, dim=-1).amax(dim=-1)).numpy()
        return *_top(table, count, usable), np.where(usable, total, np.float32(np.nan))

    def noisy_best(
        self, logits: Tensor, positions: Sequence[int], seed: int, temperature: float, floors: Floats | None = None
    ) -> tuple[Ids, Flags]:
        usable = _usable(logits / temperature)
        ids, _ = self.best_tokens(_noisy(logits, positions, seed, temperature, floors))
        return np.where(usable, ids, NO_BEST), usable

    def noisy_top(
        self,
        logits: Tensor,
        positions: Sequence[int],
        seed: int,
        temperature: float,
        count: int,
        floors: Floats | None = None,
    ) -> tuple[Floats, Ids, Floats]:
        noisy = _noisy(logits, positions, seed, temperature, floors).float().cpu()
        values, ids = _top(noisy, count, _usable(logits / temperature))
        return values, ids, torch.from_numpy(values).logsumexp(dim=1).numpy()


@functools.cache
def _compiled_ranking() -> NativeRanking | None:
    found = library()
    return NativeRanking(found) if found else None


def _ranking(scores: Tensor) -> NativeRanking | TorchRanking:
    return (_compiled_ranking() if scores.device.type == "cpu" else None) or TorchRanking()


def _usable(logits: Tensor) -> Flags:
    flags: Flags = logits.amax(dim=-1).isfinite().cpu().numpy()
    return flags


def _noisy(logits: Tensor, positions: Sequence[int], seed: int, temperature: float, floors: Floats | None) -> Tensor:
    scaled = logits / temperature
    if floors is not None:
        scaled = scaled.masked_fill(scaled < torch.from_numpy(floors).to(scaled.device)[:, None], float("-inf"))
    noise = torch.stack([_noise_row(seed, position, logits.shape[-1]) for position in positions])
    return scaled + noise.to(scaled.device)


@functools.lru_cache(maxsize=_REMEMBERED_NOISE)
def _noise_row(seed: int, position: int, vocab_size: int) -> Tensor:
    return gumbel_rows(seed, range(position, position + 1), vocab_size)[0]


def _top(table: Tensor, count: int, usable: Flags) -> tuple[Floats, Ids]:
    least = table.topk(count, dim=-1).values[:, -1].numpy()
    values = np.full((len(least), count), np.nan, np.float32)
    ids = np.zeros((len(least), count), np.int64)
    for row in np.flatnonzero(usable):
        scored = table[row].numpy()
        found = np.flatnonzero(scored >= least[row])  # topk does not define which of several equal values it returns
        ids[row] = found[np.argsort(-scored[found], kind="stable")[:count]]
        values[row] = scored[ids[row]]
    ids[np.isneginf(values)] = 0
    return values, ids
