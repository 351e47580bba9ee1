"""Computes on the device how a drafter's heads score every candidate after every candidate of the slot before.

Only heads that look one token back can be computed like this; a head that depends on the whole path runs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.cpu.ranking import LEAST_TEMPERATURE
from slipstream.kernels.gpu.tree_growth import HeadScores

_RANKS_AT_ONCE = 64  # columns of a head's tables per turn
_HIDDEN_AT_ONCE = 1024  # columns of a hidden row per turn
_LEAST_DOT = 16  # the smallest number of rows that tl.dot supports
_LEAST_HEAT = tl.constexpr(LEAST_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class CorrectionGate:
    """A gate of a head: it multiplies the previous token's row by a sigmoid of that row and of the hidden row."""

    inner: Tensor  # fp32 [rank, rank]
    of_hidden: Tensor  # fp32 [rank, hidden]
    bias: Tensor  # fp32 [rank]


@dataclass(frozen=True, slots=True)
class Trust:
    """A confidence head: sigmoid(of_hidden . hidden + of_before . before[previous] + bias)."""

    of_hidden: Tensor  # fp32 [hidden]
    bias: float
    before: Tensor | None = None  # [vocabulary, rank]; None if the token before does not matter
    of_before: Tensor | None = None  # fp32 [rank]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A drafter's heads on the device; a correction is before[previous] . after[candidate]."""

    before: Tensor | None = None  # [vocabulary, rank] in any float type; None if nothing is corrected
    after: Tensor | None = None
    weigh: Tensor | None = None  # fp32 [rank, hidden]: with it the hidden row weighs the product
    gate: CorrectionGate | None = None
    trust: Trust | None = None


@triton.jit
def _previous(candidates, sequence_stride, slot_stride, anchors, sequence, slot, line, count):  # type: ignore[no-untyped-def]
    """Returns the tokens that may precede a slot: the candidates of the slot before it, or the anchor."""
    at = candidates + sequence.to(tl.int64) * sequence_stride + (slot - 1) * slot_stride
    found = tl.load(at + line, mask=line < tl.where(slot > 0, count, 0), other=0)
    return (found + tl.where(slot > 0, 0, tl.load(anchors + sequence))).to(tl.int64)


@triton.jit
def _correction_kernel(  # type: ignore[no-untyped-def]
    before, after, given, weights, candidates, sequence_stride, slot_stride, anchors, temperature, corrections, scale,
    count, rank, GIVEN: tl.constexpr, WEIGHED: tl.constexpr, LINES: tl.constexpr, RANKS: tl.constexpr,
):
    """Computes the corrections [K (before), K] of one slot; `given` are rows that replace those of the table."""
    sequence, slot = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, LINES)
    there = line < count
    branch = sequence * tl.num_programs(1) + slot
    previous = _previous(candidates, sequence_stride, slot_stride, anchors, sequence, slot, line, count)
    own = candidates + sequence.to(tl.int64) * sequence_stride + slot * slot_stride
    token = tl.load(own + line, mask=there, other=0).to(tl.int64)
    total = tl.zeros((LINES, LINES), tl.float32)
    for start in range(0, rank, RANKS):
        column = start + tl.arange(0, RANKS)
        inside = there[:, None] & (column < rank)[None, :]
        if GIVEN:
            left = tl.load(given + (branch * count + line).to(tl.int64)[:, None] * rank + column[None, :], inside, 0.0)
        else:
            left = tl.load(before + previous[:, None] * rank + column[None, :], inside, 0.0).to(tl.float32)
        if WEIGHED:
            left *= tl.load(weights + branch * rank + column, mask=column < rank, other=0.0)[None, :]
        right = tl.load(after + token[:, None] * rank + column[None, :], inside, 0.0).to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    to = (branch * count + line).to(tl.int64)[:, None] * count + line[None, :]
    tl.store(corrections + to, total, mask=there[:, None] & there[None, :])
    if slot == 0:
        heat = tl.load(temperature + sequence)
        tl.store(scale + sequence, tl.where(heat > 0.0, 1.0 / tl.maximum(heat, _LEAST_HEAT), 1.0))


