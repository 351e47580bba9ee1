"""The heads against their formulas, written out in float64 over the whole vocabulary, token by token."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.models.dflash import load_drafter
from slipstream.models.heads import DraftHeads
from tests.oracles import FOLDER_VOCAB, edit_config, edit_tensors, save_model, tiny_drafter

HIDDEN, RANK, SLOTS = 64, 12, 7
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
Doubles = NDArray[np.float64]


def noise(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def markov_tensors(kind: str, biases: bool = True) -> dict[str, Tensor]:
    tensors = {W1: noise(FOLDER_VOCAB, RANK, seed=1), W2: noise(FOLDER_VOCAB, RANK, seed=2)}
    name, outputs, inputs = {
        "vanilla": ("", 0, 0),
        "gated": ("gate", RANK, HIDDEN + RANK),
        "rnn": ("joint", 3 * RANK, 2 * RANK + HIDDEN),
    }[kind]
    if name:
        tensors[f"markov_head.{name}_proj.weight"] = noise(outputs, inputs, seed=3, size=0.3)
        if biases:
            tensors[f"markov_head.{name}_proj.bias"] = noise(outputs, seed=4)
    return tensors


def confidence_tensors(with_markov: bool, bias: bool = True) -> dict[str, Tensor]:
    width = HIDDEN + (RANK if with_markov else 0)
    tensors = {"confidence_head.proj.weight": noise(1, width, seed=5, size=0.2)}
    return tensors | ({"confidence_head.proj.bias": noise(1, seed=6)} if bias else {})


def load_heads(folder: Path, tensors: dict[str, Tensor], **config: Any) -> DraftHeads:
    save_model(tiny_drafter(), folder)
    edit_config(folder, **config)
    edit_tensors(folder, **tensors)
    heads = load_drafter(folder, "fp32").heads
    assert heads is not None
    return heads


def sigmoid(x: Doubles) -> Doubles:
    return 1 / (1 + np.exp(-x))


@dataclass
class Reference:
    """One step of a Markov head and its confidence, as the formulas say."""

    kind: str
    tensors: dict[str, Tensor]

    def get(self, name: str, size: int = 1) -> Doubles:
        return self.tensors[name].double().numpy() if name in self.tensors else np.zeros(size)

    def step(self, hidden: Doubles, previous: int, memory: Doubles) -> tuple[Doubles, Doubles]:
        embedded = self.get(W1)[previous]
        if self.kind == "gated":
            joined = np.concatenate((hidden, embedded))
            gate = self.get("markov_head.gate_proj.weight") @ joined + self.get("markov_head.gate_proj.bias", RANK)
            embedded = sigmoid(gate) * embedded
        if self.kind == "rnn":
            joined = np.concatenate((memory, embedded, hidden))
            mixed = self.get("markov_head.joint_proj.weight") @ joined
            mixed += self.get("markov_head.joint_proj.bias", 3 * RANK)
            keep, fresh, embedded = sigmoid(mixed[:RANK]), np.tanh(mixed[RANK : 2 * RANK]), np.tanh(mixed[2 * RANK :])
            memory = keep * memory + (1 - keep) * fresh
        return self.get(W2) @ embedded, memory

    def confidence(self, hidden: Doubles, previous: int) -> float:
        weight = self.get("confidence_head.proj.weight")[0]
        read = hidden if len(weight) == HIDDEN else np.concatenate((hidden, self.get(W1)[previous]))
        return float(sigmoid(weight @ read + self.get("confidence_head.proj.bias"))[0])


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("confidence", ["none", "hidden", "with-markov"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_greedy_walk_over_the_whole_vocabulary_matches(
    kind: str, confidence: str, biases: bool, tmp_path: Path
) -> None:
    tensors = markov_tensors(kind, biases)
    if confidence != "none":
        tensors |= confidence_tensors(confidence == "with-markov", biases)
    heads = load_heads(tmp_path, tensors, markov_rank=RANK, markov_head_type=kind)
    reference = Reference(kind, tensors)
    assert (heads.corrects, heads.candidate_limit) == (True, None)
    assert heads.has_confidence == (confidence != "none")
    hidden, logits = noise(SLOTS, HIDDEN, seed=7), noise(SLOTS, FOLDER_VOCAB, seed=8).numpy()
    walk = heads.begin(hidden, torch.arange(FOLDER_VOCAB).expand(SLOTS, -1))
    for anchor in range(5, 15):
        mine = theirs = anchor
        state, memory = None, np.zeros(RANK)
        for slot, row in enumerate(hidden.double().numpy()):
            chance = walk.confidence(slot, mine)
            expected = reference.confidence(row, theirs) if confidence != "none" else None
            assert chance == (pytest.approx(expected, abs=1e-5) if expected is not None else None)
            added, state = walk.correct(slot, mine, state)
            wanted, memory = reference.step(row, theirs, memory)
            assert added.dtype == np.float32
            np.testing.assert_allclose(added, wanted, atol=1e-4)
            mine, theirs = int(np.argmax(logits[slot] + added)), int(np.argmax(logits[slot] + wanted))
            assert mine == theirs


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_walk_may_branch_and_sees_its_candidates_only(kind: str, tmp_path: Path) -> None:
    """Correcting one branch must not disturb another that continues from the same state, in whatever order."""
    heads = load_heads(tmp_path, markov_tensors(kind), markov_rank=RANK)
    hidden, candidates = noise(2, HIDDEN, seed=7), torch.tensor([[9, 3, 200], [4, 4, 258]])
    walk = heads.begin(hidden, candidates)
    whole = heads.begin(hidden, torch.arange(FOLDER_VOCAB).expand(2, -1))
    first, behind = walk.correct(0, 30, None)
    all_first, all_behind = whole.correct(0, 30, None)
    np.testing.assert_allclose(first, all_first[candidates[0].numpy()], atol=1e-5)
    branches = {token: walk.correct(1, token, behind)[0].copy() for token in (9, 3, 200)}
    for token in (200, 9, 3):
        again = whole.correct(1, token, all_behind)[0][candidates[1].numpy()]
        np.testing.assert_allclose(branches[token], again, atol=1e-5)
    assert float(np.abs(branches[9] - branches[3]).max()) > 0.1


def test_a_recurrent_head_remembers_more_than_the_last_token(tmp_path: Path) -> None:
    heads = load_heads(tmp_path, markov_tensors("rnn"), markov_rank=RANK)
    walk = heads.begin(noise(2, HIDDEN, seed=7), torch.arange(FOLDER_VOCAB).expand(2, -1))
    _, one = walk.correct(0, 30, None)
    _, other = walk.correct(0, 31, None)
    assert float(np.abs(walk.correct(1, 8, one)[0] - walk.correct(1, 8, other)[0]).max()) > 0.1


@pytest.mark.parametrize("shape", [(1, HIDDEN), (HIDDEN,)])
def test_a_confidence_head_alone_corrects_nothing(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = confidence_tensors(with_markov=False)
    stored = tensors | {"confidence_head.proj.weight": tensors["confidence_head.proj.weight"].view(shape)}
    heads = load_heads(tmp_path, stored, enable_confidence_head=True)
    assert (heads.corrects, heads.has_confidence) == (False, True)
    hidden = noise(SLOTS, HIDDEN, seed=7)
    walk = heads.begin(hidden, torch.zeros(SLOTS, 5, dtype=torch.long))
    reference = Reference("vanilla", tensors)
    for slot in range(SLOTS):
        added, _ = walk.correct(slot, 40, None)
        assert added.tolist() == [0.0] * 5
        assert walk.confidence(slot, 40) == pytest.approx(
            reference.confidence(hidden[slot].double().numpy(), 40), abs=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tables_are_read_as_they_are_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: table.to(dtype) for name, table in markov_tensors("vanilla").items()}
    walk = load_heads(tmp_path, tensors, markov_rank=RANK).begin(
        noise(1, HIDDEN, seed=7), torch.arange(FOLDER_VOCAB)[None]
    )
    wanted = tensors[W2].double() @ tensors[W1][17].double()
    np.testing.assert_allclose(walk.correct(0, 17, None)[0], wanted.numpy(), atol=1e-5)


def test_a_selector_scores_with_its_codebooks_and_the_hidden_row(tmp_path: Path) -> None:
    before, after, projection = noise(FOLDER_VOCAB, 6, seed=1), noise(FOLDER_VOCAB, 6, seed=2), noise(6, HIDDEN, seed=3)
    prefix = "candidate_selector."
    heads = load_heads(
        tmp_path,
        {
            prefix + "predecessor_codebook": before,
            prefix + "successor_codebook": after,
            prefix + "hidden_projection.weight": projection,
        },
        selector_rank=6,
        selector_top_k=4,
    )
    assert (heads.candidate_limit, heads.corrects, heads.has_confidence) == (4, True, False)
    hidden, candidates = noise(SLOTS, HIDDEN, seed=7), torch.randint(0, FOLDER_VOCAB, (SLOTS, 4))
    walk = heads.begin(hidden, candidates)
    for slot in range(SLOTS):
        wanted = ((before[50] * (projection @ hidden[slot])) * after[candidates[slot]]).sum(dim=-1)
        np.testing.assert_allclose(walk.correct(slot, 50, None)[0], wanted.numpy(), rtol=1e-4, atol=1e-3)
