"""Encodes ggml's super-blocks of 256 numbers: Q4_K and Q5_K have eight scales and minima each, Q6_K has 16 scales.

The scales of a super-block are small integers times one 16-bit float. To make up for the error of that rounding, the
neighbouring integers are tried on the numbers themselves.
"""

from __future__ import annotations

import numpy as np

from slipstream.formats.quantise_search import fit_range, fit_scale, inverse, to_halves
from slipstream.formats.quants import Bytes, Floats

_GROUP, _SMALL_GROUP = 32, 16
_TOP_SCALE = 63  # scales and minima of Q4_K and Q5_K have six bits
_LEVELS = 32  # the codes of Q6_K are -32 ... 31
_NEIGHBOURS = (0, -1, 1)  # offsets from the rounded scale that are tried; of equally good ones the first is taken


def encode_q4_k(blocks: Floats) -> Bytes:
    head, codes = _encode_with_minima(blocks, 15)
    return np.hstack((head, _nibble_pairs(codes)))


def encode_q5_k(blocks: Floats) -> Bytes:
    head, codes = _encode_with_minima(blocks, 31)
    # One byte per position in a group holds the fifth bits of the eight groups.
    high = np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0]
    return np.hstack((head, high, _nibble_pairs(codes)))


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
    halves = shared.astype("<f2").view(np.uint8)
    return np.hstack((low.reshape(count, -1), high.reshape(count, -1), scales, halves))


def _encode_with_minima(blocks: Floats, top: int) -> tuple[Bytes, Bytes]:
    """Returns the head of each super-block (two halves, packed scales and minima) and its codes [n, 8, 32]."""
    count = len(blocks)
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
    head = [shared_scale.astype("<f2").view(np.uint8), shared_minimum.astype("<f2").view(np.uint8)]
    return np.hstack((*head, _six_bit(best_scale, best_minimum))), best_codes.astype(np.uint8)


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


def _nibble_pairs(codes: Bytes) -> Bytes:
    """Packs the low four bits of pairs of groups: the first group in the low nibbles, the second in the high ones."""
    return ((codes[:, ::2] & np.uint8(0x0F)) | codes[:, 1::2] << np.uint8(4)).reshape(len(codes), -1)
