"""Matrices in every weight format against fp64, and the formats whose rows do not depend on the rows beside them."""

# mypy: disable-error-code="list-item, unused-ignore"

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.config import WeightFormat
from slipstream.errors import ConfigError
from slipstream.formats.weight_files import WeightTensor, open_weights
from slipstream.kernels.cpu.linear import DenseMatrix, Int4Matrix, Int8Matrix, Matrix, MatrixSource, make_matrix

Kind = gguf.GGMLQuantizationType


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(matrix: Matrix, rows: Tensor, weight: Tensor) -> float:
    """Largest deviation from fp64, relative to the size a sum of this many random terms has."""
    exact = rows.double() @ weight.double().t()
    return ((matrix(rows).double() - exact).abs().max() / exact.std()).item()


class Plain:
    """A tensor that is not 4-bit."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.shape = tuple(weight.shape)

    def dense(self) -> Tensor:
        return self.weight

    def q4_groups(self) -> None:
        return None


def stored(folder: Path, kind: Kind, outputs: int, inputs: int = 64, seed: int = 0) -> WeightTensor:
    """A tensor quantised by the gguf package and read back by Slipstream's reader."""
    path = folder / f"{kind.name}-{outputs}-{inputs}-{seed}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)
    writer.add_tensor("w", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_weights(path).tensor("w")


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)])
def test_dense_matrices_match_fp64(dtype: torch.dtype, allowed: float) -> None:
    weight, rows = randn(48, 256), randn(9, 256, seed=1)
    matrix = DenseMatrix(weight, dtype)
    assert error(matrix, rows, weight) < allowed
    assert matrix(rows).dtype == torch.float32
    assert (matrix.out_features, matrix.in_features) == (48, 256)
    assert matrix.nbytes == 48 * 256 * dtype.itemsize


@pytest.mark.parametrize(("outputs", "inputs"), [(48, 256), (17, 33), (1, 8), (100, 1024)])
def test_int8_matches_fp64_within_its_weights_precision(outputs: int, inputs: int) -> None:
    weight, rows = randn(outputs, inputs), randn(9, inputs, seed=1)
    matrix = Int8Matrix(weight)
    exact_weight = (weight / matrix.scale[:, None]).round() * matrix.scale[:, None]
    assert torch.equal(matrix.codes.t().float() * matrix.scale[:, None], exact_weight)
    exact = rows.double() @ exact_weight.double().t()
    scale = rows.abs().amax() * exact_weight.abs().sum(dim=1).amax()
    deviation = (matrix(rows).double() - exact).abs().max() / scale
    assert deviation < 1e-4, "the rows keep about 15 bits"
    assert error(matrix, rows, weight) < 0.06


def test_int8_rows_of_any_size_keep_their_precision() -> None:
    weight = randn(32, 64)
    rows = randn(6, 64, seed=1) * torch.tensor([1e-20, 1e-3, 1.0, 1e3, 1e20, 0.0])[:, None]
    seen = Int8Matrix(weight)(rows)
    exact = rows.double() @ weight.double().t()
    assert bool(seen.isfinite().all()) and seen[5].count_nonzero() == 0
    for row in range(5):
        assert torch.allclose(seen[row].double() / exact[row].std(), exact[row] / exact[row].std(), atol=0.06)


def test_an_all_zero_output_stays_zero() -> None:
    weight = randn(16, 32)
    weight[3] = 0.0
    assert Int8Matrix(weight)(randn(4, 32, seed=1))[:, 3].count_nonzero() == 0


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_int4_multiplies_the_files_own_weights(tmp_path: Path, kind: Kind) -> None:
    source = stored(tmp_path, kind, 32, 96)
    groups = source.q4_groups()
    assert groups is not None
    codes, scale, minimum = groups
    rebuilt = codes.float() * scale.repeat_interleave(32, dim=1) + minimum.repeat_interleave(32, dim=1)
    assert torch.allclose(rebuilt, source.dense(), atol=1e-6)
    matrix = make_matrix([source], "int4")
    assert isinstance(matrix, Int4Matrix)
    seen = matrix(torch.eye(96))  # a unit row reads one column of weights
    assert torch.allclose(seen.t(), source.dense(), atol=0.03), "bf16 scales of weights up to 4"
    assert error(matrix, randn(7, 96, seed=2), source.dense()) < 0.05


