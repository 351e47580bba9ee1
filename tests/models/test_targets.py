"""Llama and Qwen3 targets against `transformers`: logits and taps, from safetensors and from GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.errors import ConfigError, FormatError, SlipstreamError
from slipstream.models.decoder import Decoder
from slipstream.models.loading import load_target
from tests.oracles import (
    FOLDER_VOCAB,
    TOLERANCE,
    edit_config,
    edit_tensors,
    our_target,
    save_model,
    their_logits,
    their_taps,
    tiny_target,
    write_target_gguf,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}

# name -> family and what differs from 4 query heads over 2 key heads of 16, hidden size 64, own head, plain rotary
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-six-over-two": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias-tied": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-mha": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3-mqa-tied": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3-wide-heads": ("qwen3", {"num_attention_heads": 6, "head_dim": 32, "rms_norm_eps": 1e-6}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-linear": ("qwen3", {"rope_parameters": LINEAR}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}}),
}
IN_GGUF = [name for name in VARIANTS if not name.endswith("yarn")]
LENGTHS = (1, 5, 64, 65, 150)


def build(variant: str) -> PreTrainedModel:
    family, changes = VARIANTS[variant]
    return tiny_target(family, seed=len(variant), **changes)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, FOLDER_VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(path: Path) -> Decoder:
    return load_target(path, "fp32").model


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Within the tolerance, of numbers large enough for it to mean something."""
    assert ours.shape == theirs.shape
    assert float(theirs.std()) > 0.2
    assert float((ours - theirs).abs().max()) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_however_the_rows_are_cut(variant: str, tmp_path: Path) -> None:
    theirs_model = build(variant)
    model = load(save_model(theirs_model, tmp_path))
    ids = prompt(150)
    theirs = their_logits(theirs_model, ids)
    for chunk in (len(ids), 1, 3, 7, 64):
        ((ours, _),) = our_target(model, [ids], chunk)
        assert_close(ours, theirs)


@pytest.mark.parametrize("variant", ["llama", "llama-mqa", "qwen3", "qwen3-wide-heads"])
@pytest.mark.parametrize("chunk", [1, 33, 1000])
def test_logits_match_in_a_batch_of_different_lengths(variant: str, chunk: int, tmp_path: Path) -> None:
    theirs_model = build(variant)
    model = load(save_model(theirs_model, tmp_path))
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    for ids, (ours, _) in zip(prompts, our_target(model, prompts, chunk), strict=True):
        assert_close(ours, their_logits(theirs_model, ids))


@pytest.mark.parametrize("variant", ["llama-biases", "qwen3-mqa-tied"])
def test_logits_match_from_shards(variant: str, tmp_path: Path) -> None:
    theirs_model = build(variant)
    save_model(theirs_model, tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids = prompt(40)
    ((ours, _),) = our_target(load(tmp_path), [ids])
    assert_close(ours, their_logits(theirs_model, ids))


@pytest.mark.parametrize("variant", IN_GGUF)
def test_logits_match_from_gguf(variant: str, tmp_path: Path) -> None:
    theirs_model = build(variant)
    write_target_gguf(theirs_model, tmp_path / "model.gguf")
    model = load(tmp_path / "model.gguf")
    ids = prompt(150)
    theirs = their_logits(theirs_model, ids)
    for chunk in (len(ids), 7, 64):
        ((ours, _),) = our_target(model, [ids], chunk)
        assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("variant", ["llama-six-over-two", "llama-attention-bias-tied", "qwen3", "qwen3-mqa-tied"])
def test_logits_match_from_a_quantised_gguf(variant: str, kind: str, tmp_path: Path) -> None:
    theirs_model = build(variant)
    ids = prompt(70)
    unquantised = their_logits(theirs_model, ids)
    write_target_gguf(theirs_model, tmp_path / "model.gguf", kind)
    theirs = their_logits(theirs_model, ids)
    assert float((theirs - unquantised).abs().max()) > 100 * TOLERANCE
    for chunk in (70, 16):
        ((ours, _),) = our_target(load(tmp_path / "model.gguf"), [ids], chunk)
        assert_close(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_taps_are_what_each_layer_leaves(family: str, tmp_path: Path) -> None:
    """The last layer is tapped before the final norm, -1 is the embedding, and the order is the one asked for."""
    theirs_model = tiny_target(family)
    model = load(save_model(theirs_model, tmp_path))
    prompts = [prompt(length, seed=length) for length in (3, 70)]
    for layers in ((0,), (2,), (-1,), (2, -1, 0, 1)):
        for chunk in (1000, 8):
            for ids, (_, ours) in zip(prompts, our_target(model, prompts, chunk, taps=layers), strict=True):
                assert ours.shape == (len(ids), 64 * len(layers))
                assert_close(ours, their_taps(theirs_model, ids, layers))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_legacy_rope_keys_mean_the_same(kind: str, tmp_path: Path) -> None:
    """Older configs have `rope_theta` at top level and `rope_scaling` with `type`."""
    values = {"linear": LINEAR, "llama3": LLAMA3, "yarn": YARN}[kind]
    theirs_model = tiny_target("llama", rope_parameters=values)
    save_model(theirs_model, tmp_path)
    legacy: dict[str, Any] = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_type")}
    edit_config(tmp_path, ["rope_parameters"], rope_theta=values["rope_theta"], rope_scaling=legacy | {"type": kind})
    ids = prompt(100)
    ((ours, _),) = our_target(load(tmp_path), [ids])
    assert_close(ours, their_logits(theirs_model, ids))


# ---- what is refused


def refusal(path: Path, kind: type[SlipstreamError]) -> str:
    """The one sentence with which a model is refused."""
    with pytest.raises(kind) as caught:
        load_target(path, "fp32")
    message = caught.value.message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_missing_tensor_is_named(family: str, tmp_path: Path) -> None:
    save_model(tiny_target(family), tmp_path)
    edit_tensors(tmp_path, ["model.layers.1.mlp.up_proj.weight"])
    assert "'model.layers.1.mlp.up_proj.weight'" in refusal(tmp_path, FormatError)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_unknown_tensor_is_named(family: str, tmp_path: Path) -> None:
    save_model(tiny_target(family), tmp_path)
    edit_tensors(tmp_path, model__layers__0__self_attn__sinks=torch.zeros(4))
    assert "model.layers.0.self_attn.sinks" in refusal(tmp_path, ConfigError)


def test_a_missing_norm_of_qwen3_is_named(tmp_path: Path) -> None:
    save_model(tiny_target("qwen3"), tmp_path)
    edit_tensors(tmp_path, ["model.layers.2.self_attn.k_norm.weight"])
    assert "'model.layers.2.self_attn.k_norm.weight'" in refusal(tmp_path, FormatError)


@pytest.mark.parametrize(
    ("change", "name", "stored", "implied"),
    [
        ({"num_key_value_heads": 4}, "layers.0.self_attn.k_proj", [32, 64], [64, 64]),
        ({"head_dim": 32}, "layers.0.self_attn.q_proj", [64, 64], [128, 64]),
        ({"intermediate_size": 128}, "layers.0.mlp.gate_proj", [96, 64], [128, 64]),
        ({"vocab_size": 300}, "embed_tokens", [259, 64], [300, 64]),
        ({"hidden_size": 96}, "embed_tokens", [259, 64], [259, 96]),
    ],
)
def test_a_config_that_contradicts_a_shape_is_refused(
    change: dict[str, Any], name: str, stored: list[int], implied: list[int], tmp_path: Path
) -> None:
    save_model(tiny_target("llama"), tmp_path)
    edit_config(tmp_path, **change)
    said = f"'model.{name}.weight' has shape {stored} where the config implies {implied}"
    assert said in refusal(tmp_path, ConfigError)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 2}, "model.layers.2."),
        ({"num_attention_heads": 3}, "3 attention heads cannot share 2 key heads evenly"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
    ],
)
def test_a_config_that_contradicts_itself_or_the_tensors_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_model(tiny_target("llama"), tmp_path)
    edit_config(tmp_path, **change)
    assert said in refusal(tmp_path, ConfigError)


