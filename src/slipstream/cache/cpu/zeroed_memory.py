"""Zeroed memory for caches, straight from the system: it costs nothing until it is used."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def zeros(*shape: int) -> Tensor:
    """Returns a zeroed tensor; a masked slot still enters a sum as 0 * value, and other memory may hold NaN.

    The memory are zero pages of the operating system, none of which is touched here, so a pool takes memory only as it
    fills. An allocator would hand out memory that an earlier pool left behind, and would have to write zeros into it.
    """
    size = math.prod(shape)
    if not size:
        return torch.zeros(shape)
    memory = mmap.mmap(-1, size * torch.float32.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
