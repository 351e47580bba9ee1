"""Chains and trees of drafted candidates, grown on the device into the rows of the verify step.

There are two launches: one ranks and calibrates what may follow each token of each slot, the other adds nodes best
first. Every row of a tree has at most one open candidate, its next child, so the open candidates are a vector, and the
next node is its maximum. Nodes come in the same order as in speculative/tree.py: claims are doubles, and among equals
the candidate that was offered first wins. Where a sequence's own text offers a continuation, its tokens then take free
rows and those of less likely nodes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.cpu.native_growth import CalibrationTable
from slipstream.kernels.gpu.device_rows import MAX_DEPTH, DeviceRows

MOST_ROWS = 64  # rows of a tree, and candidates of a slot; open candidates are packed with six bits for each

# A calibration is one line of doubles: whether there is one, its bounds, its number of depths, and from these indices
# on its edges and factors: first those of the drafter's tokens, then those of tokens from the text.
_CLAIMS, _DEPTHS, _FACTORS = 4, 20, 28
_MOST_CLAIMS, _MOST_DEPTHS, _MOST_BINS = 16, 8, 48
_CLAIMS_AT, _DEPTHS_AT = tl.constexpr(_CLAIMS), tl.constexpr(_DEPTHS)
DRAFTER_FACTORS, TEXT_FACTORS = tl.constexpr(_FACTORS), tl.constexpr(_FACTORS + _MOST_BINS)
CALIBRATION_WORDS = 128
_WORDS = tl.constexpr(CALIBRATION_WORDS)
_TAKEN_AS_THEY_ARE = bytes(8)  # the beginning of a line that leaves claims as they are

# They stand for a branch's number of candidates if its scores have NaN or +Inf, or if its head gave NaN or Inf.
_NOT_NUMBERS, _LOST_HEAD = -2, -1
_NO_NUMBERS, _HEAD_LOST = tl.constexpr(_NOT_NUMBERS), tl.constexpr(_LOST_HEAD)
_LAST = tl.constexpr(2**63 - 1)
_DEEP = tl.constexpr(MAX_DEPTH)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What each sequence wants grown; all tensors are [sequences]."""

    anchors: Tensor  # int32
    nodes: Tensor  # int32: the most nodes after the anchor; -1 marks a padding sequence, which uses no rows
    depth: Tensor  # int32: the largest depth of a drafter's node; those of the text may be deeper
    shape: Tensor  # int32: CHAIN, TREE or SEEDED_TREE
    text: Tensor  # int32: 1 if the sequence's own text may add nodes to its tree
    floor: Tensor  # fp32: nodes that are less likely to survive are not added to a tree
    calibration: Tensor  # fp64 [sequences, CALIBRATION_WORDS], see `calibration_line`

    @classmethod
    def empty(cls, sequences: int, device: torch.device) -> Wishes:
        """Makes wishes without nodes, whose claims are taken as they are."""
        def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((sequences, *shape), dtype=dtype, device=device)

        whole = torch.int32
        return cls(numbers(whole), numbers(whole), numbers(whole), numbers(whole), numbers(whole),
                   numbers(torch.float32), numbers(torch.float64, CALIBRATION_WORDS))


@dataclass(frozen=True, slots=True)
class TextDraft:
    """How each sequence's own text went on after an earlier occurrence of its last tokens."""

    tokens: Tensor  # int32 [sequences, depth]
    claims: Tensor  # fp64 [sequences, depth]: the claimed probability of each token given the one before it
    worths: Tensor  # fp64: the calibrated claims
    counts: Tensor  # int32 [sequences]: how many tokens are offered; 0 if the last token is new to the text

    @classmethod
    def empty(cls, sequences: int, depth: int, device: torch.device) -> TextDraft:
        def numbers(dtype: torch.dtype) -> Tensor:
            return torch.zeros((sequences, depth), dtype=dtype, device=device)

        counts = torch.zeros(sequences, dtype=torch.int32, device=device)
        return cls(numbers(torch.int32), numbers(torch.float64), numbers(torch.float64), counts)


