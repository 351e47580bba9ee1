"""The tools on targets of every family: checking, sizing and converting them, in folders and in GGUF files."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from slipstream.formats.gguf import read_gguf
from slipstream.tools.checks import check_file
from slipstream.tools.conversion import convert
from slipstream.tools.fit import quantised_bytes
from slipstream.tools.requantize import quantize_file
from slipstream.tools.tensor_compare import compare_files
from tests.family_gguf import save_family
from tests.models.test_gemma4 import VARIANTS as GEMMA4
from tests.models.test_gemma4 import build as gemma4
from tests.models.test_laguna import build as laguna
from tests.models.test_qwen3_5 import hybrid
from tests.models.test_qwen3_moe import build as qwen3_moe
from tests.oracles import edit_tensors
from tests.unit.test_inspect_checks import failures

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_moe": lambda: qwen3_moe(norm_topk_prob=True),
    "laguna": laguna,
    "gemma4": gemma4,
    "gemma4-experts": lambda: gemma4(**GEMMA4["experts-tied"]),
    "gemma4-shared": lambda: gemma4(**GEMMA4["shared-keys-wide"]),
    "qwen3_5": lambda: hybrid("dense"),
    "qwen3_5_moe": lambda: hybrid("experts"),
}
# a part that only this family has, in its folder
OWN_PART = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.up_proj.weight",
    "laguna": "model.layers.2.self_attn.g_proj.weight",
    "gemma4": "model.layers.0.per_layer_input_gate.weight",
    "gemma4-experts": "model.layers.3.router.per_expert_scale",
    "gemma4-shared": "model.layers.1.self_attn.k_norm.weight",
    "qwen3_5": "model.layers.0.linear_attn.conv1d.weight",
    "qwen3_5_moe": "model.layers.3.mlp.shared_expert_gate.weight",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_files_pass_and_damaged_ones_do_not(family: str, tmp_path: Path) -> None:
    folder = save_family(FAMILIES[family](), tmp_path / "hf")
    convert(folder, tmp_path / "t.gguf")
    for path in (folder, tmp_path / "t.gguf"):
        assert failures(check_file(path)) == []
    compared = compare_files(folder, tmp_path / "t.gguf")
    assert not compared.missing and not compared.extra and not compared.shapes
    assert max(tensor.relative_rms for tensor in compared.tensors) < 1e-6
    lost = OWN_PART[family]
    other = lost.replace("weight", "sinks") + "s"
    edit_tensors(folder, [lost], **{other: torch.ones(4)})
    assert failures(check_file(folder)) == [f"tensors: missing: {lost}", f"tensors: unknown: {other}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_survives_the_round_trip_in_bfloat16(family: str, tmp_path: Path) -> None:
    """To the bit and to the type, but for Qwen3.5's norms and rates, which pass through a sum and a logarithm."""
    folder = save_family(FAMILIES[family]().to(torch.bfloat16), tmp_path / "hf")
    assert set(convert(folder, tmp_path / "t.gguf").types) == {"BF16", "F32"}
    convert(tmp_path / "t.gguf", tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        if family.startswith("qwen3_5") and name.endswith(("norm.weight", "A_log")):
            torch.testing.assert_close(after[name].float(), tensor.float(), rtol=1e-6, atol=1e-6)
        else:
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_quant_would_weigh_is_what_it_weighs(family: str, tmp_path: Path) -> None:
    folder = save_family(FAMILIES[family](), tmp_path / "hf")
    convert(folder, tmp_path / "t.gguf")
    quantize_file(tmp_path / "t.gguf", tmp_path / "q.gguf", "q8_0")
    assert failures(check_file(tmp_path / "q.gguf")) == []
    weight = sum(entry.nbytes for entry in read_gguf(tmp_path / "q.gguf").tensors if entry.name != "rope_freqs.weight")
    assert quantised_bytes(folder, ["q8_0"]) == quantised_bytes(tmp_path / "t.gguf", ["q8_0"]) == {"q8_0": weight}
