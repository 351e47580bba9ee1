"""The compiled growth of chains and trees against the one in Python, on random blocks, heads and estimates."""

# mypy: disable-error-code="arg-type, list-item, unused-ignore"

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.native_growth import BRAIN, FLOAT, HALF, CompiledWalk, Grower, HeadTables
from slipstream.kernels.rows import CHAIN, SEEDED_TREE, TREE
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.estimate import DraftOutcome, Estimate, Record
from slipstream.speculative.tree import Growth
from tests.native import libraries

SHAPES = (CHAIN, TREE, SEEDED_TREE)
VOCAB = 300
Floats = NDArray[np.float32]
TYPES = {FLOAT: torch.float32, HALF: torch.float16, BRAIN: torch.bfloat16}


@pytest.fixture(params=libraries() or [None], ids=lambda each: each.isa if each else "none")
def grower(request: pytest.FixtureRequest) -> Grower:
    if request.param is None:
        pytest.skip("no compiled kernels")
    return Grower(request.param)


@dataclass
class Head:
    """A vanilla Markov head with, if `trusting`, a confidence head; walked in Python and readable by compiled code."""

    before: torch.Tensor
    after: torch.Tensor
    kind: int
    confidence_of: Floats | None = None  # per slot
    trusted: Floats | None = None

    def tables(self) -> HeadTables:
        vocab, rank = self.before.shape
        trusted = None if self.trusted is None else self.trusted.ctypes.data
        return HeadTables(vocab, rank, self.kind, self.kind, self.before.data_ptr(), self.after.data_ptr(), trusted)

    def walk(self, drafts: BlockDrafts) -> Walk:
        return Walk(self, drafts)


@dataclass
class Walk:
    head: Head
    drafts: BlockDrafts

    def correct(self, slot: int, previous: int, state: None) -> tuple[Floats, None]:
        rows = self.head.after[torch.from_numpy(self.drafts.tokens[slot])].float().numpy()
        with np.errstate(invalid="ignore"):
            return rows @ self.head.before[previous].float().numpy(), None

    def confidence(self, slot: int, previous: int) -> float | None:
        if self.head.confidence_of is None:
            return None
        score = float(self.head.confidence_of[slot])
        if self.head.trusted is not None:
            score += float(self.head.trusted @ self.head.before[previous].float().numpy())
        return float(0.5 * (np.tanh(np.float32(0.5) * np.float32(score)) + 1.0))


def random_head(source: random.Random, slots: int, trusting: bool | None = None) -> Head:
    rank, kind = source.choice([1, 7, 16, 33, 256]), source.choice([FLOAT, HALF, BRAIN])
    numbers = torch.Generator().manual_seed(source.randrange(1 << 30))
    before, after = ((torch.randn(VOCAB, rank, generator=numbers) / rank**0.25).to(TYPES[kind]) for _ in range(2))
    trusting = source.random() < 0.4 if trusting is None else trusting
    if not trusting:
        return Head(before, after, kind)
    trusted = (0.3 * torch.randn(rank, generator=numbers)).numpy() if source.random() < 0.5 else None
    doubt = source.choice([1.0, -3.0])  # with low confidence the first candidate caps the others
    return Head(before, after, kind, torch.randn(slots, generator=numbers).numpy() + np.float32(doubt), trusted)


def random_block(source: random.Random, slots: int, hidden: bool = False) -> tuple[NDArray[np.int64], Floats]:
    """Returns candidates and log-probabilities; `hidden` of them are those that a filter removed."""
    count = source.choice([1, 3, 16, 64])
    numbers = np.random.default_rng(source.randrange(1 << 30))
    scores = source.choice([1.0, 4.0]) * numbers.standard_normal((slots, VOCAB))
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    tokens = np.argsort(-scores, axis=1)[:, :count]
    kept = np.take_along_axis(scores, tokens, axis=1).astype(np.float32)
    if hidden:
        kept[source.randrange(slots), source.randrange(count) :] = -np.inf
    return tokens, kept


def random_estimate(source: random.Random) -> Estimate | None:
    if source.random() < 0.2:
        return None
    estimate = Estimate(Record(Record()) if source.random() < 0.8 else Record())
    for _ in range(source.choice([0, 1, 10, 300])):
        claimed = source.random() ** source.choice([0.2, 1, 3])
        estimate.learn([DraftOutcome(claimed, source.randint(1, 15), source.random() < claimed * 0.8)])
    return estimate


