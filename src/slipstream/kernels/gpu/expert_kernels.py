"""Triton kernels of a mixture of experts: choosing and grouping, products with the chosen experts only, and their sum.

A pair is a row and one of the experts it chose. Pairs of the same expert are grouped, 16 of them form a tile, and the
products of a tile read the expert's weights once. The sums of a pair do not depend on the other pairs in its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.gpu.dense_kernels import dense_sums
from slipstream.kernels.gpu.elementwise import store_normed
from slipstream.kernels.gpu.quant_kernels import TILE_ROWS, block_sums

PAIRS = tl.constexpr(16)  # pairs per tile
# a tile is encoded as its expert plus SIXTEENS times the index of its 16 pairs in the list
SIXTEENS = tl.constexpr(2**16)
GATED_BY_SILU = tl.constexpr(1)
GATED_BY_GELU = tl.constexpr(2)
GONE = tl.constexpr(-(2**31))  # the key of an expert that is already chosen, below the key of every other
NO_NUMBER = tl.constexpr(-(2**31) + 1)  # the key of NaN


@triton.jit
def ordered(numbers):  # type: ignore[no-untyped-def]
    """Maps numbers to integers in the same order; NaN comes last, and both zeros are equal."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)
    return tl.where(numbers == numbers, bits ^ ((bits >> 31) & 0x7FFFFFFF), NO_NUMBER)


@triton.jit
def score_kernel(weight_ptr, x_ptr, out_ptr, x_stride, out_stride, outputs, inputs, ROWS: tl.constexpr,  # type: ignore[no-untyped-def]
                 TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
                 INTERPRETED: tl.constexpr):  # fmt: skip
    """Computes out[part, row, output] = the sum of x[row, k] * weight[output, k] over a part of the inputs."""
    part = tl.program_id(1)
    output, row = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, ROWS)
    k = part * DEPTH + tl.arange(0, DEPTH)
    weight_at = weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs + k[None, :]
    x_at = x_ptr + row[None, :] * x_stride + k[:, None]
    # the weights are loaded before the wait, because no earlier kernel writes them
    weight = tl.load(weight_at) if EVEN else tl.load(weight_at, mask=(k < inputs)[None, :], other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_at) if EVEN else tl.load(x_at, mask=(k < inputs)[:, None], other=0.0)
    if INTERPRETED:
        weight, x = weight.to(tl.float32), x.to(tl.float32)
    sums = tl.dot(weight, x, input_precision="ieee")
    place = out_ptr + (part * ROWS + row)[None, :] * out_stride + output[:, None]
    tl.store(place, sums, mask=(output < outputs)[:, None])


