"""From logits to tokens: penalties, filters and seeded Gumbel noise; each row is independent of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.grammar.guide import Guide, GuideError, Mask, Path
from slipstream.kernels.cpu.ranking import (
    LEAST_TEMPERATURE,
    NO_BEST,
    Floats,
    Ids,
    SlotCandidates,
    best_tokens,
    noisy_best,
    noisy_top,
    top_scores,
)
from slipstream.speculative.accept import NOT_CHOSEN, children_of
from slipstream.speculative.constrained_drafts import DraftRule
from slipstream.types import Proposal, SamplingParams

# Tokens that are ranked first to find a nucleus, which is nearly always smaller. Ranking the whole vocabulary is slow,
# so a larger value costs time in every row and a smaller one makes more rows rank the whole vocabulary afterwards.
_NUCLEUS_GUESS = 1024
# Tokens of a row that are ranked to find where its filters cut; the second number is used where the first is too small.
# Most rows need few, and rows that both numbers leave undecided are filtered over the whole vocabulary.
_RANKED = (64, 1024)
_HIDDEN = float("-inf")  # the logit of a token that must not be chosen
_BAN = -100.0  # A logit bias of this or less bans its token altogether, as the OpenAI API documents it.
# A constrained request has at least so many candidates per slot, because the constraint may forbid the likeliest ones.
# With fewer candidates, more slots have to be ranked a second time under their mask.
_GUIDED_CANDIDATES = 16


def penalise(logits: Tensor, seen: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    """Applies the repetition penalty to all `seen` tokens; presence and frequency penalties use generated `counts`."""
    if params.repetition_penalty != 1.0:
        weakened = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, weakened, logits)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return logits


def filter_logits(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Hides the tokens that min-p, top-k and top-p leave out; `scaled` is already divided by the temperature."""
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
    """The smallest logit in each row's nucleus, which is the fewest tokens whose probability reaches top_p."""
    # logsumexp is not used: torch splits the sum of a single long row over its threads, so that the last bit of the
    # result would depend on the batch.
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
    """The smallest logit / temperature of each row that `filter_logits` keeps, found from the row's best few tokens."""
    values, _, total = top_scores(logits, ranked[0], temperature)
    floors = np.full(len(values), _HIDDEN, np.float32)
    if params.min_p > 0.0:
        floors = values[:, 0] + np.log(np.float32(params.min_p))
    narrowed = 0 < params.top_k < logits.shape[-1]
    if narrowed and params.top_k <= values.shape[1]:
        floors = np.maximum(floors, values[:, params.top_k - 1])
    # A row is complete if all tokens that the filters have kept so far are among the ranked values.
    complete = (floors > values[:, -1]) | np.isneginf(values[:, -1]) | (values.shape[1] == logits.shape[-1])
    settled = complete | (not narrowed or params.top_k <= values.shape[1])
    if params.top_p < 1.0:
        kept = values >= floors[:, None]
        if narrowed or params.min_p > 0.0:
            shares = np.where(kept, np.exp(values - values[:, :1]), np.float32(0.0))
            # the sum is 0 where the values are NaN
            shares /= np.maximum(shares.sum(axis=1, keepdims=True), np.float32(1e-30))
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
            filter_floors(left, params, temperature, ranked[1:])
            if len(ranked) > 1
            else _least_kept(filter_logits(left / temperature, params))
        )
    return floors


def _least_kept(filtered: Tensor) -> Floats:
    least: Floats = filtered.masked_fill(filtered.isneginf(), float("inf")).amin(dim=-1).numpy()
    return least


