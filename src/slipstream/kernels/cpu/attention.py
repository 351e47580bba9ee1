"""Chooses the attention kernel: the compiled one if it supports the shapes, otherwise torch's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.cpu.native_attention import native_attention, serves
from slipstream.kernels.cpu.native_library import library
from slipstream.kernels.cpu.native_threads import threads
from slipstream.kernels.cpu.torch_kernels import row_attention
from slipstream.kernels.rows import RowGroup


def attention(queries: Tensor, keys: Tensor, values: Tensor, groups: Sequence[RowGroup], scale: float) -> Tensor:
    """Computes attention of rows [n, heads, dim] over paged keys and values [pages, kv heads, page tokens, dim]."""
    compiled = library()
    if compiled is not None and serves(queries, keys, values):
        return native_attention(compiled, queries, keys, values, groups, scale, threads())
    return row_attention(queries, keys, values, groups, scale)