def bound(block: tuple[NDArray[np.int64], Floats], head: Head | None, **settings: float) -> BlockDrafts:
    drafts = BlockDrafts(*block, **settings)
    if head is not None:
        drafts.bind(head.walk(drafts), CompiledWalk(head.tables(), head.confidence_of))
    return drafts


def natively(grower: Grower, drafts: BlockDrafts, estimate: Estimate | None, **asked: float) -> Growth:
    table = estimate.table() if estimate is not None else None
    grown, drafts.broken = grower.grow(drafts.block(), table, **asked)  # type: ignore[arg-type]
    return Growth(*grown.lists())


def assert_alike(compiled_growth: Growth, plain_growth: Growth) -> None:
    """Asserts that two growths are equal; of two nodes whose survivals differ by rounding, either may come first."""
    close = [
        row
        for row in range(2, len(plain_growth.tokens))
        if plain_growth.survivals[row - 1] - plain_growth.survivals[row] < 1e-5 * plain_growth.survivals[row - 1]
    ]
    rows = close[0] - 1 if close else len(plain_growth.tokens)
    assert len(compiled_growth.tokens) == len(plain_growth.tokens)
    assert compiled_growth.tokens[:rows] == plain_growth.tokens[:rows]
    assert compiled_growth.parents[:rows] == plain_growth.parents[:rows]
    assert compiled_growth.depths[:rows] == plain_growth.depths[:rows]
    np.testing.assert_allclose(compiled_growth.claims[:rows], plain_growth.claims[:rows], rtol=2e-5)
    np.testing.assert_allclose(compiled_growth.survivals, plain_growth.survivals, rtol=2e-4)


@pytest.mark.parametrize("seed", range(150))
def test_the_compiled_growth_is_the_plain_one(grower: Grower, seed: int) -> None:
    source = random.Random(seed)
    slots = source.randint(1, 15)
    head = random_head(source, slots) if source.random() < 0.8 else None
    settings = {"scale": source.choice([1.0, 0.5, 3.0]), "min_confidence": source.choice([0.0, 0.4])}
    block, estimate = random_block(source, slots, hidden=source.random() < 0.3), random_estimate(source)
    asked = {
        "anchor": source.randrange(VOCAB),
        "shape": source.choice(SHAPES),
        "nodes": source.choice([0, 1, 8, 63, 255]),
        "depth": source.randint(0, 16),
        "floor": source.choice([0.0, 0.0, 1e-3, 0.05]),
    }
    plain = bound(block, head, **settings)
    expected = plain.grow_plainly(estimate=estimate, **asked)  # type: ignore[arg-type]
    compiled = bound(block, head, **settings)
    assert_alike(natively(grower, compiled, estimate, **asked), expected)
    assert compiled.broken == plain.broken


def test_the_random_cases_hold_what_they_should() -> None:
    """The cases include branching trees, chains cut by a threshold and full trees, so that the comparison is real."""
    branching = cut = full = 0
    for seed in range(40):
        source = random.Random(seed)
        drafts = bound(random_block(source, 12), random_head(source, 12), min_confidence=0.4)
        chain, tree = drafts.grow_plainly(3, CHAIN, 12, 12), drafts.grow_plainly(3, TREE, 63, 12)
        branching += tree.proposal().branching
        cut += chain.nodes < 12
        full += tree.nodes == 63
    assert branching > 10 and cut > 3 and full > 10


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_without_a_head_the_two_agree_to_the_last_digits(grower: Grower, calibrated: bool, shape: int) -> None:
    source = random.Random(7)
    estimate = Estimate(Record(Record())) if calibrated else None
    if estimate is not None:
        estimate.learn([DraftOutcome(source.random(), source.randint(1, 12), source.random() < 0.6) for _ in range(40)])
    drafts = bound(random_block(source, 15), None)
    asked = {"anchor": 1, "shape": shape, "nodes": 200, "depth": 15, "floor": 0.0}
    expected = drafts.grow_plainly(estimate=estimate, **asked)  # type: ignore[arg-type]
    compiled_growth = natively(grower, drafts, estimate, **asked)
    np.testing.assert_allclose(compiled_growth.survivals, expected.survivals, rtol=1e-12)
    np.testing.assert_allclose(compiled_growth.claims, expected.claims, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_keep_their_order(grower: Grower, shape: int) -> None:
    tokens = np.arange(40, dtype=np.int64).reshape(4, 10)
    drafts = bound((tokens, np.full((4, 10), np.log(0.1), np.float32)), None)
    asked = {"anchor": 1, "shape": shape, "nodes": 60, "depth": 4, "floor": 0.0}
    expected = drafts.grow_plainly(**asked)  # type: ignore[arg-type]
    compiled_growth = natively(grower, drafts, None, **asked)
    assert (compiled_growth.tokens, compiled_growth.parents) == (expected.tokens, expected.parents)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [200.0, -200.0, 2000.0, -2000.0])
