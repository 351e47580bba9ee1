"""A drafter's heads as tables on the device, which is possible if every head looks back one token and no further."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.gpu.head_tables import CorrectionGate, HeadWeights, Trust
from slipstream.models.heads import CandidateSelector, ConfidenceHead, DraftHeads, MarkovHead


def device_heads(heads: DraftHeads, device: torch.device) -> HeadWeights | None:
    """The heads on a device; None if one of them remembers the whole path to a token."""
    corrector = heads.corrector
    trust = _trust(heads.trust, device) if heads.trust is not None else None
    if corrector is None:
        return HeadWeights(trust=trust)
    if isinstance(corrector, CandidateSelector):
        before, after = corrector.predecessors.table.to(device), corrector.successors.table.to(device)
        return HeadWeights(before, after, weigh=_floats(corrector.projection, device), trust=trust)
    assert isinstance(corrector, MarkovHead)
    if corrector.kind == "rnn":
        return None
    gate = None
    if corrector.kind == "gated":
        inner = torch.from_numpy(corrector.inner)
        gate = CorrectionGate(*(_floats(part, device) for part in (inner, corrector.of_hidden, corrector.bias)))
    before, after = corrector.embedding.table.to(device), corrector.output.table.to(device)
    return HeadWeights(before, after, gate=gate, trust=trust)


def _trust(head: ConfidenceHead, device: torch.device) -> Trust:
    of_hidden = _floats(head.of_hidden, device)
    if head.embedding is None or head.of_token is None:
        return Trust(of_hidden, head.bias)
    of_before = torch.from_numpy(head.of_token)
    return Trust(of_hidden, head.bias, head.embedding.table.to(device), _floats(of_before, device))


def _floats(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device, torch.float32).contiguous()