def test_more_layers_than_tensors_are_refused(tmp_path: Path) -> None:
    save_model(tiny_target("llama"), tmp_path)
    edit_config(tmp_path, num_hidden_layers=4)
    assert "'model.layers.3.self_attn.q_proj.weight'" in refusal(tmp_path, FormatError)


@pytest.mark.parametrize("change", [{"attention_bias": False}, {"mlp_bias": False}])
def test_biases_the_config_does_not_announce_are_named(change: dict[str, Any], tmp_path: Path) -> None:
    save_model(build("llama-biases"), tmp_path)
    edit_config(tmp_path, **change)
    assert ".bias" in refusal(tmp_path, ConfigError)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(tiny_target("llama"), tmp_path, shard_size="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refusal(tmp_path, FormatError)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    save_model(tiny_target("llama"), tmp_path, shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    moved = next(name for name, shard in content["weight_map"].items() if shard == shards[0])
    assert moved in load_file(tmp_path / shards[0])
    content["weight_map"][moved] = shards[1]
    index.write_text(json.dumps(content))
    message = refusal(tmp_path, FormatError)
    assert moved in message and shards[1] in message


@pytest.mark.parametrize("nested", [{"rope_type": "default"}, None])
def test_a_missing_rope_theta_is_refused(nested: dict[str, Any] | None, tmp_path: Path) -> None:
    save_model(tiny_target("qwen3"), tmp_path)
    edit_config(tmp_path, rope_parameters=nested)
    assert "rope_theta" in refusal(tmp_path, ConfigError)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": None}, "model_type"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial rotary"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}, "mscale"),
        ({"rope_parameters": YARN | {"truncate": False}}, "truncation"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_model(tiny_target("llama"), tmp_path)
    edit_config(tmp_path, **change)
    assert said in refusal(tmp_path, ConfigError)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ({"drop": ["blk.1.ffn_up.weight"]}, FormatError, "'blk.1.ffn_up.weight'"),
        ({"drop": ["blk.0.attn_norm.weight"]}, FormatError, "'blk.0.attn_norm.weight'"),
        ({"extra": ["blk.0.attn_sinks.weight"]}, ConfigError, "blk.0.attn_sinks.weight"),
        ({"without_theta": True}, ConfigError, "rope.freq_base"),
        ({"rotary_dim": 8}, ConfigError, "partial rotary"),
    ],
)
def test_a_faulty_gguf_is_refused(
    family: str, fault: dict[str, Any], kind: type[SlipstreamError], said: str, tmp_path: Path
) -> None:
    write_target_gguf(tiny_target(family), tmp_path / "model.gguf", **fault)
    assert said in refusal(tmp_path / "model.gguf", kind)


def test_yarn_in_a_gguf_target_is_refused(tmp_path: Path) -> None:
    """ggml's YaRN is not Hugging Face's; a guess between them would be wrong."""
    write_target_gguf(build("llama-yarn"), tmp_path / "model.gguf")
    assert "'yarn'" in refusal(tmp_path / "model.gguf", ConfigError)
