"""Rotary tables against transformers for every scaling we read, and the config reading after them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.errors import ConfigError
from slipstream.formats.file_bytes import MemoryBytes, TensorEntry
from slipstream.formats.weight_files import WeightFile
from slipstream.kernels.cpu.torch_kernels import rotate
from slipstream.models import llama
from slipstream.models.config_reading import ConfigReader
from slipstream.models.rope import RopeConfig, RotaryTable, inverse_frequencies, read_rope
from slipstream.models.weights import Weights, keep_name

DIM, MAX_POSITIONS = 64, 4096
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 1e7},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "llama3-other": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 9.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-explicit": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.7,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
}


def oracle_config(parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters),
    )


def read(parameters: dict[str, Any]) -> RopeConfig:
    return read_values({"rope_parameters": parameters})


def read_values(values: dict[str, object]) -> RopeConfig:
    return read_rope(ConfigReader(values | {"max_position_embeddings": MAX_POSITIONS}, "tiny"), DIM)


@pytest.mark.parametrize("kind", KINDS)
def test_cos_and_sin_are_those_of_transformers(kind: str) -> None:
    positions = torch.tensor([0, 1, 2, 63, 500, 1023, 1024, 3000, 4095])
    cos, sin = LlamaRotaryEmbedding(oracle_config(KINDS[kind]))(torch.zeros(1), positions[None])
    seen = RotaryTable(read(KINDS[kind])).rows(positions, 4096)
    assert seen[0].shape == (9, 1, DIM)
    assert torch.allclose(seen[0][:, 0], cos[0], atol=1e-5)
    signed = torch.cat((-sin[0, :, : DIM // 2], sin[0, :, DIM // 2 :]), dim=-1)
    assert torch.allclose(seen[1][:, 0], signed, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "llama3-other", "yarn", "yarn-explicit"])
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    expected, attention_factor = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](oracle_config(KINDS[kind]), None)
    rope = read(KINDS[kind])
    assert torch.allclose(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_the_scalings_differ_from_each_other() -> None:
    tables = {kind: inverse_frequencies(read(parameters)) for kind, parameters in KINDS.items()}
    for kind in ("linear", "llama3", "yarn"):
        plain = inverse_frequencies(RopeConfig(KINDS[kind]["rope_theta"], DIM))
        assert not torch.allclose(tables[kind], plain, rtol=1e-3)


def test_gguf_factors_divide_the_frequencies() -> None:
    factors = tuple(1.0 + index for index in range(DIM // 2))
    seen = inverse_frequencies(RopeConfig(10000.0, DIM, factors=factors))
    assert torch.equal(seen, inverse_frequencies(RopeConfig(10000.0, DIM)) / torch.tensor(factors))


def test_a_grown_table_keeps_its_values() -> None:
    table = RotaryTable(read(KINDS["yarn"]))
    positions = torch.tensor([0, 5, 100, 2047])
    before = [part.clone() for part in table.rows(positions, 2048)]
    far = torch.tensor([2048, 5000, 9999])
    grown = [part.clone() for part in table.rows(far, 10_000)]
    after = table.rows(positions, 2048)
    assert all(map(torch.equal, before, after))
    at_once = RotaryTable(read(KINDS["yarn"])).rows(far, 10_000)
    assert all(map(torch.equal, grown, at_once))


def test_rotating_pairs_the_halves_and_depends_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 3, DIM, generator=generator), torch.randn(1, 3, DIM, generator=generator)
    table = RotaryTable(RopeConfig(10000.0, DIM))

    def turned(x: Tensor, position: int) -> Tensor:
        return rotate(x, *table.rows(torch.tensor([position]), position + 1))

    near = (turned(query, 7) * turned(key, 3)).sum(dim=-1)
    far = (turned(query, 1007) * turned(key, 1003)).sum(dim=-1)
    assert torch.allclose(near, far, atol=1e-3)
    unit = torch.zeros(1, 1, DIM)
    unit[..., 0] = 1.0
    seen = turned(unit, 1)[0, 0]
    assert seen[0].item() == pytest.approx(0.5403023) and seen[DIM // 2].item() == pytest.approx(0.8414710)


@pytest.mark.parametrize(
    ("values", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 7.0}, 5.0),
        ({"rope_theta": 7.0}, 7.0),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7}, 7.0),
        ({"rope_parameters": None, "rope_scaling": None, "rope_theta": 7.0}, 7.0),
    ],
)
def test_theta_is_read_nested_first_then_at_top_level(values: dict[str, object], theta: float) -> None:
    assert read_values(values).theta == theta


def test_legacy_scaling_is_read_like_the_new_spelling() -> None:
    legacy = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read_values(legacy) == read(KINDS["linear"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "no rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope' is not supported"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3"}}, "has no 'factor'"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "truncation"),
    ],
)
def test_what_would_be_guessed_or_computed_wrongly_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_values(values)


@pytest.mark.parametrize(
    ("hidden", "factors", "said"),
    [
        (64, 31, r"'rope_freqs.weight' has shape \[31\] where the config implies \[32\]"),
        (63, 31, "heads of 63 dimensions cannot turn in pairs"),
    ],
)
def test_a_gguf_target_must_turn_whole_pairs(hidden: int, factors: int, said: str) -> None:
    keys = {
        "llama.embedding_length": hidden,
        "llama.attention.head_count": 1,
        "llama.rope.freq_base": 10000.0,
        "llama.block_count": 1,
        "llama.feed_forward_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 128,
    }
    shapes = {"rope_freqs.weight": (factors,), "token_embd.weight": (1, hidden)}
    tensors = {
        name: (
            TensorEntry(name, "F32", shape, 0, 4 * math.prod(shape)),
            MemoryBytes(np.zeros(4 * math.prod(shape), np.uint8)),
        )
        for name, shape in shapes.items()
    }
    weights = Weights(WeightFile(Path("x.gguf"), tensors, {}), "fp32", keep_name)
    with pytest.raises(ConfigError, match=said):
        llama.read_gguf(ConfigReader(keys, "x.gguf"), weights)
