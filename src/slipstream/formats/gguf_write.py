"""Writes GGUF files completely or not at all: typed metadata, and tensors whose bytes are made when they are written.

`stored_metadata` returns a file's metadata as the bytes in the file, so that a file can be rewritten without loss.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from slipstream.errors import FormatError, IntegrityError
from slipstream.formats.atomic import atomic_file
from slipstream.formats.file_bytes import FileBytes
from slipstream.formats.gguf import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, SCALARS, ValueKind, parse_header
from slipstream.formats.quants import BLOCKS, GGML_TYPES, Bytes
from slipstream.types import Progress

VERSION = 3
MAX_TENSOR_NAME_BYTES = 63  # ggml keeps a name in 64 bytes, of which the last is a zero
Piece = bytes | memoryview | Bytes
Value = str | float | Sequence[str] | Sequence[float]  # of metadata, as Python has it

_TYPE_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The type and the bytes of a metadata value, as a file stores it."""

    kind: ValueKind
    data: bytes


Metadata = dict[str, StoredValue]  # in the order of the file


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
        if self.type_name not in BLOCKS:
            raise FormatError(f"tensor '{self.name}' cannot be stored as {self.type_name}", "GGUF has no such type")
        block, size = BLOCKS[self.type_name]
        if not 1 <= len(self.shape) <= MAX_DIMS or min(self.shape) < 1:
            raise FormatError(f"tensor '{self.name}' of shape {list(self.shape)} cannot be stored in GGUF")
        if self.shape[-1] % block:
            raise FormatError(
                f"tensor '{self.name}' has rows of {self.shape[-1]} elements, which {self.type_name} cannot have",
                f"its rows must divide into blocks of {block}",
            )
        return math.prod(self.shape) // block * size


def entries(values: Mapping[str, Value], kind: ValueKind | None = None) -> Metadata:
    """Stores values as GGUF does; `kind` is the type of the numbers or of the elements of arrays.

    Without it, a whole number becomes UINT32, or INT32 in an array, and any other number becomes FLOAT32.
    """
    return {key: _stored(key, value, kind) for key, value in values.items()}


def _stored(key: str, value: Value, kind: ValueKind | None) -> StoredValue:
    if isinstance(value, str):
        return StoredValue(ValueKind.STRING, _text(value))
    if isinstance(value, int | float):
        kind = _usual_kind(value, ValueKind.UINT32) if kind is None else kind
        return StoredValue(kind, _numbers(key, [value], kind))
    kind = _usual_kind(value[0], ValueKind.INT32) if kind is None else kind
    items = b"".join(_text(str(item)) for item in value) if kind == ValueKind.STRING else _numbers(key, value, kind)
    return StoredValue(ValueKind.ARRAY, struct.pack("<IQ", kind, len(value)) + items)


def _usual_kind(value: object, whole: ValueKind) -> ValueKind:
    if isinstance(value, bool):
        return ValueKind.BOOL
    if isinstance(value, str):
        return ValueKind.STRING
    return whole if isinstance(value, int) else ValueKind.FLOAT32


def stored_metadata(path: Path) -> Metadata:
    """Returns every key of a GGUF file with the exact bytes of its value."""
    with closing(FileBytes(path)) as data:
        found = parse_header(data, path.name).stored
        return {
            key: StoredValue(ValueKind(kind), data.read(start, end - start).tobytes())
            for key, (kind, start, end) in found.items()
        }


def write_gguf(path: Path, metadata: Metadata, tensors: Sequence[TensorPlan], progress: Progress | None = None) -> None:
    """Writes a GGUF file; if anything fails, an earlier file at `path` is unchanged."""
    refuse_repeats(tensors, path)
    alignment = _alignment(metadata)
    with atomic_file(path) as file:
        file.write(_header(metadata, tensors, alignment))
        write_pieces(file, tensors, alignment, progress, path.name)


def as_read(metadata: Metadata) -> dict[str, object]:
    """Returns metadata as a reader of the finished file sees it, rounded to the types in which it is stored."""
    return parse_header(_header(metadata, [], DEFAULT_ALIGNMENT), "metadata").metadata


def _header(metadata: Metadata, tensors: Sequence[TensorPlan], alignment: int) -> bytes:
    parts, offset = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))], 0
    parts += [_text(key) + struct.pack("<I", value.kind) + value.data for key, value in metadata.items()]
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
    dims, number = plan.shape[::-1], _TYPE_NUMBERS[plan.type_name]
    return _text(plan.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)


def _alignment(metadata: Metadata) -> int:
    value = metadata.get("general.alignment")
    return int.from_bytes(value.data, "little") if value and value.kind == ValueKind.UINT32 else DEFAULT_ALIGNMENT


def refuse_repeats(tensors: Sequence[TensorPlan], path: Path) -> None:
    """Refuses a repeated name, because it would make the file unreadable."""
    names = [plan.name for plan in tensors]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"the tensor '{repeated}' would stand twice in {path.name}", "names must differ")


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _numbers(key: str, values: Sequence[object], kind: ValueKind) -> bytes:
    dtype = SCALARS[kind]
    try:
        return np.array(values, dtype).tobytes()
    except OverflowError:
        raise FormatError(f"the metadata value '{key}' does not fit into {kind.name.lower()}") from None
