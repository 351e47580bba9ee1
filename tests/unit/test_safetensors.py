"""Reading safetensors: equal to the safetensors package on good files, clear errors on bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.errors import FormatError
from slipstream.formats.safetensors import parse_header
from slipstream.formats.weight_files import open_weights, read_config
from tests.fuzz_formats import described
from tests.helpers_models import safetensors_bytes

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"t.{str(dtype).split('.')[-1]}": (torch.randn(5, 7) * 10).to(dtype) for dtype in DTYPES}
    return found | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "cube": torch.randn(2, 3, 4)}


def test_every_type_equals_torch(tmp_path: Path) -> None:
    tensors = samples()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with open_weights(tmp_path) as weights:
        assert set(weights.names()) == set(tensors)
        assert weights.metadata == {}
        for name, expected in tensors.items():
            found = weights.tensor(name)
            assert found.shape == tuple(expected.shape)
            assert found.nbytes == expected.numel() * expected.element_size()
            assert torch.equal(found.dense(), expected.float()), name
        index = torch.tensor([4, 0])
        assert torch.equal(weights.tensor("t.bfloat16").rows(index).dense(), tensors["t.bfloat16"][index].float())
        assert weights.tensor("t.bfloat16").q4_groups() is None


def test_sharded_models_join(tmp_path: Path) -> None:
    first, second = {"a": torch.randn(3, 2)}, {"b": torch.randn(4), "c": torch.randn(1)}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors"} | dict.fromkeys("bc", "model-00002-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for path in (tmp_path, index):
        with open_weights(path) as weights:
            assert weights.names() == ["a", "b", "c"]
            assert torch.equal(weights.tensor("a").dense(), first["a"])
            assert torch.equal(weights.tensor("b").dense(), second["b"])

    index.write_text(json.dumps({"weight_map": weight_map | {"d": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(FormatError, match="model-00002-of-00002.safetensors lacks tensor 'd'"):
        open_weights(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match="model-00002-of-00002.safetensors .* is missing"):
        open_weights(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "", 7, "a/b.safetensors"])
def test_an_index_cannot_point_elsewhere(tmp_path: Path, shard: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(FormatError, match="a shard is a file beside the index"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"short", "too short"),
        (safetensors_bytes(b"{}", b"", length=2**62), "claims a header"),
        (safetensors_bytes(b"{}", b"", length=1000), "ends inside its header"),
        (safetensors_bytes(b"{nope", b""), "not valid JSON"),
        (safetensors_bytes(b"\xff\xff", b""), "not valid JSON"),
        (safetensors_bytes(b"[]", b""), "not a JSON object"),
        (safetensors_bytes(b"[" * 200_000, b""), "nested too deeply"),
        (safetensors_bytes(b'{"t": {}, "t": {}}', b""), "'t' appears twice"),
        (safetensors_bytes(b'{"t": 1}', b""), "'t' of x has no description"),
        (safetensors_bytes({"t": described(dtype="Q7")}, bytes(8)), "unknown type 'Q7'"),
        (safetensors_bytes({"t": described(shape=[-1])}, bytes(8)), "'t' of x has an impossible shape"),
        (safetensors_bytes({"t": described(shape=[2.0])}, bytes(8)), "impossible shape"),
        (safetensors_bytes({"t": described(shape=[2**40, 2**40])}, bytes(8)), "impossible shape"),
        (safetensors_bytes({"t": described(shape=[1] * 9)}, bytes(8)), "impossible shape"),
        (safetensors_bytes({"t": described(data_offsets=[8, 0])}, bytes(8)), "impossible offsets"),
        (safetensors_bytes({"t": described(data_offsets=[0])}, bytes(8)), "impossible offsets"),
        (safetensors_bytes({"t": described(shape=[3])}, bytes(12)), "'t' of x needs 12 bytes and has 8"),
        (safetensors_bytes({"t": described(), "u": described(data_offsets=[4, 12])}, b""), "'t' and 'u' of x overlap"),
    ],
)
def test_wrong_claims_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        parse_header(data, "x")


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"t": described()}, bytes(8))[:-3])
    with pytest.raises(FormatError, match="ends 3 bytes early: truncated"):
        open_weights(path)


def test_config_is_read_or_refused_clearly(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 8}')
    assert read_config(tmp_path) == {"hidden_size": 8}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({}, b""))
    assert read_config(tmp_path / "model.safetensors") == {"hidden_size": 8}
    config.write_text("{hidden")
    with pytest.raises(FormatError, match="config.json is not valid JSON"):
        read_config(tmp_path)
    config.write_text("[1]")
    with pytest.raises(FormatError, match="config.json is not a JSON object"):
        read_config(tmp_path)