@dataclass(frozen=True, slots=True)
class HeadScores:
    """The heads' scores of each candidate after each candidate of the slot before; in slot 0 only line 0 is used."""

    corrections: Tensor  # fp32 [sequences, slots, K (before), K]
    scale: Tensor  # fp32 [sequences]: the factor from a correction to a score
    confidence: Tensor | None  # fp32 [sequences, slots, K (before)]: probability that the first candidate is right
    least_confidence: Tensor  # fp32 [sequences]: below this confidence no candidate is offered

    @classmethod
    def empty(
        cls, sequences: int, slots: int, candidates: int, confident: bool, least_confidence: Tensor
    ) -> HeadScores:
        """Makes room for the heads' scores; the caller provides the least confidence."""
        def floats(*shape: int) -> Tensor:
            return torch.zeros((sequences, *shape), dtype=torch.float32, device=least_confidence.device)

        confidence = floats(slots, candidates) if confident else None
        return cls(floats(slots, candidates, candidates), floats(), confidence, least_confidence)


@dataclass(frozen=True, slots=True)
class Grown:
    """What is known of the grown nodes beyond their rows; row r belongs to sequence r // each."""

    parents: Tensor  # int32 [rows]; -1 for the anchor and for unused rows
    claims: Tensor  # fp32 [rows]: the probability that each token's source claims for it, given its parent
    survivals: Tensor  # fp32 [rows]: the calibrated probability that a node is kept; 1 for the anchor
    counts: Tensor  # int32 [sequences]: nodes after the anchor; -1 marks a padding sequence
    broken: Tensor  # int32 [sequences]: 1 if the drafter's numbers are not finite; such a sequence has no nodes
    texts: Tensor  # int32 [sequences]: how many nodes, the last ones, come from the text and not from the drafter

    @classmethod
    def empty(cls, rows: DeviceRows) -> Grown:
        def whole(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=rows.tokens.device)

        def real(count: int) -> Tensor:
            return torch.zeros(count, device=rows.tokens.device)

        count, sequences = rows.rows, rows.sequences
        return cls(whole(count), real(count), real(count), whole(sequences), whole(sequences), whole(sequences))


