"""Calls the compiled code that moves rows between places of the page pools; torch moves them if there is none."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.cpu.native_library import library

Place = tuple[int, int]  # page and offset


class RowMover:
    """Moves the same rows in several pools, each an fp32 tensor [pages, heads, page tokens, dim]."""

    def __init__(self, pools: Sequence[Tensor], handle: ctypes.CDLL) -> None:
        _, self._heads, self._page_tokens, self._dim = pools[0].shape
        self._pools = list(pools)  # keeps the memory alive whose addresses are stored below
        self._addresses = (ctypes.c_void_p * len(pools))(*[pool.data_ptr() for pool in pools])
        self._call = handle.slip_move_rows
        number = ctypes.c_int
        self._call.argtypes = [ctypes.c_void_p, number, number, number, number, ctypes.c_void_p, number]
        self._call.restype = None

    @classmethod
    def make(cls, pools: Sequence[Tensor]) -> RowMover | None:
        """Returns None if nothing was compiled, or if the pools are not in the CPU's memory."""
        found = library()
        return cls(pools, found.handle) if found and pools and pools[0].device.type == "cpu" else None

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