@triton.jit
def most_wanted(wanted, inside, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the ACTIVE most wanted experts, best first, one per lane; of two wanted equally, the lower one comes
    first.
    """
    expert, lane = tl.arange(0, WIDTH), tl.arange(0, LANES)
    key = tl.where(inside, ordered(wanted), GONE)
    chosen = tl.zeros((LANES,), tl.int32)
    for rank in tl.static_range(ACTIVE):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, WIDTH), 0)
        chosen = tl.where(lane == rank, best, chosen)
        key = tl.where(expert == best, GONE, key)
    return chosen


@triton.jit
def route_kernel(logits_ptr, bias_ptr, expert_scale_ptr, places_ptr, shares_ptr, experts_ptr, lists_ptr, tiles_ptr,  # type: ignore[no-untyped-def]
                 counts_ptr, part_stride, row_stride, scratch_place, rows, softcap, scale, PARTS: tl.constexpr,
                 EXPERTS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, ACTIVE: tl.constexpr,
                 SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
                 HAS_SCALE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, JOINED: tl.constexpr,
                 ALONE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Handles one row per program: its experts and their shares and, if there are other rows, its pairs in the lists.

    Every sixteenth pair of a list opens a tile. Pairs enter a list in any order, because their sums do not depend on
    it.
    """
    row = tl.program_id(0)
    expert, lane = tl.arange(0, WIDTH), tl.arange(0, LANES)
    inside = expert < EXPERTS
    own_logits = logits_ptr + row * row_stride
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=inside, other=0.0)
    used = tl.load(places_ptr + row) < scratch_place
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    logits = tl.load(own_logits + expert, mask=inside, other=0.0)
    shared = 1.0
    if GATED:
        shared = tl.load(own_logits + EXPERTS)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(own_logits + part * part_stride + expert, mask=inside, other=0.0)
        if GATED:
            shared += tl.load(own_logits + part * part_stride + EXPERTS)
    if GATED:
        shared = tl.sigmoid(shared)
    logits = tl.where(inside, logits, float("-inf"))
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
        wanted = scores + bias
    chosen = most_wanted(wanted, inside, WIDTH, ACTIVE, LANES)
    shares = tl.where(lane < ACTIVE, tl.gather(scores, chosen, 0), 0.0)
    if RENORMALISE:
        shares = shares / tl.sum(shares, 0)
    shares *= scale
    if HAS_SCALE:
        shares *= tl.load(expert_scale_ptr + chosen)
    if JOINED:
        chosen = tl.where(lane == ACTIVE, EXPERTS, chosen)
    ranked = lane < ACTIVE + JOINED
    mine, pair = tl.where(used, lane, LANES) < ACTIVE + JOINED, row * (ACTIVE + JOINED) + lane
    tl.store(shares_ptr + row * (ACTIVE + SHARED) + lane, tl.where(lane < ACTIVE, shares, shared),
             mask=lane < ACTIVE + SHARED)  # fmt: skip
    tl.store(experts_ptr + pair, tl.where(used, chosen, -1), mask=ranked)
    if not ALONE:
        ordinal = tl.atomic_add(counts_ptr + chosen, 1, mask=mine, sem="relaxed")
        tl.store(lists_ptr + chosen * rows + ordinal, pair, mask=mine)
        opens = mine & (ordinal % PAIRS == 0)
        tile = tl.atomic_add(counts_ptr + EXPERTS + JOINED + lane * 0, 1, mask=opens, sem="relaxed")
        tl.store(tiles_ptr + tile, chosen + ordinal // PAIRS * SIXTEENS, mask=opens)


@triton.jit
def outputs_of_part(part, outputs, TILE: tl.constexpr, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the outputs of a program: neighbours or, with a gate, half as many gates and the outputs that they gate.

    A last part that is not full reads the last output again; that result is not stored.
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
    """Stores a program's outputs for the pairs of its tile; with a gate, the gates come first in the sums."""
    numbers, width = sums, outputs
    size: tl.constexpr = TILE if GATE == 0 else TILE // 2
    if GATE != 0:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, TILE // 2, PAIRS)), (1, 2, 0)))
        if GATE == GATED_BY_SILU:
            numbers = gate * tl.sigmoid(gate) * up
        else:  # the GELU with a tanh: 0.5 * (1 + tanh(u)) is the sigmoid of 2 u
            numbers = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
        width = outputs // 2
    output = part * size + tl.arange(0, size)
    place = out_ptr + pair.to(tl.int64)[None, :] * width + output[:, None]
    tl.store(place, numbers.to(out_ptr.dtype.element_ty), mask=known[None, :] & (output < width)[:, None])


@triton.jit
def pairs_of_tile(experts_ptr, lists_ptr, tiles_ptr, counts_ptr, total_ptr, rows, ALONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a program's expert (-1: no work), its pairs, and which of them exist.

    A single row has a tile per pair.
    """
    slot, column = tl.program_id(1), tl.arange(0, PAIRS)
    if ALONE:
        expert, pair, known = tl.load(experts_ptr + slot), slot + column * 0, column == 0
    else:
        # loads that do not depend on each other are issued together; entries that do not exist hold arbitrary numbers
        total, tile = tl.load(total_ptr), tl.load(tiles_ptr + slot)
        expert, place = tl.where(slot < total, tile % SIXTEENS, -1), tile // SIXTEENS * PAIRS + column
        known = place < tl.load(counts_ptr + expert, mask=expert >= 0, other=0)
        pair = tl.load(lists_ptr + expert * rows + place, mask=tl.where(expert >= 0, place, rows) < rows, other=0)
        pair = tl.where(known, pair, 0)
    return expert, pair, known


@triton.jit
def dense_experts_kernel(weight_ptr, x_ptr, out_ptr, experts_ptr, lists_ptr, tiles_ptr, counts_ptr, total_ptr, rows,  # type: ignore[no-untyped-def]
                         x_stride, outputs, inputs, SHARING: tl.constexpr, GATE: tl.constexpr, TILE: tl.constexpr,
                         DEPTH: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, ALONE: tl.constexpr,
                         EARLY: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Computes out[pair] = weight[expert] @ x[pair // SHARING] for a tile of pairs and a part of the outputs."""
    part = tl.program_id(0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert, pair, known = pairs_of_tile(experts_ptr, lists_ptr, tiles_ptr, counts_ptr, total_ptr, rows, ALONE)
    if expert >= 0:
        output = outputs_of_part(part, outputs, TILE, GATE)
        weight_rows = weight_ptr + expert.to(tl.int64) * outputs * inputs + output.to(tl.int64) * inputs
        sums = dense_sums(weight_rows, x_ptr + (pair // SHARING).to(tl.int64) * x_stride, known, inputs, 0,
                          tl.cdiv(inputs, DEPTH), DEPTH, EVEN, True, STAGES, False, INTERPRETED)  # fmt: skip
        store_pairs(out_ptr, sums, pair, known, part, outputs, TILE, GATE)


@triton.jit
def quant_experts_kernel(words_ptr, high_ptr, scale_ptr, offset_ptr, x_ptr, out_ptr, experts_ptr, lists_ptr,  # type: ignore[no-untyped-def]
                         tiles_ptr, counts_ptr, total_ptr, rows, x_stride, outputs, inputs, steps, unit,
                         BITS: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
                         OFFSETS: tl.constexpr, SHARING: tl.constexpr, GATE: tl.constexpr, TILE: tl.constexpr,
                         UNROLL: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, ALONE: tl.constexpr,
                         EARLY: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Does what `dense_experts_kernel` does with quantised blocks; an expert's outputs fill tiles of the packing."""
    part = tl.program_id(0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert, pair, known = pairs_of_tile(experts_ptr, lists_ptr, tiles_ptr, counts_ptr, total_ptr, rows, ALONE)
    if expert >= 0:
        output = outputs_of_part(part, outputs, TILE, GATE)
        groups = expert.to(tl.int64) * (outputs // TILE_ROWS) * steps * TILE_ROWS
        sums = block_sums(words_ptr + groups * GROUP, high_ptr + groups // 2 * GROUP, scale_ptr + groups,
                          offset_ptr + groups, output, x_ptr + (pair // SHARING).to(tl.int64) * x_stride, known,
                          inputs, steps, 0, steps // UNROLL, BITS, HIGH, GROUP, ZERO, OFFSETS, UNROLL, EVEN, True,
                          STAGES, False, INTERPRETED)  # fmt: skip
        store_pairs(out_ptr, sums * unit, pair, known, part, outputs, TILE, GATE)


@triton.jit
def mixed_columns(row, column, inside, answers_ptr, shares_ptr, extra_ptr, places_ptr, rows, width, scratch_place,  # type: ignore[no-untyped-def]
                  RANKS: tl.constexpr, SHARES: tl.constexpr):  # fmt: skip
    """Adds a row's answers by their shares, in the order of its ranking, and then the shared expert's answer."""
    total = tl.zeros(column.shape, tl.float32)
    if (row < rows) & (tl.load(places_ptr + row) < scratch_place):
        pair = row.to(tl.int64) * RANKS
        for rank in tl.static_range(RANKS):
            answer = tl.load(answers_ptr + (pair + rank) * width + column, mask=inside, other=0.0)
            total += tl.load(shares_ptr + row * SHARES + rank) * answer
        if RANKS < SHARES:
            extra = tl.load(extra_ptr + row.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(shares_ptr + row * SHARES + RANKS) * extra
    return total.to(tl.bfloat16)


@triton.jit
def forget_pairs(row, experts_ptr, counts_ptr, total_ptr, rows, RANKS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Resets the counters that the row has incremented."""
    if row < rows:
        rank = tl.arange(0, LANES)
        expert = tl.load(experts_ptr + row * RANKS + rank, mask=rank < RANKS, other=-1)
        tl.store(counts_ptr + expert, 0, mask=expert >= 0)
        tl.store(total_ptr, 0)


@triton.jit
def combine_kernel(answers_ptr, shares_ptr, extra_ptr, places_ptr, out_ptr, experts_ptr, counts_ptr, total_ptr, rows,  # type: ignore[no-untyped-def]
                   width, scratch_place, RANKS: tl.constexpr, SHARES: tl.constexpr, LANES: tl.constexpr,
                   BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Adds up a row's answers."""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    mixed = mixed_columns(row, column, inside, answers_ptr, shares_ptr, extra_ptr, places_ptr, rows, width,
                          scratch_place, RANKS, SHARES)  # fmt: skip
    tl.store(out_ptr + row.to(tl.int64) * width + column, mixed, mask=inside)
    if tl.program_id(0) == 0:
        forget_pairs(row, experts_ptr, counts_ptr, total_ptr, rows, RANKS, LANES)


@triton.jit
def combine_norm_kernel(answers_ptr, shares_ptr, extra_ptr, places_ptr, residual_ptr, weight_ptr, out_ptr, tap_ptr,  # type: ignore[no-untyped-def]
                        experts_ptr, counts_ptr, total_ptr, tap_stride, rows, eps, scratch_place,
                        WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, SHARES: tl.constexpr,
                        LANES: tl.constexpr, HAS_TAP: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Adds up a row's answers, adds them to the stream and norms it."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    place = row.to(tl.int64) * WIDTH + column
    x = tl.load(residual_ptr + place, mask=inside, other=0.0)
    mixed = mixed_columns(row, column, inside, answers_ptr, shares_ptr, extra_ptr, places_ptr, rows, WIDTH,
                          scratch_place, RANKS, SHARES)  # fmt: skip
    x += mixed.to(tl.float32)
    tl.store(residual_ptr + place, x, mask=inside)
    store_normed(x, row.to(tl.int64), column, inside, weight, out_ptr, tap_ptr, tap_stride, eps, WIDTH, HAS_TAP)
    forget_pairs(row, experts_ptr, counts_ptr, total_ptr, rows, RANKS, LANES)
