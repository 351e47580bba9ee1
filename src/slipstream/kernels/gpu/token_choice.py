"""Finds the target's token after every row and the candidates of drafted slots, from logits that stay on the device.

After the filters have found their floors (filters.py) there are two launches: the largest score of every group of
tokens, and the best K tokens of a row, which can only be in the K best groups. A row's answer depends only on its
logits, position and settings, and among equal scores the lowest id wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.cpu.ranking import LEAST_TEMPERATURE, NO_BEST
from slipstream.kernels.gpu.filters import FilterScratch, find_floors, ordered, precise_log
from slipstream.kernels.noise import gumbel_rows

_GROUP = 64  # tokens that compete for one place among a row's best groups
_GROUPS = 64  # groups that one program ranks
_STRETCH_WARPS = 8
_ROW_WARPS = 8
_LEAST_HEAT = tl.constexpr(LEAST_TEMPERATURE)
_NO_BEST = tl.constexpr(NO_BEST)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How each sequence samples; a top_k of 0, a top_p of 1 and a min_p of 0 leave everything in."""

    temperature: Tensor  # fp32 [sequences]; at 0 the largest logit wins
    seed: Tensor  # int64
    top_k: Tensor  # int32
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32
    shared: Tensor  # int32: whether drafts are ranked with the noise that the target will use

    @classmethod
    def empty(cls, sequences: int, device: torch.device) -> SamplingSettings:
        """Makes settings of greedy sequences without filters."""
        def numbers(dtype: torch.dtype, value: float = 0) -> Tensor:
            return torch.full((sequences,), value, dtype=dtype, device=device)

        whole, real = torch.int32, torch.float32
        return cls(numbers(real), numbers(torch.int64), numbers(whole), numbers(real, 1.0), numbers(real),
                   numbers(whole, 1))