def test_int4_is_exact_up_to_the_rounding_of_its_result() -> None:
    """Scales, rows and sums that bf16 and fp32 hold without error leave only torch's bf16 result to round."""
    codes = torch.randint(0, 16, (32, 64), generator=torch.Generator().manual_seed(0))
    scale, minimum = torch.full((32, 2), 0.25), torch.full((32, 2), -1.5)
    rows = torch.randint(-8, 9, (5, 64), generator=torch.Generator().manual_seed(1)).float()
    expected = rows @ (codes.float() * 0.25 - 1.5).t()
    assert torch.equal(Int4Matrix(codes, scale, minimum)(rows), expected.bfloat16().float())


def assert_row_invariant(matrix: Matrix, rows: Tensor) -> None:
    """Every row is the same to the bit alone, in 2 to 17 rows, and in a long chunk."""
    alone = torch.cat([matrix(rows[index : index + 1]) for index in range(rows.shape[0])])
    for count in [*range(2, 18), 32, 64, rows.shape[0]]:
        for start in {0, 5, rows.shape[0] - count}:
            if start + count <= rows.shape[0]:
                assert torch.equal(matrix(rows[start : start + count]), alone[start : start + count]), (start, count)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (960, 576), (1536, 1536)])
@pytest.mark.parametrize("threads", [1, 2])
def test_int4_rows_do_not_depend_on_their_number(outputs: int, inputs: int, threads: int) -> None:
    source = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (outputs, inputs), generator=source)
    scale = torch.rand(outputs, inputs // 32, generator=source)
    minimum = -8 * torch.rand(outputs, inputs // 32, generator=source)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert_row_invariant(Int4Matrix(codes, scale, minimum), randn(70, inputs, seed=1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (33, 100), (960, 576)])
def test_int8_rows_do_not_depend_on_their_number(outputs: int, inputs: int) -> None:
    assert_row_invariant(Int8Matrix(randn(outputs, inputs)), randn(70, inputs, seed=1))


@pytest.mark.parametrize("outputs", [8, 24, 40])
def test_outputs_that_do_not_divide_by_16_fall_back_to_int8(tmp_path: Path, outputs: int) -> None:
    source = stored(tmp_path, Kind.Q4_1, outputs)
    matrix = make_matrix([source], "int4")
    assert isinstance(matrix, Int8Matrix)
    assert error(matrix, randn(4, 64), source.dense()) < 0.06


def test_stacked_4_bit_tensors_become_one_int4_matrix_when_together_they_fit(tmp_path: Path) -> None:
    parts = [stored(tmp_path, kind, 8, seed=seed) for seed, kind in enumerate((Kind.Q4_0, Kind.Q4_1))]
    matrix = make_matrix(list[MatrixSource](parts), "int4")
    assert isinstance(matrix, Int4Matrix)
    assert error(matrix, randn(4, 64), torch.cat([part.dense() for part in parts])) < 0.05


def test_one_part_that_is_not_4_bit_makes_the_stack_int8(tmp_path: Path) -> None:
    parts: list[MatrixSource] = [stored(tmp_path, Kind.Q4_1, 16), stored(tmp_path, Kind.Q8_0, 16)]
    matrix = make_matrix(parts, "int4")
    assert isinstance(matrix, Int8Matrix)
    assert error(matrix, randn(4, 64), torch.cat([part.dense() for part in parts])) < 0.06


@pytest.mark.parametrize("weight_format", ["fp32", "fp16", "bf16", "int8"])
def test_every_format_stacks_along_the_outputs(weight_format: WeightFormat) -> None:
    first, second = randn(16, 64), randn(32, 64, seed=3)
    matrix = make_matrix([Plain(first), Plain(second)], weight_format)
    assert (matrix.out_features, matrix.in_features) == (48, 64)
    assert error(matrix, randn(5, 64, seed=4), torch.cat((first, second))) < 0.06


def test_an_unresolved_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown weight format 'auto'"):
        make_matrix([Plain(randn(16, 32))], "auto")
