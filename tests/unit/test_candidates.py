"""What a drafted block offers: probabilities that are those of the whole row, and what heads make of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kernels.cpu.ranking import top_scores
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.tree import grow_chain, grow_tree

VOCAB = 30
HIDDEN = float("-inf")


def random_scores(slots: int, seed: int = 0) -> Tensor:
    return 2.0 * torch.randn(slots, VOCAB, generator=torch.Generator().manual_seed(seed))


def best_of(scores: Tensor, count: int, **settings: float) -> BlockDrafts:
    """The `count` best tokens of every row of scores [slots, vocabulary], as a block offers them."""
    values, ids, total = top_scores(scores, count)
    return BlockDrafts(ids, values - total[:, None], **settings)


class Walk:
    """A head whose corrections are a table by (slot, previous token), and which counts the tokens it came by."""

    def __init__(self, drafts: BlockDrafts, confidence: float | None = None, size: float = 2.0) -> None:
        self.drafts = drafts
        self.trust = confidence
        self.size = size

    def bias(self, previous: int) -> NDArray[np.float32]:
        """Over the vocabulary; the walk hands out the candidates' part."""
        return self.size * np.random.default_rng(previous).standard_normal(VOCAB).astype(np.float32)

    def correct(self, slot: int, previous: int, state: object) -> tuple[NDArray[np.float32], object]:
        assert (state or 0) == slot, "the state of another depth"
        return self.bias(previous)[self.drafts.tokens[slot]], slot + 1

    def confidence(self, slot: int, previous: int) -> float | None:
        return self.trust


def headed(scores: Tensor, count: int, walk_confidence: float | None = None, **settings: float) -> BlockDrafts:
    drafts = best_of(scores, count, **settings)
    drafts.bind(Walk(drafts, walk_confidence))
    return drafts


@pytest.mark.parametrize("count", [1, 5, VOCAB, VOCAB + 9])
def test_candidates_are_the_best_of_the_row_with_their_share_of_the_whole(count: int) -> None:
    scores = random_scores(4)
    drafts = best_of(scores, count)
    assert drafts.slots == 4
    for slot in range(4):
        exact = scores[slot].double().softmax(dim=0)
        best = sorted(range(VOCAB), key=lambda token: -float(exact[token]))[:count]
        branch = drafts.after(slot, 3, None)
        assert list(branch.tokens) == best
        assert list(branch.claims) == pytest.approx([float(exact[token]) for token in best], rel=1e-5)
        rest = math.fsum(float(exact[token]) for token in range(VOCAB) if token not in best)
        assert sum(branch.claims) + rest == pytest.approx(1.0, abs=1e-5)


def test_what_a_filter_hid_is_no_candidate() -> None:
    scores = random_scores(3)
    scores[1, 4:] = HIDDEN
    drafts = best_of(scores, 9)
    assert [len(drafts.after(slot, 0, None).tokens) for slot in range(3)] == [9, 4, 9]
    assert sum(drafts.after(1, 0, None).claims) == pytest.approx(1.0, abs=1e-6)
    drafts.bind(Walk(drafts))
    branch = drafts.after(1, 7, 1)
    assert set(branch.tokens) == {0, 1, 2, 3} and sum(branch.claims) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_a_head_corrects_the_candidates_and_leaves_the_rest_its_share(scale: float) -> None:
    scores = random_scores(3, seed=1)
    drafts = headed(scores, 6, scale=scale)
    walk = Walk(drafts)
    reordered = 0
    for slot in range(3):
        for previous in range(8):
            branch = drafts.after(slot, previous, slot)
            exact = scores[slot].double().softmax(dim=0).tolist()
            bias = walk.bias(previous)
            base = sorted(range(VOCAB), key=lambda token: -exact[token])[:6]
            weights = {token: exact[token] * math.exp(scale * float(bias[token])) for token in base}
            rest = math.fsum(exact[token] for token in range(VOCAB) if token not in base)
            total = math.fsum(weights.values()) + rest
            ranked = sorted(base, key=lambda token: -weights[token])
            assert list(branch.tokens) == ranked
            assert list(branch.claims) == pytest.approx([weights[token] / total for token in ranked], rel=1e-4)
            assert sum(branch.claims) + rest / total == pytest.approx(1.0, abs=1e-5)
            assert branch.memory == slot + 1
            reordered += ranked != base
    assert reordered > 5, "the head did change the order"


