"""Row matmuls of the compiled module: right, the same bits for every row count and instruction set, NaN visible."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.cpu.linear import NativeMatrix
from slipstream.kernels.cpu.native_library import Library
from slipstream.kernels.cpu.native_matrix import RowTable
from tests.native import FLOATS, QUANTISED, Stored, every_library, libraries, reference_product, stored

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 31, 33, 64)
SHAPES = {"Q4_K": ((16, 256), (49, 512)), "Q6_K": ((16, 256), (49, 512))}
ANY_SHAPES = ((16, 32), (40, 96), (5, 64), (130, 576))
ODD_SHAPES = ((16, 32), (7, 33), (130, 101), (1, 1))


def shapes(kind: str) -> tuple[tuple[int, int], ...]:
    return ODD_SHAPES if kind in FLOATS else SHAPES.get(kind, ANY_SHAPES)


def rows_of(count: int, inputs: int) -> torch.Tensor:
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    rows[::2, ::37] *= 300.0  # some rows get blocks in which one value is far larger than the others
    return rows


CASES = [(kind, *shape) for kind in (*QUANTISED, *FLOATS) for shape in shapes(kind)]


@every_library()
@pytest.mark.parametrize(("kind", "outputs", "inputs"), CASES)
def test_products_equal_the_reference(library: Library, kind: str, outputs: int, inputs: int) -> None:
    source = stored(kind, outputs, inputs)
    linear = NativeMatrix(library, [source])
    weight = source.dense()
    for count in ROWS:
        rows = rows_of(count, inputs)
        expected = reference_product(rows, weight, float_rows=kind in FLOATS)
        found = linear.multiply(rows, 1)
        # the reference sums in double precision; single precision loses in proportion to the terms
        size = (rows.abs() @ weight.abs().t()).clamp_min(1e-6)
        assert ((found - expected).abs() / size).max() < 2e-6, (kind, count)


@every_library()
@pytest.mark.parametrize("kind", (*QUANTISED, *FLOATS))
def test_a_row_is_the_same_alone_and_among_others(library: Library, kind: str) -> None:
    linear = NativeMatrix(library, [stored(kind, 70, 512)])
    rows = rows_of(64, 512)
    together = linear.multiply(rows, 2)
    for count in ROWS:
        assert torch.equal(linear.multiply(rows[:count], 1), together[:count])
    assert torch.equal(linear.multiply(rows, 3), together)
    assert torch.equal(linear.multiply(rows[40:41], 1), together[40:41])


@pytest.mark.skipif(len(libraries()) < 2, reason="no AVX-512")
@pytest.mark.parametrize("kind", (*QUANTISED, *FLOATS))
def test_instruction_sets_agree_to_the_bit(kind: str) -> None:
    source, rows = stored(kind, 70, 512), rows_of(21, 512)
    first, second = (NativeMatrix(each, [source]).multiply(rows, 2) for each in libraries()[:2])
    assert torch.equal(first, second)


@every_library()
def test_parts_of_different_types_stand_side_by_side(library: Library) -> None:
    sources = [stored("Q4_K", 24, 256), stored("Q6_K", 7, 256, seed=1), stored("F16", 33, 256, seed=2)]
    rows = rows_of(5, 256)
    together = NativeMatrix(library, sources).multiply(rows, 2)
    alone = [NativeMatrix(library, [source]).multiply(rows, 2) for source in sources]
    assert torch.equal(together, torch.cat(alone, dim=1))


@every_library()
def test_types_without_a_kernel_are_taken_through_the_nearest_one(library: Library) -> None:
    source = stored("Q5_1", 48, 96)
    rows = rows_of(4, 96)
    found = NativeMatrix(library, [source]).multiply(rows, 1)
    assert torch.allclose(found, rows @ source.dense().t(), rtol=0.02, atol=0.02 * float(rows.abs().max()) * 10)


@every_library()
def test_a_spike_leaves_its_neighbours_their_digits(library: Library) -> None:
    source, rows = stored("Q8_0", 48, 96), rows_of(4, 96)
    rows[:, 5] = 24_000.0
    found = NativeMatrix(library, [source]).multiply(rows, 1)
    exact = reference_product(rows, source.dense(), float_rows=True)
    # 8 bits of the spike alone would lose up to 94 of each of the 31 values beside it
    assert (found - exact).abs().max() < 10.0


@every_library()
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("kind", ("Q4_1", "Q8_0", "Q6_K", "F16"))
def test_numbers_that_are_none_stay_visible_and_in_their_row(library: Library, kind: str, bad: float) -> None:
    linear = NativeMatrix(library, [stored(kind, 32, 256)])
    rows = rows_of(6, 256)
    clean = linear.multiply(rows, 1)
    rows[2, 100] = bad
    found = linear.multiply(rows, 1)
    assert not found[2].isfinite().any()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])


@every_library()
@pytest.mark.parametrize("kind", (*QUANTISED, *FLOATS))
def test_table_rows_are_the_files_values(library: Library, kind: str) -> None:
    source: Stored = stored(kind, 40, 256)
    ids = torch.tensor([0, 39, 7, 7, 21])
    assert torch.equal(RowTable(library, source)(ids), source.dense()[ids])
