"""The target's token after every row and the candidates of every drafted slot, from logits that stay on the device.

Three launches: the filters' floors (a row without filters ends at once), the best of every stretch of the vocabulary,
and the best of a row's stretches. A row's answer depends on its logits, position and settings only: stretches have one
size, and equals go to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.noise import gumbel_rows
from slipstream.kernels.ranking import LEAST_TEMPERATURE, NO_BEST

MOST_CANDIDATES = 64
_STRETCH = 4096  # tokens that one program ranks
_FEW = 8192  # what is left of a row above a rough cut is gathered if it is no more than this
_FLOOR_BLOCK = 4096
_STRETCH_WARPS = 8
_LEAST_HEAT = tl.constexpr(LEAST_TEMPERATURE)
_NO_BEST = tl.constexpr(NO_BEST)


@dataclass(frozen=True, slots=True)
class Settings:
    """How each sequence samples; a top_k of 0, a top_p of 1 and a min_p of 0 leave everything in."""

    temperature: Tensor  # fp32 [sequences], 0: the largest logit wins
    seed: Tensor  # int64
    top_k: Tensor  # int32
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32
    shared: Tensor  # int32: whether drafts are ranked with the noise that the target will use

    @classmethod
    def empty(cls, sequences: int, device: torch.device) -> Settings:
        """Greedy sequences without filters."""
        def numbers(dtype: torch.dtype, value: float = 0) -> Tensor:
            return torch.full((sequences,), value, dtype=dtype, device=device)

        whole, real = torch.int32, torch.float32
        return cls(numbers(real), numbers(torch.int64), numbers(whole), numbers(real, 1.0), numbers(real),
                   numbers(whole, 1))


@dataclass(frozen=True, slots=True)
class RankingScratch:
    """Where the launches leave what the next one reads."""

    floors: Tensor  # fp32 [rows]
    few: Tensor  # fp32 [rows, _FEW]
    keys: Tensor  # int64 [rows, stretches, count]
    peaks: Tensor  # fp32 [rows, stretches]
    sums: Tensor  # fp32 [rows, stretches]

    @classmethod
    def empty(cls, rows: int, vocabulary: int, count: int, device: torch.device) -> RankingScratch:
        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        stretches = triton.cdiv(vocabulary, _STRETCH)
        keys = torch.empty((rows, stretches, count), dtype=torch.int64, device=device)
        return cls(floats(rows), floats(rows, _FEW), keys, floats(rows, stretches), floats(rows, stretches))


@triton.jit
def _ordered(bits):  # type: ignore[no-untyped-def]
    """Bits of floats as integers of the same order; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    """ln x of positive normal numbers to about one unit in the last place, also near 1, where tl.log is coarse."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # leaves a mantissa of √½ to √2
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = -0.076344948905 * f + 0.12761575187
    p = p * f - 0.13160182112
    p = p * f + 0.14201758278
    p = p * f - 0.16623357412
    p = p * f + 0.20001226864
    p = p * f - 0.25000821032
    p = p * f + 0.33333331708
    n = exponent.to(tl.float32)
    square = f * f
    tail = n * 1.42860677e-6 + p * f * square - 0.5 * square
    return n * 0.693145751953125 + (f + tail)


@triton.jit
def _gumbel(seed, position, first, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The noise of WIDTH tokens from `first` on, a multiple of four: the words of kernels/noise.py."""
    block = (first // 4 + tl.arange(0, WIDTH // 4)).to(tl.uint32)
    nothing = tl.zeros_like(block)
    a, b, c, d = tl.philox(seed, block, nothing + position.to(tl.uint32), nothing, nothing)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (WIDTH,))
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    rest = 1.0 - uniform
    lost = (1.0 - rest) - uniform  # what rounding took from 1 - u, exactly: the smallest u make the largest noise
    return -_log(-(_log(rest) + (lost * uniform + lost)))


