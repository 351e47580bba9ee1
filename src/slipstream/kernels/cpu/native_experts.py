"""Multiplies many matrices of one shape, each with its own rows, in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu.native_library import Library
from slipstream.kernels.cpu.native_matrix import PackedLinear

_INT, _POINTER = ctypes.c_int32, ctypes.c_void_p


def multiply_grouped(
    library: Library, linears: Sequence[PackedLinear], counts: Sequence[int], rows: Tensor, threads: int
) -> Tensor:
    """Multiplies rows [n, in], sorted by matrix with `counts` of each, with their matrix."""
    touched = [(linear, count) for linear, count in zip(linears, counts, strict=True) if count]
    addresses = (_POINTER * len(touched))(*[linear.address for linear, _ in touched])
    numbers = array("i", [count for _, count in touched])
    rows = rows.contiguous()
    out = torch.empty(rows.shape[0], linears[0].out_features)
    _product(library)(
        ctypes.addressof(addresses), numbers.buffer_info()[0], len(touched), rows.data_ptr(), out.data_ptr(), threads
    )
    return out


@functools.cache
def _product(library: Library) -> Any:
    return library.function("slip_grouped_matmul", [_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT])