class RowSampler:
    """Chooses the tokens of one request; it holds the state of its penalties, bias, constraint and noise."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        share_noise: bool,
        guide: Guide | None = None,
    ) -> None:
        self.params = params
        self.share_noise = share_noise
        self.guide = guide
        self.failure: str | None = None  # the reason why no token can be chosen although the target's logits are finite
        self._bias = _bias(params.logit_bias, vocab_size) if params.logit_bias else None
        self._temperature = max(params.temperature, LEAST_TEMPERATURE)
        self._filtered = params.min_p > 0.0 or 0 < params.top_k < vocab_size or params.top_p < 1.0
        self._seen = torch.zeros(vocab_size if params.penalised else 0, dtype=torch.bool)
        self._counts = torch.zeros(vocab_size if params.penalised else 0)
        if params.penalised:
            self._seen[torch.tensor(prompt)] = True

    def observe(self, tokens: Sequence[int]) -> None:
        """Counts committed tokens for the penalties, and moves the guide of a constraint along."""
        if self.guide is not None:
            for token in tokens:
                self.guide.observe(token)
        if self.params.penalised and tokens:
            ids = torch.tensor(tokens)
            self._seen[ids] = True
            self._counts.index_add_(0, ids, torch.ones(len(tokens)))

    def choose(self, logits: Tensor, first_position: int, proposal: Proposal | None = None) -> Ids:
        """The target's own token after each row, or NO_TOKEN where its logits are NaN or infinite.

        The token after row 0 will stand at `first_position`; further rows are the drafts of the proposal.
        """
        if self.params.penalised:
            logits = penalise(logits, *self._history(logits.shape, proposal), self.params)
        if self._bias is not None:
            logits = logits + self._bias
        if self.guide is not None:
            return self._choose_guided(self.guide, logits, first_position, proposal)
        return self._best(logits, first_position, proposal)

    def _best(self, logits: Tensor, first_position: int, proposal: Proposal | None = None) -> Ids:
        if self.params.greedy:
            return best_tokens(logits)[0]
        positions = [first_position + depth for depth in proposal.depths] if proposal else [first_position]
        return noisy_best(logits, positions, self.params.seed, self._temperature, self._floors(logits))[0]

    def _choose_guided(self, guide: Guide, logits: Tensor, first_position: int, proposal: Proposal | None) -> Ids:
        """Follows the target's own tokens from the anchor; only the rows on that path need a mask and get one."""
        # For rows off the path it only matters whether their logits are finite.
        ids = best_tokens(logits)[0] if self._filtered else self._best(logits, first_position, proposal)
        children = children_of(proposal) if proposal is not None else {}
        row = 0
        path: Path = ()
        while ids[row] != NO_BEST:
            token = self._allowed(guide, logits[row : row + 1], first_position + len(path), path, int(ids[row]))
            ids[row] = token
            child = children.get((row, token))
            if child is None:
                break
            row, path = child, (*path, token)
            if not guide.knows(path):
                ids[row] = NOT_CHOSEN
                break
        return ids

    def _allowed(self, guide: Guide, logits: Tensor, position: int, path: Path, favourite: int) -> int:
        """The target's token after a path among those that the guide allows; `favourite` is its choice without mask."""
        try:
            mask = guide.mask(path)
        except GuideError as error:
            self.failure = str(error)
            return NO_BEST
        if mask is not None:
            # Without filters the best token of all is also the best allowed one. A filter's cut depends on the mask.
            if not self._filtered and favourite in mask:
                return favourite
            if mask.only is not None and self._bias is None:
                return mask.only
            logits = _masked(logits, mask)
        elif not self._filtered:
            return favourite
        token = int(self._best(logits, position)[0])
        if token == NO_BEST:
            self.failure = "logit_bias bans every token that the constraint allows here"
        return token

    @property
    def complete(self) -> bool:
        """Whether the constraint leaves nothing more to write."""
        return self.guide is not None and self.guide.complete

    @property
    def settled(self) -> bool:
        """Whether it is already known if the constraint leaves anything more to write."""
        return self.guide is None or self.guide.settled

    @property
    def slow(self) -> bool:
        """Whether the constraint's masks take too long for drafts to be kept within it."""
        return self.guide is not None and self.guide.slow

    def draft_rule(self, logits: Tensor, first_position: int) -> DraftRule | None:
        """The rule that keeps drafts from these logits within the constraint; None without a constraint."""
        if self.guide is None:
            return None

        def ranked(slot: int, mask: Mask) -> SlotCandidates | None:
            row = _masked(self._shaped(logits[slot : slot + 1]), mask)
            return self._rank(row, first_position + slot, _GUIDED_CANDIDATES)

        return DraftRule(self.guide, ranked)

    def draft_candidates(self, logits: Tensor, first_position: int, count: int) -> SlotCandidates | None:
        """The `count` likeliest drafts of consecutive positions, by the target's own rule on the drafter's logits.

        Above temperature 0 the noise that the target will use at each position is added, so that drafter and target
        tend to choose the same token. The result is None if the drafter's logits are NaN or infinite.
        """
        logits = self._shaped(logits)
        if self.guide is not None:
            count = max(count, _GUIDED_CANDIDATES)
        return self._rank(logits, first_position, count)

    def _shaped(self, logits: Tensor) -> Tensor:
        """Draft logits after penalties and bias."""
        if self.params.penalised:
            logits = penalise(logits, self._seen, self._counts, self.params)
        return logits if self._bias is None else logits + self._bias

    def _rank(self, logits: Tensor, first_position: int, count: int) -> SlotCandidates | None:
        params = self.params
        if params.greedy:
            return SlotCandidates.of(top_scores(logits, count))
        floors = self._floors(logits)
        if self.share_noise:
            positions = range(first_position, first_position + logits.shape[0])
            return SlotCandidates.of(noisy_top(logits, positions, params.seed, self._temperature, count, floors))
        if floors is None:
            return SlotCandidates.of(top_scores(logits, count, self._temperature))
        scaled = logits / self._temperature
        return SlotCandidates.of(
            top_scores(scaled.masked_fill(scaled < torch.from_numpy(floors)[:, None], _HIDDEN), count)
        )

    @property
    def draft_scale(self) -> float:
        """The factor from a draft logit to a candidate's score."""
        return 1.0 if self.params.greedy else 1.0 / self._temperature

    def _floors(self, logits: Tensor) -> Floats | None:
        return filter_floors(logits, self.params, self._temperature) if self._filtered else None

    def _history(self, shape: torch.Size, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        """Per row, which tokens were seen and how often: the committed ones and those of the row's own ancestors."""
        ahead = torch.zeros(shape)
        if proposal is not None:
            for row in range(1, len(proposal.tokens)):
                ahead[row] = ahead[proposal.parents[row]]
                ahead[row, proposal.tokens[row]] += 1.0
        return self._seen | (ahead > 0), self._counts + ahead


def _bias(pairs: Sequence[tuple[int, float]], vocab_size: int) -> Tensor:
    """A value for every token that is added to its logit."""
    bias = torch.zeros(vocab_size)
    for token, value in pairs:
        bias[token] = _HIDDEN if value <= _BAN else value
    return bias


def _masked(logits: Tensor, mask: Mask) -> Tensor:
    return logits.masked_fill(torch.from_numpy(~mask.allowed), _HIDDEN)


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each chosen token, and the `top` most likely tokens, under the unmodified target."""
    table = torch.log_softmax(logits, dim=-1)
    chosen = table.gather(1, tokens[:, None])[:, 0]
    values, ids = table.topk(top, dim=-1) if top else (table[:, :0], torch.empty((len(tokens), 0), dtype=torch.long))
    return chosen, values, ids
