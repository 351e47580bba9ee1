"""Packs weights for the compiled row kernels; a type that no kernel reads becomes Q8_0 or F32."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.native_library import Library

# The numbers of the weight types are those of matrix.h.
KINDS = {name: number for number, name in enumerate(("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "BF16", "F32"))}
_OTHER_TYPES_AS = "Q8_0"  # the other block types are coarser, so their weights lose next to nothing as Q8_0
_ALIGNMENT = 64  # bytes of a cache line
_ARENA_BYTES = 32 << 20  # allocated at once, so that small matrices share large pages
_INT, _POINTER = ctypes.c_int32, ctypes.c_void_p


class StoredTensor(Protocol):
    """A tensor of a model file that can return its values and its bytes."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type_name(self) -> str: ...
    def dense(self) -> Tensor: ...
    def raw(self) -> NDArray[np.uint8]: ...


class SlipMatrix(ctypes.Structure):
    _fields_ = (("kind", _INT), ("outputs", _INT), ("inputs", _INT), ("data", _POINTER))


class SlipLinear(ctypes.Structure):
    _fields_ = (("parts", _INT), ("outputs", _INT), ("part", _POINTER), ("bias", _POINTER))


class Arena:
    """Memory for packed weights in large pages, which the processor reads twice as fast as small ones."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns zeroed, aligned bytes; their memory is freed when no array refers to it any more."""
        if self._memory is None or self._used + size > len(self._memory):
            # the mapping is private, so that a forked child does not write its weights into its parent's memory
            self._memory = mmap.mmap(-1, max(size, _ARENA_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._used = 0
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        taken = np.frombuffer(self._memory, np.uint8, size, self._used)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken


_COMMON = Arena()
_arena: ContextVar[Arena] = ContextVar("arena", default=_COMMON)


@contextmanager
def memory_of_its_own() -> Iterator[None]:
    """Packs the weights of a `with` block into separate memory, which is freed when those weights are deleted."""
    before = _arena.set(Arena())
    try:
        yield
    finally:
        _arena.reset(before)


class Coarsened:
    """A stored tensor rounded to 4 bits per weight, for products that need not be exact."""

    type_name = "Q4_1"
    _FINER = ("Q8_0", "Q6_K", "F16", "BF16", "F32")

    def __init__(self, source: StoredTensor) -> None:
        import gguf

        self.shape = source.shape
        self._source = source
        self._bytes = gguf.quants.quantize(source.dense().numpy(), gguf.GGMLQuantizationType.Q4_1)

    @classmethod
    def helps(cls, source: StoredTensor) -> bool:
        return source.type_name in cls._FINER and source.shape[1] % 32 == 0

    def dense(self) -> Tensor:
        return self._source.dense()

    def raw(self) -> NDArray[np.uint8]:
        return self._bytes


def pack(library: Library, source: StoredTensor) -> tuple[SlipMatrix, NDArray[np.uint8]]:
    outputs, inputs = source.shape
    kind, rows = _native_rows(source)
    if rows.nbytes != outputs * library.function("slip_row_bytes", "ii", "l")(KINDS[kind], inputs):
        raise IntegrityError(f"a {kind} weight [{outputs}, {inputs}] has {rows.nbytes} bytes")
    numbers = KINDS[kind], outputs, inputs
    data = _arena.get().take(library.function("slip_packed_bytes", "iii", "l")(*numbers))
    library.function("slip_pack", "iiipp")(*numbers, rows.ctypes.data, data.ctypes.data)
    return SlipMatrix(*numbers, data.ctypes.data), data


def _native_rows(source: StoredTensor) -> tuple[str, NDArray[np.uint8]]:
    """Returns the type that a kernel reads, and the tensor's bytes in that type."""
    kind = source.type_name
    if kind in KINDS:
        return kind, np.ascontiguousarray(source.raw())
    dense = source.dense()
    if dense.shape[1] % 32:
        return "F32", dense.numpy().view(np.uint8)
    import gguf  # imported here, because few files need it and some machines do not have it

    return _OTHER_TYPES_AS, gguf.quants.quantize(dense.numpy(), gguf.GGMLQuantizationType[_OTHER_TYPES_AS])


class RowTable:
    """A table of a model file, such as an embedding, whose rows are converted to floats when they are read.

    The type of its numbers must be one of `KINDS`.
    """

    def __init__(self, library: Library, source: StoredTensor) -> None:
        self._rows = source.raw()
        self._count, self._width = source.shape
        self._kind = KINDS[source.type_name]
        self._decode = library.function("slip_decode_rows", "iiippip", "i")
        self._address = self._rows.ctypes.data

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Returns the rows [tokens, width] of int64 ids."""
        count = token_ids.numel()
        out = torch.empty(count, self._width)
        if not self._decode(
            self._kind, self._count, self._width, self._address, token_ids.data_ptr(), count, out.data_ptr()
        ):
            raise IntegrityError(f"a token id is outside the table of {self._count} rows")
        return out
