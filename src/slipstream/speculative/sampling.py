"""From logits to tokens: penalties, filters and seeded Gumbel noise, row by row and independent of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.ranking import (
    LEAST_TEMPERATURE,
    Candidates,
    Floats,
    best_tokens,
    noisy_best,
    noisy_top,
    top_scores,
)
from slipstream.types import Proposal, SamplingParams

_NUCLEUS_GUESS = 1024  # a nucleus is nearly always smaller, and sorting a whole vocabulary is slow
_RANKED = (64, 1024)  # how much of a row is ranked to see where its filters cut: most rows need little
_HIDDEN = float("-inf")


def penalise(logits: Tensor, seen: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    """Repetition penalty on tokens `seen` anywhere, presence and frequency penalties on `counts` of generated ones."""
    if params.repetition_penalty != 1.0:
        weakened = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, weakened, logits)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return logits


def filter_logits(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Hides what min-p, top-k and top-p leave out; `scaled` is already divided by the temperature."""
    if params.min_p > 0.0:
        floor = scaled.amax(dim=-1, keepdim=True) + torch.tensor(params.min_p).log()
        scaled = scaled.masked_fill(scaled < floor, _HIDDEN)
    if 0 < params.top_k < scaled.shape[-1]:
        least = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, _HIDDEN)
    if params.top_p < 1.0:
        scaled = scaled.masked_fill(scaled < _nucleus_edge(scaled, params.top_p), _HIDDEN)
    return scaled


def _nucleus_edge(scaled: Tensor, top_p: float) -> Tensor:
    """The smallest logit inside the nucleus of each row: the fewest tokens whose probability reaches top_p."""
    # not logsumexp: torch splits the sum of a single long row over its threads, so its last bit depends on the batch
    total = scaled.amax(dim=-1, keepdim=True) - torch.log_softmax(scaled, dim=-1).amax(dim=-1, keepdim=True)
    size = min(_NUCLEUS_GUESS, scaled.shape[-1])
    while True:
        ranked = scaled.topk(size, dim=-1).values
        mass = (ranked - total).exp().cumsum(dim=-1)
        inside = (mass < top_p).sum(dim=-1, keepdim=True)
        if size == scaled.shape[-1] or bool((inside < size).all()):
            return ranked.gather(1, inside.clamp_max(size - 1))
        size = scaled.shape[-1]


def filter_floors(
    logits: Tensor, params: SamplingParams, temperature: float, ranked: Sequence[int] = _RANKED
) -> Floats:
    """The smallest logit / temperature of each row that `filter_logits` keeps, from its best few where they suffice."""
    values, _, total = top_scores(logits, ranked[0], temperature)
    floors = np.full(len(values), _HIDDEN, np.float32)
    if params.min_p > 0.0:
        floors = values[:, 0] + np.log(np.float32(params.min_p))
    narrowed = 0 < params.top_k < logits.shape[-1]
    if narrowed and params.top_k <= values.shape[1]:
        floors = np.maximum(floors, values[:, params.top_k - 1])
    # nothing that is kept so far stands behind the last of the ranked values
    complete = (floors > values[:, -1]) | np.isneginf(values[:, -1]) | (values.shape[1] == logits.shape[-1])
    settled = complete | (not narrowed or params.top_k <= values.shape[1])
    if params.top_p < 1.0:
        kept = values >= floors[:, None]
        if narrowed or params.min_p > 0.0:
            shares = np.where(kept, np.exp(values - values[:, :1]), np.float32(0.0))
            shares /= np.maximum(shares.sum(axis=1, keepdims=True), np.float32(1e-30))  # 0 where values are not numbers
            settled &= complete
        else:
            shares = np.exp(values - total[:, None])
        inside = (shares.cumsum(axis=1) < params.top_p).sum(axis=1)
        count = kept.sum(axis=1)
        settled &= complete | (inside < count)
        edges = np.take_along_axis(values, np.maximum(np.minimum(inside, count - 1), 0)[:, None], axis=1)
        floors = np.maximum(floors, edges[:, 0])
    settled |= np.isnan(total)
    if not settled.all():
        open_rows = np.flatnonzero(~settled)
        left = logits[torch.from_numpy(open_rows)]
        floors[open_rows] = (
            filter_floors(left, params, temperature, ranked[1:]) if len(ranked) > 1
            else _least_kept(filter_logits(left / temperature, params))
        )
    return floors


