"""Finds where min-p, top-k and top-p cut a row of logits: the smallest logit / temperature that they keep.

A row's numbers are its logits / temperature, and their mass is the sum of their exponentials. There are three launches,
which end at once for a row without filters. The first takes some numbers of the row as cuts and computes, stretch by
stretch, the mass above each. The second gathers in a list the numbers between the two cuts that enclose the answer. The
third searches this list, or the whole row if the list is too long, which mostly means that many numbers are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.cpu.ranking import LEAST_TEMPERATURE

STRETCH = 4096  # tokens that one program reads
MOST_GATHERED = 16384  # numbers of a row's list; a longer list is not gathered, and the row is searched as a whole
_CUTS = 32  # cuts per row
_SAMPLED = 256  # tokens of a row from which the cuts are taken: of 152K tokens about 5000 are between two cuts
_WEIGHED_AT_ONCE = 256  # tokens per turn of the first launch, which has to keep _CUTS sums for each
_SEARCHED_AT_ONCE = 2048  # tokens per turn of the search
_LEAST_HEAT = tl.constexpr(LEAST_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class FilterScratch:
    """Where each launch stores what the next one reads; `floors` is the result."""

    floors: Tensor  # fp32 [rows]; -inf if nothing is filtered
    peaks: Tensor  # fp32 [rows, stretches]
    cuts: Tensor  # fp32 [rows, _CUTS], rising
    counts: Tensor  # int32 [rows, stretches, _CUTS]: how many numbers reach each cut
    masses: Tensor  # fp32 [rows, stretches, _CUTS]: the mass of those numbers, relative to the stretch's peak
    few: Tensor  # fp32 [rows, MOST_GATHERED]: the gathered list

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device) -> FilterScratch:
        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        stretches = triton.cdiv(vocabulary, STRETCH)
        counts = torch.empty((rows, stretches, _CUTS), dtype=torch.int32, device=device)
        return cls(floats(rows), floats(rows, stretches), floats(rows, _CUTS), counts,
                   floats(rows, stretches, _CUTS), floats(rows, MOST_GATHERED))


@triton.jit
def ordered(bits):  # type: ignore[no-untyped-def]
    """Maps the bits of floats to integers in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def precise_log(x):  # type: ignore[no-untyped-def]
    """Computes ln x of positive normal numbers to about one unit in the last place, also near 1, where tl.log is
    coarse.
    """
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
def _filters(sequence, temperature, top_k, top_p, min_p, size):  # type: ignore[no-untyped-def]
    """Returns a sequence's settings (a top-k that keeps everything is 0), and whether anything is filtered."""
    heat, most = tl.load(temperature + sequence), tl.load(top_k + sequence)
    share, least = tl.load(top_p + sequence), tl.load(min_p + sequence)
    most = tl.where((most > 0) & (most < size), most, 0)
    some = (heat > 0.0) & ((most > 0) | (share < 1.0) | (least > 0.0))
    return tl.maximum(heat, _LEAST_HEAT), most, share, least, some


