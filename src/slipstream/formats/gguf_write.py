"""Writes GGUF files completely or not at all: typed metadata, and tensors whose bytes are made when they are written.

`stored_metadata` returns a file's metadata as the bytes in the file, so that a file can be rewritten without loss.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np

from slipstream.errors import FormatError, IntegrityError
from slipstream.formats.atomic import atomic_file
from slipstream.formats.file_bytes import FileBytes
from slipstream.formats.gguf import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, SCALARS, parse_header
from slipstream.formats.quants import GGML_TYPES, Bytes
from slipstream.types import Progress

VERSION = 3
MAX_TENSOR_NAME_BYTES = 63  # ggml keeps a name in 64 bytes, of which the last is a zero
Piece = bytes | memoryview | Bytes

_TYPE_NUMBERS = {name: (number, block, size) for number, (name, block, size) in GGML_TYPES.items()}


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


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """One key and its value as the file stores it; the functions below make it, or `stored_metadata` reads it."""

    key: str
    kind: ValueKind
    data: bytes


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to be written; `produce` is called once, when its turn comes, and yields its bytes in pieces."""

    name: str
    type_name: str
    shape: tuple[int, ...]  # torch order: the last dimension is the contiguous one
    produce: Callable[[], Iterable[Piece]]

    @property
    def nbytes(self) -> int:
        """How many bytes the tensor takes; raises FormatError if its type cannot have its shape."""
        if self.type_name not in _TYPE_NUMBERS:
            raise FormatError(f"tensor '{self.name}' cannot be stored as {self.type_name}", "GGUF has no such type")
        _, block, size = _TYPE_NUMBERS[self.type_name]
        if not 1 <= len(self.shape) <= MAX_DIMS or min(self.shape) < 1:
            raise FormatError(f"tensor '{self.name}' of shape {list(self.shape)} cannot be stored in GGUF")
        if self.shape[-1] % block:
            raise FormatError(
                f"tensor '{self.name}' has rows of {self.shape[-1]} elements, which {self.type_name} cannot have",
                f"its rows must divide into blocks of {block}",
            )
        elements = 1
        for length in self.shape:
            elements *= length
        return elements // block * size


def text_entry(key: str, value: str) -> MetadataEntry:
    return MetadataEntry(key, ValueKind.STRING, _text(value))


def number_entry(key: str, value: float | bool, kind: ValueKind) -> MetadataEntry:
    return MetadataEntry(key, kind, _numbers(key, [value], kind))


def array_entry(key: str, values: Sequence[str] | Sequence[float], kind: ValueKind) -> MetadataEntry:
    """Makes an array of strings or numbers; `kind` is the type of its elements."""
    if kind == ValueKind.STRING:
        data = b"".join(_text(value) for value in values if isinstance(value, str))
    else:
        data = _numbers(key, values, kind)
    return MetadataEntry(key, ValueKind.ARRAY, struct.pack("<IQ", kind, len(values)) + data)


def stored_metadata(path: Path) -> list[MetadataEntry]:
    """Returns every key of a GGUF file with the exact bytes of its value."""
    with closing(FileBytes(path)) as data:
        header = parse_header(data, path.name)
        return [
            MetadataEntry(key, ValueKind(value.kind), data.read(value.start, value.end - value.start).tobytes())
            for key, value in header.stored.items()
        ]


def replaced(entries: Sequence[MetadataEntry], *changes: MetadataEntry) -> list[MetadataEntry]:
    """Returns the entries with new values for some keys; a key that is already there keeps its place."""
    new = {entry.key: entry for entry in changes}
    kept = [new.pop(entry.key, entry) for entry in entries]
    return [*kept, *new.values()]


def write_gguf(
    path: Path, metadata: Sequence[MetadataEntry], tensors: Sequence[TensorPlan], progress: Progress | None = None
) -> None:
    """Writes a GGUF file; if anything fails, an earlier file at `path` is unchanged."""
    refuse_repeats([entry.key for entry in metadata], "metadata key", path)
    refuse_repeats([plan.name for plan in tensors], "tensor", path)
    alignment = _alignment(metadata)
    with atomic_file(path) as file:
        file.write(_header(metadata, tensors, alignment))
        write_pieces(file, tensors, alignment, progress, path.name)


def as_read(entries: Sequence[MetadataEntry]) -> dict[str, object]:
    """Returns metadata as a reader of the finished file sees it, rounded to the types in which it is stored."""
    return parse_header(_header(entries, [], DEFAULT_ALIGNMENT), "metadata").metadata


def _header(metadata: Sequence[MetadataEntry], tensors: Sequence[TensorPlan], alignment: int) -> bytes:
    parts, offset = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))], 0
    parts += [_text(entry.key) + struct.pack("<I", entry.kind) + entry.data for entry in metadata]
    for plan in tensors:
        length = plan.nbytes  # raises FormatError for a tensor that cannot be stored
        parts.append(_description(plan, offset))
        offset += length + -length % alignment
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment)


def write_pieces(
    file: BinaryIO, tensors: Sequence[TensorPlan], alignment: int, progress: Progress | None, name: str
) -> None:
    """Makes and writes the bytes of each tensor, padded to the alignment; a wrong number of bytes is refused."""
    total, done = sum(plan.nbytes for plan in tensors), 0
    for plan in tensors:
        left = plan.nbytes
        for piece in plan.produce():
            view = piece.data if isinstance(piece, np.ndarray) else memoryview(piece)
            left -= view.nbytes
            if left < 0:
                break
            file.write(view)
            done += view.nbytes
            if progress is not None:
                progress(f"writing {name}", done, total)
        if left:
            raise IntegrityError(f"tensor '{plan.name}' was not given the {plan.nbytes} bytes its shape needs")
        file.write(bytes(-plan.nbytes % alignment))


def _description(plan: TensorPlan, offset: int) -> bytes:
    if not plan.name or len(plan.name.encode()) > MAX_TENSOR_NAME_BYTES:
        raise FormatError(f"the tensor name '{plan.name}' cannot be stored", f"1 to {MAX_TENSOR_NAME_BYTES} bytes fit")
    dims, number = plan.shape[::-1], _TYPE_NUMBERS[plan.type_name][0]
    return _text(plan.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)


def _alignment(metadata: Sequence[MetadataEntry]) -> int:
    for entry in metadata:
        if entry.key == "general.alignment" and entry.kind == ValueKind.UINT32:
            return int(struct.unpack("<I", entry.data)[0])
    return DEFAULT_ALIGNMENT


def refuse_repeats(names: Sequence[str], what: str, path: Path) -> None:
    """Refuses a repeated name, because it would make the file unreadable."""
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"the {what} '{repeated}' would stand twice in {path.name}", "names must differ")


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _numbers(key: str, values: Sequence[object], kind: ValueKind) -> bytes:
    dtype = SCALARS[kind]
    try:
        return np.array(values, dtype).tobytes()
    except OverflowError:
        raise FormatError(f"the metadata value '{key}' does not fit into {kind.name.lower()}") from None
