"""Writing GGUF and safetensors: other readers agree on every value, and a failure leaves what was there before."""

# mypy: disable-error-code="misc, no-untyped-def, unused-ignore"

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from slipstream.errors import FormatError, IntegrityError, SourceError
from slipstream.formats.atomic import atomic_folder
from slipstream.formats.gguf import ValueKind, read_gguf
from slipstream.formats.gguf_write import Metadata, TensorPlan, as_read, entries, stored_metadata, write_gguf
from slipstream.formats.safetensors import write_safetensors
from slipstream.formats.weight_files import open_weights
from slipstream.tools.convert_plans import tensor_plan
from tests.fuzz_formats import head, text
from tests.helpers_models import write_gguf as write_small

NUMBERS = {
    ValueKind.UINT8: (0, 255),
    ValueKind.INT8: (-128, 127),
    ValueKind.UINT16: (0, 65535),
    ValueKind.INT16: (-32768, 32767),
    ValueKind.UINT32: (0, 2**32 - 1),
    ValueKind.INT32: (-(2**31), 2**31 - 1),
    ValueKind.UINT64: (0, 2**64 - 1),
    ValueKind.INT64: (-(2**63), 2**63 - 1),
    ValueKind.BOOL: (False, True),
    ValueKind.FLOAT32: (-0.5, 1e7),
    ValueKind.FLOAT64: (1e-300, 3.141592653589793),
}


def plan(name: str, values: np.ndarray, pieces: int = 1) -> TensorPlan:
    return TensorPlan(name, "F32", values.shape, lambda: [part.tobytes() for part in np.array_split(values, pieces)])


def every_kind() -> Metadata:
    made = entries({"general.architecture": "llama", "text": "grüße\n", "empty": "", "strings": ["a", "", "ö"]})
    for kind, values in NUMBERS.items():
        numbers = {f"{kind.name}.{index}": value for index, value in enumerate(values)}
        made |= entries(numbers | {f"{kind.name}.array": values}, kind)
    return made


def test_a_value_has_its_usual_kind_unless_told_otherwise() -> None:
    usual = entries({"n": 1, "x": 0.5, "yes": True, "text": "a", "ns": [1], "xs": [0.5], "flags": [True]})
    kinds = {key: (value.kind, int.from_bytes(value.data[:4], "little")) for key, value in usual.items()}
    assert [kinds[key][0] for key in ("n", "x", "yes", "text")] == [
        ValueKind.UINT32, ValueKind.FLOAT32, ValueKind.BOOL, ValueKind.STRING
    ]  # fmt: skip
    assert [kinds[key] for key in ("ns", "xs", "flags")] == [
        (ValueKind.ARRAY, kind) for kind in (ValueKind.INT32, ValueKind.FLOAT32, ValueKind.BOOL)
    ]


