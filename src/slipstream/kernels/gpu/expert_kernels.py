"""Triton kernels of a mixture of experts: choosing and grouping, products with the chosen experts alone, and their sum.

A pair is a row and one of the experts it chose. Pairs of the same expert stand together, 16 of them make a tile, and a
tile's products read the expert's weights once. A pair's sums do not depend on who shares its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.gpu.dense_kernels import dense_sums
from slipstream.kernels.gpu.quant_kernels import TILE_ROWS, block_sums

PAIRS = tl.constexpr(16)  # in a tile
GATED_BY_SILU = tl.constexpr(1)
GATED_BY_GELU = tl.constexpr(2)
GONE = tl.constexpr(-(2**63) + 1)  # below the key of any expert that can still be chosen
NO_NUMBER = tl.constexpr(-(2**31) + 1)


@triton.jit
def ordered(numbers):  # type: ignore[no-untyped-def]
    """Integers in the order of the numbers; what is no number comes last, and zeros have one sign."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)
    return tl.where(numbers == numbers, bits ^ ((bits >> 31) & 0x7FFFFFFF), NO_NUMBER)


@triton.jit
def group_pairs(marks_ptr, pairs_ptr, tiles_ptr, rows, most_tiles, WIDTH: tl.constexpr, RANKS: tl.constexpr,  # type: ignore[no-untyped-def]
                CHUNK: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Pairs by expert and, within one, by row, in tiles; of a tile its expert (-1 behind the last) and its size."""
    expert = tl.arange(0, WIDTH)
    within = tl.arange(0, CHUNK)
    at = marks_ptr + within[:, None] * WIDTH + expert[None, :]
    counts = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, rows, CHUNK):
        known = (start + within < rows)[:, None]
        marks = tl.load(at + start * WIDTH, mask=known, other=0, cache_modifier=".cg")
        counts += tl.sum((marks != 0).to(tl.int32), 0)
    tiles = (counts + PAIRS - 1) // PAIRS
    first = tl.cumsum(tiles, 0) - tiles
    spare = tl.arange(0, MOST)
    tl.store(tiles_ptr + spare * 2, -1, mask=(spare >= tl.sum(tiles, 0)) & (spare < most_tiles))
    for tile in range(tl.cdiv(rows, PAIRS)):
        left = counts - tile * PAIRS
        own_ptr = tiles_ptr + (first + tile) * 2
        tl.store(own_ptr, expert, mask=left > 0)
        tl.store(own_ptr + 1, tl.minimum(left, PAIRS), mask=left > 0)
    position = first * PAIRS
    for start in range(0, rows, CHUNK):
        known = (start + within < rows)[:, None]
        marks = tl.load(at + start * WIDTH, mask=known, other=0, cache_modifier=".cg").to(tl.int32)
        chosen = (marks != 0).to(tl.int32)
        pair = (start + within)[:, None] * RANKS + marks - 1
        place = position[None, :] + tl.cumsum(chosen, 0) - chosen
        tl.store(pairs_ptr + place, pair, mask=chosen != 0)
        position += tl.sum(chosen, 0)


@triton.jit
def route_kernel(logits_ptr, bias_ptr, expert_scale_ptr, places_ptr, shares_ptr, marks_ptr, pairs_ptr, tiles_ptr,  # type: ignore[no-untyped-def]
                 ticket_ptr, logits_stride, scratch_place, rows, most_tiles, softcap, scale,
                 EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SIGMOID: tl.constexpr,
                 RENORMALISE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
                 SHARED: tl.constexpr, GATED: tl.constexpr, JOINED: tl.constexpr, CHUNK: tl.constexpr,
                 MOST: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """A row a program: its experts (a mark: the rank plus one) and their shares; the last to come groups all pairs."""
    row = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    inside = expert < EXPERTS
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    used = tl.load(places_ptr + row) < scratch_place
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=inside, other=float("-inf"))
    if SOFTCAP:
        logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(tl.where(inside, logits, float("-inf")), 0))
        scores = tl.where(inside, scores, 0.0)
        scores = scores / tl.sum(scores, 0)
    wanted = scores
    if HAS_BIAS:
        wanted = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    # the lower expert comes first where two are wanted alike
    key = (ordered(wanted).to(tl.int64) << 32) | (WIDTH - 1 - expert).to(tl.int64)
    key = tl.where(inside, key, GONE)
    marks = tl.zeros((WIDTH,), tl.int32)
    for rank in tl.static_range(ACTIVE):
        best = key == tl.max(key, 0)
        marks = tl.where(best, rank + 1, marks)
        key = tl.where(best, GONE, key)
    shares = scores
    if RENORMALISE:
        shares = scores / tl.sum(tl.where(marks > 0, scores, 0.0), 0)
    shares *= scale
    if HAS_SCALE:
        shares *= tl.load(expert_scale_ptr + expert, mask=inside, other=0.0)
    marks = tl.where(used, marks, 0)
    own_shares = shares_ptr + row * (ACTIVE + SHARED)
    tl.store(own_shares + marks - 1, shares, mask=marks > 0)
    if SHARED:
        share = 1.0
        if GATED:
            share = tl.sigmoid(tl.load(logits_ptr + row * logits_stride + EXPERTS))
        tl.store(own_shares + ACTIVE, share, mask=used)
    if JOINED:
        marks = tl.where(expert == EXPERTS, tl.where(used, ACTIVE + 1, 0), marks)
    tl.store(marks_ptr + row * WIDTH + expert, marks.to(tl.int8), cache_modifier=".cg")
    tl.debug_barrier()  # everybody's marks are written before the ticket says so
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == rows - 1:
        group_pairs(marks_ptr, pairs_ptr, tiles_ptr, rows, most_tiles, WIDTH, ACTIVE + JOINED, CHUNK, MOST)
        tl.store(ticket_ptr, 0)


@triton.jit
def outputs_of_part(part, outputs, TILE: tl.constexpr, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The outputs of a program: neighbours, or with a gate half as many and what each of them is gated with.

    A last part that is not full reads the last output again; what it makes of it is not stored.
    """
    local = tl.arange(0, TILE)
    half: tl.constexpr = TILE // 2
    if GATE == 0:
        output = tl.minimum(part * TILE + local, outputs - 1)
    else:
        gates = outputs // 2
        output = tl.minimum(part * half + local % half, gates - 1) + local // half * gates
    return output


@triton.jit
def store_pairs(out_ptr, sums, pair, known, part, outputs, TILE: tl.constexpr, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's outputs of the pairs of its tile; gates come first in a tile."""
    numbers, width = sums, outputs
    size: tl.constexpr = TILE if GATE == 0 else TILE // 2
    if GATE != 0:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, TILE // 2, PAIRS)), (1, 2, 0)))
        if GATE == GATED_BY_SILU:
            numbers = gate * tl.sigmoid(gate) * up
        else:
            numbers = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
        width = outputs // 2
    output = part * size + tl.arange(0, size)
    place = out_ptr + pair.to(tl.int64)[None, :] * width + output[:, None]
    tl.store(place, numbers.to(out_ptr.dtype.element_ty), mask=known[None, :] & (output < width)[:, None])


@triton.jit
def pairs_of_tile(pairs_ptr, tiles_ptr):  # type: ignore[no-untyped-def]
    """A program's expert (-1: it has no work), its pairs, and which of them exist."""
    tile, column = tl.program_id(0), tl.arange(0, PAIRS)
    # three loads that do not wait for each other; of pairs that do not exist the memory may hold anything
    expert, count = tl.load(tiles_ptr + tile * 2), tl.load(tiles_ptr + tile * 2 + 1)
    pair, known = tl.load(pairs_ptr + tile * PAIRS + column), column < count
    return expert, tl.where(known, pair, 0), known


@triton.jit
def dense_experts_kernel(weight_ptr, x_ptr, out_ptr, pairs_ptr, tiles_ptr, x_stride, outputs, inputs,  # type: ignore[no-untyped-def]
                         SHARING: tl.constexpr, GATE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
                         EVEN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
                         INTERPRETED: tl.constexpr):  # fmt: skip
    """out[pair] = weight[expert] @ x[pair // SHARING] for a tile of pairs and a part of the outputs."""
    part = tl.program_id(1)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert, pair, known = pairs_of_tile(pairs_ptr, tiles_ptr)
    if expert >= 0:
        output = outputs_of_part(part, outputs, TILE, GATE)
        weight_rows = weight_ptr + expert.to(tl.int64) * outputs * inputs + output.to(tl.int64) * inputs
        sums = dense_sums(weight_rows, x_ptr + (pair // SHARING).to(tl.int64) * x_stride, known, inputs, 0,
                          tl.cdiv(inputs, DEPTH), DEPTH, EVEN, True, STAGES, False, INTERPRETED)  # fmt: skip
        store_pairs(out_ptr, sums, pair, known, part, outputs, TILE, GATE)


@triton.jit
def quant_experts_kernel(words_ptr, high_ptr, scale_ptr, offset_ptr, x_ptr, out_ptr, pairs_ptr, tiles_ptr, x_stride,  # type: ignore[no-untyped-def]
                         outputs, inputs, steps, unit, BITS: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
                         ZERO: tl.constexpr, OFFSETS: tl.constexpr, SHARING: tl.constexpr, GATE: tl.constexpr,
                         TILE: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
                         EARLY: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """The same with weights that are read as blocks; an expert's outputs fill its last tile of them."""
    part = tl.program_id(1)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert, pair, known = pairs_of_tile(pairs_ptr, tiles_ptr)
    if expert >= 0:
        output = outputs_of_part(part, outputs, TILE, GATE)
        groups = expert.to(tl.int64) * (outputs // TILE_ROWS) * steps * TILE_ROWS
        sums = block_sums(words_ptr + groups * GROUP, high_ptr + groups // 2 * GROUP, scale_ptr + groups,
                          offset_ptr + groups, output, x_ptr + (pair // SHARING).to(tl.int64) * x_stride, known,
                          inputs, steps, 0, steps // UNROLL, BITS, HIGH, GROUP, ZERO, OFFSETS, UNROLL, EVEN, True,
                          STAGES, False, INTERPRETED)  # fmt: skip
        store_pairs(out_ptr, sums * unit, pair, known, part, outputs, TILE, GATE)


@triton.jit
def combine_kernel(answers_ptr, shares_ptr, extra_ptr, places_ptr, out_ptr, rows, width, scratch_place,  # type: ignore[no-untyped-def]
                   RANKS: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """The answers of a row's pairs by their shares, in the order of its ranking, and what every row passes last."""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    if (row < rows) & (tl.load(places_ptr + row) < scratch_place):
        pair = row.to(tl.int64) * RANKS
        for rank in tl.static_range(RANKS):
            answer = tl.load(answers_ptr + (pair + rank) * width + column, mask=inside, other=0.0)
            total += tl.load(shares_ptr + row * SHARES + rank) * answer
        if RANKS < SHARES:
            extra = tl.load(extra_ptr + row.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(shares_ptr + row * SHARES + RANKS) * extra
    tl.store(out_ptr + row.to(tl.int64) * width + column, total.to(tl.bfloat16), mask=inside)
