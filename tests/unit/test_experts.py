"""Experts: grouped products are the single ones to the bit, and a row's mixture depends on that row alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cpu import native_library
from slipstream.kernels.cpu.expert_products import grouped_product, mix_experts
from slipstream.kernels.cpu.linear import DenseMatrix, Int8Matrix, NativeMatrix
from slipstream.kernels.cpu.native_library import Library
from tests.native import FLOATS, QUANTISED, every_library, stored

COUNTS = ((1,), (0, 3, 0), (2, 0, 1, 17), (16, 16), (5, 33, 0, 1, 1, 40))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    native_library.set_threads(0)  # follows torch again


@every_library()
@pytest.mark.parametrize("kind", (*QUANTISED, *FLOATS))
@pytest.mark.parametrize("threads", [1, 2])
def test_a_grouped_product_is_each_matrix_times_its_rows(library: Library, kind: str, threads: int) -> None:
    for counts in COUNTS:
        linears = [
            NativeMatrix(library, [stored(kind, 40, 256, seed), stored(kind, 24, 256, seed + 50)])
            for seed in range(len(counts))
        ]
        rows = random(sum(counts), 256)
        parts = rows.split(list(counts))
        expected = [one.multiply(part, 1) for one, part in zip(linears, parts, strict=True)]
        native_library.set_threads(threads)
        assert torch.equal(grouped_product(linears, rows, counts), torch.cat(expected))


def test_dense_matrices_are_grouped_too() -> None:
    matrices = [DenseMatrix(random(7, 12, seed=seed), torch.float32) for seed in range(4)]
    rows, counts = random(9, 12), (4, 0, 3, 2)
    expected = torch.cat([matrix(part) for matrix, part in zip(matrices, rows.split(list(counts)), strict=True)])
    assert torch.equal(grouped_product(matrices, rows, counts), expected)


def test_a_mixture_is_the_sum_of_its_shares() -> None:
    gate_up = [DenseMatrix(random(12, 8, seed=seed), torch.float32) for seed in range(5)]
    down = [DenseMatrix(random(8, 6, seed=9 + seed), torch.float32) for seed in range(5)]
    rows, shares = random(11, 8), random(11, 2, seed=3).abs()
    chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(row))[:2] for row in range(11)])
    found = mix_experts(gate_up, down, rows, chosen, shares, F.silu)
    for row in range(11):
        expected = torch.zeros(8)
        for rank in range(2):
            expert = int(chosen[row, rank])
            gate, up = gate_up[expert](rows[row : row + 1]).chunk(2, dim=-1)
            expected += shares[row, rank] * down[expert](F.silu(gate) * up)[0]
        assert torch.allclose(found[row], expected, rtol=1e-4, atol=1e-4)


def test_neighbours_and_their_order_do_not_matter() -> None:
    """Rows have the same bits if the matrices promise it, because each row adds its experts in its own order."""
    gate_up = [Int8Matrix(random(64, 32, seed=seed)) for seed in range(6)]
    down = [Int8Matrix(random(32, 32, seed=20 + seed)) for seed in range(6)]
    rows, shares = random(40, 32), random(40, 3, seed=3).abs()
    chosen = random(40, 6, seed=4).topk(3).indices
    together = mix_experts(gate_up, down, rows, chosen, shares, F.silu)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    assert torch.equal(mix_experts(gate_up, down, rows[order], chosen[order], shares[order], F.silu), together[order])
    for row in range(40):
        alone = mix_experts(gate_up, down, rows[row, None], chosen[row, None], shares[row, None], F.silu)
        assert torch.equal(alone[0], together[row])
