"""Reading GGUF: correct files are read correctly, and every wrong claim is refused with the name of its place."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from slipstream.errors import FormatError, IntegrityError, SourceError
from slipstream.formats.file_bytes import missing_bytes
from slipstream.formats.gguf import parse_header, read_gguf
from slipstream.formats.weight_files import open_weights, read_config
from tests.fuzz_formats import head, tensor, text
from tests.helpers_models import smollm2_path, write_gguf


def number(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path)
    return path


def test_every_tensor_reads_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    expected = write_gguf(path)
    with open_weights(path) as weights:
        assert weights.names() == list(expected)
        for name, values in expected.items():
            found = weights.tensor(name)
            assert found.shape == values.shape
            assert found.dense().dtype == torch.float32
            np.testing.assert_array_equal(found.dense().numpy(), values)


def test_metadata_equals_the_gguf_package(small: Path) -> None:
    reader = gguf.GGUFReader(small)
    expected = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
    assert read_gguf(small).metadata == expected


@pytest.mark.slow
def test_the_real_target_equals_the_gguf_package() -> None:
    path = smollm2_path()
    began = time.process_time()
    header = read_gguf(path)
    assert time.process_time() - began < 5  # it takes 0.2 s of processor time; reading the tensors as well takes longer
    reader = gguf.GGUFReader(path)
    assert {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")} == header.metadata
    assert [(t.name, t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors] == [
        (e.name, e.type_name, e.offset, e.nbytes) for e in header.tensors
    ]
    with open_weights(path) as weights:
        for stored in reader.tensors[:12]:
            expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
            np.testing.assert_array_equal(weights.tensor(stored.name).dense().numpy(), expected)


def test_version_2_reads_like_version_3(small: Path, tmp_path: Path) -> None:
    data = bytearray(small.read_bytes())
    data[4] = 2
    older = tmp_path / "older.gguf"
    older.write_bytes(data)
    assert read_gguf(older).version == 2
    assert read_gguf(older).metadata == read_gguf(small).metadata


def test_nested_arrays_and_every_scalar() -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 1, 2)
    scalars = [
        (0, "<B", 200), (1, "<b", -3), (2, "<H", 60000), (3, "<h", -5), (4, "<I", 2**31), (5, "<i", -7),
        (6, "<f", 0.5), (7, "<B", 1), (10, "<Q", 2**63), (11, "<q", -(2**40)), (12, "<d", 0.1),
    ]  # fmt: skip
    data = head(0, len(scalars) + 1)
    for kind, pattern, value in scalars:
        data += text(b"k%d" % kind) + struct.pack("<I", kind) + struct.pack(pattern, value)
    data += text(b"nested") + struct.pack("<IIQ", 9, 9, 2) + inner * 2
    metadata = parse_header(data, "x").metadata
    assert metadata.pop("nested") == [[1, 2], [1, 2]]
    assert metadata == {f"k{kind}": value for kind, _, value in scalars}
    assert metadata["k7"] is True


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (head(0, 0, version=1), "version 1"),
        (head(2**60, 0), "claims 1152921504606846976 tensors"),
        (head(0, 2**60), "metadata keys"),
        (head(0, 1) + struct.pack("<Q", 2**63) + bytes(16), "a metadata key of x claims"),
        (head(0, 1) + text(b"k") + struct.pack("<IQ", 8, 2**63), "ends inside its header"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**20), "elements of 'k'"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 0, 2**60), "claims 1152921504606846976 elements"),
        (head(0, 1) + text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50 + bytes(20), "too deeply"),
        (head(0, 1) + text(b"k") + struct.pack("<I", 77) + bytes(20), "unknown type 77"),
        (head(0, 1) + number(b"\xff", 1) + bytes(8), "not valid UTF-8"),
        (head(0, 2) + number(b"k", 1) + number(b"k", 2), "'k' of x appears twice"),
        (head(1, 0) + tensor(b"t", []) + bytes(64), "0 dimensions"),
        (head(1, 0) + tensor(b"t", [1, 1, 1, 1, 1]) + bytes(64), "5 dimensions"),
        (head(1, 0) + tensor(b"t", [2**40, 2**40]) + bytes(64), "impossible shape"),
        (head(1, 0) + tensor(b"t", [4, 0]) + bytes(64), "impossible shape"),
        (head(1, 0) + tensor(b"t", [8], kind=99) + bytes(64), "unknown type 99"),
        (head(1, 0) + tensor(b"t", [33], kind=2) + bytes(64), "rows of 33 elements"),
        (head(1, 0) + tensor(b"t", [8], offset=8) + bytes(64), "not aligned"),
        (head(1, 0) + tensor(b"", [8]) + bytes(64), "has no name"),
        (head(2, 0) + tensor(b"t", [8]) + tensor(b"t", [8], offset=32) + bytes(99), "'t' of x appears twice"),
        (head(2, 0) + tensor(b"t", [9]) + tensor(b"u", [8], offset=32) + bytes(99), "overlap"),
        (head(0, 1) + number(b"general.alignment", 24), "alignment 24"),
        (head(0, 1) + number(b"general.alignment", 0), "alignment 0"),
        (head(0, 1) + number(b"general.alignment", 2**31), "alignment"),
    ],
)
def test_wrong_claims_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        parse_header(data, "x")


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_truncated_file_says_how_much_is_missing(small: Path, cut: int) -> None:
    whole = small.read_bytes()
    end = max(entry.end for entry in read_gguf(small).tensors)
    small.write_bytes(whole[: end - cut])
    with pytest.raises(FormatError, match=f"ends {cut} bytes early: truncated"):
        open_weights(small)


def test_alignment_is_honoured() -> None:
    data = head(1, 1) + number(b"general.alignment", 128) + tensor(b"t", [8], offset=128)
    header = parse_header(data, "x")
    assert header.data_offset == 128
    assert header.tensors[0].offset == 256
    assert missing_bytes(header.tensors, header.file_size) == 256 + 32 - len(data)


def test_rows_select_lazily_and_compose(small: Path) -> None:
    with open_weights(small) as weights:
        for name in ("q4_1.weight", "q8_0.weight", "f16.weight"):
            whole = weights.tensor(name)
            index = torch.tensor([5, 0, 3])
            picked = whole.rows(index)
            assert picked.shape == (3, 64)
            assert picked.nbytes == whole.nbytes // 2
            assert torch.equal(picked.dense(), whole.dense()[index])
            assert torch.equal(picked.rows(torch.tensor([2, 2])).dense(), whole.dense()[[3, 3]])
        assert torch.equal(weights.tensor("norm").rows(torch.tensor([9, 1])).dense(), torch.tensor([9.0, 1.0]))
        for wrong in ([6], [-1]):
            with pytest.raises(IntegrityError):
                weights.tensor("f32.weight").rows(torch.tensor(wrong))


def test_dense_memory_outlives_the_file(small: Path) -> None:
    weights = open_weights(small)
    kept = weights.tensor("norm")
    values = kept.dense()
    values += 1  # the tensor owns its memory: writing must neither fail nor change the file
    assert torch.equal(kept.dense() + 1, values)
    weights.close()
    assert values[0] == 1
    with pytest.raises(IntegrityError, match="closed"):
        kept.dense()


def test_a_missing_tensor_is_named(small: Path) -> None:
    with open_weights(small) as weights:
        assert "norm" in weights
        assert "nope" not in weights
        with pytest.raises(FormatError, match="nope"):
            weights.tensor("nope")


def test_folders_and_missing_files(small: Path, tmp_path: Path) -> None:
    assert open_weights(small.parent).path == small
    assert read_config(small) is None
    (tmp_path / "other.gguf").write_bytes(small.read_bytes())
    with pytest.raises(SourceError, match="holds 2 GGUF files"):
        open_weights(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SourceError, match="holds no model"):
        open_weights(empty)
    with pytest.raises(SourceError, match="no file"):
        open_weights(tmp_path / "absent.gguf")
    (empty / "zero.gguf").touch()
    with pytest.raises(FormatError, match="empty"):
        open_weights(empty)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    path.write_bytes(head(0, 1) + number(b"split.count", 3))
    with pytest.raises(FormatError, match="one of 3 parts"):
        open_weights(path)
