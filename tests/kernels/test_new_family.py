"""A family that exists only in this file: one class says what its layers consist of, and both devices run it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.gpu.kernel_set import gpu_kernels
from slipstream.models import qwen3
from slipstream.models.decoder import Decoder, FamilyNames
from slipstream.models.gpu.device_models import GpuTarget
from slipstream.models.layers import Layer, LayerPart, Sublayer, load_attention, load_gate, load_mlp, load_projections
from slipstream.models.loading import FAMILIES, load_target
from slipstream.models.weights import Weights
from tests.families import ids_of, load
from tests.kernels.test_gpu_stack import DEVICE, OnDevice, check_rows
from tests.oracles import edit_config, our_target, save_model, tiny_target

SOURCES = Path(qwen3.__file__).parents[1]
HIDDEN, HEADS, DIM, LAYERS = 64, 4, 16, 3
NORMS = ("behind_attention", "behind_mlp")


class MadeUp(Decoder):
    """Qwen3 with a sigmoid on every head, a GELU, norms after attention and MLP, and a number per layer."""

    def make_layer(self, weights: Weights, names: FamilyNames, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        inner = prefix + "self_attn."
        projections = load_projections(weights, config, inner)
        source = weights.source(inner + "g_proj.weight", (config.heads, config.hidden_size))
        gate = load_gate(weights, "sigmoid", source, projections)
        attention = load_attention(weights, config, index, inner, projections, gate)
        mlp = load_mlp(weights, config, prefix + "mlp.", "gelu")
        before = [weights.norm(f"{prefix}{name}_layernorm.weight", HIDDEN) for name in ("input", "post_attention")]
        behind = [weights.norm(f"{prefix}{name}.weight", HIDDEN) for name in NORMS]
        parts: tuple[LayerPart, ...] = (attention, mlp)
        sublayers = [Sublayer(*given) for given in zip(parts, before, behind, strict=True)]
        return Layer(sublayers, float(weights.vector(prefix + "scalar", 1)))


@dataclass(slots=True)
class Unheard:
    """A part that no device has code for."""

    matrices: list[Matrix]


class Unknown(Decoder):
    """Qwen3 with a part in the MLP's place that no device runs."""

    def make_feeder(self, weights: Weights, index: int, prefix: str) -> LayerPart:
        return Unheard(super().make_feeder(weights, index, prefix).matrices)


class Scaled(Decoder):
    """Qwen3 with a number per layer, but without the norms after parts in whose launches a GPU scales the stream."""

    def make_layer(self, weights: Weights, names: FamilyNames, index: int) -> Layer:
        return Layer(super().make_layer(weights, names, index).sublayers, 0.5)


def register(monkeypatch: pytest.MonkeyPatch, model: type[Decoder]) -> None:
    module: Any = SimpleNamespace(MODEL=model, read_hf=qwen3.read_hf, read_gguf=qwen3.read_gguf)
    monkeypatch.setitem(FAMILIES, "made_up", module)


def write_made_up(folder: Path) -> Path:
    model: Any = tiny_target("qwen3", 4, num_hidden_layers=LAYERS)
    path = save_model(model.to(torch.bfloat16), folder)
    edit_config(path, model_type="made_up")
    make, own = torch.Generator().manual_seed(3), {}
    for prefix in (f"model.layers.{index}." for index in range(LAYERS)):
        own[prefix + "self_attn.g_proj.weight"] = torch.randn(HEADS, HIDDEN, generator=make) / 8
        own |= {f"{prefix}{name}.weight": 1 + torch.randn(HIDDEN, generator=make) / 4 for name in NORMS}
        own[prefix + "scalar"] = torch.tensor([0.75])
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: one.to(torch.bfloat16) for name, one in own.items()}, file)
    return path


def test_one_class_is_enough_for_both_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, MadeUp)
    path, ids, taps = write_made_up(tmp_path), ids_of(40, 3), (-1, *range(LAYERS))
    ((expected, residuals),) = our_target(load(path), [ids], taps=taps)
    logits, found = OnDevice.load(path, taps=taps).rows(ids, 16)
    check_rows("made_up", logits, expected)
    check_rows("made_up", found, residuals)


@pytest.mark.parametrize("leave_out", ["gate", "post_norm", "scalar", "gelu"])
def test_every_part_of_the_description_counts(leave_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, MadeUp)
    path, ids = write_made_up(tmp_path), ids_of(40, 3)
    model: Any = load(path)
    ((expected, _),) = our_target(load(path), [ids])
    for layer in model.layers:
        if leave_out == "gate":
            layer.parts[0].gate = None
        elif leave_out == "post_norm":
            layer.sublayers[1].post_norm = None
        elif leave_out == "scalar":
            layer.scalar = 1.0
        else:
            layer.parts[1].activation = "silu"
    ((found, _),) = our_target(model, [ids])
    assert float((found - expected).abs().max()) > 0.01


@pytest.mark.parametrize("model", [Unknown, Scaled])
def test_what_a_gpu_cannot_run_is_refused(
    model: type[Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, model)
    path = save_model(tiny_target("qwen3", 4), tmp_path)
    edit_config(path, model_type="made_up")
    with pytest.raises(ConfigError, match="do not run on a GPU yet"):
        GpuTarget(gpu_kernels("reference"), load_target(path, "fp32").model, 64, DEVICE)


@pytest.mark.parametrize("folder", ["models/cpu", "models/gpu", "kernels", "cache", "speculative", "engine"])
def test_device_code_knows_no_family(folder: str) -> None:
    families = {module.__name__.rpartition(".")[2] for module in FAMILIES.values()}
    named = re.compile(rf"slipstream\.models(\.| import .*\b)({'|'.join(families)})\b")
    assert not [path for path in (SOURCES / folder).rglob("*.py") if named.search(path.read_text())]
