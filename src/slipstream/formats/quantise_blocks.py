"""Encodes ggml's blocks of 32 numbers: Q4_0, Q5_0 and Q8_0 have a scale, Q4_1 and Q5_1 also an offset.

Codes are chosen for the scale as it is stored, not for the scale that the search found before rounding.
"""

from __future__ import annotations

import numpy as np

from slipstream.formats.quantise_search import Halves, fit_range, fit_scale, inverse, to_halves
from slipstream.formats.quants import Bytes, Floats


def encode_q4_0(blocks: Floats) -> Bytes:
    scale, codes = _encode_with_scale(blocks, 8)
    return np.hstack((_bytes(scale), _nibbles(codes)))


def encode_q5_0(blocks: Floats) -> Bytes:
    scale, codes = _encode_with_scale(blocks, 16)
    return np.hstack((_bytes(scale), _fifth_bits(codes), _nibbles(codes)))


def encode_q4_1(blocks: Floats) -> Bytes:
    scale, offset, codes = _encode_with_offset(blocks, 15)
    return np.hstack((_bytes(scale), _bytes(offset), _nibbles(codes)))


def encode_q5_1(blocks: Floats) -> Bytes:
    scale, offset, codes = _encode_with_offset(blocks, 31)
    return np.hstack((_bytes(scale), _bytes(offset), _fifth_bits(codes), _nibbles(codes)))


def encode_q8_0(blocks: Floats) -> Bytes:
    # With 255 codes the largest number decides the scale; a finer search has no gain that could be measured.
    scale = to_halves(np.abs(blocks).max(axis=1) / np.float32(127))
    codes = np.rint(blocks * inverse(scale.astype(np.float32))[:, None]).clip(-127, 127)
    return np.hstack((_bytes(scale), codes.astype(np.int8).view(np.uint8)))


def _encode_with_scale(blocks: Floats, levels: int) -> tuple[Halves, Bytes]:
    scale = to_halves(fit_scale(blocks, levels))
    codes = np.rint(blocks * inverse(scale.astype(np.float32))[:, None]) + np.float32(levels)
    return scale, codes.clip(0, 2 * levels - 1).astype(np.uint8)


def _encode_with_offset(blocks: Floats, top: int) -> tuple[Halves, Halves, Bytes]:
    fitted_scale, fitted_offset = fit_range(blocks, top, offset_up_to_zero=False)
    scale = to_halves(fitted_scale)
    with np.errstate(over="ignore"):
        offset = fitted_offset.astype(np.float16)
    if not np.isfinite(offset).all():
        raise OverflowError("an offset exceeds the range of 16-bit floats")
    above = blocks - offset.astype(np.float32)[:, None]
    codes = np.rint(above * inverse(scale.astype(np.float32))[:, None])
    return scale, offset, codes.clip(0, top).astype(np.uint8)


def _bytes(halves: Halves) -> Bytes:
    return halves.astype("<f2").view(np.uint8).reshape(len(halves), 2)


def _nibbles(codes: Bytes) -> Bytes:
    """Packs the low four bits: a block's first half into the low nibbles, its second half into the high ones."""
    half = codes.shape[1] // 2
    return (codes[:, :half] & np.uint8(0x0F)) | (codes[:, half:] << np.uint8(4))


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")
