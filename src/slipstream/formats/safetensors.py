"""Reads and writes safetensors files, and reads shards joined by an index; every claim of a header is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import FormatError
from slipstream.formats.atomic import atomic_file
from slipstream.formats.file_bytes import (
    MAX_ELEMENTS,
    MemoryBytes,
    StoredBytes,
    TensorEntry,
    parse_json_object,
    read_json_object,
    refuse_overlaps,
    refuse_truncation,
)
from slipstream.formats.gguf_write import TensorPlan, refuse_repeats, write_pieces
from slipstream.formats.quants import NUMPY_TYPES
from slipstream.types import Progress

# The limits are those of the reference reader or far above real files; they bound what a damaged header can cause.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8
TYPE_BYTES = {name: dtype.itemsize for name, dtype in NUMPY_TYPES.items()} | {"BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}

_HEADER_ALIGNMENT = 8  # bytes, as in the reference writer
_DAMAGED = "the file is damaged: fetch it again"


def parse_header(data: bytes | StoredBytes, file_name: str) -> list[TensorEntry]:
    """Reads the tensors that a file describes; `refuse_truncation` checks whether their data is complete."""
    stored = MemoryBytes(np.frombuffer(data, np.uint8)) if isinstance(data, bytes) else data
    size = len(stored)
    if size < 8:
        raise FormatError(f"{file_name} is too short for a safetensors file", "fetch it again")
    length = int.from_bytes(stored.read(0, 8).tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{file_name} claims a header of {length} bytes", "it is damaged or not a safetensors file")
    if length > size - 8:
        raise FormatError(f"{file_name} ends inside its header: truncated", "fetch it again")
    header = parse_json_object(stored.read(8, length).tobytes(), f"the header of {file_name}")
    header.pop("__metadata__", None)
    entries = [_entry(name, value, 8 + length, file_name) for name, value in header.items()]
    refuse_overlaps(entries, file_name)
    return entries


def read_entries(data: StoredBytes, file_name: str) -> list[TensorEntry]:
    """Reads the header of a file and checks that the file is complete."""
    entries = parse_header(data, file_name)
    refuse_truncation(entries, len(data), file_name)
    return entries


def read_index(path: Path) -> dict[str, str]:
    """Reads a shard index, which maps a tensor's name to the shard file beside the index that holds it."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path.name} has no weight_map", "it must map tensor names to shard files")
    for name, shard in weight_map.items():
        # A shard must be beside its index; any other path could make the program open a file that the user did not
        # mean.
        if not isinstance(shard, str) or not shard or Path(shard).name != shard or "\0" in shard:
            raise FormatError(f"{path.name} sends tensor '{name}' to {shard!r}", "a shard is a file beside the index")
    return weight_map


def _entry(name: str, value: Any, data_offset: int, file_name: str) -> TensorEntry:
    if not isinstance(value, dict):
        raise FormatError(f"tensor '{name}' of {file_name} has no description", _DAMAGED)
    type_name = value.get("dtype")
    if not isinstance(type_name, str) or type_name not in TYPE_BYTES:
        raise FormatError(f"tensor '{name}' of {file_name} has the unknown type {type_name!r}", "it cannot be read")
    shape, offsets = _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMS:
        raise FormatError(f"tensor '{name}' of {file_name} has an impossible shape", _DAMAGED)
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"tensor '{name}' of {file_name} has impossible offsets", _DAMAGED)
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise FormatError(f"tensor '{name}' of {file_name} has the impossible shape {shape}", _DAMAGED)
    needed, given = math.prod(shape) * TYPE_BYTES[type_name], offsets[1] - offsets[0]
    if needed != given:
        raise FormatError(f"tensor '{name}' of {file_name} needs {needed} bytes and has {given}", _DAMAGED)
    return TensorEntry(name, type_name, tuple(shape), data_offset + offsets[0], needed)


def _sizes(value: Any) -> list[int] | None:
    valid = isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
    return value if valid else None


def write_safetensors(path: Path, tensors: Sequence[TensorPlan], progress: Progress | None = None) -> None:
    """Writes tensors of plain (not block-quantised) types in the given order.

    If anything fails, no file is left; each tensor's bytes are made when it is written.
    """
    refuse_repeats(tensors, path)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in tensors:
        if plan.type_name not in TYPE_BYTES:
            raise FormatError(f"tensor '{plan.name}' cannot be stored as {plan.type_name}", "use f32, f16 or bf16")
        end = offset + plan.nbytes
        header[plan.name] = {"dtype": plan.type_name, "shape": list(plan.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        write_pieces(file, tensors, 1, progress, path.name)