@triton.jit
def _confidence_kernel(  # type: ignore[no-untyped-def]
    hidden, hidden_stride, row_stride, of_hidden, bias, before, of_before, candidates, sequence_stride, slot_stride,
    anchors, confidence, count, size, rank, BEFORE: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Computes the confidence in one slot's proposal after each token that may precede it."""
    sequence, slot = tl.program_id(0), tl.program_id(1)
    row = hidden + sequence.to(tl.int64) * hidden_stride + slot * row_stride
    parts = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight = tl.load(of_hidden + at, mask=at < size, other=0.0)
        parts += tl.load(row + at, mask=at < size, other=0.0).to(tl.float32) * weight
    line = tl.arange(0, LINES)
    score = tl.zeros((LINES,), tl.float32) + (tl.sum(parts) + bias)
    if BEFORE:
        previous = _previous(candidates, sequence_stride, slot_stride, anchors, sequence, slot, line, count)
        for start in range(0, rank, RANKS):
            column = start + tl.arange(0, RANKS)
            inside = (line < count)[:, None] & (column < rank)[None, :]
            rows = tl.load(before + previous[:, None] * rank + column[None, :], inside, 0.0).to(tl.float32)
            score += tl.sum(rows * tl.load(of_before + column, mask=column < rank, other=0.0)[None, :], axis=1)
    branch = sequence * tl.num_programs(1) + slot
    tl.store(confidence + branch * count + line, 1.0 / (1.0 + tl.exp(-score)), mask=line < count)


def _previous_tokens(candidates: Tensor, anchors: Tensor) -> Tensor:
    """Returns the tokens [sequences, slots, K] that may precede each slot."""
    first = anchors[:, None, None].expand(-1, 1, candidates.shape[2])
    return torch.cat((first, candidates[:, :-1]), dim=1)


def _gated(weights: HeadWeights, gate: CorrectionGate, hidden: Tensor, candidates: Tensor, anchors: Tensor) -> Tensor:
    """Returns the gated rows [sequences, slots, K, rank] of the tokens before."""
    assert weights.before is not None
    rows = weights.before[_previous_tokens(candidates, anchors)].float()
    opened = torch.nn.functional.linear(hidden.float(), gate.of_hidden, gate.bias)
    return rows * torch.sigmoid(rows @ gate.inner.t() + opened[:, :, None])


def score_heads(
    weights: HeadWeights, hidden: Tensor, candidates: Tensor, anchors: Tensor, temperature: Tensor, out: HeadScores
) -> None:
    """Fills `out`, except its least confidence, from hidden rows [sequences, slots, H] and candidates [.., slots, K].

    Heads without a correction give zeros. `temperature` is that of each sequence.
    """
    sequences, slots, count = candidates.shape
    assert candidates.stride(2) == 1 and hidden.stride(2) == 1
    lines = max(_LEAST_DOT, triton.next_power_of_2(count))
    tokens = candidates, candidates.stride(0), candidates.stride(1), anchors
    nothing = hidden
    # without tables the rank is 0, and the kernel stores corrections of 0
    rank = weights.before.shape[1] if weights.before is not None else 0
    given = _gated(weights, weights.gate, hidden, candidates, anchors) if weights.gate is not None else nothing
    weighed = nothing if weights.weigh is None else hidden.float() @ weights.weigh.t()
    _correction_kernel[(sequences, slots)](
        nothing if weights.before is None else weights.before, nothing if weights.after is None else weights.after,
        given, weighed, *tokens, temperature, out.corrections, out.scale, count, rank, weights.gate is not None,
        weights.weigh is not None, lines, _RANKS_AT_ONCE, num_warps=4,
    )
    trust = weights.trust
    if trust is not None and out.confidence is not None:
        before, of_before = trust.before, trust.of_before
        _confidence_kernel[(sequences, slots)](
            hidden, hidden.stride(0), hidden.stride(1), trust.of_hidden, trust.bias,
            nothing if before is None else before, nothing if of_before is None else of_before, *tokens,
            out.confidence, count, hidden.shape[2], 0 if before is None else before.shape[1], before is not None,
            lines, _HIDDEN_AT_ONCE, _RANKS_AT_ONCE, num_warps=4,
        )


def score_heads_reference(
    weights: HeadWeights, hidden: Tensor, candidates: Tensor, anchors: Tensor, temperature: Tensor, out: HeadScores
) -> None:
    """Does what `score_heads` does, in plain torch."""
    previous = _previous_tokens(candidates, anchors)
    if weights.before is None or weights.after is None:
        out.corrections.zero_()
    else:
        left = weights.before[previous].float()
        if weights.gate is not None:
            left = _gated(weights, weights.gate, hidden, candidates, anchors)
        if weights.weigh is not None:
            left = left * (hidden.float() @ weights.weigh.t())[:, :, None]
        out.corrections.copy_(left @ weights.after[candidates].float().transpose(-1, -2))
    out.scale.copy_(torch.where(temperature > 0.0, 1.0 / temperature.clamp_min(LEAST_TEMPERATURE), 1.0))
    trust = weights.trust
    if trust is not None and out.confidence is not None:
        score = (hidden.float() @ trust.of_hidden + trust.bias)[:, :, None].expand_as(out.confidence)
        if trust.before is not None and trust.of_before is not None:
            score = score + trust.before[previous].float() @ trust.of_before
        out.confidence.copy_(torch.sigmoid(score))
