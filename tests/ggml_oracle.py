"""llama.cpp's own quantisers, with which ours are compared."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType


class Ggml:
    """llama.cpp's quantisers and readers, called in the library that its Python package includes."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("xllamacpp")
        if spec is None or spec.origin is None:
            pytest.skip("xllamacpp is not installed")
        self._library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))
        self._quantise = self._library.ggml_quantize_chunk
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._quantise.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
        self._quantise.restype = ctypes.c_size_t

    def encode(self, values: np.ndarray, type_name: str) -> np.ndarray:
        kind = GGMLQuantizationType[type_name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows, width = values.shape
        encoded = np.zeros((rows, width // block * size), np.uint8)
        written = self._quantise(int(kind), values.ctypes.data, encoded.ctypes.data, 0, rows, width, None)
        assert written == encoded.nbytes
        return encoded

    def decode(self, encoded: np.ndarray, type_name: str, width: int) -> np.ndarray:
        read = getattr(self._library, f"dequantize_row_{type_name[:2].lower()}{type_name[2:]}")
        read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        values = np.zeros((len(encoded), width), np.float32)
        read(encoded.ctypes.data, values.ctypes.data, values.size)
        return values
