"""Bytes to numbers: our unpacking agrees with the gguf package and with torch for every type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from slipstream.errors import FormatError
from slipstream.formats import weight_files as weights_module
from slipstream.formats.quants import decode_rows, unpack_q4
from slipstream.formats.weight_files import open_weights

READABLE = sorted(gguf.quants._type_traits, key=int)


def random_rows(kind: Kind, rows: int, width: int, seed: int = 0) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(seed).integers(0, 256, (rows, width // block * size), np.uint8)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]]) -> None:
    writer = gguf.GGUFWriter(path, "test")
    for name, (stored, kind) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_readable_type_reads_through_a_file(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_ELEMENTS", 1000)  # several chunks, the last one short
    stored = random_rows(kind, 7, 512)
    write(tmp_path / "t.gguf", {"t": (stored, kind)})
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(stored, kind)
    with open_weights(tmp_path / "t.gguf") as opened:
        found = opened.tensor("t")
        assert (found.type_name, found.shape, found.nbytes) == (kind.name, (7, 512), stored.nbytes)
        np.testing.assert_array_equal(found.dense().numpy(), expected)
        picked = found.rows(torch.tensor([6, 1, 1, 0])).dense().numpy()
        np.testing.assert_array_equal(picked, expected[[6, 1, 1, 0]])


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_q4_groups_give_the_same_values(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_ELEMENTS", 300)
    values = np.random.default_rng(1).standard_normal((9, 160)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    write(tmp_path / "t.gguf", {"t": (stored, kind)})
    with open_weights(tmp_path / "t.gguf") as opened:
        groups = opened.tensor("t").q4_groups()
        assert groups is not None
        nibbles, scale, minimum = groups
        assert nibbles.dtype == torch.uint8
        assert nibbles.shape == (9, 160)
        assert int(nibbles.max()) <= 15
        assert scale.shape == minimum.shape == (9, 5)
        spread = nibbles.view(9, 5, 32).float() * scale[..., None] + minimum[..., None]
        assert torch.equal(spread.view(9, 160), opened.tensor("t").dense())
        picked = opened.tensor("t").rows(torch.tensor([8, 2])).q4_groups()
        assert picked is not None
        for part, whole in zip(picked, groups, strict=True):
            assert torch.equal(part, whole[[8, 2]])


def test_q4_element_order_is_low_nibbles_then_high() -> None:
    packed = (np.arange(16) | (np.arange(15, -1, -1) << 4)).astype(np.uint8)
    raw = np.concatenate((np.array([2.0], "<f2").view(np.uint8), packed))[None]
    nibbles, scale, minimum = unpack_q4(raw, "Q4_0")
    assert nibbles.tolist() == [[*range(16), *range(15, -1, -1)]]
    assert (scale.item(), minimum.item()) == (2.0, -16.0)


def test_other_types_have_no_q4_groups(tmp_path: Path) -> None:
    write(tmp_path / "t.gguf", {"t": (random_rows(Kind.Q8_0, 2, 64), Kind.Q8_0)})
    with open_weights(tmp_path / "t.gguf") as opened:
        assert opened.tensor("t").q4_groups() is None


def test_three_dimensional_experts_keep_their_shape(tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal((3, 4, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, Kind.Q4_1)
    write(tmp_path / "t.gguf", {"t": (stored, Kind.Q4_1)})
    expected = torch.from_numpy(gguf.quants.dequantize(stored, Kind.Q4_1))
    with open_weights(tmp_path / "t.gguf") as opened:
        found = opened.tensor("t")
        assert torch.equal(found.dense(), expected)
        assert torch.equal(found.rows(torch.tensor([2, 0])).dense(), expected[[2, 0]])
        groups = found.q4_groups()
        assert groups is not None
        assert groups[1].shape == (3, 4, 2)


def test_a_type_without_a_reader_is_named(tmp_path: Path) -> None:
    write(tmp_path / "t.gguf", {"t": (random_rows(Kind.Q8_K, 1, 256), Kind.Q8_K)})
    with open_weights(tmp_path / "t.gguf") as opened, pytest.raises(FormatError, match="Q8_K"):
        opened.tensor("t").dense()


@pytest.mark.parametrize(("name", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_eight_bit_floats_equal_torch(name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(dtype).float().numpy()
    np.testing.assert_array_equal(decode_rows(codes.numpy()[None], name)[0], expected)


def test_bfloat16_equals_torch() -> None:
    codes = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    expected = codes.view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decode_rows(codes.numpy().view(np.uint8)[None], "BF16")[0], expected)
