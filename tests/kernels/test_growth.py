"""Trees grown on the device equal those that speculative/tree.py grows from the same candidates."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.tree_growth import Branches, Grown, HeadScores, Wishes, calibration_line, grow
from slipstream.kernels.gpu.tree_growth_reference import grow_reference
from slipstream.kernels.rows import CHAIN, SEEDED_TREE, TREE
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.estimate import DraftOutcome, Estimate, Record
from slipstream.speculative.tree import Growth

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, SCRATCH = 64, 7
VOCABULARY = 1000


@dataclass
class Case:
    """The candidates of some sequences, and what is to be grown from them."""

    tokens: Tensor
    scores: Tensor
    wishes: Wishes
    estimates: list[Estimate | None]
    heads: HeadScores | None = None


class TableWalk:
    """A head for the Python growth that answers from the device's tables; the candidates of a slot are distinct."""

    def __init__(self, case: Case, sequence: int) -> None:
        assert case.heads is not None
        self._corrections = case.heads.corrections[sequence].numpy()
        found = case.heads.confidence
        self._confidence = None if found is None else found[sequence].numpy()
        self._tokens = case.tokens[sequence].tolist()

    def _line(self, slot: int, previous: int) -> int:
        return self._tokens[slot - 1].index(previous) if slot else 0

    def correct(self, slot: int, previous: int, state: object) -> tuple[np.ndarray, object]:
        return self._corrections[slot, self._line(slot, previous)], None

    def confidence(self, slot: int, previous: int) -> float | None:
        return None if self._confidence is None else float(self._confidence[slot, self._line(slot, previous)])


