"""Heads that correct a slot's candidates once the token before them is chosen, and say how far to trust the slot.

Compiled code reads the tables of the simplest heads itself. For other heads a walk gathers everything that one block
can need in a few tensor calls. After that it works with numpy on small arrays, one call per chosen token or tree node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.formats.weight_files import WeightTensor
from slipstream.kernels.cpu.native_growth import BRAIN, FLOAT, HALF, CompiledWalk, HeadTables
from slipstream.lazy import cached_property
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.dflash_names import shapes_in
from slipstream.models.weights import FLOAT_TYPES, Weights

Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]
State: TypeAlias = Floats | None  # what a head remembers of the path to a node; None: nothing, as at a path's start
Walk: TypeAlias = Callable[[int, int, State], tuple[Floats, State]]  # a correcting head at work: see `HeadPass.correct`

_HALF_LIMIT = float(torch.finfo(torch.float16).max)


class TokenRows:
    """A table with a row per token, in 16 bits where that loses nothing that matters; single rows are cheap to read."""

    def __init__(self, source: WeightTensor) -> None:
        values = source.dense()
        dtype = FLOAT_TYPES.get(source.type_name)
        if dtype is None:
            # Quantised values are coarser than half precision, but their range may be wider than its range.
            dtype = torch.float16 if float(values.abs().max()) <= _HALF_LIMIT else torch.float32
        self.table = values.to(dtype).contiguous()
        self._brain = dtype is torch.bfloat16
        # numpy has no bfloat16, whose bits are the upper half of a float32.
        self._view = self.table.view(torch.uint16).numpy() if self._brain else self.table.numpy()

    @property
    def place(self) -> tuple[int, int]:
        """The address of the rows and the type of their numbers, for compiled code."""
        return self._view.ctypes.data, BRAIN if self._brain else HALF if self._view.itemsize == 2 else FLOAT

    def row(self, token: int) -> Floats:
        stored = self._view[token]
        if self._brain:
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)

    def rows(self, tokens: Tensor) -> Floats:
        """Returns rows [..., rank] of tokens [...]."""
        return _numpy(self.table[tokens])


class MarkovHead:
    """A low-rank bias on the next token given the last one: vanilla, gated by the hidden row, or recurrent."""

    def __init__(self, weights: Weights, config: DFlashConfig) -> None:
        rank, hidden = config.parts.markov_rank, config.hidden_size
        self.kind = config.parts.markov_head_type
        self.embedding = _token_rows(weights, "markov_head.markov_w1.weight", (config.vocab_size, rank))
        self.output = _token_rows(weights, "markov_head.markov_w2.weight", (config.vocab_size, rank))
        self.rank = rank
        self.vocabulary = config.vocab_size
        if self.kind == "gated":
            joined, self.bias = _linear(weights, "markov_head.gate_proj", rank, hidden + rank)
            self.of_hidden, inner = joined[:, :hidden], joined[:, hidden:]
        elif self.kind == "rnn":
            joined, self.bias = _linear(weights, "markov_head.joint_proj", 3 * rank, 2 * rank + hidden)
            self.of_hidden, inner = joined[:, 2 * rank :], joined[:, : 2 * rank]
        else:
            return
        self.inner: Floats = np.ascontiguousarray(inner.numpy())

    def begin(self, hidden: Tensor, candidates: Tensor) -> Walk:
        output = self.output.rows(candidates)
        if self.kind == "vanilla":
            return _table_walk(self.embedding, output)
        from_hidden = _numpy(hidden @ self.of_hidden.t() + self.bias)

        def gated(slot: int, previous: int, state: State) -> tuple[Floats, State]:
            embedded = self.embedding.row(previous)
            gate = _sigmoid(self.inner @ embedded + from_hidden[slot])
            return output[slot] @ (gate * embedded), None

        def recurrent(slot: int, previous: int, state: State) -> tuple[Floats, State]:
            rank = self.rank
            before = np.zeros(rank, np.float32) if state is None else state
            joined = np.concatenate((before, self.embedding.row(previous)))
            mixed = self.inner @ joined + from_hidden[slot]
            keep = _sigmoid(mixed[:rank])
            after = keep * before + (1 - keep) * np.tanh(mixed[rank : 2 * rank])
            return output[slot] @ np.tanh(mixed[2 * rank :]), after

        return gated if self.kind == "gated" else recurrent


def _table_walk(before: TokenRows, after: Floats) -> Walk:
    """Returns a walk that multiplies the previous token's row with the candidates' rows; it needs no state."""
    return lambda slot, previous, state: (after[slot] @ before.row(previous), None)


class CandidateSelector:
    """Scores the step from one token to the next through codebooks that the slot's hidden row weighs."""

    def __init__(self, weights: Weights, config: DFlashConfig) -> None:
        rank, table = config.parts.selector_rank, (config.vocab_size, config.parts.selector_rank)
        self.predecessors = _token_rows(weights, "candidate_selector.predecessor_codebook.weight", table)
        self.successors = _token_rows(weights, "candidate_selector.successor_codebook.weight", table)
        name = "candidate_selector.hidden_projection.weight"
        self.projection = weights.source(name, (rank, config.hidden_size)).dense()

    def begin(self, hidden: Tensor, candidates: Tensor) -> Walk:
        # The successors are weighed here once, so that no node of the walk has to compute this product again.
        weighed = self.successors.rows(candidates) * _numpy(hidden @ self.projection.t())[:, None]
        return _table_walk(self.predecessors, weighed)


