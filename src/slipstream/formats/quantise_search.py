"""Searches for the scale (and offset) with the smallest error for a block of numbers, for many blocks at once.

Every candidate step gives codes, and least squares gives the best scale for those codes; the candidate with the
smallest squared error wins. Blocks are first scaled to unit size, so that no sum of squares can overflow or vanish.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.formats.quants import Floats

Halves = NDArray[np.float16]
# By how many codes the largest number is assumed to lie beyond the last code. Negative whole numbers find the steps of
# a block that was quantised before; positive numbers clip the largest values in favour of the others. Of equally good
# candidates the first wins, and the first uses all codes. Twice as many candidates improve the error by less than half
# a per cent.
STEPS = (0.0, -1.0, -2.0, -3.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0)


def to_halves(values: Floats) -> Halves:
    """Rounds scales to 16 bits; very small ones are rounded up, so that the largest codes still reach their numbers."""
    with np.errstate(over="ignore", under="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise OverflowError("a scale exceeds the range of 16-bit floats")
    short = np.abs(halves.astype(np.float32)) < np.abs(values) * np.float32(1 - 2**-10)
    return np.where(short, np.nextafter(halves, np.copysign(np.float16(np.inf), halves)), halves)


def inverse(values: Floats) -> Floats:
    """Returns 1 / value, or 0 where that is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverted: Floats = np.float32(1) / values
    inverted[~np.isfinite(inverted)] = 0
    return inverted


def fit_scale(blocks: Floats, levels: int) -> Floats:
    """Returns the scale of each block [n, size] for codes -levels ... levels - 1.

    The largest number of a block gets the negative end of the codes, which reaches one further.
    """
    where = np.abs(blocks).argmax(axis=1)
    peak = np.take_along_axis(blocks, where[:, None], axis=1)[:, 0]
    unit = blocks * inverse(peak)[:, None]
    codes = np.empty_like(unit)
    best_gain = np.zeros(len(blocks), np.float32)
    best_scale = np.zeros(len(blocks), np.float32)
    for step in STEPS:
        np.multiply(unit, np.float32(levels + step), out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, 1 - levels, levels, out=codes)
        products, squares = _dot(codes, unit), _dot(codes, codes)
        scale = products * inverse(squares)
        gain = scale * products  # the part of the sum of squares that this scale explains
        better = gain > best_gain * np.float32(1 + 1e-6)  # a difference within rounding errors does not count
        best_gain[better] = gain[better]
        best_scale[better] = scale[better]
    return -best_scale * peak


def fit_range(blocks: Floats, top: int, offset_up_to_zero: bool) -> tuple[Floats, Floats]:
    """Returns the scale and offset of each block [n, size] for codes 0 ... top.

    With `offset_up_to_zero` no offset is above zero, because the K types store offsets as minima to be subtracted.
    """
    low, high = blocks.min(axis=1), blocks.max(axis=1)
    if offset_up_to_zero:
        low = np.minimum(low, 0)
    span = high - low
    unit = (blocks - low[:, None]) * inverse(span)[:, None]
    limit = -low * inverse(span) if offset_up_to_zero else np.full_like(low, np.inf)
    count = np.float32(blocks.shape[1])
    total, squares = unit.sum(axis=1), _dot(unit, unit)
    codes = np.empty_like(unit)
    best_error = np.full(len(blocks), np.inf, np.float32)
    best_scale, best_offset = np.zeros_like(low), np.zeros_like(low)
    for step in STEPS:
        np.multiply(unit, np.float32(top + step), out=codes)
        np.rint(codes, out=codes)
        np.minimum(codes, np.float32(top), out=codes)
        code_sum, code_squares, products = codes.sum(axis=1), _dot(codes, codes), _dot(codes, unit)
        scale = (count * products - code_sum * total) * inverse(count * code_squares - code_sum * code_sum)
        offset = (total - scale * code_sum) / count
        above = offset > limit
        if above.any():
            offset = np.where(above, limit, offset)
            scale = np.where(above, (products - limit * code_sum) * inverse(code_squares), scale)
        error = (
            squares
            - 2 * (scale * products + offset * total)
            + scale * (scale * code_squares + 2 * offset * code_sum)
            + count * offset * offset
        )
        better = error < best_error
        best_error[better] = error[better]
        best_scale[better], best_offset[better] = scale[better], offset[better]
    return best_scale * span, low + best_offset * span


def _dot(left: Floats, right: Floats) -> Floats:
    result: Floats = np.einsum("ij,ij->i", left, right)
    return result
