"""Drafts from the text on the device: the longest earlier occurrence, and the nodes that it adds to a tree."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.text_match import match_text, match_text_reference
from slipstream.kernels.gpu.tree_growth import Branches, Grown, TextDraft, Wishes, calibration_line, grow
from slipstream.kernels.gpu.tree_growth_reference import grow_reference
from slipstream.kernels.rows import TREE
from slipstream.speculative.estimate import DraftOutcome, Estimate, Record
from slipstream.speculative.suffix_index import claim_of
from slipstream.types import Source

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
PAGE, SCRATCH, LONGEST, DEPTH = 8, 0, 6, 5


def naive_match(text: list[int]) -> tuple[int, int]:
    """How many tokens match, and where the last of them stands: the longest match, and the last of equal ones."""
    found = (0, 0)
    for end in range(len(text) - 1):
        known = 0
        while known < min(LONGEST, end + 1) and text[end - known] == text[-1 - known]:
            known += 1
        found = max(found, (known, end))
    return found


def stored_texts(texts: list[list[int]]) -> tuple[torch.Tensor, DeviceRows, Wishes]:
    """Texts in pages that lie in any order; the last token of each is the anchor, which is not stored."""
    pages = max(len(text) for text in texts) // PAGE + 2
    rows = DeviceRows.empty("tree", len(texts), 16, pages, DEVICE)
    rows.pages.copy_((torch.randperm(pages * len(texts)) + 1).view(len(texts), pages))
    stored = torch.full(((pages * len(texts) + 1) * PAGE,), 3, dtype=torch.int32, device=DEVICE)
    wishes = Wishes.empty(len(texts), DEVICE)
    wishes.text.fill_(1)
    for sequence, text in enumerate(texts):
        rows.base[sequence], wishes.anchors[sequence] = len(text) - 1, text[-1]
        for position, token in enumerate(text[:-1]):
            stored[int(rows.pages[sequence, position // PAGE]) * PAGE + position % PAGE] = token
    return stored, rows, wishes


def some_texts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(kinds) for _ in range(length)] for kinds, length in ((2, 40), (4, 33), (30, 25), (3, 1))]


@KERNELS
@pytest.mark.parametrize("seed", range(4))
def test_the_longest_match_goes_on_as_it_did_before(seed: int, kernel: bool) -> None:
    texts = [*some_texts(seed), [5, 6, 7, 5, 6, 7, 5]]
    stored, rows, wishes = stored_texts(texts)
    estimate = Estimate(Record())
    estimate.learn([DraftOutcome(0.8, 1, False, Source.TEXT)] * 9 + [DraftOutcome(0.8, 1, True)] * 9)
    wishes.calibration[0] = calibration_line(estimate.table())
    draft = TextDraft.empty(len(texts), DEPTH, DEVICE)
    (match_text if kernel else match_text_reference)(stored, rows, wishes, PAGE, LONGEST, draft)
    for sequence, text in enumerate(texts):
        known, end = naive_match(text)
        assert int(draft.counts[sequence]) == (DEPTH if known else 0)
        if not known:
            continue
        period = len(text) - 1 - end
        assert draft.tokens[sequence].tolist() == [text[end + 1 + step % period] for step in range(DEPTH)]
        claims = [claim_of(1.0, known + step) for step in range(DEPTH)]
        assert draft.claims[sequence].tolist() == claims
        worths = [estimate.chance(claim, step, Source.TEXT) for step, claim in enumerate(claims, start=1)]
        assert draft.worths[sequence].tolist() == pytest.approx(worths if sequence == 0 else claims)


@KERNELS
def test_a_sequence_that_does_not_wish_for_text_gets_none(kernel: bool) -> None:
    stored, rows, wishes = stored_texts([[1, 2, 1, 2, 1], [1, 2, 1, 2, 1]])
    wishes.text[0] = 0
    draft = TextDraft.empty(2, DEPTH, DEVICE)
    (match_text if kernel else match_text_reference)(stored, rows, wishes, PAGE, LONGEST, draft)
    assert draft.counts.tolist() == [0, DEPTH]


def grown_with(
    nodes: int, survivals: list[float], text: list[tuple[int, float]], kernel: bool, each: int = 8
) -> tuple[list[int], list[int], int]:
    """Tokens, parents and text nodes of a tree whose drafter offers the tokens 10, 11, ... one after the other."""
    slots = len(survivals)
    tokens = torch.arange(10, 10 + slots, dtype=torch.int32, device=DEVICE).view(1, slots, 1)
    scores = torch.tensor(survivals, device=DEVICE).log().view(1, slots, 1)
    wishes = Wishes.empty(1, DEVICE)
    for part, value in ((wishes.anchors, 1), (wishes.nodes, nodes), (wishes.depth, slots), (wishes.shape, TREE)):
        part.fill_(value)
    draft = TextDraft.empty(1, len(text), DEVICE)
    draft.tokens[0] = torch.tensor([token for token, _ in text])
    draft.claims[0] = draft.worths[0] = torch.tensor([worth for _, worth in text], dtype=torch.float64)
    draft.counts.fill_(len(text))
    rows = DeviceRows.empty("tree", 1, each, 4, DEVICE)
    rows.base.fill_(3)
    grown, branches = Grown.empty(rows), Branches.empty(1, slots, 1, False, DEVICE)
    call = grow if kernel else grow_reference
    call(tokens, scores, wishes, None, rows, SCRATCH, PAGE, grown, branches, draft)
    count = int(grown.counts[0]) + 1
    depths = [int(position) - 3 for position in rows.positions[:count]]
    parents: list[int] = grown.parents[:count].tolist()
    assert all(depths[row] == depths[parents[row]] + 1 for row in range(1, count))
    return rows.tokens[:count].tolist(), parents, int(grown.texts[0])


@KERNELS
def test_free_rows_take_what_the_text_offers(kernel: bool) -> None:
    tokens, parents, texts = grown_with(6, [0.9, 0.5], [(30, 0.1), (31, 0.1)], kernel)
    assert (tokens, parents, texts) == ([1, 10, 11, 30, 31], [-1, 0, 1, 0, 3], 2)


@KERNELS
def test_a_text_goes_on_where_the_drafter_agrees_with_it(kernel: bool) -> None:
    tokens, parents, texts = grown_with(6, [0.9, 0.5], [(10, 0.5), (31, 0.5), (32, 0.5)], kernel)
    assert (tokens, parents, texts) == ([1, 10, 11, 31, 32], [-1, 0, 1, 1, 3], 2)


@KERNELS
def test_a_likelier_token_of_the_text_takes_the_last_nodes_row(kernel: bool) -> None:
    survivals = [0.9, 0.5, 0.5, 0.5]  # 0.9, 0.45, 0.225 and 0.1125 after the tokens before
    tokens, parents, texts = grown_with(4, survivals, [(30, 0.3), (31, 0.9), (32, 0.1)], kernel)
    assert (tokens, parents, texts) == ([1, 10, 11, 30, 31], [-1, 0, 1, 0, 3], 2)
    tokens, parents, texts = grown_with(4, survivals, [(30, 0.1)], kernel)
    assert (tokens, parents, texts) == ([1, 10, 11, 12, 13], [-1, 0, 1, 2, 3], 0)


@KERNELS
def test_a_text_takes_no_row_of_the_nodes_that_it_stands_behind(kernel: bool) -> None:
    text = [(10, 1.0), (11, 1.0), (12, 1.0), (40, 0.99), (41, 0.99)]
    assert grown_with(3, [0.5, 0.5, 0.5], text, kernel) == ([1, 10, 11, 12], [-1, 0, 1, 2], 0)


@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_grows_what_the_reference_grows(seed: int) -> None:
    chance = random.Random(seed)
    survivals = [chance.uniform(0.2, 1.0) for _ in range(chance.randrange(1, 6))]
    agreed = chance.randrange(len(survivals) + 1)
    text = [(10 + step if step < agreed else 30 + step, chance.random()) for step in range(6)]
    nodes = chance.randrange(1, 8)
    assert grown_with(nodes, survivals, text, True) == grown_with(nodes, survivals, text, False)
