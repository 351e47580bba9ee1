"""What inspect says about whole, truncated and sharded files is right and can be written as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.errors import FormatError, SourceError
from slipstream.formats.gguf import read_gguf
from slipstream.tools.file_report import inspect_file
from tests.helpers_models import smollm2_path, write_gguf


def test_the_real_target_is_described() -> None:
    report = inspect_file(smollm2_path())
    json.dumps(report, allow_nan=False)
    assert report["format"] == "GGUF v3"
    assert report["architecture"] == "llama"
    assert report["size"] == 98362432
    assert report["parameters"] == 134515008
    assert (report["complete"], report["missing_bytes"], report["problem"]) == (True, 0, "")
    assert report["metadata"]["tokenizer.ggml.tokens"] == "[49152 strings]"  # type: ignore[index]
    assert report["metadata"]["tokenizer.ggml.token_type"] == "[49152 integers]"  # type: ignore[index]
    assert report["metadata"]["general.languages"] == ["en"]  # type: ignore[index]
    assert report["totals"]["Q4_1"] == {"count": 210, "parameters": 106168320, "bytes": 66355200}  # type: ignore[index]
    first = report["tensors"][0]  # type: ignore[index]
    assert first == {"name": "token_embd.weight", "type": "Q8_0", "shape": [49152, 576], "bytes": 30081024}


def test_truncated_data_is_reported_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_gguf(path)
    end = max(entry.end for entry in read_gguf(path).tensors)
    path.write_bytes(path.read_bytes()[: end - 100])
    report = inspect_file(path)
    assert (report["complete"], report["missing_bytes"]) == (False, 100)
    assert len(report["tensors"]) == 9  # type: ignore[arg-type]


def test_a_truncated_header_is_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:400])
    report = inspect_file(path)
    json.dumps(report, allow_nan=False)
    assert report["complete"] is False
    assert report["missing_bytes"] > 0  # type: ignore[operator]
    assert report["architecture"] == "llama"
    assert report["tensors"] == []


def test_folders_of_safetensors_and_missing_shards(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 2), "b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["DFlashDraftModel"], "ids": list(range(20)), "deep": {"eps": float("inf")}})
    )
    report = inspect_file(tmp_path)
    json.dumps(report, allow_nan=False)
    assert (report["format"], report["architecture"], report["parameters"]) == ("safetensors", "DFlashDraftModel", 11)
    assert report["metadata"]["ids"] == "[20 integers]"  # type: ignore[index]
    assert report["complete"] is True
    assert inspect_file(tmp_path / "model.safetensors")["tensors"] == report["tensors"]

    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    assert inspect_file(tmp_path)["missing_bytes"] == 5

    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "one.safetensors").write_bytes(whole)
    index = {"metadata": {"total_size": 10**6}, "weight_map": {"a": "one.safetensors", "z": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = inspect_file(tmp_path)
    assert (report["complete"], report["problem"]) == (False, "missing shards: two.safetensors")
    assert report["missing_bytes"] == 10**6 - len(whole)


def test_what_cannot_be_described_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no file"):
        inspect_file(tmp_path / "absent.gguf")
    with pytest.raises(SourceError, match="holds no model"):
        inspect_file(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"not a model at all, just text" * 3)
    with pytest.raises(FormatError, match="not a GGUF file"):
        inspect_file(tmp_path / "x.gguf")