def _least_kept(filtered: Tensor) -> Floats:
    least: Floats = filtered.masked_fill(filtered.isneginf(), float("inf")).amin(dim=-1).numpy()
    return least


class RowSampler:
    """Chooses the tokens of one request; keeps what its penalties and noise depend on."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt: Sequence[int], share_noise: bool) -> None:
        self.params = params
        self.share_noise = share_noise
        self.plain_greedy = params.greedy and not params.penalised
        self._temperature = max(params.temperature, LEAST_TEMPERATURE)
        self._filtered = params.min_p > 0.0 or 0 < params.top_k < vocab_size or params.top_p < 1.0
        self._seen = torch.zeros(vocab_size if params.penalised else 0, dtype=torch.bool)
        self._counts = torch.zeros(vocab_size if params.penalised else 0)
        if params.penalised:
            self._seen[torch.tensor(prompt)] = True

    def observe(self, tokens: Sequence[int]) -> None:
        """Counts committed tokens for the penalties."""
        if self.params.penalised and tokens:
            ids = torch.tensor(tokens)
            self._seen[ids] = True
            self._counts.index_add_(0, ids, torch.ones(len(tokens)))

    def choose(self, logits: Tensor, first_position: int, proposal: Proposal | None = None) -> Tensor:
        """The target's own token after each row, NO_TOKEN where its logits are not numbers.

        The token after row 0 will stand at `first_position`; further rows are the proposal's drafts.
        """
        if self.params.penalised:
            logits = penalise(logits, *self._history(logits.shape, proposal), self.params)
        if self.params.greedy:
            return torch.from_numpy(best_tokens(logits)[0])
        positions = [first_position + depth for depth in proposal.depths] if proposal else [first_position]
        ids, _ = noisy_best(logits, positions, self.params.seed, self._temperature, self._floors(logits))
        return torch.from_numpy(ids)

    def draft_candidates(self, logits: Tensor, first_position: int, count: int) -> Candidates | None:
        """The `count` likeliest drafts of consecutive positions by the target's own rule on the drafter's logits.

        Above temperature 0 the noise the target will use there is added, which couples the two choices. None if
        the drafter's numbers are not finite.
        """
        params = self.params
        if params.penalised:
            logits = penalise(logits, self._seen, self._counts, params)
        if params.greedy:
            return Candidates.of(top_scores(logits, count))
        floors = self._floors(logits)
        if self.share_noise:
            positions = range(first_position, first_position + logits.shape[0])
            return Candidates.of(noisy_top(logits, positions, params.seed, self._temperature, count, floors))
        if floors is None:
            return Candidates.of(top_scores(logits, count, self._temperature))
        scaled = logits / self._temperature
        return Candidates.of(top_scores(scaled.masked_fill(scaled < torch.from_numpy(floors)[:, None], _HIDDEN), count))

    @property
    def draft_scale(self) -> float:
        """What one unit of a draft logit is worth in a candidate's score."""
        return 1.0 if self.params.greedy else 1.0 / self._temperature

    def _floors(self, logits: Tensor) -> Floats | None:
        return filter_floors(logits, self.params, self._temperature) if self._filtered else None

    def _history(self, shape: torch.Size, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        """Per row, the committed tokens and those of its own ancestors."""
        ahead = torch.zeros(shape)
        if proposal is not None:
            for row in range(1, len(proposal.tokens)):
                ahead[row] = ahead[proposal.parents[row]]
                ahead[row, proposal.tokens[row]] += 1.0
        return self._seen | (ahead > 0), self._counts + ahead


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each chosen token, and the `top` most likely ones, under the unmodified target."""
    table = torch.log_softmax(logits, dim=-1)
    chosen = table.gather(1, tokens[:, None])[:, 0]
    values, ids = table.topk(top, dim=-1) if top else (table[:, :0], torch.empty((len(tokens), 0), dtype=torch.long))
    return chosen, values, ids
