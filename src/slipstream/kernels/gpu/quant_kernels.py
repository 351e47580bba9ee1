"""Triton kernels that read packed blocks: a product with 16 to 64 rows, whole matrices as bf16, and single rows.

A word holds one code of each of its planes (packing.py), so codes become weights in place, by shifts that are known
when the kernel is compiled, and every dot reads a plane's inputs in their natural order. Weights are rounded to bf16
and then multiplied like dense ones, so unpacking costs no more for 64 rows than for 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.gpu.dense_kernels import combined

TILE_ROWS = tl.constexpr(64)  # weights lie in tiles of this many outputs
WIDTH = tl.constexpr(64)  # words of an output in a step

# Two weights at a time, one in each half of a register. An integer below 256 whose bits are read as a bf16 is that
# integer times 2^-133, so codes need no conversion: they are masked out, and scales make up for the power of two.
# Everything is exact up to the rounding of the fma.
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
CODES_WITH_MINIMA = tl.constexpr(_CODES + _CENTRE + _SCALE)
HIGH_CODES = tl.constexpr(_HIGH_BITS + _SCALE)
HIGH_CODES_WITH_MINIMA = tl.constexpr(_HIGH_BITS + _CENTRE + _SCALE)
PAIR = tl.constexpr("prmt.b32 $0, $1, 0, $2;")
PAIR_TIMES = tl.constexpr("""{ .reg .b32 pair;
    prmt.b32 pair, $1, 0, $2;
    mul.bf16x2 $0, pair, $3; }""")
SIXTEENTH = tl.constexpr(0x3D803D80)  # 1/16 as two bf16


@triton.jit
def code_integers(words, high, PLANE: tl.constexpr, CRUMB: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A plane's codes as int32."""
    codes = (words.to(tl.int32) >> (BITS * PLANE)) & ((1 << BITS) - 1)
    if HIGH:
        codes |= ((high.to(tl.int32) >> (2 * CRUMB)) & 3) << 4
    return codes


