"""Encodes ggml's blocks of 32 numbers and super-blocks of 256 numbers.

Q4_0, Q5_0 and Q8_0 have a scale, Q4_1 and Q5_1 also an offset. Codes are chosen for the scale as it is stored, not for
the scale that the search found before rounding.

Q4_K and Q5_K have eight scales and minima each, Q6_K has 16 scales. They are small integers times one 16-bit float. To
make up for the error of that rounding, the neighbouring integers are tried on the numbers themselves.
"""

from __future__ import annotations

import numpy as np

from slipstream.formats.quantise_search import Halves, fit_range, fit_scale, inverse, to_halves
from slipstream.formats.quants import Bytes, Floats

_GROUP, _SMALL_GROUP = 32, 16
_TOP_SCALE = 63  # scales and minima of Q4_K and Q5_K have six bits
_LEVELS = 32  # the codes of Q6_K are -32 ... 31
_NEIGHBOURS = (0, -1, 1)  # offsets from the rounded scale that are tried; of equally good ones the first is taken


def encode_with_scale(blocks: Floats, bits: int) -> Bytes:
    """Q4_0 and Q5_0."""
    levels = 2 ** (bits - 1)
    scale = to_halves(fit_scale(blocks, levels))
    codes = np.rint(blocks * inverse(scale.astype(np.float32))[:, None]) + np.float32(levels)
    return _packed([scale], codes.clip(0, 2 * levels - 1).astype(np.uint8), bits)


def encode_with_offset(blocks: Floats, bits: int) -> Bytes:
    """Q4_1 and Q5_1."""
    top = 2**bits - 1
    fitted_scale, fitted_offset = fit_range(blocks, top, offset_up_to_zero=False)
    scale = to_halves(fitted_scale)
    with np.errstate(over="ignore"):
        offset = fitted_offset.astype(np.float16)
    if not np.isfinite(offset).all():
        raise OverflowError("an offset exceeds the range of 16-bit floats")
    above = blocks - offset.astype(np.float32)[:, None]
    codes = np.rint(above * inverse(scale.astype(np.float32))[:, None])
    return _packed([scale, offset], codes.clip(0, top).astype(np.uint8), bits)


def encode_q8_0(blocks: Floats) -> Bytes:
    # With 255 codes the largest number decides the scale; a finer search has no gain that could be measured.
    scale = to_halves(np.abs(blocks).max(axis=1) / np.float32(127))
    codes = np.rint(blocks * inverse(scale.astype(np.float32))[:, None]).clip(-127, 127)
    return np.hstack((_bytes(scale), codes.astype(np.int8).view(np.uint8)))


def encode_with_minima(blocks: Floats, bits: int) -> Bytes:
    """Q4_K and Q5_K: a super-block has two halves, packed scales and minima, and then its codes."""
    count, top = len(blocks), 2**bits - 1
    groups = blocks.reshape(count, -1, _GROUP)
    scale, offset = (
        part.reshape(count, -1) for part in fit_range(groups.reshape(-1, _GROUP), top, offset_up_to_zero=True)
    )
    shared_scale = to_halves(scale.max(axis=1, keepdims=True) / np.float32(_TOP_SCALE))
    shared_minimum = to_halves(-offset.min(axis=1, keepdims=True) / np.float32(_TOP_SCALE))
    unit, minimum_unit = shared_scale.astype(np.float32), shared_minimum.astype(np.float32)
    rounded = np.rint(scale * inverse(unit))
    best_error = np.full(scale.shape, np.inf, np.float32)
    best_scale, best_minimum, best_codes = np.zeros_like(scale), np.zeros_like(scale), np.zeros_like(groups)
    for neighbour in _NEIGHBOURS:
        candidate = np.clip(rounded + np.float32(neighbour), 0, _TOP_SCALE)
        step = (unit * candidate)[:, :, None]
        minimum = np.clip(np.rint(-offset * inverse(minimum_unit)), 0, _TOP_SCALE)
        for _ in range(2):
            shift = (minimum_unit * minimum)[:, :, None]
            codes = np.rint((groups + shift) * inverse(step)).clip(0, top)
            error = np.square(codes * step - shift - groups).sum(axis=2)
            better = error < best_error
            best_error[better], best_scale[better] = error[better], candidate[better]
            best_minimum[better], best_codes[better] = minimum[better], codes[better]
            # The best minimum for these codes may differ from the one that gave them.
            missing = (codes * step - groups).mean(axis=2)
            minimum = np.clip(np.rint(missing * inverse(minimum_unit)), 0, _TOP_SCALE)
    codes = best_codes.astype(np.uint8)
    # One byte per position in a group holds the fifth bits of the eight groups.
    high = [_fifth_bits(codes)[:, 0]] if bits == 5 else []
    # Of each pair of groups, the first is in the low nibbles and the second in the high ones.
    low = ((codes[:, ::2] & np.uint8(0x0F)) | codes[:, 1::2] << np.uint8(4)).reshape(count, -1)
    return np.hstack((_bytes(shared_scale), _bytes(shared_minimum), _six_bit(best_scale, best_minimum), *high, low))


