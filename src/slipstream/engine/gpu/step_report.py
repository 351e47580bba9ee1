"""Lays tensors of several shapes side by side in one stretch of memory, so that one copy moves all of them.

`Report` holds what a device step tells the host; `row_passes.py` packs rows that the host lays out in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.gpu.commit import CommitOutcome
from slipstream.kernels.gpu.device_rows import LEAST_ROWS, MAX_DEPTH
from slipstream.kernels.gpu.tree_growth import Grown

# Each part begins at a multiple of so many 4-byte numbers (16 bytes), because kernels read and write 16 bytes at once
# only from such an address; with a smaller value their accesses would be smaller.
_ALIGNED = 4


def room(shapes: Sequence[Sequence[int]]) -> int:
    """Returns how many numbers tensors of these shapes take side by side, padding included."""
    return sum(map(_padded, shapes))


def parts(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns views of these shapes that lie side by side in one stretch of memory."""
    pieces = flat.split(list(map(_padded, shapes)))
    return [piece[: math.prod(shape)].view(*shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _padded(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) // _ALIGNED) * _ALIGNED


class Report:
    """The tensors of a step that the host reads, on the device or as their copy on the host.

    There are `each` rows for every sequence. `Grown` and `CommitOutcome` say what the tensors hold. The copy for a GPU
    lies in pinned memory.
    """

    def __init__(self, sequences: int, each: int, device: torch.device, pinned: bool = False) -> None:
        rows = sequences * each
        shapes = (
            (max(rows, LEAST_ROWS),),  # matmuls read at least so many tokens
            (rows,),
            (rows,),
            (rows,),
            (rows,),
            (sequences,),
            (sequences,),
            (sequences,),
            (sequences,),
            (sequences,),
            (sequences, MAX_DEPTH),
            (sequences, MAX_DEPTH),
        )
        self.each = each
        self.flat = torch.zeros(room(shapes), dtype=torch.int32, device=device, pin_memory=pinned)
        (
            self.tokens,
            self.parents,
            claims,
            survivals,
            self.chosen,
            self.counts,
            self.broken,
            self.texts,
            self.taken,
            self.failed,
            self.path,
            self.kept,
        ) = parts(self.flat, shapes)
        self.claims: Tensor = claims.view(torch.float32)
        self.survivals: Tensor = survivals.view(torch.float32)

    @property
    def grown(self) -> Grown:
        return Grown(self.parents, self.claims, self.survivals, self.counts, self.broken, self.texts)

    @property
    def outcome(self) -> CommitOutcome:
        return CommitOutcome(self.path, self.kept, self.taken, self.failed)
