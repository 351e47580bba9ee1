"""Numbers to bytes: every type loses no more than llama.cpp's own quantiser, and others read what we write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from slipstream.errors import FormatError
from slipstream.formats import quantise
from slipstream.formats.gguf_write import TensorPlan, write_gguf
from slipstream.formats.quantise import ENCODABLE, encode_rows
from slipstream.formats.quants import BLOCKS, decode_rows, unpack_q4
from slipstream.formats.weight_files import open_weights
from slipstream.kernels.cpu.native_library import library
from slipstream.kernels.cpu.native_matrix import KINDS, RowTable
from tests.ggml_oracle import Ggml

QUANTS = tuple(name for name in ENCODABLE if name.startswith("Q"))
# The largest relative error on normally distributed numbers; the format's plain recipe has a larger error.
NORMAL_LIMITS = {
    "F16": 0.00022,
    "BF16": 0.0017,
    "Q8_0": 0.0055,
    "Q6_K": 0.0172,
    "Q5_0": 0.041,
    "Q5_1": 0.0345,
    "Q5_K": 0.0358,
    "Q4_0": 0.083,
    "Q4_1": 0.0715,
    "Q4_K": 0.0718,
}
LEAST_HALF = 2.0**-24


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape) * 0.02


def _spiky(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 1.0, 0.01)


ROWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": _normal,
    "heavy-tailed": lambda rng, shape: rng.standard_t(4, shape) * 0.02,
    "spiky": _spiky,
    "positive": lambda rng, shape: rng.random(shape) + 0.5,
    "negative": lambda rng, shape: -rng.random(shape) - 3,
    "constant": lambda rng, shape: np.full(shape, 0.3),
    "constant-negative": lambda rng, shape: np.full(shape, -0.3),
    "zero": lambda rng, shape: np.zeros(shape),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-6,
    "vanishing": lambda rng, shape: rng.standard_normal(shape) * 1e-39,
}


def rows_of(kind: str, rows: int = 33, width: int = 1024, seed: int = 0) -> np.ndarray:
    return ROWS[kind](np.random.default_rng(seed), (rows, width)).astype(np.float32)


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def after(values: np.ndarray, type_name: str) -> np.ndarray:
    return decode_rows(encode_rows(values, type_name), type_name)


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    return Ggml()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("type_name", NORMAL_LIMITS)
def test_the_error_is_at_most_llama_cpps(ggml: Ggml, type_name: str, rows: str) -> None:
    values = rows_of(rows)
    theirs = gguf.quants.dequantize(ggml.encode(values, type_name), Kind[type_name])
    assert rms(after(values, type_name) - values) <= 1.001 * rms(theirs - values)


@pytest.mark.parametrize("type_name", QUANTS)
def test_llama_cpp_reads_the_values_we_read(ggml: Ggml, type_name: str) -> None:
    encoded = encode_rows(rows_of("heavy-tailed"), type_name)
    ours = decode_rows(encoded, type_name)
    # Not to the bit: its compiler may join a product and a sum.
    np.testing.assert_allclose(ggml.decode(encoded, type_name, 1024), ours, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("type_name", NORMAL_LIMITS)
def test_the_error_on_normal_numbers(type_name: str) -> None:
    values = rows_of("normal", rows=64)
    error = rms(after(values, type_name) - values) / rms(values)
    assert 0.5 * NORMAL_LIMITS[type_name] < error < NORMAL_LIMITS[type_name]


@pytest.mark.parametrize("type_name", QUANTS)
def test_every_reader_of_ours_sees_the_same_numbers(tmp_path: Path, type_name: str) -> None:
    """The gguf package, Slipstream's unpacking of nibbles and the compiled reader read the bytes to the same bits."""
    encoded = encode_rows(rows_of("heavy-tailed", rows=7, width=512), type_name)
    expected = gguf.quants.dequantize(encoded, Kind[type_name])
    write_gguf(tmp_path / "t.gguf", {}, [TensorPlan("t", type_name, (7, 512), lambda: [encoded])])
    with open_weights(tmp_path / "t.gguf") as file:
        tensor = file.tensor("t")
        np.testing.assert_array_equal(tensor.dense().numpy(), expected)
        compiled = library()
        if compiled is not None and tensor.type_name in KINDS:
            np.testing.assert_array_equal(RowTable(compiled, tensor)(torch.arange(7)).numpy(), expected)
    if type_name in ("Q4_0", "Q4_1"):
        nibbles, scale, minimum = unpack_q4(encoded, type_name)
        spread = nibbles.reshape(7, 16, 32) * scale[..., None] + minimum[..., None]
        np.testing.assert_array_equal(spread.reshape(7, 512), expected)


