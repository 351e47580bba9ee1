"""Turns stored bytes into float32. Plain number types are decoded here, block quants by the gguf package.

The gguf package is imported only when a block type is decoded: a GPU reads blocks as they are stored, and its machine
may not have the package.

All functions work on rows of raw bytes, so that the caller decides how much is unpacked at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import FormatError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

Q4_BLOCK = 32
Q4_TYPES = ("Q4_0", "Q4_1")
# ggml's type number -> (name, elements per block, bytes per block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
# name -> (elements per block, bytes per block)
BLOCKS = {name: (block, size) for name, block, size in GGML_TYPES.values()}
# Safetensors and GGUF use these names for the same bytes.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


def decode_rows(raw: Bytes, type_name: str) -> Floats:
    """Converts contiguous rows of raw bytes [rows, bytes] of any readable type to float32 [rows, elements]."""
    if type_name in NUMPY_TYPES:
        return raw.view(NUMPY_TYPES[type_name]).astype(np.float32)
    if type_name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if type_name == "F8_E4M3":
        return _E4M3[raw]
    if type_name == "F8_E5M2":
        return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    try:
        import gguf
    except ImportError:
        raise FormatError(f"tensors of type {type_name} need the gguf package", "pip install gguf") from None
    try:
        # Damaged scales may be NaN or infinite. The numbers are passed on, and numpy must not warn about each of them.
        with np.errstate(all="ignore"):
            return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    except (KeyError, NotImplementedError):
        raise FormatError(f"tensors of type {type_name} cannot be read", "convert the file to another type") from None


def unpack_q4(raw: Bytes, type_name: str) -> tuple[Bytes, Floats, Floats]:
    """Splits Q4_0 or Q4_1 rows into nibbles [rows, K], scales and minima [rows, K // 32]; value = q * scale + min."""
    header = 2 if type_name == "Q4_0" else 4
    blocks = raw.reshape(raw.shape[0], -1, header + Q4_BLOCK // 2)
    packed = blocks[:, :, header:]
    # The first sixteen elements of a block are the low nibbles of its bytes, the last sixteen the high ones.
    nibbles = np.concatenate((packed & 0x0F, packed >> 4), axis=2).reshape(raw.shape[0], -1)
    scale = _halves(blocks[:, :, :2])
    if type_name == "Q4_1":
        return nibbles, scale, _halves(blocks[:, :, 2:4])
    with np.errstate(all="ignore"):
        return nibbles, scale, scale * np.float32(-8)


def _halves(pairs: Bytes) -> Floats:
    return np.ascontiguousarray(pairs).view("<f2").astype(np.float32)[:, :, 0]


def _e4m3_table() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes >= 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_table()