def encode_q6_k(blocks: Floats) -> Bytes:
    count = len(blocks)
    groups = blocks.reshape(count, -1, _SMALL_GROUP)
    fitted = fit_scale(groups.reshape(-1, _SMALL_GROUP), _LEVELS).reshape(count, -1)
    largest = np.take_along_axis(fitted, np.abs(fitted).argmax(axis=1)[:, None], axis=1)
    shared = to_halves(largest / np.float32(-128))
    unit = shared.astype(np.float32)
    rounded = np.rint(fitted * inverse(unit))
    best_error = np.full(fitted.shape, np.inf, np.float32)
    best_scale, best_codes = np.zeros_like(fitted), np.zeros_like(groups)
    for neighbour in _NEIGHBOURS:
        scale = np.clip(rounded + np.float32(neighbour), -128, 127)
        step = (unit * scale)[:, :, None]
        codes = np.rint(groups * inverse(step)).clip(-_LEVELS, _LEVELS - 1)
        error = np.square(codes * step - groups).sum(axis=2)
        better = error < best_error
        best_error[better], best_scale[better], best_codes[better] = error[better], scale[better], codes[better]
    scales = best_scale.astype(np.int8).view(np.uint8)
    # Each half of 128 numbers has four quarters of 32. A byte of nibbles pairs the first quarter with the third and the
    # second with the fourth; a byte of high bits holds all four.
    quarters = (best_codes + np.float32(_LEVELS)).astype(np.uint8).reshape(count, 2, 4, 32)
    low = (quarters[:, :, :2] & 0x0F) | (quarters[:, :, 2:] & 0x0F) << 4
    high = np.zeros((count, 2, 32), np.uint8)
    for quarter in range(4):
        high |= quarters[:, :, quarter] >> 4 << (2 * quarter)
    return np.hstack((low.reshape(count, -1), high.reshape(count, -1), scales, _bytes(shared)))


def _packed(head: list[Halves], codes: Bytes, bits: int) -> Bytes:
    """Joins a block's halves and codes: its first half is in the low nibbles, its second half in the high ones."""
    half = codes.shape[1] // 2
    nibbles = (codes[:, :half] & np.uint8(0x0F)) | (codes[:, half:] << np.uint8(4))
    return np.hstack((*map(_bytes, head), *([_fifth_bits(codes)] if bits == 5 else []), nibbles))


def _bytes(halves: Halves) -> Bytes:
    return halves.astype("<f2").view(np.uint8).reshape(len(halves), 2)


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _six_bit(scales: Floats, minima: Floats) -> Bytes:
    """Packs eight scales and minima of six bits into 12 bytes; the last four of each are split over two places."""
    scale, minimum = scales.astype(np.uint8), minima.astype(np.uint8)
    return np.hstack(
        (
            scale[:, :4] | scale[:, 4:] >> 4 << 6,
            minimum[:, :4] | minimum[:, 4:] >> 4 << 6,
            (scale[:, 4:] & 0x0F) | minimum[:, 4:] << 4,
        )
    )
