"""The memory behind the pages: target keys and values per layer, and draft context for all draft layers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.native.pools import RowMover


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Layers, heads and head size of one kind of cache."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * torch.float32.itemsize


class KvPools:
    """Pools share page ids: page p of the target and page p of the draft context belong to the same tokens."""

    def __init__(self, pages: int, page_tokens: int, target: PoolShape, draft: PoolShape | None) -> None:
        shape = (pages, target.kv_heads, page_tokens, target.head_dim)
        self.target: list[tuple[Tensor, Tensor]] = [(_zeros(*shape), _zeros(*shape)) for _ in range(target.layers)]
        shapes = (draft.layers, pages, draft.kv_heads, page_tokens, draft.head_dim) if draft else (0,)
        self.draft_keys = _zeros(*shapes)
        self.draft_values = _zeros(*shapes)
        self._mover = RowMover.make([pool for layer in self.target for pool in layer])

    def copy_page(self, source: int, destination: int) -> None:
        for keys, values in self.target:
            keys[destination] = keys[source]
            values[destination] = values[source]
        if self.draft_keys.numel():
            self.draft_keys[:, destination] = self.draft_keys[:, source]
            self.draft_values[:, destination] = self.draft_values[:, source]

    def move_rows(self, sources: Sequence[tuple[int, int]], destinations: Sequence[tuple[int, int]]) -> None:
        """Moves target keys and values between (page, offset) places; all are read before any is written."""
        if self._mover is not None:
            self._mover.move(sources, destinations)
        else:
            self.move_rows_plainly(sources, destinations)

    def move_rows_plainly(
        self, sources: Sequence[tuple[int, int]], destinations: Sequence[tuple[int, int]]
    ) -> None:
        """The same by torch."""
        (from_pages, from_offsets), (to_pages, to_offsets) = torch.tensor(sources).t(), torch.tensor(destinations).t()
        for pool in (tensor for layer in self.target for tensor in layer):
            pool[to_pages, :, to_offsets] = pool[from_pages, :, from_offsets]

    def clear_rows(self, places: Sequence[tuple[int, int]]) -> None:
        """Zeroes target keys and values at (page, offset) places."""
        pages, offsets = torch.tensor(places).t()
        for pool in (tensor for layer in self.target for tensor in layer):
            pool[pages, :, offsets] = 0.0

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeroes pages that may hold NaN: even a masked slot of theirs would spoil whoever gets them next."""
        ids = torch.tensor(pages, dtype=torch.long)
        for pool in (tensor for layer in self.target for tensor in layer):
            pool[ids] = 0.0
        if self.draft_keys.numel():
            self.draft_keys[:, ids] = 0.0
            self.draft_values[:, ids] = 0.0


def _zeros(*shape: int) -> Tensor:
    """Zeroed, since a masked slot still enters a sum as 0 * value and other memory may hold NaN.

    Zero pages straight from the system, of which none is touched: a pool costs memory only as it fills. An allocator
    would hand out what an earlier pool left behind, and would have to write zeros over it.
    """
    size = math.prod(shape)
    if not size:
        return torch.zeros(shape)
    memory = mmap.mmap(-1, size * torch.float32.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
