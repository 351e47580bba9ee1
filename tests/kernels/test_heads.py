"""Tables of head scores computed on the device equal those that the host computes from the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from slipstream.kernels.gpu.head_tables import HeadWeights, score_heads, score_heads_reference
from slipstream.kernels.gpu.tree_growth import HeadScores
from slipstream.models.gpu.device_models import device_heads
from slipstream.models.heads import DraftHeads
from tests.models.test_heads import FOLDER_VOCAB, HIDDEN, RANK, confidence_tensors, load_heads, markov_tensors, noise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEQUENCES, SLOTS, ANCHORS = 2, 3, (33, 190)
TEMPERATURES = (0.0, 0.5)
KERNELS = pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
SELECTOR = {
    "candidate_selector.predecessor_codebook": noise(FOLDER_VOCAB, 6, seed=1),
    "candidate_selector.successor_codebook": noise(FOLDER_VOCAB, 6, seed=2),
    "candidate_selector.hidden_projection.weight": noise(6, HIDDEN, seed=3, size=0.3),
}
HALVES = {name: table.half() for name, table in markov_tensors("vanilla").items()}
CASES: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "vanilla": (markov_tensors("vanilla") | confidence_tensors(True), {"markov_rank": RANK}),
    "halves": (HALVES | confidence_tensors(False), {"markov_rank": RANK}),
    "gated": (markov_tensors("gated"), {"markov_rank": RANK, "markov_head_type": "gated"}),
    "selector": (SELECTOR, {"selector_rank": 6, "selector_top_k": 4}),
    "confidence": (confidence_tensors(False), {"enable_confidence_head": True}),
}


def scored(weights: HeadWeights, hidden: Tensor, candidates: Tensor, kernel: bool) -> HeadScores:
    """Slots from the second row of a block on, as they are with a drafter that drops its first."""
    sequences, block, count = candidates.shape
    trusted = torch.zeros(sequences, device=DEVICE)
    out = HeadScores.empty(sequences, block - 1, count, weights.trust is not None, trusted)
    for part in (out.corrections, out.scale, out.confidence):
        if part is not None:
            part.fill_(float("nan"))
    anchors = torch.tensor(ANCHORS, dtype=torch.int32, device=DEVICE)
    temperature = torch.tensor(TEMPERATURES, device=DEVICE)
    call = score_heads if kernel else score_heads_reference
    call(weights, hidden.to(DEVICE)[:, 1:], candidates.to(DEVICE)[:, 1:], anchors, temperature, out)
    return out


def check_against_walks(heads: DraftHeads, out: HeadScores, hidden: Tensor, candidates: Tensor) -> None:
    for sequence, anchor in enumerate(ANCHORS):
        own = candidates[sequence, 1:].long()
        walk = heads.begin(hidden[sequence, 1:], own)
        for slot in range(SLOTS):
            for line, token in enumerate(own[slot - 1].tolist() if slot else [anchor]):
                wanted = torch.from_numpy(walk.correct(slot, token, None)[0])
                got = out.corrections[sequence, slot, line].cpu()
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
                chance = walk.confidence(slot, token)
                assert (chance is None) == (out.confidence is None)
                if chance is not None and out.confidence is not None:
                    assert float(out.confidence[sequence, slot, line]) == pytest.approx(chance, abs=1e-6)


@KERNELS
@pytest.mark.parametrize("name", CASES)
def test_the_tables_are_the_hosts_walk(name: str, kernel: bool, tmp_path: Path) -> None:
    tensors, config = CASES[name]
    heads = load_heads(tmp_path, tensors, **config)
    weights = device_heads(heads, DEVICE)
    assert weights is not None
    count = heads.candidate_limit or 17  # more than the smallest tile, and no whole tile
    hidden = noise(SEQUENCES, SLOTS + 1, HIDDEN, seed=7)
    chosen = torch.rand(SEQUENCES, SLOTS + 1, FOLDER_VOCAB, generator=torch.Generator().manual_seed(8))
    candidates = chosen.topk(count).indices.int()
    out = scored(weights, hidden, candidates, kernel)
    check_against_walks(heads, out, hidden, candidates)
    assert out.scale.tolist() == [1.0, 2.0]
    assert bool(out.corrections.abs().max() > 1) == heads.corrects


def test_a_head_that_remembers_has_no_tables(tmp_path: Path) -> None:
    heads = load_heads(tmp_path, markov_tensors("rnn"), markov_rank=RANK, markov_head_type="rnn")
    assert device_heads(heads, DEVICE) is None
