"""Model weights as the models read them: named tensors that are loaded lazily from GGUF or safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import FormatError, IntegrityError, SourceError
from slipstream.formats import gguf, safetensors
from slipstream.formats.file_bytes import FileBytes, MemoryBytes, StoredBytes, TensorEntry, read_json_object
from slipstream.formats.quants import Q4_BLOCK, Q4_TYPES, Bytes, decode_rows, unpack_q4

# Elements that are unpacked at a time: the temporaries of a large tensor stay small, and unpacking is not slower.
CHUNK_ELEMENTS = 2**20
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class WeightTensor:
    """One tensor of a file; its data is read when `dense`, `raw` or `q4_groups` is called."""

    def __init__(self, entry: TensorEntry, data: StoredBytes, index: torch.Tensor | None = None) -> None:
        self._entry = entry
        self.data = data  # the bytes of the whole file, which all of its tensors share
        self._index = index
        self.name = entry.name
        self.type_name = entry.type_name
        self.shape = entry.shape if index is None else (index.numel(), *entry.shape[1:])
        self.nbytes = entry.nbytes if index is None else entry.nbytes // max(entry.shape[0], 1) * index.numel()

    def __repr__(self) -> str:
        return f"WeightTensor({self.name!r}, {list(self.shape)}, {self.type_name})"

    def dense(self) -> torch.Tensor:
        """Reads the whole tensor as float32 into new memory."""
        result = torch.empty(self.shape, dtype=torch.float32)
        if result.numel():
            flat = result.view(self._row_count(), -1).numpy()
            for start, raw in self._chunks():
                flat[start : start + len(raw)] = decode_rows(raw, self.type_name)
        return result

    def raw(self) -> Bytes:
        """Reads the rows' bytes as they are stored [rows, bytes]."""
        parts = [part for _, part in self._chunks(None if self._index is None else CHUNK_ELEMENTS)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def raw_pieces(self, elements: int) -> Iterator[Bytes]:
        """Yields the rows' bytes as they are stored, about `elements` elements at a time."""
        return (part for _, part in self._chunks(elements))

    def q4_groups(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Reads nibbles, scales and minima of a 4-bit tensor; returns None for any other type.

        In each group of 32, value = nibble * scale + minimum.
        """
        if self.type_name not in Q4_TYPES:
            return None
        groups = (*self.shape[:-1], self.shape[-1] // Q4_BLOCK)
        nibbles = torch.empty(self.shape, dtype=torch.uint8)
        scale, minimum = torch.empty(groups, dtype=torch.float32), torch.empty(groups, dtype=torch.float32)
        if nibbles.numel():
            outputs = [tensor.view(self._row_count(), -1).numpy() for tensor in (nibbles, scale, minimum)]
            for start, raw in self._chunks():
                for output, part in zip(outputs, unpack_q4(raw, self.type_name), strict=True):
                    output[start : start + len(raw)] = part
        return nibbles, scale, minimum

    def rows(self, index: torch.Tensor) -> WeightTensor:
        """Returns the tensor with its first dimension selected or permuted by `index`, still unread."""
        if not self.shape or (len(self.shape) == 1 and self._entry.block > 1):
            raise IntegrityError(f"tensor '{self.name}' has no rows to select")
        index = index.detach().to(device="cpu", dtype=torch.int64)
        if index.dim() != 1 or (index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.shape[0]):
            raise IntegrityError(f"rows outside tensor '{self.name}', which has {self.shape[0]}, were requested")
        return WeightTensor(self._entry, self.data, index if self._index is None else self._index[index])

    def as_row(self) -> WeightTensor:
        """Returns a vector as a matrix of one row, because some writers drop a dimension of size one."""
        return WeightTensor(replace(self._entry, shape=(1, *self._entry.shape)), self.data)

    def in_memory(self) -> WeightTensor:
        """Returns the tensor with its bytes in memory, for tensors that are read as long as the model runs."""
        data = self.raw().reshape(-1)
        return WeightTensor(replace(self._entry, shape=self.shape, offset=0, nbytes=data.nbytes), MemoryBytes(data))

    def part(self, index: int) -> WeightTensor:
        """Returns one entry of the first dimension as a tensor, still unread."""
        if len(self.shape) < 3 or self._index is not None or not 0 <= index < self.shape[0]:
            raise IntegrityError(f"tensor '{self.name}' {list(self.shape)} has no part {index}")
        size = self._entry.nbytes // self.shape[0]
        entry = replace(
            self._entry,
            name=f"{self.name}[{index}]",
            shape=self.shape[1:],
            nbytes=size,
            offset=self._entry.offset + index * size,
        )
        return WeightTensor(entry, self.data)

    def _row_count(self) -> int:
        """Returns how many rows can be read separately: the first dimension, unless blocks extend over it."""
        return self.shape[0] if self.shape and (len(self.shape) > 1 or self._entry.block == 1) else 1

    def _chunks(self, elements: int | None = CHUNK_ELEMENTS) -> Iterator[tuple[int, Bytes]]:
        """Yields the index of a first row and rows of about `elements` elements; None means all rows at once."""
        count = self._row_count()
        size = max(1, int(np.prod(self.shape, dtype=np.int64)))
        step = count if elements is None else max(1, elements * count // size)
        for start in range(0, count, step):
            stop = min(start + step, count)
            if self._index is None:
                yield start, self._read(start, stop, self._entry.nbytes // count)
            else:
                yield start, self._select(self._index[start:stop].numpy())

    def _read(self, start: int, stop: int, row_bytes: int) -> Bytes:
        """Reads the stored rows from `start` to before `stop`."""
        data = self.data.read(self._entry.offset + start * row_bytes, (stop - start) * row_bytes)
        return data.reshape(stop - start, row_bytes)

    def _select(self, index: NDArray[np.int64]) -> Bytes:
        """Reads the stored rows of an index, in one read if most rows between its first and its last are wanted."""
        row_bytes = self._entry.nbytes // self._entry.shape[0]
        first, last = int(index.min()), int(index.max())
        if last - first < 2 * len(index):
            return self._read(first, last + 1, row_bytes)[index - first]
        runs = np.split(index, np.flatnonzero(np.diff(index) != 1) + 1)
        return np.concatenate([self._read(int(run[0]), int(run[-1]) + 1, row_bytes) for run in runs])


class WeightFile:
    """The tensors of one model in one or more files; `metadata` holds the GGUF keys and is {} for safetensors."""

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[TensorEntry, StoredBytes]], metadata: dict[str, object]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> WeightTensor:
        if name not in self._tensors:
            raise FormatError(f"{self.path.name} has no tensor '{name}'", "it may be a model of another kind")
        return WeightTensor(*self._tensors[name])

    def close(self) -> None:
        """Closes the files. Tensors returned before can then not be read any more; data already read stays valid."""
        for _, data in self._tensors.values():
            data.close()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path: Path) -> WeightFile:
    """Opens a GGUF or safetensors file, or the only model in a folder."""
    if path.is_dir():
        if (path / SINGLE).is_file():
            return _open_safetensors(path / SINGLE)
        if (path / INDEX).is_file():
            return _open_sharded(path / INDEX)
        return _open_gguf(find_gguf(path))
    if path.name.endswith(".safetensors.index.json"):
        return _open_sharded(path)
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_gguf(path)


def read_config(path: Path) -> dict[str, object] | None:
    """Reads config.json from a model folder or beside a safetensors file; None if there is none, as for GGUF."""
    if path.suffix == ".gguf" and path.is_file():
        return None
    config = (path if path.is_dir() else path.parent) / "config.json"
    return read_json_object(config) if config.is_file() else None


def find_gguf(folder: Path) -> Path:
    """Returns the only GGUF file of a folder."""
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise SourceError(f"{folder} holds no model", f"expected {SINGLE}, {INDEX} or one .gguf file")
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise SourceError(f"{folder} holds {len(found)} GGUF files", f"name one of them: {names}")
    return found[0]


def _open_gguf(path: Path) -> WeightFile:
    header = gguf.read_gguf(path)
    parts = header.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise FormatError(f"{path.name} is one of {parts} parts of a split model", "join them with gguf-split --merge")
    data = FileBytes(path)
    return WeightFile(path, {entry.name: (entry, data) for entry in header.tensors}, header.metadata)


def _open_safetensors(path: Path) -> WeightFile:
    data = FileBytes(path)
    entries = safetensors.read_entries(data, path.name)
    return WeightFile(path, {entry.name: (entry, data) for entry in entries}, {})


def _open_sharded(index: Path) -> WeightFile:
    weight_map = safetensors.read_index(index)
    shards: dict[str, tuple[StoredBytes, dict[str, TensorEntry]]] = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise FormatError(f"the shard {shard} that {index.name} names is missing", "fetch the model again")
        data = FileBytes(path)
        shards[shard] = data, {entry.name: entry for entry in safetensors.read_entries(data, shard)}
    tensors: dict[str, tuple[TensorEntry, StoredBytes]] = {}
    for name, shard in weight_map.items():
        shard_data, entries = shards[shard]
        if name not in entries:
            raise FormatError(f"the shard {shard} lacks tensor '{name}', which its index promises", "fetch it again")
        tensors[name] = entries[name], shard_data
    return WeightFile(index.parent, tensors, {})
