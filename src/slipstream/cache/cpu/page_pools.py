"""The memory behind the pages on the CPU: target keys and values per layer, and draft context for all draft layers."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.cpu.state_tensors import StateTensors, zeros
from slipstream.cache.pages import Place
from slipstream.cache.recurrent import StatePool
from slipstream.kernels.cpu.delta_rule import DeltaShape
from slipstream.kernels.cpu.native_library import Library, library


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The number of key heads and the head size of every layer that stores keys and values in one kind of cache.

    A target may also have recurrent layers, which keep a state per sequence and nothing per token.
    """

    layers: tuple[tuple[int, int], ...]
    states: DeltaShape | None = None

    @classmethod
    def alike(cls, layers: int, kv_heads: int, head_dim: int) -> PoolShape:
        return cls(((kv_heads, head_dim),) * layers)

    def bytes_per_token(self) -> int:
        return 2 * sum(kv_heads * head_dim for kv_heads, head_dim in self.layers) * torch.float32.itemsize


PoolShapes = tuple[PoolShape, PoolShape | None]  # the target's shape, and that of the draft context


class RowMover:
    """Moves the same rows in several pools, each an fp32 tensor [pages, heads, page tokens, dim], by compiled code."""

    def __init__(self, pools: Sequence[Tensor], compiled: Library) -> None:
        _, self._heads, self._page_tokens, self._dim = pools[0].shape
        self._pools = list(pools)  # keeps the memory alive whose addresses are stored below
        self._addresses = (ctypes.c_void_p * len(pools))(*[pool.data_ptr() for pool in pools])
        self._call = compiled.function("slip_move_rows", "piiiipi")

    def move(self, sources: Sequence[Place], destinations: Sequence[Place]) -> None:
        """Moves rows; all are read before any is written."""
        places = array("i", [n for pair in zip(sources, destinations, strict=True) for place in pair for n in place])
        self._call(
            ctypes.addressof(self._addresses),
            len(self._pools),
            self._heads,
            self._page_tokens,
            self._dim,
            places.buffer_info()[0],
            len(sources),
        )


class KvPools:
    """The pools share page ids: page p of the target and page p of the draft context belong to the same tokens.

    The layers of a drafter have the same shape and lie in one tensor; those of a target may differ in shape.
    """

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        target: PoolShape,
        draft: PoolShape | None,
        state_slots: int | None = None,
        state_stride: int = 0,
    ) -> None:
        """`state_slots` is the number of recurrent states; one per page, the default, is enough for all sequences.

        A checkpoint of the recurrent state is kept every `state_stride` pages; 0 keeps none.
        """
        self.target: list[tuple[Tensor, Tensor]] = []
        for kv_heads, head_dim in target.layers:
            shape = (pages, kv_heads, page_tokens, head_dim)
            self.target.append((zeros(*shape), zeros(*shape)))
        shapes: tuple[int, ...] = (0,)
        if draft is not None and draft.layers:
            kv_heads, head_dim = draft.layers[0]
            shapes = (len(draft.layers), pages, kv_heads, page_tokens, head_dim)
        self.draft_keys = zeros(*shapes)
        self.draft_values = zeros(*shapes)
        self._target_pools = [pool for layer in self.target for pool in layer]
        drafts = [self.draft_keys, self.draft_values] if self.draft_keys.numel() else []
        self._all = [*self._target_pools, *(layer for pools in drafts for layer in pools)]
        slots = pages if state_slots is None else state_slots
        self.state_tensors = StateTensors(slots, target.states) if target.states is not None else None
        self.states = StatePool(slots, self.state_tensors, state_stride) if self.state_tensors is not None else None
        self.movers = self._make_movers()

    def _make_movers(self) -> list[RowMover] | None:
        """Returns a compiled mover for each group of pools of one shape; None without compiled kernels."""
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for pool in self._target_pools:
            alike.setdefault(tuple(pool.shape), []).append(pool)
        compiled = library()
        return None if compiled is None else [RowMover(group, compiled) for group in alike.values()]

    def copy_page(self, source: int, destination: int) -> None:
        for pool in self._all:
            pool[destination] = pool[source]

    def move_rows(self, sources: Sequence[Place], destinations: Sequence[Place]) -> None:
        """Moves target keys and values between (page, offset) places, as if all were read before any is written."""
        if self.movers is None:
            self.move_rows_plainly(sources, destinations)
            return
        for mover in self.movers:
            mover.move(sources, destinations)

    def move_rows_plainly(self, sources: Sequence[Place], destinations: Sequence[Place]) -> None:
        """Moves the rows with torch, for machines without the compiled mover and as its reference in tests."""
        (from_pages, from_offsets), (to_pages, to_offsets) = torch.tensor(sources).t(), torch.tensor(destinations).t()
        for pool in self._target_pools:
            pool[to_pages, :, to_offsets] = pool[from_pages, :, from_offsets]

    def clear_rows(self, places: Sequence[Place]) -> None:
        """Zeroes target keys and values at (page, offset) places."""
        pages, offsets = torch.tensor(places).t()
        for pool in self._target_pools:
            pool[pages, :, offsets] = 0.0

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeroes pages that may hold NaN: even a masked slot with NaN would spoil the page's next holder."""
        ids = torch.tensor(pages, dtype=torch.long)
        for pool in self._all:
            pool[ids] = 0.0