def test_every_candidate_with_a_head_sums_to_one() -> None:
    drafts = headed(random_scores(2, seed=2), VOCAB)
    assert sum(drafts.after(0, 5, None).claims) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("size", [200.0, -200.0, 2000.0, -2000.0])
def test_a_strong_correction_neither_overflows_nor_loses_every_candidate(size: float) -> None:
    """A low temperature multiplies corrections: what is added may be hundreds."""
    scores = random_scores(1, seed=3)
    drafts = best_of(scores, 4)

    class Strong(Walk):
        def bias(self, previous: int) -> NDArray[np.float32]:
            return np.full(VOCAB, self.size, np.float32)

    for confidence in (None, 0.5):
        drafts.bind(Strong(drafts, confidence, size))
        branch = drafts.after(0, 1, None)
        assert all(0.0 <= chance <= 1.0 for chance in branch.claims)
        if size > 0:
            assert list(branch.tokens) == scores[0].topk(4).indices.tolist(), "all were lifted alike"
            assert confidence or sum(branch.claims) == pytest.approx(1.0, abs=1e-5), "nothing is left for the rest"
        else:
            assert confidence or sum(branch.claims) < 1e-30, "the rest takes it all"


def test_the_first_candidate_is_as_likely_as_the_confidence_says_and_the_others_share_the_rest() -> None:
    scores = random_scores(2, seed=4)
    free, trusted = headed(scores, VOCAB), headed(scores, VOCAB, 0.9)
    before, after = free.after(0, 3, None), trusted.after(0, 3, None)
    assert list(after.tokens) == list(before.tokens) and after.memory == before.memory
    assert after.claims[0] == 0.9
    assert sum(after.claims) == pytest.approx(1.0, abs=1e-5)
    ratio = (1.0 - 0.9) / (1.0 - before.claims[0])
    assert list(after.claims[1:]) == pytest.approx([chance * ratio for chance in before.claims[1:]], rel=1e-4)


def test_a_confidence_near_zero_leaves_the_order_as_it_is() -> None:
    doubted = headed(random_scores(1, seed=5), VOCAB, 0.01).after(0, 3, None)
    assert doubted.claims[0] == 0.01
    assert list(doubted.claims) == sorted(doubted.claims, reverse=True), "nobody overtakes the first"


def test_a_slot_is_cut_where_the_confidence_is_below_the_threshold() -> None:
    class Fading(Walk):
        def confidence(self, slot: int, previous: int) -> float | None:
            return 0.9 - 0.2 * slot

    drafts = best_of(random_scores(5, seed=6), 4, min_confidence=0.45)
    drafts.bind(Fading(drafts))
    assert [len(drafts.after(slot, 1, slot).tokens) for slot in range(5)] == [4, 4, 4, 0, 0]
    assert grow_chain(drafts, 1, 5).nodes == 3
    assert max(grow_tree(drafts, 1, 40, 5).depths) == 3


def test_without_a_threshold_nothing_is_cut_and_without_a_confidence_head_the_threshold_does_nothing() -> None:
    scores = random_scores(3, seed=7)
    assert grow_chain(headed(scores, 4, 0.0), 1, 3).nodes == 3
    assert grow_chain(headed(scores, 4, None, min_confidence=0.99), 1, 3).nodes == 3


def test_a_chain_follows_the_head_from_its_own_choice_to_the_next() -> None:
    scores = random_scores(4, seed=8)
    drafts = headed(scores, VOCAB)
    walk, expected = Walk(drafts), [11]
    for slot in range(4):
        expected.append(int((scores[slot] + torch.from_numpy(walk.bias(expected[-1]))).argmax()))
    assert grow_chain(drafts, 11, 4).tokens == expected
    assert expected[1:] != scores.argmax(dim=-1).tolist()