def test_a_strong_correction_neither_overflows_nor_loses_every_candidate(
    grower: Grower, size: float, shape: int
) -> None:
    source = random.Random(3)
    block = random_block(source, 1)
    head = Head(torch.ones(VOCAB, 1), torch.full((VOCAB, 1), size), FLOAT)
    asked = {"anchor": 1, "shape": shape, "nodes": 20, "depth": 1, "floor": 0.0}
    compiled_growth = natively(grower, bound(block, head), None, **asked)
    assert all(0.0 <= chance <= 1.0 for chance in compiled_growth.claims)
    assert (compiled_growth.nodes > 0) == (size > -2000)


def test_nobody_overtakes_a_first_candidate_that_is_doubted(grower: Grower) -> None:
    source = random.Random(5)
    block, head = random_block(source, 1), random_head(source, 1, trusting=True)
    assert head.confidence_of is not None and block[0].shape[1] > 2
    head.confidence_of[0], head.trusted = -4.0, None
    asked = {"anchor": 1, "shape": TREE, "nodes": 60, "depth": 1, "floor": 0.0}
    drafts = bound(block, head)
    tree, expected = natively(grower, drafts, None, **asked), drafts.grow_plainly(**asked)  # type: ignore[arg-type]
    assert tree.claims[1] == pytest.approx(1 / (1 + np.exp(4.0)))
    assert tree.claims[2] == tree.claims[1], "the second would be likelier"
    assert tree.tokens == expected.tokens
    np.testing.assert_allclose(tree.claims, expected.claims, rtol=2e-5)


def spoil_before(head: Head) -> None:
    head.before[5] = float("nan")


def spoil_after(head: Head) -> None:
    head.after[:] = float("inf")


def spoil_confidence(head: Head) -> None:
    assert head.confidence_of is not None
    head.confidence_of[0] = np.nan


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spoil", [spoil_before, spoil_after, spoil_confidence])
def test_numbers_that_are_none_offer_nothing_and_are_told(
    grower: Grower, spoil: Callable[[Head], None], shape: int
) -> None:
    source = random.Random(11)
    block, head = random_block(source, 6), random_head(source, 6, trusting=True)
    spoil(head)
    asked = {"anchor": 5, "shape": shape, "nodes": 30, "depth": 6, "floor": 0.0}
    drafts, plain = bound(block, head), bound(block, head)
    assert natively(grower, drafts, None, **asked).nodes == 0
    plain.grow_plainly(**asked)  # type: ignore[arg-type]
    assert drafts.broken and plain.broken


@pytest.mark.parametrize("anchor", [-1, VOCAB, 1 << 30])
def test_a_token_that_the_tables_do_not_hold_is_refused(grower: Grower, anchor: int) -> None:
    source = random.Random(12)
    drafts = bound(random_block(source, 3), random_head(source, 3, trusting=False))
    with pytest.raises(IntegrityError, match="not in the table"):
        natively(grower, drafts, None, anchor=anchor, shape=CHAIN, nodes=3, depth=3, floor=0.0)
    drafts.tokens[0, 0] = anchor
    with pytest.raises(IntegrityError, match="not in the table"):
        natively(grower, drafts, None, anchor=1, shape=CHAIN, nodes=3, depth=3, floor=0.0)


def test_the_block_grows_natively_where_it_can(grower: Grower, monkeypatch: pytest.MonkeyPatch) -> None:
    """BlockDrafts.grow uses compiled code for tables that it can read, and Python for any other head."""
    monkeypatch.setattr("slipstream.speculative.candidates.grower", lambda: grower)
    source = random.Random(13)
    block, head = random_block(source, 5), random_head(source, 5, trusting=False)
    calls: list[int] = []
    monkeypatch.setattr(
        Walk,
        "correct",
        lambda self, slot, previous, state, old=Walk.correct: (calls.append(slot), old(self, slot, previous, state))[1],
    )
    drafts = bound(block, head)
    native = drafts.grow(1, TREE, 20, 5)
    assert not calls
    drafts.bind(head.walk(drafts))
    plain = drafts.grow(1, TREE, 20, 5)
    assert calls
    assert_alike(native, plain)