class ConfidenceHead:
    """The chance that a slot's proposal is accepted, from its hidden row and perhaps the token before it."""

    def __init__(self, weights: Weights, config: DFlashConfig, markov: MarkovHead | None) -> None:
        self.embedding = markov.embedding if markov is not None and config.parts.confidence_head_with_markov else None
        width = config.hidden_size + (config.parts.markov_rank if self.embedding is not None else 0)
        name = "confidence_head.proj"
        # The matrix has one output, and some writers drop its dimension of size one.
        flat = len(shapes_in(weights.file)(f"{name}.weight") or ()) == 1
        weight = weights.source(f"{name}.weight", (width,) if flat else (1, width)).dense().flatten()
        bias = weights.optional_vector(f"{name}.bias", 1)
        self.bias = 0.0 if bias is None else float(bias)
        self.of_hidden = weight[: config.hidden_size]
        self._of_token: Floats = np.ascontiguousarray(weight[config.hidden_size :].numpy())

    def begin(self, hidden: Tensor) -> Floats:
        """Returns the part of each slot's score that does not depend on the token before it."""
        return _numpy(hidden @ self.of_hidden + self.bias)

    @property
    def of_token(self) -> Floats | None:
        """The weights of the previous token's row; None if the score does not depend on that token."""
        return self._of_token if self.embedding is not None else None

    def chance(self, score: float, previous: int) -> float:
        if self.embedding is not None:
            score = score + float(self._of_token @ self.embedding.row(previous))
        return float(_sigmoid(np.float32(score)))


class HeadPass:
    """The heads over one sequence's block; slot 0 is the first proposal."""

    def __init__(self, heads: DraftHeads, hidden: Tensor, candidates: Tensor | Ids) -> None:
        self.corrector, self.trust = heads.corrector, heads.trust
        self._hidden = hidden
        self._candidates = candidates
        self._scores = self.trust.begin(_on_host(hidden)) if self.trust is not None else None
        self.compiled = CompiledWalk(heads.tables, self._scores) if heads.tables is not None else None

    @cached_property
    def _walk(self) -> Walk | None:
        # The walk is made only when it is needed, because compiled code needs none and making one takes longer than
        # all that compiled code does.
        if self.corrector is None:
            return None
        return self.corrector.begin(_on_host(self._hidden), torch.as_tensor(self._candidates).to("cpu"))

    def correct(self, slot: int, previous: int, state: State) -> tuple[Floats, State]:
        """Returns what to add to the slot's candidates' logits after token `previous`, and the state after the slot."""
        if self._walk is None:
            return np.zeros(self._candidates.shape[-1], np.float32), state
        return self._walk(slot, previous, state)

    def confidence(self, slot: int, previous: int) -> float | None:
        """Returns the chance that the slot's proposal after `previous` is accepted; None without a confidence head."""
        if self.trust is None or self._scores is None:
            return None
        return self.trust.chance(float(self._scores[slot]), previous)


class DraftHeads:
    """All heads of one drafter."""

    def __init__(self, weights: Weights, config: DFlashConfig) -> None:
        parts = config.parts
        markov = MarkovHead(weights, config) if parts.markov_rank else None
        self.corrector: MarkovHead | CandidateSelector | None = markov
        if parts.selector_rank:
            self.corrector = CandidateSelector(weights, config)
        self.trust = ConfidenceHead(weights, config, markov) if parts.enable_confidence_head else None
        self.tables: HeadTables | None = None
        if self.corrector is None or (self.corrector is markov and markov.kind == "vanilla"):
            self.tables = _tables(markov, self.trust)
        self.candidate_limit = parts.selector_top_k or None  # candidates per slot; None: the caller chooses how many
        self.corrects = self.corrector is not None
        self.has_confidence = self.trust is not None

    def begin(self, hidden: Tensor, candidates: Tensor | Ids) -> HeadPass:
        """Prepares one block: hidden rows [slots, H] after the final norm, candidate ids [slots, K]."""
        return HeadPass(self, hidden, candidates)


def _tables(markov: MarkovHead | None, confidence: ConfidenceHead | None) -> HeadTables:
    """Returns the tables that compiled code reads; the heads own their memory, and DraftHeads keeps the heads alive."""
    of_token = confidence.of_token if confidence is not None else None
    trusted = None if of_token is None else of_token.ctypes.data
    if markov is None:
        return HeadTables(0, 0, FLOAT, FLOAT, None, None, trusted)
    (before, before_type), (after, after_type) = markov.embedding.place, markov.output.place
    return HeadTables(markov.vocabulary, markov.rank, before_type, after_type, before, after, trusted)


def _on_host(hidden: Tensor) -> Tensor:
    return hidden.detach().to("cpu", torch.float32)


def _token_rows(weights: Weights, name: str, shape: tuple[int, int]) -> TokenRows:
    source = weights.source(name, shape)
    return weights.part("rows", [source], lambda: TokenRows(source))


def _linear(weights: Weights, name: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    weight = weights.source(f"{name}.weight", (outputs, inputs)).dense()
    bias = weights.optional_vector(f"{name}.bias", outputs)
    return weight, torch.zeros(outputs) if bias is None else bias


def _numpy(values: Tensor) -> Floats:
    found: Floats = values.float().numpy()
    return found


def _sigmoid(x: Floats | np.float32) -> Floats:
    # This form of the sigmoid cannot overflow.
    found: Floats = np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1))
    return found
