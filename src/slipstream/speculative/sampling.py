"""From logits to tokens: penalties, filters and seeded Gumbel noise, row by row and independent of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.noise import NoiseRows
from slipstream.speculative.accept import NO_TOKEN
from slipstream.types import Proposal, SamplingParams

_NUCLEUS_GUESS = 1024  # a nucleus is nearly always smaller, and sorting a whole vocabulary is slow
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


class RowSampler:
    """Chooses the tokens of one request; keeps what its penalties and noise depend on."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt: Sequence[int], share_noise: bool) -> None:
        self.params = params
        self.share_noise = share_noise
        self.plain_greedy = params.greedy and not params.penalised
        self._noise = None if params.greedy else NoiseRows(params.seed, vocab_size)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool)
        self._counts = torch.zeros(vocab_size)
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
        depths = proposal.depths if proposal is not None else [0]
        usable = _usable(logits)
        if self.params.penalised:
            logits = penalise(logits, *self._history(logits.shape, proposal), self.params)
        scores = self._scores(logits, [first_position + depth for depth in depths], noisy=True)
        return _best(scores).masked_fill(~usable, NO_TOKEN)

    def draft_scores(self, logits: Tensor, first_position: int) -> Tensor | None:
        """What ranks the drafts of consecutive positions: the target's own rule on the drafter's logits.

        Above temperature 0 the noise the target will use there is added, which couples the two choices. None if
        the drafter's numbers are not finite.
        """
        if not bool(_usable(logits).all()):
            return None
        if self.params.penalised:
            logits = penalise(logits, self._seen, self._counts, self.params)
        return self._scores(logits, range(first_position, first_position + logits.shape[0]), noisy=self.share_noise)

    @property
    def draft_scale(self) -> float:
        """What one unit of a draft logit is worth in `draft_scores`."""
        return 1.0 if self.params.greedy else 1.0 / self.params.temperature

    def _scores(self, logits: Tensor, positions: Sequence[int], noisy: bool) -> Tensor:
        if self._noise is None:
            return logits
        scores = filter_logits(logits / self.params.temperature, self.params)
        return scores + self._noise.get(positions) if noisy else scores

    def _history(self, shape: torch.Size, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        """Per row, the committed tokens and those of its own ancestors."""
        ahead = torch.zeros(shape)
        if proposal is not None:
            for row in range(1, len(proposal.tokens)):
                ahead[row] = ahead[proposal.parents[row]]
                ahead[row, proposal.tokens[row]] += 1.0
        return self._seen | (ahead > 0), self._counts + ahead


def _best(scores: Tensor) -> Tensor:
    """The largest score's token per row, the lowest id among equals."""
    # on a CPU numpy does this twelve times as fast, and torch leaves open which of several equals it returns
    return torch.from_numpy(scores.numpy().argmax(axis=-1)) if scores.device.type == "cpu" else scores.argmax(dim=-1)


def _usable(logits: Tensor) -> Tensor:
    """Rows without NaN and +inf that leave some token possible; -inf alone is what masks write."""
    return logits.amax(dim=-1).isfinite()


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each chosen token, and the `top` most likely ones, under the unmodified target."""
    table = torch.log_softmax(logits, dim=-1)
    chosen = table.gather(1, tokens[:, None])[:, 0]
    values, ids = table.topk(top, dim=-1) if top else (table[:, :0], torch.empty((len(tokens), 0), dtype=torch.long))
    return chosen, values, ids