@dataclass(frozen=True, slots=True)
class Branches:
    """The candidates after each token before them, likeliest first; without heads they are the same for all tokens."""

    claims: Tensor  # fp64 [sequences, slots, before, K]
    worths: Tensor  # fp64: the calibrated claims
    origins: Tensor  # int32: the index of each among the slot's candidates
    counts: Tensor  # int32 [sequences, slots, before]

    @classmethod
    def empty(cls, sequences: int, slots: int, candidates: int, heads: bool, device: torch.device) -> Branches:
        shape = (sequences, slots, candidates if heads else 1)

        def numbers(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros((*shape, *more), dtype=dtype, device=device)

        real, whole = torch.float64, torch.int32
        return cls(numbers(real, candidates), numbers(real, candidates), numbers(whole, candidates), numbers(whole))


def calibration_line(table: CalibrationTable | None) -> Tensor:
    """Returns a calibration on the host in the form that the kernels read; None takes claims as they are."""
    line = torch.zeros(CALIBRATION_WORDS, dtype=torch.float64)
    write_calibration(line.data_ptr(), table)
    return line


def write_calibration(start: int, table: CalibrationTable | None) -> None:
    """Writes a `calibration_line` to an address; it copies memory directly, because every drafting step calls it."""
    if table is None:
        ctypes.memmove(start, _TAKEN_AS_THEY_ARE, 8)
        return
    claims, depths = table.claims, table.depths
    bins = (claims + 1) * (depths + 1)
    assert claims <= _MOST_CLAIMS and depths <= _MOST_DEPTHS and bins <= _MOST_BINS
    move = ctypes.memmove
    move(start, _line_head(1, table.least, table.most, depths), 8 * _FACTORS)
    move(start + 8 * _CLAIMS, table.claim_edges, 8 * claims)
    move(start + 8 * _DEPTHS, table.depth_edges, 8 * depths)
    move(start + 8 * _FACTORS, table.factors, 8 * bins)
    move(start + 8 * (_FACTORS + _MOST_BINS), table.factors + 8 * bins, 8 * bins)


@cache
def _line_head(*numbers: float) -> bytes:
    """Returns the first numbers of a line, with edges that no claim or depth reaches."""
    head = np.full(_FACTORS, np.inf)
    head[:_CLAIMS] = 0.0
    head[: len(numbers)] = numbers
    return head.tobytes()


@triton.jit
def calibrated(line, claimed, depth, factors):  # type: ignore[no-untyped-def]
    """Returns what claims are worth at their depths (two vectors); see Estimate.chance of speculative/estimate.py."""
    worth = claimed
    if tl.load(line) > 0.0:
        least, most, depths = tl.load(line + 1), tl.load(line + 2), tl.load(line + 3).to(tl.int32)
        edges = tl.load(line + _CLAIMS_AT + tl.arange(0, 16))
        levels = tl.load(line + _DEPTHS_AT + tl.arange(0, 8))
        claim = tl.sum((edges[None, :] <= claimed[:, None]).to(tl.int32), axis=1)
        place = claim * (depths + 1) + tl.sum((levels[None, :] <= depth.to(tl.float64)[:, None]).to(tl.int32), axis=1)
        worth = tl.minimum(most, tl.maximum(least, claimed * tl.load(line + factors + place)))
    return worth


@triton.jit
def _infinite(values):  # type: ignore[no-untyped-def]
    return tl.max(((values != values) | (tl.abs(values) == float("inf"))).to(tl.int32)) > 0


@triton.jit
def _branch_kernel(  # type: ignore[no-untyped-def]
    scores, sequence_stride, slot_stride, corrections, scale, confidence, least_confidence, calibration,
    claims, worths, origins, counts, candidates, HEADS: tl.constexpr, CONFIDENT: tl.constexpr, WIDTH: tl.constexpr,
):
    """Ranks one slot's candidates after one token.

    The first candidate gets the confidence, the others share the rest.
    """
    sequence, slot, before = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    branch = (sequence * tl.num_programs(1) + slot) * tl.num_programs(2) + before
    place = tl.arange(0, WIDTH)
    there = place < candidates
    line = scores + sequence.to(tl.int64) * sequence_stride + slot * slot_stride
    score = tl.load(line + place, mask=there, other=float("-inf")).to(tl.float64)
    unknown = tl.max(((score != score) | (score == float("inf"))).to(tl.int32)) > 0
    chance = tl.exp(score)
    lost, silent = False, False
    if HEADS:
        correction = tl.load(corrections + branch.to(tl.int64) * candidates + place, mask=there, other=0.0)
        lost = _infinite(correction)
        rest = tl.maximum(0.0, 1.0 - tl.sum(chance))
        corrected = score + tl.load(scale + sequence).to(tl.float64) * correction.to(tl.float64)
        # keeps exp in its range, since a low temperature scales corrections up
        shift = tl.maximum(0.0, tl.max(corrected))
        weights = tl.exp(corrected - shift)
        chance = weights / (tl.sum(weights) + rest * tl.exp(-shift))
    earlier = (chance[None, :] == chance[:, None]) & (place[None, :] < place[:, None])
    rank = tl.sum(((chance[None, :] > chance[:, None]) | earlier).to(tl.int32), axis=1)
    possible = chance > 0.0
    if CONFIDENT:
        trusted = tl.load(confidence + branch)
        silent = trusted < tl.load(least_confidence + sequence)
        lost = lost | (trusted != trusted) | (tl.abs(trusted) == float("inf"))
        sure = trusted.to(tl.float64)
        left = 1.0 - tl.max(chance)
        share = tl.where(left > 0.0, (1.0 - sure) / left, 0.0)
        chance = tl.where(rank == 0, sure, tl.minimum(sure, chance * share))
    to = branch.to(tl.int64) * candidates + rank
    tl.store(claims + to, chance, mask=possible)
    depth = tl.full(place.shape, 1, tl.int32) + slot
    tl.store(worths + to, calibrated(calibration + sequence * _WORDS, chance, depth, DRAFTER_FACTORS), mask=possible)
    tl.store(origins + to, place, mask=possible)
    count = tl.sum(possible.to(tl.int32))
    count = tl.where(silent, 0, tl.where(lost, _HEAD_LOST, count))
    tl.store(counts + branch, tl.where(unknown, _NO_NUMBERS, count))


@triton.jit
def _grow(  # type: ignore[no-untyped-def]
    row, worths, origins, counts, limit, deepest, shape, floor, candidates, BEFORE: tl.constexpr
):
    """Adds nodes until there are enough; returns parents, indices into the branches, survivals, nodes, and a fault.

    The open candidate of a row is packed as (order of its offer, branch, rank, row).
    """
    survival = tl.where(row == 0, 1.0, 0.0).to(tl.float64)
    parent, place = tl.full(row.shape, -1, tl.int32), tl.zeros_like(row)
    first = tl.load(counts)
    opened = (first > 0) & (deepest > 0)
    own = tl.load(worths, mask=opened, other=0.0)  # survival of the newest row's first child, uncapped
    waiting = tl.where((row == 0) & opened, tl.minimum(own, 1.0), -1.0).to(tl.float64)
    packed = row.to(tl.int64)
    broken = (first == _HEAD_LOST) & (deepest > 0)
    branch_of_newest, step = 0, tl.full((), 0, tl.int32)
    lead = tl.where(shape == 1, 0, tl.minimum(limit, deepest))  # length of the chain that is added before other nodes
    best = tl.max(waiting)
    leading = (step < lead) & opened
    going = (limit > 0) & (broken == 0) & (leading | ((shape != 0) & (best >= floor) & (best >= 0.0)))
    while going:
        lead = tl.where(leading, lead, 0)
        key = tl.min(tl.where(waiting == best, packed, _LAST))
        chosen = tl.where(leading, step, (key & 63).to(tl.int32))
        rank = tl.where(leading, 0, ((key >> 6) & 63).to(tl.int32))
        branch = tl.where(leading, branch_of_newest, ((key >> 12) & 0xFFFFF).to(tl.int32))
        reached = tl.where(leading, own, best)
        at = branch * candidates + rank
        child = (branch // BEFORE + 1) * BEFORE
        opened = branch // BEFORE + 1 < deepest
        if BEFORE > 1:
            child += tl.load(origins + at)
        siblings, children = tl.load(counts + branch), tl.load(counts + child, mask=opened, other=0)
        sibling_worth = tl.load(worths + at + 1, mask=rank + 1 < siblings, other=0.0)
        opened = children > 0
        child_worth = tl.load(worths + child * candidates, mask=opened, other=0.0)
        held = tl.sum(tl.where(row == chosen, survival, 0.0))
        # a calibration need not be monotone, but a less likely sibling must not come first
        sibling = tl.where(rank + 1 < siblings, tl.minimum(held * sibling_worth, reached), -1.0)
        own = reached * child_worth
        broken = broken | (children == _HEAD_LOST)
        is_parent, order = row == chosen, step.to(tl.int64) << 33
        next_sibling = order | (branch << 12 | (rank + 1) << 6 | chosen).to(tl.int64)
        step += 1
        is_new = row == step
        first_child = order | (1 << 32) | (child << 12 | step).to(tl.int64)
        waiting = tl.where(is_parent, sibling, waiting)
        waiting = tl.where(is_new, tl.where(opened, tl.minimum(own, reached), -1.0), waiting)
        packed = tl.where(is_new, first_child, tl.where(is_parent, next_sibling, packed))
        survival = tl.where(is_new, reached, survival)
        parent, place = tl.where(is_new, chosen, parent), tl.where(is_new, at, place)
        branch_of_newest = child
        best = tl.max(waiting)
        leading = (step < lead) & opened
        going = (step < limit) & (broken == 0) & (leading | ((shape != 0) & (best >= floor) & (best >= 0.0)))
    return parent, place, survival, step, broken


@triton.jit
def _with_text(  # type: ignore[no-untyped-def]
    row, parent, level, token, chance, survival, count, limit, floor, tokens, claims, worths, depth
):
    """Adds what the text offers after the part of it that the tree has already.

    Each further token takes a free row or the row of the last node, which is the least likely one and has no children,
    if the token is more likely. Nodes that tree and text have in common stay as they are. Returns the changed rows, and
    how many of them came from the text.
    """
    known, here, reached = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 1.0, tl.float64)
    offered = tl.load(tokens, mask=depth > 0, other=-1)
    child = tl.max(tl.where((row > 0) & (row <= count) & (parent == 0) & (token == offered), row, 0))
    while child > 0:
        reached *= tl.load(worths + known)
        reached = tl.maximum(reached, tl.sum(tl.where(row == child, survival, 0.0)))
        known += 1
        here = child
        offered = tl.load(tokens + known, mask=known < depth, other=-1)
        child = tl.max(tl.where((row <= count) & (parent == here) & (token == offered), row, 0))
    added, left, least = tl.full((), 0, tl.int32), count, reached
    least *= tl.load(worths + known, mask=known < depth, other=-1.0)
    free = left < limit
    going = (least >= floor) & (free | ((left > here) & (least > tl.sum(tl.where(row == left, survival, 0.0)))))
    while going:
        left = tl.where(free, left, left - 1)
        added += 1
        least *= tl.load(worths + known + added, mask=known + added < depth, other=-1.0)
        free = left + added < limit
        last = tl.sum(tl.where(row == left, survival, 0.0))
        going = (least >= floor) & (free | ((left > here) & (least > last)))
    place = row - left - 1
    new = (place >= 0) & (place < added)
    parent = tl.where(new, tl.where(place == 0, here, row - 1), parent)
    level = tl.where(new, known + place + 1, level)
    token = tl.where(new, tl.load(tokens + known + place, mask=new, other=0), token)
    chance = tl.where(new, tl.load(claims + known + place, mask=new, other=0.0), chance)
    step = tl.full((), 0, tl.int32)
    while step < added:
        reached *= tl.load(worths + known + step)
        survival = tl.where(place == step, reached, survival)
        step += 1
    return parent, level, token, chance, survival, left + added, added


@triton.jit
def _grow_kernel(  # type: ignore[no-untyped-def]
    tokens, sequence_stride, slot_stride, anchors, nodes, depth, shape, floor,
    branch_chances, worths, origins, counts, base, pages, most_pages, scratch_place, page_tokens,
    row_tokens, row_positions, row_places, row_paths, parents, claims, survivals, node_counts, broken_flags, texts,
    text_tokens, text_claims, text_worths, text_counts,
    slots, candidates, BEFORE: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, TEXT: tl.constexpr,
):
    """Handles one sequence: first its nodes, then its rows; unused rows are like row 0."""
    sequence = tl.program_id(0)
    row = tl.arange(0, ROWS)
    lines = (sequence * ROWS + row)[:, None] * _DEEP
    tl.store(row_paths + lines + tl.arange(0, _DEEP)[None, :], tl.zeros((ROWS, _DEEP), tl.int32))
    counts += sequence * slots * BEFORE
    own_branches = sequence.to(tl.int64) * slots * BEFORE * candidates
    slot = tl.arange(0, SLOTS)
    known = tl.load(counts + slot * BEFORE, mask=slot < slots, other=0)
    unknown = tl.min(known) == _NO_NUMBERS
    wanted = tl.load(nodes + sequence)
    limit = tl.where(unknown, 0, tl.minimum(wanted, ROWS - 1))
    deepest = tl.minimum(tl.load(depth + sequence), slots)
    parent, place, survival, count, broken = _grow(
        row, worths + own_branches, origins + own_branches, counts, limit, deepest, tl.load(shape + sequence),
        tl.load(floor + sequence).to(tl.float64), candidates, BEFORE,
    )
    broken = (broken | unknown) & (wanted > 0)
    count = tl.where(wanted < 0, -1, tl.where(broken, 0, count))
    used = (row > 0) & (row <= count)
    level = tl.where(used, place // (candidates * BEFORE) + 1, 0)
    origin = tl.load(origins + own_branches + place, mask=used, other=0)
    mine = tokens + sequence.to(tl.int64) * sequence_stride + (level - 1) * slot_stride + origin
    token = tl.load(mine, mask=used, other=0)
    chance = tl.load(branch_chances + own_branches + place, mask=used, other=0.0)
    added = tl.full((), 0, tl.int32)
    if TEXT > 0:
        offered, at = tl.load(text_counts + sequence), sequence * TEXT
        if (offered > 0) & (wanted > 0) & (broken == 0):
            parent, level, token, chance, survival, count, added = _with_text(
                row, parent, level, token, chance, survival, count, limit, tl.load(floor + sequence).to(tl.float64),
                text_tokens + at, text_claims + at, text_worths + at, offered,
            )
            used = (row > 0) & (row <= count)
    tl.store(texts + sequence, added)
    out = sequence * ROWS + row
    start = tl.load(base + sequence)
    tl.store(row_tokens + out, tl.where(used, token, tl.load(anchors + sequence)))
    tl.store(row_positions + out, start + level)
    stored = row <= count
    page = tl.load(pages + sequence * most_pages + (start + row) // page_tokens, mask=stored, other=0)
    tl.store(row_places + out, tl.where(stored, page * page_tokens + (start + row) % page_tokens, scratch_place))
    tl.store(parents + out, tl.where(used, parent, -1))
    tl.store(claims + out, tl.where(row == 0, 1.0, tl.where(used, chance.to(tl.float32), 0.0)))
    tl.store(survivals + out, tl.where(row == 0, 1.0, tl.where(used, survival.to(tl.float32), 0.0)))
    tl.store(node_counts + sequence, count)
    tl.store(broken_flags + sequence, broken.to(tl.int32))
    tl.debug_barrier()  # other threads have written the parents and cleared the paths
    ancestor, high = tl.where(used, row, 0), tl.max(level)
    while high > 0:
        above = tl.load(parents + sequence * ROWS + ancestor, mask=ancestor > 0, other=0)
        tl.store(row_paths + (sequence * ROWS + row) * _DEEP + level, ancestor, mask=level > 0)
        ancestor, level, high = above, tl.maximum(level - 1, 0), high - 1


def grow(
    tokens: Tensor, scores: Tensor, wishes: Wishes, heads: HeadScores | None, rows: DeviceRows, scratch_place: int,
    page_tokens: int, grown: Grown, branches: Branches, text: TextDraft | None = None,
) -> None:
    """Fills `branches`, `rows` (except base, earliest and pages) and `grown` from candidates and their scores.

    Candidates and scores are [sequences, slots, K]. With `text`, a tree also takes what the sequence's own text offers.
    """
    sequences, slots, candidates = tokens.shape
    before = branches.counts.shape[2]
    assert tokens.stride() == scores.stride() and tokens.stride(2) == 1
    assert rows.sequences == sequences and rows.each <= MOST_ROWS and candidates <= MOST_ROWS
    assert before == (1 if heads is None else candidates)
    confidence = None if heads is None else heads.confidence
    unused = scores
    # fused multiply-adds are off, so that the doubles have the same bits as on the host
    _branch_kernel[(sequences, slots, before)](
        scores, scores.stride(0), scores.stride(1), unused if heads is None else heads.corrections,
        unused if heads is None else heads.scale, unused if confidence is None else confidence,
        unused if heads is None else heads.least_confidence, wishes.calibration, branches.claims, branches.worths,
        branches.origins, branches.counts, candidates, heads is not None, confidence is not None,
        triton.next_power_of_2(candidates), num_warps=1 if candidates <= 16 else 4, enable_fp_fusion=False,
    )
    _grow_kernel[(sequences,)](
        tokens, tokens.stride(0), tokens.stride(1), wishes.anchors, wishes.nodes, wishes.depth, wishes.shape,
        wishes.floor, branches.claims, branches.worths, branches.origins, branches.counts, rows.base, rows.pages,
        rows.pages.shape[1], scratch_place, page_tokens, rows.tokens, rows.positions, rows.places, rows.paths,
        grown.parents, grown.claims, grown.survivals, grown.counts, grown.broken, grown.texts,
        *((unused,) * 4 if text is None else (text.tokens, text.claims, text.worths, text.counts)), slots, candidates,
        before, rows.each, triton.next_power_of_2(slots), 0 if text is None else text.tokens.shape[1], num_warps=1,
        enable_fp_fusion=False,
    )
