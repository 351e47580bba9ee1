"""What a step tells the host: kernels write it side by side in one stretch of memory, so that one copy brings it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.kernels.gpu.commit import Outcome
from slipstream.kernels.gpu.growth import Grown
from slipstream.kernels.gpu.rows import LEAST_ROWS, MAX_DEPTH

_ALIGNED = 4  # numbers: kernels read and write 16 bytes at a time where a part begins at such a border


class Report:
    """The tensors of a step that the host reads, or their copy on the host (which is pinned)."""

    def __init__(self, sequences: int, each: int, device: torch.device, pinned: bool = False) -> None:
        rows = sequences * each
        shapes = (
            (max(rows, LEAST_ROWS),), (rows,), (rows,), (rows,), (rows,), (sequences,), (sequences,), (sequences,),
            (sequences,), (sequences, MAX_DEPTH), (sequences, MAX_DEPTH),
        )
        sizes = [-(-math.prod(shape) // _ALIGNED) * _ALIGNED for shape in shapes]
        self.each = each
        self.flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device, pin_memory=pinned)
        parts = self.flat.split(sizes)
        (
            self.tokens, self.parents, chances, survivals, self.chosen, self.counts, self.broken, self.taken,
            self.failed, self.path, self.kept,
        ) = (part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True))
        self.chances: Tensor = chances.view(torch.float32)
        self.survivals: Tensor = survivals.view(torch.float32)

    @property
    def grown(self) -> Grown:
        return Grown(self.parents, self.chances, self.survivals, self.counts, self.broken)

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.path, self.kept, self.taken, self.failed)
