"""One matrix per expert, multiplied with the rows that chose it; a row's sums do not depend on the rows beside it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.kernels.cpu.linear import Matrix, NativeMatrix
from slipstream.kernels.cpu.native_library import threads

Activation = Callable[[Tensor], Tensor]


def grouped_product(matrices: Sequence[Matrix], rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiplies each row with its expert's matrix; rows are sorted by expert, and `counts` says how many each has."""
    touched = [(matrix, count) for matrix, count in zip(matrices, counts, strict=True) if count]
    native = [matrix for matrix, _ in touched if isinstance(matrix, NativeMatrix)]
    if len(native) < len(touched):
        parts = rows.split([count for _, count in touched])
        return torch.cat([matrix(part) for (matrix, _), part in zip(touched, parts, strict=True)])
    addresses = (ctypes.c_void_p * len(native))(*[matrix.address for matrix in native])
    numbers = array("i", [count for _, count in touched])
    rows = rows.contiguous()
    out = torch.empty(rows.shape[0], native[0].out_features)
    native[0].library.function("slip_grouped_matmul", "ppippi")(
        ctypes.addressof(addresses), numbers.buffer_info()[0], len(native), rows.data_ptr(), out.data_ptr(), threads()
    )
    return out


def mix_experts(
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    rows: Tensor,
    chosen: Tensor,
    shares: Tensor,
    activation: Activation,
) -> Tensor:
    """Adds up the answers of each row's chosen experts [rows, k], weighted by `shares` [rows, k].

    The answers are added in the order of the row's own ranking, so that the sum does not depend on other rows.
    """
    ranks = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()
    gate, up = grouped_product(gate_up, rows[order // ranks], counts).chunk(2, dim=-1)
    answers = torch.empty(rows.shape[0] * ranks, rows.shape[1])
    answers[order] = grouped_product(down, activation(gate) * up, counts)
    by_rank = answers.view(rows.shape[0], ranks, -1)
    mixed = by_rank[:, 0] * shares[:, :1]
    for rank in range(1, ranks):
        mixed += by_rank[:, rank] * shares[:, rank : rank + 1]
    return mixed