def random_case(seed: int, sequences: int, slots: int, candidates: int, nodes: int, ties: bool = False) -> Case:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((sequences, slots, 200), generator=generator) * 3
    scores = logits.log_softmax(dim=-1).topk(candidates, dim=-1).values
    if ties:  # children of equal nodes are also equal, on the device and on the host
        scores = scores.repeat_interleave(2, dim=-1)[..., :candidates] - 0.7
    tokens = torch.rand((sequences, slots, VOCABULARY), generator=generator).topk(candidates).indices
    wishes = Wishes.empty(sequences, torch.device("cpu"))
    estimates: list[Estimate | None] = []
    for sequence in range(sequences):
        wishes.anchors[sequence] = 17 + sequence
        wishes.nodes[sequence] = int(torch.randint(1, nodes + 1, (), generator=generator))
        wishes.depth[sequence] = int(torch.randint(1, slots + 2, (), generator=generator))
        wishes.shape[sequence] = (CHAIN, TREE, SEEDED_TREE)[(seed + sequence) % 3]
        wishes.floor[sequence] = (0.0, 0.0, 0.01)[(seed // 3) % 3]
        # the last slot has empty places among its candidates, as after a strict filter
        scores[sequence, slots - 1, (seed + sequence) % candidates :] = float("-inf")
        estimate = (None, Estimate(Record()), Estimate(Record(Record())))[(seed + sequence // 2) % 3]
        if estimate is not None:
            for _ in range(60):
                claim, depth, luck = torch.rand(3, generator=generator).tolist()
                estimate.learn([DraftOutcome(claim, 1 + int(depth * slots), luck < claim)])
        estimates.append(estimate)
        wishes.calibration[sequence] = calibration_line(None if estimate is None else estimate.table())
    return Case(tokens.int(), scores, wishes, estimates)


def with_heads(case: Case, seed: int, confident: bool) -> Case:
    generator = torch.Generator().manual_seed(seed + 1000)
    sequences, slots, candidates = case.tokens.shape
    corrections = torch.randn((sequences, slots, candidates, candidates), generator=generator)
    confidence = torch.rand((sequences, slots, candidates), generator=generator) if confident else None
    case.heads = HeadScores(corrections, torch.full((sequences,), 1.25), confidence, torch.full((sequences,), 0.1))
    return case


def expected(case: Case, sequence: int, most: int) -> Growth:
    """Returns what the host grows, and the shape in the form in which the device gets it."""
    wishes, heads = case.wishes, case.heads
    drafts = BlockDrafts(
        case.tokens[sequence].long().numpy(),
        case.scores[sequence].numpy(),
        1.0 if heads is None else float(heads.scale[sequence]),
        0.0 if heads is None else float(heads.least_confidence[sequence]),
    )
    if heads is not None:
        drafts.bind(TableWalk(case, sequence))
    nodes, depth, shape = (int(part[sequence]) for part in (wishes.nodes, wishes.depth, wishes.shape))
    anchor, floor = int(wishes.anchors[sequence]), float(wishes.floor[sequence])
    return drafts.grow_plainly(anchor, shape, min(nodes, most), depth, case.estimates[sequence], floor)


def moved(record: object) -> object:
    """Moves a dataclass of tensors to the device."""
    parts = (getattr(record, field.name) for field in fields(record))  # type: ignore[arg-type]
    return type(record)(*(part.to(DEVICE) if isinstance(part, Tensor) else part for part in parts))


def grown_rows(case: Case, each: int, kernel: bool = True) -> tuple[DeviceRows, Grown]:
    sequences, slots, candidates = case.tokens.shape
    rows = DeviceRows.empty("tree", sequences, each, 9, DEVICE)
    rows.pages.copy_(torch.randperm(9 * sequences).view(sequences, 9) + 1)
    rows.base.copy_(torch.arange(sequences) * 37 + 50)
    grown = Grown.empty(rows)
    branches = Branches.empty(sequences, slots, candidates, case.heads is not None, DEVICE)
    for poisoned in (
        rows.tokens,
        rows.positions,
        rows.places,
        rows.paths,
        grown.parents,
        grown.counts,
        grown.broken,
        branches.counts,
        branches.origins,
    ):
        poisoned.fill_(-99)
    for poisoned in (grown.claims, grown.survivals, branches.claims, branches.worths):
        poisoned.fill_(float("nan"))
    heads = None if case.heads is None else moved(case.heads)
    call = grow if kernel else grow_reference
    call(
        case.tokens.to(DEVICE), case.scores.to(DEVICE), moved(case.wishes), heads, rows, SCRATCH, PAGE, grown, branches
    )  # type: ignore[arg-type]
    return rows, grown


def check_rows(rows: DeviceRows, grown: Grown, sequence: int, growth: Growth) -> None:
    own = slice(sequence * rows.each, (sequence + 1) * rows.each)
    count, base = len(growth.tokens), int(rows.base[sequence])
    unused = rows.each - count
    assert int(grown.counts[sequence]) == count - 1
    assert rows.tokens[own].tolist() == growth.tokens + [growth.tokens[0]] * unused
    assert grown.parents[own].tolist() == growth.parents + [-1] * unused
    assert rows.positions[own].tolist() == [base + depth for depth in growth.depths] + [base] * unused
    pages = rows.pages[sequence].tolist()
    places = [pages[slot // PAGE] * PAGE + slot % PAGE for slot in range(base, base + count)]
    assert rows.places[own].tolist() == places + [SCRATCH] * unused
    np.testing.assert_allclose(grown.claims[own].tolist(), growth.claims + [0.0] * unused, rtol=1e-6)
    np.testing.assert_allclose(grown.survivals[own].tolist(), growth.survivals + [0.0] * unused, rtol=1e-6)
    paths = rows.paths[own].tolist()
    for row in range(rows.each):
        path, at = [], row if row < count else 0
        while at >= 0:
            path.append(at)
            at = growth.parents[at]
        assert paths[row] == path[::-1] + [0] * (len(paths[row]) - len(path))


# the interpreter takes a second for five sequences, so the kernel gets fewer of the same cases
@pytest.mark.parametrize(("seed", "kernel"), [(s, False) for s in range(24)] + [(s, True) for s in range(8)])
def test_trees_and_chains_are_the_hosts(seed: int, kernel: bool) -> None:
    each, slots, candidates = ((16, 9, 5), (4, 3, 8), (32, 6, 4), (64, 5, 16), (16, 1, 4), (32, 7, 1))[seed % 6]
    case = random_case(seed, 6, slots, candidates, each + 2, ties=seed % 2 == 1)
    rows, grown = grown_rows(case, each, kernel)
    assert not grown.broken.any()
    for sequence in range(rows.sequences):
        check_rows(rows, grown, sequence, expected(case, sequence, each - 1))


@pytest.mark.parametrize(("seed", "kernel"), [(s, False) for s in range(8)] + [(s, True) for s in range(2)])
def test_heads_change_what_follows_a_token(seed: int, kernel: bool) -> None:
    case = with_heads(random_case(seed, 3, 4, 4, 15), seed, confident=seed % 2 == 1)
    rows, grown = grown_rows(case, 16, kernel)
    for sequence in range(rows.sequences):
        check_rows(rows, grown, sequence, expected(case, sequence, 15))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
def test_numbers_that_are_none_leave_a_sequence_without_nodes(kernel: bool) -> None:
    case = random_case(3, 3, 4, 4, 15)
    case.wishes.nodes.fill_(8)
    case.wishes.depth.fill_(5)
    case.scores[1, 3, 2] = float("nan")
    rows, grown = grown_rows(case, 16, kernel)
    assert grown.broken.tolist() == [0, 1, 0]
    check_rows(rows, grown, 1, Growth([int(case.wishes.anchors[1])]))
    for sequence in (0, 2):
        check_rows(rows, grown, sequence, expected(case, sequence, 15))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
def test_a_sequence_that_is_not_there_uses_no_row(kernel: bool) -> None:
    case = random_case(4, 2, 3, 4, 7)
    case.wishes.nodes[0] = -1
    rows, grown = grown_rows(case, 8, kernel)
    assert grown.counts[0] == -1 and not grown.broken.any()
    assert rows.places[:8].tolist() == [SCRATCH] * 8 and not rows.paths[:8].any()
    check_rows(rows, grown, 1, expected(case, 1, 7))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
def test_a_head_without_numbers_matters_only_where_it_is_asked(kernel: bool) -> None:
    case = with_heads(random_case(5, 2, 4, 4, 15), 5, confident=False)
    assert case.heads is not None
    case.wishes.nodes.fill_(6)
    case.wishes.depth.fill_(3)
    case.heads.corrections[0, 0, 0, 1] = float("inf")
    case.heads.corrections[1, 0, 1, 1] = float("nan")  # not reachable: slot 0 uses only the anchor's line
    rows, grown = grown_rows(case, 16, kernel)
    assert grown.broken.tolist() == [1, 0]
    check_rows(rows, grown, 0, Growth([int(case.wishes.anchors[0])]))
    check_rows(rows, grown, 1, expected(case, 1, 15))