@triton.jit
def _weight_from(source, size, divisor, least, peak, by_mass, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many numbers of a list are at least `least`, or their probability on the scale of the largest one."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.div_rn(tl.load(source + place, mask=place < size, other=float("-inf")), divisor)
        weight = tl.where(by_mass, tl.exp(value - peak), 1.0)
        total += tl.where((value >= least) & (place < size), weight, 0.0)
    return tl.sum(total)


@triton.jit
def _edge(source, size, divisor, least, peak, by_mass, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest number whose weight and that of all above it reach `target`; `least` if nothing does."""
    low = _ordered(least.to(tl.int32, bitcast=True)).to(tl.int64)
    high = _ordered(peak.to(tl.int32, bitcast=True)).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        value = _ordered(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        reaches = _weight_from(source, size, divisor, value, peak, by_mass, BLOCK) >= target
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle - 1)
    return _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _rough_cut(line, size, divisor, peak, by_mass, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of four distances below the peak that `target` is reached within, and the weight of the whole row."""
    steps = tl.arange(0, 4) + 1
    cuts = peak - 1.2 * (steps * steps).to(tl.float32)
    above = tl.zeros((BLOCK, 4), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.div_rn(tl.load(line + place, mask=place < size, other=float("-inf")), divisor)
        weight = tl.where(by_mass, tl.exp(value - peak), 1.0)
        above += tl.where(value[:, None] >= cuts[None, :], weight[:, None], 0.0)
        total += weight
    whole = tl.sum(total)
    goal = tl.where(by_mass, target * whole, target)
    return tl.max(tl.where(tl.sum(above, axis=0) >= goal, cuts, float("-inf"))), whole


@triton.jit
def _gather(line, size, divisor, cut, few, MOST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies what is at least `cut`, as far as there is room; returns how much that would be."""
    count = 0
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.div_rn(tl.load(line + place, mask=place < size, other=float("-inf")), divisor)
        kept = (value >= cut) & (value > float("-inf"))
        to = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(few + to, value, mask=kept & (to < MOST))
        count += tl.sum(kept.to(tl.int32))
    tl.debug_barrier()  # other threads read what these have written
    return count


@triton.jit
def _floor(line, size, heat, top_k, top_p, min_p, peak, few, MOST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest logit / temperature that min-p, then top-k, then top-p on what is left, let through."""
    counted = (top_k > 0) & (top_k < size)
    least = float("-inf")
    if min_p > 0.0:
        least = peak + _log(min_p)
    target = tl.where(counted, top_k.to(tl.float32), tl.where(min_p > 0.0, float("inf"), top_p))
    cut, whole = _rough_cut(line, size, heat, peak, counted == 0, target, BLOCK)
    cut = tl.maximum(cut, least)
    count = _gather(line, size, heat, cut, few, MOST, BLOCK)
    source, length, divisor = line, size, heat
    if count <= MOST:
        source, length, divisor = few, count, 1.0
    floor = cut
    if counted:
        floor = _edge(source, length, divisor, cut, peak, False, top_k.to(tl.float32), BLOCK)
    if top_p < 1.0:
        if counted | (min_p > 0.0):
            whole = _weight_from(source, length, divisor, floor, peak, True, BLOCK)
        floor = _edge(source, length, divisor, floor, peak, True, top_p * whole, BLOCK)
    return floor


@triton.jit
def _floor_kernel(  # type: ignore[no-untyped-def]
    logits, stride, temperature, top_k, top_p, min_p, floors, few, each, size, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    sequence = row // each
    heat, most = tl.load(temperature + sequence), tl.load(top_k + sequence)
    share, least = tl.load(top_p + sequence), tl.load(min_p + sequence)
    floor = float("-inf")
    if (heat > 0.0) & (((most > 0) & (most < size)) | (share < 1.0) | (least > 0.0)):
        heat = tl.maximum(heat, _LEAST_HEAT)
        line = logits + row.to(tl.int64) * stride
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            highest = tl.maximum(highest, tl.load(line + place, mask=place < size, other=float("-inf")))
        peak = tl.div_rn(tl.max(highest), heat)
        if tl.abs(peak) < float("inf"):
            floor = _floor(line, size, heat, most, share, least, peak, few + row.to(tl.int64) * MOST, MOST, BLOCK)
    tl.store(floors + row, floor)


@triton.jit
def _take_best(keys, place, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the COUNT largest keys in falling order."""
    for rank in range(COUNT):
        best = tl.max(keys)
        tl.store(out + place + rank, best)
        keys = tl.where(keys == best, -(2**63), keys)


@triton.jit
def _stretch_kernel(  # type: ignore[no-untyped-def]
    logits, stride, positions, temperature, seed, shared, floors, keys, peaks, sums, each, size, ahead,
    DRAFT: tl.constexpr, COUNT: tl.constexpr, STRETCH: tl.constexpr,
):
    """The best of one stretch of a row. A key is a score and, below it, how far a token is from the highest id."""
    row, stretch = tl.program_id(0), tl.program_id(1)
    sequence = row // each
    heat = tl.load(temperature + sequence)
    first = stretch * STRETCH
    token = first + tl.arange(0, STRETCH)
    line = logits + row.to(tl.int64) * stride
    score = tl.load(line + token, mask=token < size, other=float("-inf"))
    if heat > 0.0:
        score = tl.div_rn(score, tl.maximum(heat, _LEAST_HEAT))
    broken = tl.max(((score != score) | (score == float("inf"))).to(tl.int32)) > 0
    if heat > 0.0:
        score = tl.where(score < tl.load(floors + row), float("-inf"), score)
        noisy = True
        if DRAFT:
            noisy = tl.load(shared + sequence) != 0
        if noisy:
            score += _gumbel(tl.load(seed + sequence), tl.load(positions + row) + ahead, first, STRETCH)
    score = tl.where(score == 0.0, 0.0, score)  # the two zeros are equals
    at = row * tl.num_programs(1) + stretch
    peak = tl.max(score)
    if DRAFT:
        tl.store(sums + at, tl.sum(tl.exp(score - tl.where(peak > float("-inf"), peak, 0.0))))
    tl.store(peaks + at, tl.where(broken, float("nan"), peak))
    ordered = _ordered(score.to(tl.int32, bitcast=True)).to(tl.int64)
    _take_best((ordered << 32) | (0x7FFFFFFF - token).to(tl.int64), at.to(tl.int64) * COUNT, keys, COUNT)


@triton.jit
def _row_kernel(  # type: ignore[no-untyped-def]
    keys, peaks, sums, tokens, scores, stretches, DRAFT: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    """The best of a row's stretches; a row that is not all numbers, or has no token at all, has none."""
    row = tl.program_id(0)
    stretch = tl.arange(0, STRETCHES)
    peak = tl.load(peaks + row * stretches + stretch, mask=stretch < stretches, other=float("-inf"))
    highest = tl.max(peak)
    usable = (tl.max((peak != peak).to(tl.int32)) == 0) & (highest > float("-inf"))
    place = tl.arange(0, WIDTH)
    length = stretches * COUNT
    left = tl.load(keys + row.to(tl.int64) * length + place, mask=place < length, other=-(2**63))
    total = 0.0
    if DRAFT:
        part = tl.load(sums + row * stretches + stretch, mask=stretch < stretches, other=0.0)
        total = tl.where(usable, highest + _log(tl.sum(part * tl.exp(peak - highest))), float("nan"))
    for rank in range(COUNT):
        best = tl.max(left)
        left = tl.where(left == best, -(2**63), left)
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        if DRAFT:
            score = _ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            there = (score > float("-inf")) & usable
            tl.store(tokens + row * COUNT + rank, tl.where(there, token, 0))
            tl.store(scores + row * COUNT + rank, tl.where(usable, score, float("nan")) - total)
        else:
            tl.store(tokens + row, tl.where(usable, token, _NO_BEST))


def _rank(
    logits: Tensor, positions: Tensor, settings: Settings, each: int, ahead: int, tokens: Tensor,
    scores: Tensor | None, scratch: RankingScratch,
) -> None:
    rows, size = logits.shape
    count, stretches, draft = scratch.keys.shape[2], scratch.keys.shape[1], scores is not None
    assert logits.stride(1) == 1 and tokens.numel() == rows * count and stretches == triton.cdiv(size, _STRETCH)
    unused: Any = scratch.sums
    _floor_kernel[(rows,)](
        logits, logits.stride(0), settings.temperature, settings.top_k, settings.top_p, settings.min_p,
        scratch.floors, scratch.few, each, size, _FEW, _FLOOR_BLOCK, num_warps=16,
    )
    _stretch_kernel[(rows, stretches)](
        logits, logits.stride(0), positions, settings.temperature, settings.seed, settings.shared, scratch.floors,
        scratch.keys, scratch.peaks, scratch.sums, each, size, ahead, draft, count, _STRETCH, num_warps=_STRETCH_WARPS,
    )
    width = triton.next_power_of_2(stretches * count)
    _row_kernel[(rows,)](
        scratch.keys, scratch.peaks, scratch.sums, tokens, scores if draft else unused, stretches, draft, count,
        width, triton.next_power_of_2(stretches), num_warps=8 if width > 1024 else 4,
    )


def choose(
    logits: Tensor, positions: Tensor, settings: Settings, each: int, out: Tensor, scratch: RankingScratch
) -> None:
    """The target's token (int32 [rows]) after each row of fp32 logits [rows, vocabulary], NO_BEST where it has none.

    Row r belongs to sequence r // each, and its token will stand one behind `positions[r]`. `scratch` is for one
    candidate.
    """
    _rank(logits, positions, settings, each, 1, out, None, scratch)


def top_candidates(
    logits: Tensor, positions: Tensor, settings: Settings, each: int, ahead: int, tokens: Tensor, scores: Tensor,
    scratch: RankingScratch,
) -> None:
    """The likeliest tokens (int32 [rows, K]) of drafted rows and their log-probabilities (fp32), best first.

    A row's token will stand `ahead` behind its position. Places that no token fills hold 0 and -inf; the scores of a
    row that is not all numbers are NaN. Only the tokens that the sequence's filters keep have a probability.
    """
    _rank(logits, positions, settings, each, ahead, tokens, scores, scratch)


def choose_reference(
    logits: Tensor, positions: Tensor, settings: Settings, each: int, out: Tensor, scratch: RankingScratch
) -> None:
    """`choose` in plain torch."""
    sums, usable = _reference_sums(logits, positions + 1, settings, each, noisy=settings.temperature > 0)
    ranked = sums.sort(dim=-1, descending=True, stable=True).indices[:, 0]
    out.copy_(torch.where(usable, ranked, NO_BEST))


def top_candidates_reference(
    logits: Tensor, positions: Tensor, settings: Settings, each: int, ahead: int, tokens: Tensor, scores: Tensor,
    scratch: RankingScratch,
) -> None:
    """`top_candidates` in plain torch."""
    count = scratch.keys.shape[2]
    sums, usable = _reference_sums(logits, positions + ahead, settings, each, noisy=settings.shared != 0)
    ranked = sums.sort(dim=-1, descending=True, stable=True)
    found = ranked.values[:, :count] - sums.logsumexp(dim=-1, keepdim=True)
    found = torch.where(usable[:, None], found, float("nan"))
    scores.fill_(float("-inf"))
    scores[:, : found.shape[1]] = found
    tokens.zero_()
    tokens[:, : found.shape[1]] = torch.where(found > float("-inf"), ranked.indices[:, :count], 0)


def _reference_sums(
    logits: Tensor, places: Tensor, settings: Settings, each: int, noisy: Tensor
) -> tuple[Tensor, Tensor]:
    """What is compared, in fp32, and which rows are usable; the token of a row will stand at its place."""
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


def _hide_filtered(scaled: Tensor, settings: Settings, sequence: int) -> None:
    """Sets what min-p, then top-k, then top-p on what is left, leave out to -inf."""
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