@pytest.mark.parametrize("type_name", [name for name in NORMAL_LIMITS if not name.endswith("_K")])
@pytest.mark.parametrize("rows", ["normal", "heavy-tailed", "positive", "negative", "constant", "zero"])
def test_a_second_time_changes_nothing(type_name: str, rows: str) -> None:
    once = after(rows_of(rows), type_name)
    np.testing.assert_array_equal(after(once, type_name), once)


@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("rows", ["normal", "heavy-tailed", "spiky", "positive", "negative"])
def test_a_second_time_costs_a_super_block_next_to_nothing(type_name: str, rows: str) -> None:
    """Scales of scales are not recovered exactly if a group does not use all of its codes."""
    values = rows_of(rows)
    once = after(values, type_name)
    assert rms(after(once, type_name) - values) < 1.04 * rms(once - values)


@pytest.mark.parametrize("type_name", QUANTS)
@pytest.mark.parametrize("size", [1e-6, 1e-7, 1e-9, 1e-39])
def test_numbers_below_the_smallest_scale_go_wrong_by_no_more_than_it(type_name: str, size: float) -> None:
    values = (np.random.default_rng(3).standard_normal((5, 256)) * size).astype(np.float32)
    assert np.abs(after(values, type_name) - values).max() <= max(LEAST_HALF, 0.6 * size)


@pytest.mark.parametrize("type_name", QUANTS)
def test_zeros_stay_zeros(type_name: str) -> None:
    values = rows_of("normal", rows=3, width=512)
    values[1] = 0
    values[2, 32:64] = 0
    kept = after(values, type_name)
    assert not kept[1].any()
    assert not kept[2, 32:64].any()
    assert kept[0].any()


@pytest.mark.parametrize("type_name", ENCODABLE)
def test_the_bytes_do_not_depend_on_how_the_work_is_cut(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = rows_of("heavy-tailed", rows=37, width=768)
    whole = encode_rows(values, type_name)
    assert whole.shape == (37, 768 // BLOCKS[type_name][0] * BLOCKS[type_name][1])
    np.testing.assert_array_equal(np.concatenate([encode_rows(row[None], type_name) for row in values[:5]]), whole[:5])
    monkeypatch.setattr(quantise, "CHUNK_ELEMENTS", 1000)
    for cores in ({0}, set(range(5))):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        np.testing.assert_array_equal(encode_rows(values, type_name), whole)
    backwards = np.asfortranarray(values)
    np.testing.assert_array_equal(encode_rows(backwards, type_name), whole)


@pytest.mark.parametrize("type_name", ["F16", "BF16"])
def test_short_floats_equal_torch(type_name: str) -> None:
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((4, 4096)) * np.exp2(rng.integers(-30, 14, (4, 4096)))).astype(np.float32)
    dtype = torch.float16 if type_name == "F16" else torch.bfloat16
    expected = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(encode_rows(values, type_name), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", ENCODABLE)
def test_numbers_that_are_none_are_refused_by_name(type_name: str, bad: float) -> None:
    values = rows_of("normal", rows=2, width=512)
    values[1, 300] = bad
    with pytest.raises(FormatError, match=r"'blk\.0\.attn_q\.weight'.*not finite"):
        encode_rows(values, type_name, "blk.0.attn_q.weight")


@pytest.mark.parametrize("type_name", [name for name in ENCODABLE if name != "F32"])
def test_numbers_too_large_for_the_type_are_refused_by_name(type_name: str) -> None:
    values = rows_of("normal", rows=2, width=512)
    values[1, 300] = 3.4e38
    with pytest.raises(FormatError, match=f"'w'.*3.4e.38, too large for {type_name}"):
        encode_rows(values, type_name, "w")


@pytest.mark.parametrize("type_name", QUANTS)
def test_large_numbers_within_reach_are_kept(type_name: str) -> None:
    values = rows_of("normal") * 5e5
    assert rms(after(values, type_name) - values) < 1.1 * NORMAL_LIMITS[type_name] * rms(values)


def test_impossible_rows_and_types_are_refused() -> None:
    with pytest.raises(FormatError, match="'w' has rows of 288 elements, which Q4_K cannot have"):
        encode_rows(np.zeros((2, 288), np.float32), "Q4_K", "w")
    with pytest.raises(FormatError, match="cannot be written as IQ2_S"):
        encode_rows(np.zeros((2, 256), np.float32), "IQ2_S")