@dataclass(frozen=True, slots=True)
class RankingScratch:
    """Where each launch stores what the next one reads."""

    count: int  # candidates per row
    filters: FilterScratch
    best: Tensor  # fp32 [rows, stretches * _GROUPS]: the largest score of each group
    peaks: Tensor  # fp32 [rows, stretches]
    sums: Tensor  # fp32 [rows, stretches]
    listed: Tensor  # int64 [rows, room for all keys that may be listed while the best are found]

    @classmethod
    def empty(cls, rows: int, vocabulary: int, count: int, device: torch.device) -> RankingScratch:
        def floats(columns: int) -> Tensor:
            return torch.empty((rows, columns), dtype=torch.float32, device=device)

        stretches = triton.cdiv(vocabulary, _GROUPS * _GROUP)
        filters = FilterScratch.empty(rows, vocabulary, device)
        padded, longest = triton.next_power_of_2(count), max(stretches * _GROUPS, count * _GROUP)
        room = padded + max(4 * padded, triton.next_power_of_2(longest) // 4)
        listed = torch.empty((rows, room), dtype=torch.int64, device=device)
        return cls(count, filters, floats(stretches * _GROUPS), floats(stretches), floats(stretches), listed)


@triton.jit
def gumbel_noise(seed, position, group, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the noise of the tokens [groups, GROUP]: the words of kernels/noise.py, which come in groups of four."""
    fours = (group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]).to(tl.uint32)
    nothing = tl.zeros_like(fours)
    a, b, c, d = tl.philox(seed, fours, nothing + position.to(tl.uint32), nothing, nothing)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (group.shape[0], GROUP))
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    rest = 1.0 - uniform
    lost = (1.0 - rest) - uniform  # the exact rounding error of 1 - u: the smallest u give the largest noise
    return -precise_log(-(precise_log(rest) + (lost * uniform + lost)))


@triton.jit
def _scored(  # type: ignore[no-untyped-def]
    logits, stride, positions, temperature, seed, shared, floors, row, group, each, size, ahead,
    DRAFT: tl.constexpr, GROUP: tl.constexpr,
):
    """Returns the scores by which tokens of some groups of a row are compared, and whether any logit is NaN or +Inf."""
    sequence = row // each
    heat = tl.load(temperature + sequence)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    line = logits + row.to(tl.int64) * stride
    score = tl.load(line + token, mask=token < size, other=float("-inf"))
    if heat > 0.0:
        score = tl.div_rn(score, tl.maximum(heat, _LEAST_HEAT))
    broken = tl.max(tl.max(((score != score) | (score == float("inf"))).to(tl.int32), axis=1), axis=0) > 0
    if heat > 0.0:
        score = tl.where(score < tl.load(floors + row), float("-inf"), score)
        noisy = True
        if DRAFT:
            noisy = tl.load(shared + sequence) != 0
        if noisy:
            score += gumbel_noise(tl.load(seed + sequence), tl.load(positions + row) + ahead, group, GROUP)
    return tl.where(score == 0.0, 0.0, score), broken  # the two zeros count as equal


@triton.jit
def _stretch_kernel(  # type: ignore[no-untyped-def]
    logits, stride, positions, temperature, seed, shared, floors, best, peaks, sums, each, size, ahead,
    DRAFT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):
    """Computes the largest score of every group of a stretch and of the stretch, and the sum of its exponentials."""
    row, stretch = tl.program_id(0), tl.program_id(1)
    group = stretch * GROUPS + tl.arange(0, GROUPS)
    score, broken = _scored(
        logits, stride, positions, temperature, seed, shared, floors, row, group, each, size, ahead, DRAFT, GROUP
    )
    at = row * tl.num_programs(1) + stretch
    highest = tl.max(score, axis=1)
    peak = tl.max(highest)
    tl.store(best + at * GROUPS + tl.arange(0, GROUPS), highest)
    tl.store(peaks + at, tl.where(broken, float("nan"), peak))
    if DRAFT:
        weights = tl.exp(score - tl.where(peak > float("-inf"), peak, 0.0))
        tl.store(sums + at, tl.sum(tl.sum(weights, axis=1), axis=0))


@triton.jit
def _rank_among(keys, listed, count):  # type: ignore[no-untyped-def]
    """Returns how many of `count` listed keys are larger than each of these keys."""
    rank = tl.zeros(keys.shape, tl.int32)
    for start in range(0, count, 64):
        place = start + tl.arange(0, 64)
        others = tl.load(listed + place, mask=place < count, other=-(2**63))
        rank += tl.sum((others[:, None] > keys[None, :]).to(tl.int32), axis=0)
    return rank


@triton.jit
def _best(score, number, listed, COUNT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the COUNT best as keys: a score and, in the lower bits, how far its number is from the highest possible.

    The keys are divided into lines. The COUNT best of all are at least the COUNT-th best of the lines' largest keys,
    and hardly any other key is. `listed` is memory for what other threads must see, between barriers.
    """
    order = ordered(score.to(tl.int32, bitcast=True)).to(tl.int64)
    keys = (order << 32) | (0x7FFFFFFF - number).to(tl.int64)
    if COUNT == 1:
        found = tl.max(keys, axis=0, keep_dims=True)
    else:
        LINES: tl.constexpr = 4 * COUNT
        largest = tl.max(tl.reshape(keys, (LINES, SIZE // LINES)), axis=1)
        listed += COUNT
        tl.store(listed + tl.arange(0, LINES), largest)
        tl.debug_barrier()
        least = tl.sum(tl.where(_rank_among(largest, listed, LINES) == COUNT - 1, largest, 0))
        kept = (keys >= least).to(tl.int32)
        count = tl.sum(kept)
        tl.debug_barrier()
        tl.store(listed + tl.cumsum(kept, axis=0) - 1, keys, mask=kept > 0)
        tl.debug_barrier()
        for start in range(0, count, 64):
            place = start + tl.arange(0, 64)
            some = tl.load(listed + place, mask=place < count, other=-(2**63))
            rank = _rank_among(some, listed, count)
            tl.store(listed - COUNT + rank, some, mask=(place < count) & (rank < COUNT))
        tl.debug_barrier()
        found = tl.load(listed - COUNT + tl.arange(0, COUNT))
    return found


@triton.jit
def _row_kernel(  # type: ignore[no-untyped-def]
    logits, stride, positions, temperature, seed, shared, floors, best, peaks, sums, listed, tokens, scores, each, size,
    ahead, groups, stretches, count, room, DRAFT: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, STRETCHES: tl.constexpr,
):
    """Finds the best tokens of a row's best groups; a row with NaN or Inf, or without any possible token, has none."""
    row = tl.program_id(0)
    stretch = tl.arange(0, STRETCHES)
    peak = tl.load(peaks + row * stretches + stretch, mask=stretch < stretches, other=float("-inf"))
    highest = tl.max(peak)
    usable = (tl.max((peak != peak).to(tl.int32)) == 0) & (highest > float("-inf"))
    place = tl.arange(0, WIDTH)
    of_groups = tl.load(best + row * groups + place, mask=place < groups, other=float("-inf"))
    listed += row.to(tl.int64) * room
    group = 0x7FFFFFFF - (_best(of_groups, place, listed, COUNT, WIDTH) & 0x7FFFFFFF).to(tl.int32)
    score, _ = _scored(
        logits, stride, positions, temperature, seed, shared, floors, row, group, each, size, ahead, DRAFT, GROUP
    )
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    score, token = tl.reshape(score, (COUNT * GROUP,)), tl.reshape(token, (COUNT * GROUP,))
    found = _best(score, token, listed, COUNT, COUNT * GROUP)
    token = 0x7FFFFFFF - (found & 0x7FFFFFFF).to(tl.int32)
    rank = tl.arange(0, COUNT)
    if DRAFT:
        part = tl.load(sums + row * stretches + stretch, mask=stretch < stretches, other=0.0)
        total = tl.where(usable, highest + precise_log(tl.sum(part * tl.exp(peak - highest))), float("nan"))
        score = ordered((found >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        there = (score > float("-inf")) & usable
        tl.store(tokens + row * count + rank, tl.where(there, token, 0), mask=rank < count)
        tl.store(scores + row * count + rank, tl.where(usable, score, float("nan")) - total, mask=rank < count)
    else:
        tl.store(tokens + row + rank, tl.where(usable, token, _NO_BEST))


def _rank(
    logits: Tensor, positions: Tensor, settings: SamplingSettings, each: int, ahead: int, tokens: Tensor,
    scores: Tensor | None, scratch: RankingScratch,
) -> None:
    rows, size = logits.shape
    stretches, groups, draft = scratch.peaks.shape[1], scratch.best.shape[1], scores is not None
    assert logits.stride(1) == 1 and tokens.numel() == rows * scratch.count
    assert stretches == triton.cdiv(size, _GROUPS * _GROUP)
    find_floors(
        logits, settings.temperature, settings.top_k, settings.top_p, settings.min_p, each, scratch.filters
    )
    unused: Any = scratch.sums
    given = (
        logits, logits.stride(0), positions, settings.temperature, settings.seed, settings.shared,
        scratch.filters.floors, scratch.best, scratch.peaks, scratch.sums,
    )
    _stretch_kernel[(rows, stretches)](
        *given, each, size, ahead, draft, _GROUPS, _GROUP, num_warps=_STRETCH_WARPS
    )
    count = triton.next_power_of_2(scratch.count)
    _row_kernel[(rows,)](
        *given, scratch.listed, tokens, scores if draft else unused, each, size, ahead, groups, stretches,
        scratch.count, scratch.listed.shape[1], draft, count, _GROUP, max(4 * count, triton.next_power_of_2(groups)),
        triton.next_power_of_2(stretches), num_warps=_ROW_WARPS,
    )


def choose(
    logits: Tensor, positions: Tensor, settings: SamplingSettings, each: int, out: Tensor, scratch: RankingScratch
) -> None:
    """Chooses the target's token (int32 [rows]) after each row of fp32 logits [rows, vocabulary]; NO_BEST if it has
    none.

    Row r belongs to sequence r // each, and its token gets the position after `positions[r]`. `scratch` is for one
    candidate.
    """
    _rank(logits, positions, settings, each, 1, out, None, scratch)


def top_candidates(
    logits: Tensor, positions: Tensor, settings: SamplingSettings, each: int, ahead: int, tokens: Tensor,
    scores: Tensor, scratch: RankingScratch,
) -> None:
    """Finds the likeliest tokens (int32 [rows, K]) of drafted rows and their log-probabilities (fp32), best first.

    A row's token gets the position `ahead` after the row's. Places without a token hold 0 and -inf; the scores of a
    row with NaN or Inf are NaN. Only tokens that the sequence's filters keep have a probability.
    """
    _rank(logits, positions, settings, each, ahead, tokens, scores, scratch)


def choose_reference(
    logits: Tensor, positions: Tensor, settings: SamplingSettings, each: int, out: Tensor, scratch: RankingScratch
) -> None:
    """Does what `choose` does, in plain torch."""
    sums, usable = reference_sums(logits, positions + 1, settings, each, noisy=settings.temperature > 0)
    ranked = sums.sort(dim=-1, descending=True, stable=True).indices[:, 0]
    out.copy_(torch.where(usable, ranked, NO_BEST))


def top_candidates_reference(
    logits: Tensor, positions: Tensor, settings: SamplingSettings, each: int, ahead: int, tokens: Tensor,
    scores: Tensor, scratch: RankingScratch,
) -> None:
    """Does what `top_candidates` does, in plain torch."""
    count = scratch.count
    sums, usable = reference_sums(logits, positions + ahead, settings, each, noisy=settings.shared != 0)
    ranked = sums.sort(dim=-1, descending=True, stable=True)
    found = ranked.values[:, :count] - sums.logsumexp(dim=-1, keepdim=True)
    found = torch.where(usable[:, None], found, float("nan"))
    scores.fill_(float("-inf"))
    scores[:, : found.shape[1]] = found
    tokens.zero_()
    tokens[:, : found.shape[1]] = torch.where(found > float("-inf"), ranked.indices[:, :count], 0)


def reference_sums(
    logits: Tensor, places: Tensor, settings: SamplingSettings, each: int, noisy: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the compared scores in fp32, and which rows are usable; a row's token gets the position in `places`."""
    sums, usable = logits.float().clone(), torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for row, place in enumerate(places.tolist()):
        sequence = row // each
        heat = float(settings.temperature[sequence])
        if heat > 0.0:
            sums[row] /= max(heat, LEAST_TEMPERATURE)
        usable[row] = sums[row].max().isfinite()
        if heat > 0.0:
            _hide_filtered(sums[row], settings, sequence)
            if noisy[sequence]:
                noise = gumbel_rows(int(settings.seed[sequence]), range(place, place + 1), logits.shape[1])[0]
                sums[row] += noise.to(logits.device)
    return sums, usable


def _hide_filtered(scaled: Tensor, settings: SamplingSettings, sequence: int) -> None:
    """Sets to -inf what min-p removes, then top-k, and then top-p from what is left."""
    most, share = int(settings.top_k[sequence]), float(settings.top_p[sequence])
    least = settings.min_p[sequence]
    if least > 0.0:
        scaled[scaled < scaled.max() + least.log()] = float("-inf")
    if 0 < most < len(scaled):
        scaled[scaled < scaled.topk(most).values[-1]] = float("-inf")
    if share < 1.0:
        ranked = scaled.sort(descending=True).values
        mass = ranked.double().softmax(dim=0).cumsum(dim=0)
        scaled[scaled < ranked[int((mass < share).sum().clamp_max(len(scaled) - 1))]] = float("-inf")
