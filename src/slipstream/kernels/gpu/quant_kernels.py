"""Triton kernels that read packed blocks: a product with 16 to 64 rows, whole matrices as bf16, and single rows.

A word holds one code of each of its planes (packing.py). Codes therefore become weights in place, by shifts that are
known when the kernel is compiled, and every dot reads a plane's inputs in their natural order. Weights are rounded to
bf16 and then multiplied like dense ones, so unpacking costs no more for 64 rows than for 16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.gpu.dense_kernels import combined

TILE_ROWS = tl.constexpr(64)  # outputs of a tile; packing.py has the same number

# The instructions unpack two weights at a time, one in each half of a register. An integer below 256 whose bits are
# read as a bf16 is that integer times 2^-133, so codes need no conversion: they are masked, and scales make up for the
# power of two. Everything is exact up to the rounding of the fma.
_CODES = """{ .reg .b32 code;
    shr.b32 code, $1, $2;
    and.b32 code, code, $4;"""
_HIGH_BITS = """{ .reg .b32 code, high;
    shl.b32 high, $12, $13;
    shr.b32 high, high, $15;
    shr.b32 code, $1, $2;
    and.b32 code, code, $4;
    lop3.b32 code, high, 0x00300030, code, 0xEA;"""
_CENTRE = """
    sub.bf16x2 code, code, $10;"""
_SCALE = """
    fma.rn.bf16x2 $0, code, $6, $8; }"""
CODES = tl.constexpr(_CODES + _SCALE)
CODES_WITH_OFFSETS = tl.constexpr(_CODES + _CENTRE + _SCALE)
HIGH_CODES = tl.constexpr(_HIGH_BITS + _SCALE)
HIGH_CODES_WITH_OFFSETS = tl.constexpr(_HIGH_BITS + _CENTRE + _SCALE)
PAIR = tl.constexpr("prmt.b32 $0, $1, 0, $2;")
PAIR_TIMES = tl.constexpr("""{ .reg .b32 pair;
    prmt.b32 pair, $1, 0, $2;
    mul.bf16x2 $0, pair, $3; }""")
SIXTEENTH = tl.constexpr(0x3D803D80)  # 1/16 as two bf16
MINUS = tl.constexpr(0x80008000 - 2**32)  # the sign bits of two bf16


@triton.jit
def code_integers(words, high, PLANE: tl.constexpr, CRUMB: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a plane's codes as int32; CRUMB is the place of their two high bits in a word of `high`."""
    codes = (words.to(tl.int32) >> (BITS * PLANE)) & ((1 << BITS) - 1)
    if HIGH:
        codes |= ((high.to(tl.int32) >> (2 * CRUMB)) & 3) << 4
    return codes


@triton.jit
def plane_pair(packed, PLANE: tl.constexpr, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns one of the bf16 numbers in a wide integer, twice in a register; it is multiplied by FACTOR unless that is
    0.
    """
    half = (packed >> (32 * (PLANE // 2))).to(tl.int32)
    selector = tl.full(half.shape, 0x1010 if PLANE % 2 == 0 else 0x3232, tl.int32)
    if FACTOR == 0:
        pair = tl.inline_asm_elementwise(PAIR, "=r,r,r", [half, selector], dtype=tl.int32, is_pure=True, pack=1)
    else:
        factor = tl.full(half.shape, FACTOR, tl.int32)
        pair = tl.inline_asm_elementwise(
            PAIR_TIMES, "=r,r,r,r", [half, selector, factor], dtype=tl.int32, is_pure=True, pack=1
        )
    return pair


@triton.jit
def plane_number(packed, PLANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns one of the bf16 numbers in a wide integer, in fp32."""
    half = (packed >> (32 * (PLANE // 2))).to(tl.int32)
    return ((half >> (16 * (PLANE % 2))) << 16).to(tl.float32, bitcast=True)


@triton.jit
def plane_numbers(words, high, scales, offsets, PLANE: tl.constexpr, CRUMB: tl.constexpr, BITS: tl.constexpr,  # type: ignore[no-untyped-def]
                  HIGH: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr):  # fmt: skip
    """Returns a plane's weights in fp32."""
    codes = (code_integers(words, high, PLANE, CRUMB, BITS, HIGH) - ZERO).to(tl.float32)
    numbers = codes * (plane_number(scales, PLANE) * 2.0**-70 * 2.0**-63)  # in two factors, as 2^-133 is not normal
    if OFFSETS:
        numbers += plane_number(offsets, PLANE)
    return numbers


@triton.jit
def plane_weights(words, high, scales, offsets, PLANE: tl.constexpr, CRUMB: tl.constexpr, BITS: tl.constexpr,  # type: ignore[no-untyped-def]
                  HIGH: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr):  # fmt: skip
    """Returns a plane's weights in bf16, computed by the instructions above."""
    # the upper of two nibbles of a byte is not shifted down, and is therefore sixteen times as large
    lift: tl.constexpr = 16 if BITS == 4 and not HIGH and PLANE % 2 == 1 else 1
    shape: tl.constexpr = words.shape
    shift = tl.full(shape, BITS * PLANE - (4 if lift == 16 else 0), tl.int32)
    mask = tl.full(shape, ((1 << BITS) - 1) * lift * 0x10001, tl.int32)
    centre = tl.full(shape, ZERO * lift * 0x10001, tl.int32)
    scale = tl.broadcast_to(plane_pair(scales, PLANE, SIXTEENTH if lift == 16 else 0), shape)
    if OFFSETS:
        offset = tl.broadcast_to(plane_pair(offsets, PLANE, 0), shape)
    else:
        offset = tl.broadcast_to(plane_pair(scales, PLANE, MINUS + ZERO * 0x10001), shape)
    if HIGH:
        left = tl.full(shape, 4 - 2 * CRUMB if CRUMB < 2 else 0, tl.int32)
        right = tl.full(shape, 2 * CRUMB - 4 if CRUMB > 2 else 0, tl.int32)
        weights = tl.inline_asm_elementwise(
            HIGH_CODES_WITH_OFFSETS if OFFSETS else HIGH_CODES, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words, shift, mask, scale, offset, centre, high, left, right], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        weights = tl.inline_asm_elementwise(
            CODES_WITH_OFFSETS if OFFSETS else CODES, "=r,r,r,r,r,r,r,r,r,r,r,r",
            [words, shift, mask, scale, offset, centre], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return weights


@triton.jit
def block_sums(words_ptr, high_ptr, scale_ptr, offset_ptr, output, x_rows, x_known, inputs, steps, first, last,  # type: ignore[no-untyped-def]
               BITS: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
               OFFSETS: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr, SOME: tl.constexpr,
               STAGES: tl.constexpr, EARLY: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Sums [outputs, rows] over the turns from `first` to `last`, with the weights as the M side of every dot.

    Rows are given by their start addresses. With SOME, rows outside `x_known` count as zeros and are not read.
    """
    planes: tl.constexpr = 16 // BITS
    tile: tl.constexpr = output.shape[0]
    # Every dot takes one plane of several steps, or of every second step if two steps share a word of high bits.
    apart: tl.constexpr = 2 if HIGH else 1
    taken: tl.constexpr = UNROLL // apart
    within = tl.arange(0, GROUP)
    inner = output % TILE_ROWS
    block = (output // TILE_ROWS) * steps
    # Weights are unpacked in the registers that the dots read only if all their inputs are loads of as many dimensions.
    ordinal = tl.arange(0, taken)
    groups_at = (block * TILE_ROWS + inner)[:, None, None] + (ordinal * (apart * TILE_ROWS))[None, :, None]
    words_at = words_ptr + groups_at.to(tl.int64) * GROUP + within[None, None, :]
    high_at = (block // 2) * TILE_ROWS + inner
    high_at = high_ptr + (high_at[:, None, None] + (ordinal * TILE_ROWS)[None, :, None]).to(tl.int64) * GROUP
    high_at += within[None, None, :]
    place = tl.arange(0, taken * GROUP)
    place = place // GROUP * (apart * planes * GROUP) + place % GROUP
    x_at = x_rows[None, :] + place[:, None]
    if EARLY:
        gdc_wait()  # nothing above reads or overwrites what the kernel before writes
    acc = tl.zeros((tile, x_rows.shape[0]), tl.float32)
    # if the loop could be skipped, the assembler would let every multiplication wait for the one before
    tl.assume(first < last)
    for turn in tl.range(first, last, num_stages=STAGES):
        if HIGH:
            high = tl.load(high_at + turn * (taken * TILE_ROWS * GROUP), eviction_policy="evict_first")
        for part in tl.static_range(apart):
            step = turn * UNROLL + part
            words = tl.load(words_at + step * (TILE_ROWS * GROUP), eviction_policy="evict_first")
            if not HIGH:
                high = words
            scales = tl.load(scale_ptr + groups_at + step * TILE_ROWS)
            offsets = scales
            if OFFSETS:
                offsets = tl.load(offset_ptr + groups_at + step * TILE_ROWS)
            for plane in tl.static_range(planes):
                k = (step * planes + plane) * GROUP
                if EVEN and not SOME:
                    x = tl.load(x_at + k, eviction_policy="evict_last")
                else:
                    read = (place < inputs - k)[:, None]
                    if EVEN:
                        read = x_known[None, :]
                    elif SOME:
                        read = read & x_known[None, :]
                    x = tl.load(x_at + k, mask=read, other=0.0, eviction_policy="evict_last")
                if INTERPRETED:
                    weight = plane_numbers(words, high, scales, offsets, plane, part * planes + plane, BITS, HIGH,
                                           ZERO, OFFSETS)  # fmt: skip
                    weight = tl.reshape(weight.to(tl.bfloat16).to(tl.float32), (tile, taken * GROUP))
                    acc = tl.dot(weight, x.to(tl.float32), acc, input_precision="ieee")
                else:
                    weight = plane_weights(words, high, scales, offsets, plane, part * planes + plane, BITS, HIGH,
                                           ZERO, OFFSETS)  # fmt: skip
                    acc = tl.dot(tl.reshape(weight, (tile, taken * GROUP)), x, acc)
    return acc


@triton.jit
def quant_matmul_kernel(words_ptr, high_ptr, scale_ptr, offset_ptr, x_ptr, out_ptr, partial_ptr, ticket_ptr,  # type: ignore[no-untyped-def]
                        x_stride, out_stride, outputs, inputs, steps, unit,
                        BITS: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
                        OFFSETS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
                        UNROLL: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, IN_PARTS: tl.constexpr,
                        EARLY: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Computes out[row, output] = sum of x[row, k] * weight[output, k]."""
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * TILE + tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    rounds = steps // UNROLL
    each = tl.cdiv(rounds, SPLIT)
    first = split * each
    acc = block_sums(words_ptr, high_ptr, scale_ptr, offset_ptr, output, x_ptr + row * x_stride, row, inputs, steps,
                     first, tl.minimum(first + each, rounds), BITS, HIGH, GROUP, ZERO, OFFSETS, UNROLL, EVEN, False,
                     STAGES, EARLY, INTERPRETED)  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    combined(partial_ptr, ticket_ptr, out_ptr, out_stride, acc, unit, tile, split, outputs, ROWS, TILE, SPLIT, IN_PARTS)


@triton.jit
def expand_kernel(words_ptr, high_ptr, scale_ptr, offset_ptr, ids_ptr, out_ptr, out_stride, start, outputs, inputs,  # type: ignore[no-untyped-def]
                  steps, unit, BITS: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
                  ZERO: tl.constexpr, OFFSETS: tl.constexpr, TILE: tl.constexpr, CHOSEN: tl.constexpr):  # fmt: skip
    """Writes rows of the weight in the type of `out`: those from `start` on, or those in `ids`.

    A program writes two steps of TILE rows.
    """
    local = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = local < outputs
    output = start + local
    if CHOSEN:
        output = tl.load(ids_ptr + local, mask=inside, other=0).to(tl.int32)
    planes: tl.constexpr = 16 // BITS
    within = tl.arange(0, GROUP)
    for part in tl.static_range(2):
        ahead = tl.program_id(1) * 2 + part
        step = tl.minimum(ahead, steps - 1)  # nothing is stored for a step past the last one
        at = (((output // TILE_ROWS) * steps + step) * TILE_ROWS + output % TILE_ROWS)[:, None]
        words = tl.load(words_ptr + at.to(tl.int64) * GROUP + within[None, :], mask=inside[:, None], other=0)
        high = words
        if HIGH:
            pair = (output // TILE_ROWS) * (steps // 2) + step // 2
            place = (pair * TILE_ROWS + output % TILE_ROWS).to(tl.int64)[:, None] * GROUP + within[None, :]
            high = tl.load(high_ptr + place, mask=inside[:, None], other=0)
        scales = tl.load(scale_ptr + at, mask=inside[:, None], other=0)
        offsets = scales
        if OFFSETS:
            offsets = tl.load(offset_ptr + at, mask=inside[:, None], other=0)
        for plane in tl.static_range(planes):
            k = (ahead * planes + plane) * GROUP + within
            numbers = plane_numbers(
                words, high, scales, offsets, plane, part * planes + plane, BITS, HIGH, ZERO, OFFSETS
            )
            # as in a product, numbers are rounded before they are multiplied by the unit, a power of two
            numbers = numbers.to(tl.bfloat16).to(tl.float32) * unit
            place = out_ptr + local.to(tl.int64)[:, None] * out_stride + k[None, :]
            tl.store(place, numbers.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (k < inputs)[None, :])
