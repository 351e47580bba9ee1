"""Turns float32 into stored bytes: the inverse of `quants.decode_rows` for every type that can be written."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from slipstream.errors import FormatError
from slipstream.formats.quantise_blocks import (
    encode_q6_k,
    encode_q8_0,
    encode_with_minima,
    encode_with_offset,
    encode_with_scale,
)
from slipstream.formats.quants import BLOCKS, Bytes, Floats

# Elements that are encoded at a time: the temporaries of one search then fit into the processor's cache.
CHUNK_ELEMENTS = 2**16
MAX_WORKERS = 8


def _encode_f16(values: Floats) -> Bytes:
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise OverflowError("a number exceeds the range of 16-bit floats")
    return halves.view(np.uint8)


def _encode_bf16(values: Floats) -> Bytes:
    bits = values.astype("<f4").view("<u4")
    # Rounds to the nearest, and a tie to the even one; the sum cannot wrap because the numbers are finite.
    upper = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    if ((upper & 0x7F80) == 0x7F80).any():
        raise OverflowError("a number rounds to infinity")
    return upper.view(np.uint8)


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "F32": lambda values: values.astype("<f4").view(np.uint8),
    "F16": _encode_f16,
    "BF16": _encode_bf16,
    "Q8_0": encode_q8_0,
    "Q4_0": partial(encode_with_scale, bits=4),
    "Q4_1": partial(encode_with_offset, bits=4),
    "Q5_0": partial(encode_with_scale, bits=5),
    "Q5_1": partial(encode_with_offset, bits=5),
    "Q4_K": partial(encode_with_minima, bits=4),
    "Q5_K": partial(encode_with_minima, bits=5),
    "Q6_K": encode_q6_k,
}
ENCODABLE = tuple(_ENCODERS)


def encode_rows(values: Floats, type_name: str, name: str = "") -> Bytes:
    """Converts float32 [rows, elements] to bytes [rows, bytes]; `name` is the tensor's name in error messages."""
    label = f"tensor '{name}'" if name else "a tensor"
    if type_name not in _ENCODERS:
        raise FormatError(f"{label} cannot be written as {type_name}", f"possible: {', '.join(ENCODABLE)}")
    block, size = BLOCKS[type_name]
    rows, width = values.shape
    if width % block:
        raise FormatError(
            f"{label} has rows of {width} elements, which {type_name} cannot have",
            f"its rows must divide into blocks of {block}",
        )
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, block)
    encoded = np.empty((len(blocks), size), np.uint8)
    step = max(1, CHUNK_ELEMENTS // block)

    def encode_chunk(start: int) -> None:
        encoded[start : start + step] = _encode_checked(blocks[start : start + step], type_name, label)

    starts = range(0, len(blocks), step)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # threads help because numpy releases the interpreter's lock
    with ThreadPoolExecutor(max(1, min(len(starts), cores, MAX_WORKERS))) as pool:
        list(pool.map(encode_chunk, starts))
    return encoded.reshape(rows, width // block * size)


def _encode_checked(blocks: Floats, type_name: str, label: str) -> Bytes:
    if not np.isfinite(blocks).all():
        raise FormatError(f"{label} holds numbers that are not finite", "the model is damaged: fetch it again")
    try:
        # Numbers that are too large give scales that are not finite, which the encoders refuse.
        with np.errstate(over="ignore", invalid="ignore"):
            return _ENCODERS[type_name](blocks)
    except OverflowError:
        peak = float(np.abs(blocks).max())
        raise FormatError(f"{label} holds {peak:g}, too large for {type_name}", "choose a wider type") from None