@triton.jit
def _sampled(line, at, size, heat, SAMPLED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns some numbers of a row's sample, which consists of whole memory sectors spread over the row."""
    place = tl.minimum(at // 8 * (size // (SAMPLED // 8)) + at % 8, size - 1)
    value = tl.div_rn(tl.load(line + place), heat)
    return tl.where(value != value, float("-inf"), value)


@triton.jit
def _sampled_cuts(line, size, heat, SAMPLED: tl.constexpr, CUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns rising values of the row: the highest few of a sample and every ninth below; the lowest cut is -inf."""
    at = tl.arange(0, SAMPLED)
    value = _sampled(line, at, size, heat, SAMPLED)
    rank = tl.zeros((SAMPLED,), tl.int32)
    for start in range(0, SAMPLED, 16):
        other_at = start + tl.arange(0, 16)
        other = _sampled(line, other_at, size, heat, SAMPLED)
        earlier = (other[:, None] == value[None, :]) & (other_at[:, None] < at[None, :])
        rank += tl.sum(((other[:, None] > value[None, :]) | earlier).to(tl.int32), axis=0)
    cut = CUTS - 1 - tl.arange(0, CUTS)
    wanted = tl.where(cut < 4, cut, (cut - 3) * 9)
    found = tl.max(tl.where(rank[:, None] == wanted[None, :], value[:, None], float("-inf")), axis=0)
    return tl.where(cut == CUTS - 1, float("-inf"), found)


@triton.jit
def _weigh_kernel(  # type: ignore[no-untyped-def]
    logits, stride, temperature, top_k, top_p, min_p, peaks, cuts, counts, masses, each, size,
    STRETCH: tl.constexpr, SAMPLED: tl.constexpr, CUTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Computes how many numbers of one stretch of a row reach each cut, and their mass."""
    row, stretch = tl.program_id(0), tl.program_id(1)
    heat, _, _, _, some = _filters(row // each, temperature, top_k, top_p, min_p, size)
    if some:
        line = logits + row.to(tl.int64) * stride
        cut = _sampled_cuts(line, size, heat, SAMPLED, CUTS)
        number = tl.arange(0, CUTS)
        if stretch == 0:
            tl.store(cuts + row * CUTS + number, cut)
        first = stretch * STRETCH
        whole = first + tl.arange(0, STRETCH)
        peak = tl.div_rn(tl.max(tl.load(line + whole, mask=whole < size, other=float("-inf"))), heat)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        count = tl.zeros((BLOCK, CUTS), tl.int32)
        mass = tl.zeros((BLOCK, CUTS), tl.float32)
        for start in range(first, first + STRETCH, BLOCK):
            place = start + tl.arange(0, BLOCK)
            # numbers after the end are NaN, which reaches no cut
            value = tl.div_rn(tl.load(line + place, mask=place < size, other=float("nan")), heat)
            reaches = value[:, None] >= cut[None, :]
            count += reaches.to(tl.int32)
            mass += tl.where(reaches, tl.exp(value - base)[:, None], 0.0)
        at = row * tl.num_programs(1) + stretch
        tl.store(peaks + at, peak)
        tl.store(counts + at * CUTS + number, tl.sum(count, axis=0))
        tl.store(masses + at * CUTS + number, tl.sum(mass, axis=0))


@triton.jit
def _bracket(  # type: ignore[no-untyped-def]
    row, peaks, cuts, counts, masses, stretches, most, share, least, STRETCHES: tl.constexpr, CUTS: tl.constexpr
):
    """Encloses a row's answer: (peak, least answer, low, high, mass above high, whole mass, numbers in each stretch).

    A row with only top-p is searched between two cuts; for any other row all numbers above the lower cut are needed.
    """
    stretch, number = tl.arange(0, STRETCHES), tl.arange(0, CUTS)
    there = stretch < stretches
    peak_of = tl.load(peaks + row * stretches + stretch, mask=there, other=float("-inf"))
    peak = tl.max(peak_of)
    at = (row * stretches + stretch)[:, None] * CUTS + number[None, :]
    count = tl.load(counts + at, mask=there[:, None], other=0)
    mass = tl.load(masses + at, mask=there[:, None], other=0.0) * tl.exp(peak_of - peak)[:, None]
    cut = tl.load(cuts + row * CUTS + number)
    masses_above = tl.sum(mass, axis=0)
    whole = tl.max(masses_above)
    narrowed = (most > 0) | (least > 0.0)
    floor = float("-inf")
    if least > 0.0:
        floor = peak + precise_log(least)
    enough = (most > 0) & (tl.sum(count, axis=0) >= most)
    enough = enough | (cut <= floor) | ((narrowed == 0) & (masses_above >= share * whole))
    lower = tl.max(tl.where(enough, number, 0))
    is_lower, is_upper = number == lower, (number == lower + 1) & (narrowed == 0)
    low = tl.max(tl.where(is_lower, cut, float("-inf")))
    high = tl.min(tl.where(is_upper, cut, float("inf")))
    above = tl.sum(tl.where(is_upper, masses_above, 0.0))
    inside = tl.sum(tl.where(is_lower[None, :], count, 0) - tl.where(is_upper[None, :], count, 0), axis=1)
    return peak, tl.maximum(low, floor), low, high, above, whole, inside


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    logits, stride, temperature, top_k, top_p, min_p, peaks, cuts, counts, masses, few, each, size,
    STRETCH: tl.constexpr, STRETCHES: tl.constexpr, CUTS: tl.constexpr, MOST: tl.constexpr,
):
    """Copies a stretch's part of the list that is searched, after the parts of the stretches before it."""
    row, mine = tl.program_id(0), tl.program_id(1)
    heat, most, share, least, some = _filters(row // each, temperature, top_k, top_p, min_p, size)
    if some:
        _, _, low, high, _, _, inside = _bracket(
            row, peaks, cuts, counts, masses, tl.num_programs(1), most, share, least, STRETCHES, CUTS
        )
        stretch = tl.arange(0, STRETCHES)
        if (tl.sum(inside) <= MOST) & (tl.sum(tl.where(stretch == mine, inside, 0)) > 0):
            place = mine * STRETCH + tl.arange(0, STRETCH)
            line = logits + row.to(tl.int64) * stride
            value = tl.div_rn(tl.load(line + place, mask=place < size, other=float("nan")), heat)
            kept = (value >= low) & (value < high)
            to = tl.sum(tl.where(stretch < mine, inside, 0)) + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            tl.store(few + row.to(tl.int64) * MOST + to, value, mask=kept & (to < MOST))


@triton.jit
def _weights_from(source, size, divisor, least, peak, by_mass, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns, for each of eight `least`, how many numbers of a list reach it, or their mass relative to the peak."""
    total = tl.zeros((BLOCK, 8), tl.float32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.div_rn(tl.load(source + place, mask=place < size, other=float("nan")), divisor)
        weight = tl.where(by_mass, tl.exp(value - peak), 1.0)
        total += tl.where(value[:, None] >= least[None, :], weight[:, None], 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _edge(  # type: ignore[no-untyped-def]
    source, size, divisor, least, most, peak, above, by_mass, target, BLOCK: tl.constexpr
):
    """Finds the largest number from `least` to `most` that, with all numbers above it, reaches `target`; else `least`.
    """
    low = ordered(least.to(tl.int32, bitcast=True)).to(tl.int64)
    high = ordered(most.to(tl.int32, bitcast=True)).to(tl.int64)
    while low < high:
        step = (high - low + 7) >> 3
        tried = tl.minimum(low + step * (tl.arange(0, 8) + 1), high)
        values = ordered(tried.to(tl.int32)).to(tl.float32, bitcast=True)
        reaches = above + _weights_from(source, size, divisor, values, peak, by_mass, BLOCK) >= target
        low = tl.maximum(low, tl.max(tl.where(reaches, tried, low)))
        high = tl.minimum(high, tl.min(tl.where(reaches, high, tried - 1)))
    return ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _search_kernel(  # type: ignore[no-untyped-def]
    logits, stride, temperature, top_k, top_p, min_p, peaks, cuts, counts, masses, few, floors, each, size, stretches,
    STRETCHES: tl.constexpr, CUTS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):
    """Finds one row's floor: by min-p, then top-k, then top-p on what is left."""
    row = tl.program_id(0)
    heat, most, share, least, some = _filters(row // each, temperature, top_k, top_p, min_p, size)
    floor = float("-inf")
    if some:
        peak, lowest, _, high, above, whole, inside = _bracket(
            row, peaks, cuts, counts, masses, stretches, most, share, least, STRETCHES, CUTS
        )
        if tl.abs(peak) < float("inf"):
            floor = lowest
            source, length, divisor = few + row.to(tl.int64) * MOST, tl.sum(inside), 1.0
            if length > MOST:
                source, length, divisor, above = logits + row.to(tl.int64) * stride, size, heat, 0.0
            if most > 0:
                count = most.to(tl.float32)
                floor = _edge(source, length, divisor, floor, peak, peak, 0.0, False, count, BLOCK)
            if share < 1.0:
                if (most > 0) | (least > 0.0):
                    from_floor = tl.zeros((8,), tl.float32) + floor
                    whole = tl.max(_weights_from(source, length, divisor, from_floor, peak, True, BLOCK))
                top = tl.minimum(high, peak)
                floor = _edge(source, length, divisor, floor, top, peak, above, True, share * whole, BLOCK)
    tl.store(floors + row, floor)


def find_floors(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, each: int, scratch: FilterScratch
) -> None:
    """Fills `scratch.floors` for fp32 logits [rows, vocabulary]; row r has the settings of sequence r // each."""
    rows, size = logits.shape
    stretches = scratch.peaks.shape[1]
    settings = logits, logits.stride(0), temperature, top_k, top_p, min_p
    found = scratch.peaks, scratch.cuts, scratch.counts, scratch.masses
    padded = triton.next_power_of_2(stretches)
    _weigh_kernel[(rows, stretches)](
        *settings, *found, each, size, STRETCH, _SAMPLED, _CUTS, _WEIGHED_AT_ONCE, num_warps=8
    )
    _gather_kernel[(rows, stretches)](
        *settings, *found, scratch.few, each, size, STRETCH, padded, _CUTS, MOST_GATHERED, num_warps=8
    )
    _search_kernel[(rows,)](
        *settings, *found, scratch.few, scratch.floors, each, size, stretches, padded, _CUTS, MOST_GATHERED,
        _SEARCHED_AT_ONCE, num_warps=16,
    )