def test_the_gguf_package_reads_every_value_and_its_type(tmp_path: Path) -> None:
    write_gguf(tmp_path / "f.gguf", every_kind(), [plan("t", np.arange(6, dtype=np.float32))])
    reader = gguf.GGUFReader(tmp_path / "f.gguf")
    seen = {key: value for key, value in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(seen) == set(every_kind())
    for kind, values in NUMBERS.items():
        for index, value in enumerate(values):
            field = seen[f"{kind.name}.{index}"]
            assert (field.types[0].value, field.contents()) == (kind.value, value)
        assert seen[f"{kind.name}.array"].contents() == list(values)
        assert seen[f"{kind.name}.array"].types[-1].value == kind.value
    assert seen["text"].contents() == "grüße\n" and seen["strings"].contents() == ["a", "", "ö"]
    assert read_gguf(tmp_path / "f.gguf").metadata == as_read(every_kind())


def test_tensors_of_odd_sizes_are_aligned_and_read_back(tmp_path: Path) -> None:
    values = {f"t{size}": np.random.default_rng(size).standard_normal((size, 3), np.float32) for size in (1, 7, 8, 50)}
    write_gguf(tmp_path / "f.gguf", {}, [plan(name, value, 3) for name, value in values.items()])
    for tensor in gguf.GGUFReader(tmp_path / "f.gguf").tensors:
        np.testing.assert_array_equal(tensor.data, values[tensor.name])
    with open_weights(tmp_path / "f.gguf") as weights:
        for name, value in values.items():
            np.testing.assert_array_equal(weights.tensor(name).dense().numpy(), value)
    header = read_gguf(tmp_path / "f.gguf")
    assert all(entry.offset % 32 == 0 for entry in header.tensors)
    aligned = entries({"general.alignment": 128})
    write_gguf(tmp_path / "g.gguf", aligned, [plan(name, value) for name, value in values.items()])
    assert all(entry.offset % 128 == 0 for entry in read_gguf(tmp_path / "g.gguf").tensors)


def test_a_file_copied_through_the_writer_is_the_same_file(tmp_path: Path) -> None:
    source, copy = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_small(source)
    with open_weights(source) as file:
        tensors = [tensor_plan(tensor.name, tensor, tensor.type_name) for tensor in map(file.tensor, file.names())]
        write_gguf(copy, stored_metadata(source), tensors)
    assert copy.read_bytes() == source.read_bytes()


def test_values_python_cannot_tell_apart_keep_their_bytes(tmp_path: Path) -> None:
    nan = struct.pack("<I", 0x7FC00123)  # a NaN with a payload, which must be preserved
    nested = struct.pack("<IQ", 9, 2) + struct.pack("<IQB", 0, 1, 7) + struct.pack("<IQi", 5, 1, -7)
    values = text(b"nan") + struct.pack("<I", 6) + nan + text(b"nested") + struct.pack("<I", 9) + nested
    empty = text(b"none") + struct.pack("<IIQ", 9, 10, 0)
    source = tmp_path / "a.gguf"
    source.write_bytes(head(0, 3) + values + empty)
    write_gguf(tmp_path / "b.gguf", stored_metadata(source), [])
    assert (tmp_path / "b.gguf").read_bytes().startswith(source.read_bytes())


def broken() -> Iterator[bytes]:
    yield bytes(8)
    raise RuntimeError("the source ended")


@pytest.mark.parametrize(
    ("produce", "error"),
    [(broken, RuntimeError), (lambda: [bytes(12)], IntegrityError), (lambda: [bytes(16), bytes(4)], IntegrityError)],
)
@pytest.mark.parametrize("write", [lambda path, plans: write_gguf(path, {}, plans), write_safetensors])
def test_a_failure_leaves_the_old_file_and_nothing_else(write, produce, error, tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(b"before")
    with pytest.raises(error):
        write(path, [plan("good", np.ones(4, np.float32)), TensorPlan("bad", "F32", (4,), produce)])
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "f") as partial:
        (partial / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(tmp_path / "f") as partial:
        (partial / "whole").write_text("x")
        assert not (tmp_path / "f").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["f", "whole"]
    with pytest.raises(SourceError, match="cannot be written"), atomic_folder(tmp_path / "f"):
        pass
    assert (tmp_path / "f" / "whole").read_text() == "x"


def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    ones = np.ones((2, 48), np.float32)
    for plans, words in (
        ([plan("twice", ones), plan("twice", ones)], "twice"),
        ([plan("n" * 64, ones)], "n" * 64),
        ([TensorPlan("row", "Q4_K", (2, 48), list)], "rows of 48"),
        ([TensorPlan("kind", "Q9_9", (2, 48), list)], "Q9_9"),
        ([TensorPlan("shape", "F32", (2, 0), list)], r"\[2, 0\]"),
    ):
        with pytest.raises(FormatError, match=words):
            write_gguf(tmp_path / "f.gguf", {}, plans)
    with pytest.raises(FormatError, match="'count' does not fit"):
        entries({"count": 300}, ValueKind.UINT8)
    with pytest.raises(FormatError, match="Q4_0"):
        write_safetensors(tmp_path / "f", [TensorPlan("q", "Q4_0", (2, 32), list)])
    with pytest.raises(SourceError, match="cannot be written"):
        write_gguf(tmp_path / "missing" / "f.gguf", {}, [])
    assert list(tmp_path.iterdir()) == []


def test_memory_stays_bounded_and_progress_is_told(tmp_path: Path) -> None:
    made: list[str] = []

    def produce(name: str) -> Iterator[bytes]:
        made.append(name)
        for _ in range(32):
            yield bytes(1 << 20)

    plans = [TensorPlan(name, "F32", (32, 1 << 18), lambda name=name: produce(name)) for name in ("a", "b")]
    assert not made
    seen: list[tuple[int, int]] = []
    tracemalloc.start()
    write_gguf(tmp_path / "f.gguf", {}, plans, lambda label, done, total: seen.append((done, total)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20 and made == ["a", "b"]
    assert [done for done, _ in seen] == [(count + 1) << 20 for count in range(64)] and seen[-1] == (64 << 20, 64 << 20)
    assert os.stat(tmp_path / "f.gguf").st_size >= 64 << 20


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    half = values.astype(np.float16)
    plans = [plan("a.weight", values, 2), TensorPlan("b", "F16", (3, 5), lambda: [half.tobytes()])]
    write_safetensors(tmp_path / "m.safetensors", plans)
    found = load_file(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(found["a.weight"], values)
    np.testing.assert_array_equal(found["b"], half)
    assert found["b"].dtype == np.float16
