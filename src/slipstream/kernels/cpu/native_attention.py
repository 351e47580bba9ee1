"""Computes row attention with the compiled kernel, or with torch where it does not fit; describes rows to C code."""

from __future__ import annotations

import ctypes
import operator
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.native_library import Library, library, threads
from slipstream.kernels.cpu.torch_kernels import row_attention
from slipstream.kernels.rows import AttentionPattern, RowBatch, RowGroup

LANES = 16  # the kernel supports head sizes that are multiples of this, up to MAX_DIM
MAX_DIM = 256  # torch computes the attention of larger heads
_Pointer = ctypes.c_void_p
_INT = ctypes.c_int32


class SlipBatch(ctypes.Structure):
    """The struct of that name in native.h; it keeps alive the arrays to which it points."""

    _fields_ = (
        ("rows", _INT),
        ("groups", _INT),
        ("page_tokens", _INT),
        ("group", _Pointer),
        ("page_ids", _Pointer),
        ("parents", _Pointer),
        ("positions", _Pointer),
        ("pages", _Pointer),
        ("offsets", _Pointer),
    )
    arrays: tuple[array[int], ...]


def batch_struct(batch: RowBatch, pattern: AttentionPattern) -> SlipBatch:
    """Describes the rows of a batch for layers of one pattern; the result is cached, because these layers share it."""
    found = batch.derived.get(pattern)
    if not isinstance(found, SlipBatch):
        columns = (batch.position_list, batch.page_list, batch.offset_list)
        found = _struct(batch.groups[pattern])
        found.rows = batch.rows
        found.positions, found.pages, found.offsets = (column.buffer_info()[0] for column in columns)
        found.arrays += columns
        batch.derived[pattern] = found
    return found


def group_struct(groups: Sequence[RowGroup]) -> SlipBatch:
    """Describes groups only, for attention that is called layer by layer; the places of the rows are left out."""
    others = list(groups[1:])
    kept = groups[0].derived.get("native")
    # a group may be part of several batches, so the cached struct is valid only for the same neighbours
    if kept is not None and len(kept[0]) == len(others) and all(map(operator.is_, kept[0], others)):
        made: SlipBatch = kept[1]
        return made
    made = _struct(groups)
    groups[0].derived["native"] = (others, made)
    return made


def _struct(groups: Sequence[RowGroup]) -> SlipBatch:
    numbers: list[int] = []
    pages: list[int] = []
    parents: list[int] = []
    size = groups[0].page_tokens
    for group in groups:
        needed = -(-(group.base + group.stop - group.start) // size)
        own = group.page_ids[:needed]
        if len(own) < needed or group.page_tokens != size:
            raise IntegrityError("a group has rows outside its pages")
        first_parent = -1
        if group.parents is not None:
            if any(map(operator.ge, group.parents, range(len(group.parents)))):
                raise IntegrityError("a row of a tree comes before its parent")
            first_parent = len(parents)
            parents += group.parents
        pattern = group.pattern
        numbers += (group.start, group.stop, group.base, group.earliest)
        numbers += (pattern.window, pattern.causal, len(pages), first_parent)
        pages += own
    arrays = (array("i", numbers), array("i", pages), array("i", parents))
    struct = SlipBatch(groups[-1].stop, len(groups), size, *[each.buffer_info()[0] for each in arrays])
    struct.arrays = arrays
    return struct


def attention(queries: Tensor, keys: Tensor, values: Tensor, groups: Sequence[RowGroup], scale: float) -> Tensor:
    """Computes attention of rows [n, heads, dim] over paged keys and values [pages, kv heads, page tokens, dim]."""
    compiled = library()
    if compiled is not None and serves(queries, keys, values):
        return native_attention(compiled, queries, keys, values, groups, scale, threads())
    return row_attention(queries, keys, values, groups, scale)


def serves(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the compiled kernel supports this attention; otherwise torch computes it."""
    dim = queries.shape[-1]
    return (
        dim % LANES == 0
        and 0 < dim <= MAX_DIM
        and queries.dtype == keys.dtype == values.dtype == torch.float32
        and queries.device.type == keys.device.type == "cpu"
        and keys.is_contiguous()
        and values.is_contiguous()
    )


def native_attention(
    compiled: Library,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Sequence[RowGroup],
    scale: float,
    team_threads: int,
) -> Tensor:
    """Computes `attention` with the compiled kernel."""
    rows, heads, dim = queries.shape
    if queries.stride(2) != 1 or queries.stride(1) != dim:
        queries = queries.contiguous()
    out = torch.empty(rows, heads * dim)
    compiled.function("slip_attention", "ppippiiifpi")(
        ctypes.byref(group_struct(groups)),
        queries.data_ptr(),
        queries.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        heads,
        keys.shape[1],
        dim,
        scale,
        out.data_ptr(),
        team_threads,
    )
    return out