@triton.jit
def group_number(wide, SLOT: tl.constexpr, FACTOR: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the four bf16 numbers in a wide integer: as fp32, or twice in a register and times FACTOR (two bf16)."""
    half = (wide >> (32 * (SLOT // 2))).to(tl.int32)
    if PAIRS:
        selector = tl.full(half.shape, 0x1010 if SLOT % 2 == 0 else 0x3232, tl.int32)
        if FACTOR == 0:
            number = tl.inline_asm_elementwise(PAIR, "=r,r,r", [half, selector], dtype=tl.int32, is_pure=True, pack=1)
        else:
            factor = tl.full(half.shape, FACTOR, tl.uint32).to(tl.int32, bitcast=True)
            number = tl.inline_asm_elementwise(
                PAIR_TIMES, "=r,r,r,r", [half, selector, factor], dtype=tl.int32, is_pure=True, pack=1
            )
    else:
        number = ((half << 16) if SLOT % 2 == 0 else (half >> 16) << 16).to(tl.float32, bitcast=True)
    return number[:, None]


@triton.jit
def group_numbers(packed, within, PLANE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FACTOR: tl.constexpr,  # type: ignore[no-untyped-def]
                  PAIRS: tl.constexpr):  # fmt: skip
    """A number of each group (scale or minimum) for every input of a plane."""
    one, two, three, four = packed
    if GROUP == 16:
        early = tl.where((within < 16)[None, :], group_number(one, PLANE, FACTOR, PAIRS),
                         group_number(two, PLANE, FACTOR, PAIRS))  # fmt: skip
        late = tl.where((within < 48)[None, :], group_number(three, PLANE, FACTOR, PAIRS),
                        group_number(four, PLANE, FACTOR, PAIRS))  # fmt: skip
    elif BITS == 8:
        early, late = group_number(one, PLANE, FACTOR, PAIRS), group_number(one, 2 + PLANE, FACTOR, PAIRS)
    else:
        early, late = group_number(one, PLANE, FACTOR, PAIRS), group_number(two, PLANE, FACTOR, PAIRS)
    return tl.where((within < 32)[None, :], early, late)


@triton.jit
def packed_groups(ptr, inside, BITS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The wide integers with a step's scales or minima of every output, one to four of them."""
    one = tl.load(ptr, mask=inside)
    two, three, four = one, one, one
    if BITS == 4:
        two = tl.load(ptr + TILE_ROWS, mask=inside)
    if GROUP == 16:
        three = tl.load(ptr + 2 * TILE_ROWS, mask=inside)
        four = tl.load(ptr + 3 * TILE_ROWS, mask=inside)
    return one, two, three, four


@triton.jit
def plane_numbers(words, high, scales, minima, within, PLANE: tl.constexpr, CRUMB: tl.constexpr, BITS: tl.constexpr,  # type: ignore[no-untyped-def]
                  HIGH: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr):  # fmt: skip
    """A plane's weights in fp32."""
    codes = (code_integers(words, high, PLANE, CRUMB, BITS, HIGH) - ZERO).to(tl.float32)
    scale = group_numbers(scales, within, PLANE, BITS, GROUP, 0, False)
    number = codes * (scale * 2.0**-70 * 2.0**-63)  # 2^-133 is no normal number
    if MINIMA:
        number += group_numbers(minima, within, PLANE, BITS, GROUP, 0, False)
    return number


@triton.jit
def plane_weights(words, high, scales, minima, within, PLANE: tl.constexpr, CRUMB: tl.constexpr, BITS: tl.constexpr,  # type: ignore[no-untyped-def]
                  HIGH: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr):  # fmt: skip
    """A plane's weights in bf16, by the few instructions above."""
    # the second of two neighbouring nibbles stays where it is, sixteen times as large
    lifted: tl.constexpr = BITS == 4 and not HIGH and PLANE % 2 == 1
    moved: tl.constexpr = BITS * PLANE - (4 if lifted else 0)
    mask: tl.constexpr = ((1 << BITS) - 1) * (16 if lifted else 1) * 0x10001
    centre: tl.constexpr = ZERO * (16 if lifted else 1) * 0x10001
    scale = group_numbers(scales, within, PLANE, BITS, GROUP, SIXTEENTH if lifted else 0, True)
    if MINIMA:
        offset = group_numbers(minima, within, PLANE, BITS, GROUP, 0, True)
    else:
        offset = group_numbers(scales, within, PLANE, BITS, GROUP, 0x80008000 + ZERO * 0x10001, True)
    shape: tl.constexpr = words.shape
    shift = tl.full(shape, moved, tl.int32)
    kept = tl.full(shape, mask, tl.int32)
    middle = tl.full(shape, centre, tl.int32)
    if HIGH:
        left = tl.full(shape, max(0, 4 - 2 * CRUMB), tl.int32)
        right = tl.full(shape, max(0, 2 * CRUMB - 4), tl.int32)
        weights = tl.inline_asm_elementwise(
            HIGH_CODES_WITH_MINIMA if MINIMA else HIGH_CODES, "=r" + ",r" * 16,
            [words, shift, kept, scale, offset, middle, high, left, right], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        weights = tl.inline_asm_elementwise(
            CODES_WITH_MINIMA if MINIMA else CODES, "=r" + ",r" * 11,
            [words, shift, kept, scale, offset, middle], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return weights


@triton.jit
def quant_matmul_kernel(words_ptr, high_ptr, scale_ptr, minimum_ptr, x_ptr, out_ptr, partial_ptr, ticket_ptr,  # type: ignore[no-untyped-def]
                        x_stride, out_stride, outputs, inputs, steps, unit,
                        BITS: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
                        MINIMA: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
                        UNROLL: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
                        INTERPRETED: tl.constexpr):  # fmt: skip
    """out[row, output] = sum of x[row, k] * weight[output, k], weights as the M side of every dot."""
    tile, split = tl.program_id(0), tl.program_id(1)
    planes: tl.constexpr = 16 // BITS
    wides: tl.constexpr = planes * (WIDTH // GROUP) // 4
    output = tile * TILE + tl.arange(0, TILE)
    within = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    block = (output // TILE_ROWS) * steps
    inner = output % TILE_ROWS
    rounds = steps // UNROLL
    each = tl.cdiv(rounds, SPLIT)
    first = split * each
    last = tl.minimum(first + each, rounds)
    words_at = words_ptr + (block.to(tl.int64) * TILE_ROWS + inner)[:, None] * WIDTH + within[None, :]
    high_at = high_ptr + (block.to(tl.int64) // 2 * TILE_ROWS + inner)[:, None] * WIDTH + within[None, :]
    groups_at = block * (wides * TILE_ROWS) + inner
    x_at = x_ptr + row[None, :] * x_stride + within[:, None]
    acc = tl.zeros((TILE, ROWS), tl.float32)
    for turn in tl.range(first, last, num_stages=STAGES):
        for part in tl.static_range(UNROLL):
            step = turn * UNROLL + part
            words = tl.load(words_at + step * (TILE_ROWS * WIDTH), eviction_policy="evict_first")
            high = words
            if HIGH:
                high = tl.load(high_at + (step // 2) * (TILE_ROWS * WIDTH), eviction_policy="evict_first")
            at = groups_at + step * (wides * TILE_ROWS)
            scales = packed_groups(scale_ptr + at, None, BITS, GROUP)
            minima = scales
            if MINIMA:
                minima = packed_groups(minimum_ptr + at, None, BITS, GROUP)
            for plane in tl.static_range(planes):
                k = (step * planes + plane) * WIDTH
                if EVEN:
                    x = tl.load(x_at + k, eviction_policy="evict_last")
                else:
                    known = within < inputs - k
                    x = tl.load(x_at + k, mask=known[:, None], other=0.0, eviction_policy="evict_last")
                if INTERPRETED:
                    weight = plane_numbers(words, high, scales, minima, within, plane, 4 * (part % 2) + plane, BITS, HIGH,
                                           GROUP, ZERO, MINIMA)  # fmt: skip
                    acc = tl.dot(weight.to(tl.bfloat16).to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
                else:
                    weight = plane_weights(words, high, scales, minima, within, plane, 4 * (part % 2) + plane, BITS, HIGH,
                                           GROUP, ZERO, MINIMA)  # fmt: skip
                    acc = tl.dot(weight, x, acc)
    combined(partial_ptr, ticket_ptr, out_ptr, out_stride, acc, unit, tile, split, outputs, ROWS, TILE, SPLIT)
