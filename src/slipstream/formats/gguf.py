"""Parses GGUF headers without trusting them: every count and length is checked against the file before it is used."""

from __future__ import annotations

import math
import struct
from contextlib import closing
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import FormatError
from slipstream.formats.file_bytes import (
    MAX_ELEMENTS,
    FileBytes,
    MemoryBytes,
    StoredBytes,
    TensorEntry,
    refuse_overlaps,
    refuse_truncation,
)
from slipstream.formats.quants import GGML_TYPES

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32  # bytes; the format's own default
# The limits below are far above those of real files. They bound the work and memory that a damaged header can cause.
MAX_ALIGNMENT_BYTES = 2**20
MAX_DIMS = 4  # ggml has no tensors of more dimensions
MAX_ARRAY_ELEMENTS = 2**24
MAX_ARRAY_DEPTH = 4
MAX_NAME_BYTES = 2**16

_WINDOW_BYTES = 1 << 20  # bytes that one read fetches, because a header consists of very many small values

_DAMAGED = "the file is damaged: fetch it again"


class ValueKind(IntEnum):
    """The types of metadata values, with the numbers that GGUF gives them."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# The numpy type of the bytes of a number; numpy also reads whole arrays of it.
SCALARS: dict[int, np.dtype[Any]] = {
    ValueKind.UINT8: np.dtype("u1"),
    ValueKind.INT8: np.dtype("i1"),
    ValueKind.UINT16: np.dtype("<u2"),
    ValueKind.INT16: np.dtype("<i2"),
    ValueKind.UINT32: np.dtype("<u4"),
    ValueKind.INT32: np.dtype("<i4"),
    ValueKind.FLOAT32: np.dtype("<f4"),
    ValueKind.BOOL: np.dtype("u1"),
    ValueKind.UINT64: np.dtype("<u8"),
    ValueKind.INT64: np.dtype("<i8"),
    ValueKind.FLOAT64: np.dtype("<f8"),
}
# The fewest bytes that a key-value pair, a tensor description, a string or an array takes; they bound claimed counts.
_LEAST_PAIR, _LEAST_TENSOR = 13, 32
_LEAST_ELEMENT: dict[int, int] = {ValueKind.STRING: 8, ValueKind.ARRAY: 12}


@dataclass(slots=True)
class GgufHeader:
    """Everything that a GGUF file says before its tensor data."""

    version: int = 0
    metadata: dict[str, object] = field(default_factory=dict)
    # By the same keys: the number of the value's type, and where its bytes begin and end in the file.
    stored: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    tensors: list[TensorEntry] = field(default_factory=list)
    data_offset: int = 0
    file_size: int = 0


class TruncatedHeader(FormatError):
    """The file ends inside its header. `header` holds what was read, `missing` the least number of bytes it lacks."""

    def __init__(self, message: str, header: GgufHeader, missing: int) -> None:
        super().__init__(message, _DAMAGED)
        self.header = header
        self.missing = missing


def read_gguf(path: Path) -> GgufHeader:
    """Reads a header and checks that the file contains all the data it describes."""
    with closing(FileBytes(path)) as data:
        header = parse_header(data, path.name)
    refuse_truncation(header.tensors, header.file_size, path.name)
    return header


def parse_header(data: bytes | StoredBytes, file_name: str) -> GgufHeader:
    """Parses a header. It does not check the tensor data; the caller can do so with `refuse_truncation`."""
    stored = MemoryBytes(np.frombuffer(data, np.uint8)) if isinstance(data, bytes) else data
    return _Parser(stored, file_name).parse()


class _Parser:
    """A cursor over the file's bytes that refuses to read past their end."""

    def __init__(self, data: StoredBytes, file_name: str) -> None:
        self.data = data
        self.size = len(data)
        self.window, self.window_start, self.window_end = b"", 0, 0
        self.name = file_name
        self.position = 0
        self.header = GgufHeader(file_size=self.size)

    def parse(self) -> GgufHeader:
        if self.size < len(MAGIC) or self._bytes(len(MAGIC)) != MAGIC:
            raise FormatError(f"{self.name} is not a GGUF file", "its first four bytes must be GGUF")
        self.header.version = version = self._u32()
        if version & 0xFFFF == 0 and version:
            raise FormatError(f"{self.name} is a big-endian GGUF file", "convert it to little endian")
        if version not in (2, 3):
            raise FormatError(f"{self.name} is GGUF version {version}", "versions 2 and 3 are read")
        tensor_count, pair_count = self._u64(), self._u64()
        self._claim(pair_count, _LEAST_PAIR, "metadata keys")
        for _ in range(pair_count):
            self._pair()
        self._claim(tensor_count, _LEAST_TENSOR, "tensors")
        described = [self._tensor() for _ in range(tensor_count)]
        self._place(described)
        return self.header

    def _pair(self) -> None:
        key = self._string("a metadata key", MAX_NAME_BYTES)
        if key in self.header.metadata:
            raise FormatError(f"the metadata key '{key}' of {self.name} appears twice", _DAMAGED)
        kind, start = self._u32(), self.position
        self.header.metadata[key] = self._values(kind, 1, key, 0)[0]
        self.header.stored[key] = kind, start, self.position

    def _values(self, kind: int, count: int, key: str, depth: int) -> list[object]:
        """Reads the value of a key, or at a depth the elements of an array."""
        if kind == ValueKind.STRING:
            what = f"the metadata value '{key}'"
            return [self._string(what) for _ in range(count)]
        if kind == ValueKind.ARRAY:
            return [self._array(key, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            what = "array" if depth else "metadata key"
            raise FormatError(f"the {what} '{key}' of {self.name} has the unknown type {kind}", _DAMAGED)
        dtype = SCALARS[kind]
        values: list[object] = np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
        return [bool(value) for value in values] if kind == ValueKind.BOOL else values

    def _array(self, key: str, depth: int) -> list[object]:
        if depth > MAX_ARRAY_DEPTH:
            raise FormatError(f"the metadata key '{key}' of {self.name} nests arrays too deeply", _DAMAGED)
        kind, count = self._u32(), self._u64()
        what = f"elements of '{key}'"
        if count > MAX_ARRAY_ELEMENTS:
            raise FormatError(f"{self.name} claims {count} {what}", f"at most {MAX_ARRAY_ELEMENTS} are read")
        self._claim(count, _LEAST_ELEMENT.get(kind, 0), what)
        return self._values(kind, count, key, depth)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name", MAX_NAME_BYTES)
        if not name:
            raise FormatError(f"a tensor of {self.name} has no name", _DAMAGED)
        dims = self._u32()
        if not 1 <= dims <= MAX_DIMS:
            raise FormatError(f"tensor '{name}' of {self.name} has {dims} dimensions", f"1 to {MAX_DIMS} are possible")
        shape = tuple(self._u64() for _ in range(dims))
        return name, shape[::-1], self._u32(), self._u64()

    def _place(self, described: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        alignment = self._alignment()
        self.header.data_offset = (self.position + alignment - 1) // alignment * alignment
        names: set[str] = set()
        for name, shape, kind, offset in described:
            if name in names:
                raise FormatError(f"tensor '{name}' of {self.name} appears twice", _DAMAGED)
            names.add(name)
            if offset % alignment:
                raise FormatError(f"tensor '{name}' of {self.name} is not aligned to {alignment} bytes", _DAMAGED)
            self.header.tensors.append(self._entry(name, shape, kind, self.header.data_offset + offset))
        refuse_overlaps(self.header.tensors, self.name)

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        if kind not in GGML_TYPES:
            raise FormatError(f"tensor '{name}' of {self.name} has the unknown type {kind}", "convert the file")
        type_name, block, block_bytes = GGML_TYPES[kind]
        elements = math.prod(shape)
        if not 0 < elements <= MAX_ELEMENTS:
            raise FormatError(f"tensor '{name}' of {self.name} has the impossible shape {list(shape)}", _DAMAGED)
        if shape[-1] % block:
            raise FormatError(
                f"tensor '{name}' of {self.name} has rows of {shape[-1]} elements, which {type_name} cannot have",
                _DAMAGED,
            )
        return TensorEntry(name, type_name, shape, offset, elements // block * block_bytes)

    def _alignment(self) -> int:
        value = self.header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT_BYTES or value & (value - 1):
            raise FormatError(f"{self.name} declares the alignment {value}", "it must be a power of two")
        return value

    def _claim(self, count: int, least_bytes: int, what: str) -> None:
        remaining = self.size - self.position
        if (missing := count * least_bytes - remaining) > 0:
            message = f"{self.name} claims {count} {what} but has only {remaining} bytes left"
            raise TruncatedHeader(message, self.header, missing)

    def _bytes(self, count: int) -> bytes:
        """Returns the next `count` bytes."""
        start = self.position
        if (missing := count - (self.size - start)) > 0:
            raise TruncatedHeader(f"{self.name} ends inside its header: truncated", self.header, missing)
        self.position = start + count
        if self.position > self.window_end:
            self.window_start, self.window_end = start, min(start + max(count, _WINDOW_BYTES), self.size)
            self.window = self.data.read(start, self.window_end - start).tobytes()
        return self.window[start - self.window_start : self.position - self.window_start]

    def _u32(self) -> int:
        return int(struct.unpack("<I", self._bytes(4))[0])

    def _u64(self) -> int:
        return int(struct.unpack("<Q", self._bytes(8))[0])

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._u64()
        if limit is not None and length > limit:
            raise FormatError(f"{what} of {self.name} claims {length} bytes", _DAMAGED)
        data = self._bytes(length)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"{what} of {self.name} is not valid UTF-8", _DAMAGED) from None
