"""What all file readers share: a tensor's place in a file, reading its bytes, and reading untrusted JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slipstream.errors import FormatError, IntegrityError, SourceError
from slipstream.formats.quants import BLOCKS, Bytes

MAX_ELEMENTS = 2**48  # elements of one tensor; no real tensor is this large


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a file's header describes it, checked against the rules of the format."""

    name: str
    type_name: str
    shape: tuple[int, ...]  # torch order: the last dimension is the contiguous one
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def block(self) -> int:
        """How many elements are in one block of the type; 1 for plain types."""
        return BLOCKS.get(self.type_name, (1, 0))[0]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class StoredBytes(Protocol):
    """Bytes that can be read a stretch at a time."""

    def __len__(self) -> int: ...
    def read(self, offset: int, size: int) -> Bytes: ...
    def close(self) -> None: ...


class MemoryBytes:
    """Bytes in memory; reading returns a view of them."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.nbytes

    def read(self, offset: int, size: int) -> Bytes:
        return self._data[offset : offset + size]

    def close(self) -> None:
        """Does nothing, because memory needs no closing."""


class FileBytes:
    """The bytes of a file as it was when it was opened. If the file changes later, reading raises an error.

    Files are read and never mapped: truncating a mapped file ends the process with a signal, and overwriting one
    changes numbers that are in use.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb", buffering=0)
            self._state = os.fstat(self._file.fileno())
        except FileNotFoundError:
            raise SourceError(f"there is no file {path}", "check the path") from None
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror or error}", "check its permissions") from None
        self._path = path
        if not len(self):
            raise FormatError(f"{path.name} is empty", "fetch it again")

    def __len__(self) -> int:
        return self._state.st_size

    def read(self, offset: int, size: int) -> Bytes:
        """Returns a copy of some bytes in new memory; any thread may call this."""
        if self._file.closed:
            raise IntegrityError(f"{self._path.name} is read after it was closed")
        data = np.empty(size, np.uint8)
        done = 0
        try:
            while done < size and (count := os.preadv(self._file.fileno(), [data[done:].data], offset + done)):
                done += count
            now = os.fstat(self._file.fileno())
        except OSError as error:
            raise SourceError(f"{self._path} cannot be read: {error.strerror or error}", "check the disk") from None
        if done < size or (now.st_size, now.st_mtime_ns) != (self._state.st_size, self._state.st_mtime_ns):
            raise FormatError(f"{self._path} was changed while it was in use", "load it again when it is complete")
        return data

    def close(self) -> None:
        self._file.close()


def refuse_overlaps(entries: Sequence[TensorEntry], file_name: str) -> None:
    """Refuses tensors that share bytes: the header is damaged, and could make a small file take unlimited memory."""
    filled = sorted((entry for entry in entries if entry.nbytes), key=lambda entry: entry.offset)
    for before, after in zip(filled, filled[1:], strict=False):
        if after.offset < before.end:
            what = f"tensors '{before.name}' and '{after.name}' of {file_name} overlap"
            raise FormatError(what, "the file is damaged: fetch it again")


def missing_bytes(entries: Sequence[TensorEntry], size: int) -> int:
    """How many bytes of its tensors a file of this size lacks; 0 for a complete file."""
    return max(0, max((entry.end for entry in entries), default=0) - size)


def refuse_truncation(entries: Sequence[TensorEntry], size: int, file_name: str) -> None:
    if missing := missing_bytes(entries, size):
        raise FormatError(f"{file_name} ends {missing} bytes early: truncated", "fetch it again")


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object that may be hostile; bad text, repeated keys and deep nesting raise a FormatError."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply", "the file is damaged: fetch it again") from None
    except ValueError as error:
        raise FormatError(f"{what} is not valid JSON: {error}", "the file is damaged: fetch it again") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object", "the file is damaged: fetch it again")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}", "check its permissions") from None
    return parse_json_object(data, str(path))


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key '{repeated}' appears twice")
    return result
