"""Gemma 4 against `transformers` and llama.cpp, and its text with and without speculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

from slipstream.bench import rival
from slipstream.errors import ConfigError, FormatError
from slipstream.models.cpu import part_runs
from tests.families import (
    assert_close,
    check_gguf,
    check_llama_cpp,
    check_logits,
    check_speculation,
    check_taps,
    family_settings,
    ids_of,
    load,
    open_pair,
    randomise,
    write_family_pair,
)
from tests.family_gguf import write_family_gguf
from tests.oracles import FOLDER_VOCAB, edit_config, our_target, save_model, their_logits

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "side-embeddings": {},
    "experts-tied": EXPERTS | {"hidden_size_per_layer_input": 0, "tie_word_embeddings": True},
    "shared-keys-wide": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 2.0},
    "keys-are-values": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_key_value_heads": 4,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
    },
    "biases": {"attention_bias": True, "layer_types": [FULL, FULL, SLIDING, FULL]},
}
IN_GGUF = [name for name in VARIANTS if name != "biases"]


def build(seed: int = 7, **changes: Any) -> PreTrainedModel:
    settings = family_settings(
        num_hidden_layers=4,
        vocab_size_per_layer_input=FOLDER_VOCAB,
        hidden_size_per_layer_input=16,
        global_head_dim=32,
        sliding_window=24,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        final_logit_softcapping=30.0,
        tie_word_embeddings=False,
        rope_parameters={
            FULL: {"rope_type": "proportional", "rope_theta": 100000.0, "partial_rotary_factor": 0.25},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    return randomise(Gemma4ForCausalLM(Gemma4TextConfig(**settings | changes)), seed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_however_the_rows_are_cut(variant: str, tmp_path: Path) -> None:
    theirs = build(**VARIANTS[variant])
    check_logits(load(save_model(theirs, tmp_path)), theirs)


@pytest.mark.parametrize("variant", ["side-embeddings", "shared-keys-wide"])
def test_taps_are_what_each_layer_leaves(variant: str, tmp_path: Path) -> None:
    theirs = build(**VARIANTS[variant])
    check_taps(load(save_model(theirs, tmp_path)), theirs)


def test_layers_that_share_keys_store_none(tmp_path: Path) -> None:
    config = load(save_model(build(num_kv_shared_layers=2), tmp_path)).config
    assert config.kv_shapes == ((2, 16), (2, 32))
    assert [config.pool(index) for index in range(4)] == [0, 1, 0, 1]


def as_multimodal(folder: Path) -> None:
    """Turns a text checkpoint into the language model of one that sees, as published ones are."""
    path = folder / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in load_file(path).items()}
    save_file(tensors | {"model.vision_tower.patch_embedder.weight": torch.ones(4, 4)}, path)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))


def test_the_text_part_of_a_multimodal_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    theirs = build()
    save_model(theirs, tmp_path)
    as_multimodal(tmp_path)
    check_logits(load(tmp_path), theirs, chunks=())


def test_published_configs_name_the_full_layers_heads_globally(tmp_path: Path) -> None:
    theirs = build(**VARIANTS["keys-are-values"])
    save_model(theirs, tmp_path)
    edit_config(tmp_path, ["per_layer_config"], global_head_dim=32, num_global_key_value_heads=1)
    check_logits(load(tmp_path), theirs, chunks=())


def test_keys_that_shared_layers_carry_all_the_same_are_ignored(tmp_path: Path) -> None:
    theirs = build(num_kv_shared_layers=2)
    path = save_model(theirs, tmp_path) / "model.safetensors"
    extra = {f"model.layers.3.self_attn.{name}.weight": torch.ones(64, 64) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(load_file(path) | extra, path)
    check_logits(load(tmp_path), theirs, chunks=())


@pytest.mark.parametrize(("variant", "recipe"), [*((name, None) for name in IN_GGUF), ("experts-tied", "q4_0")])
def test_logits_match_from_gguf(variant: str, recipe: Any, tmp_path: Path) -> None:
    check_gguf(build(**VARIANTS[variant]), tmp_path / "t.gguf", recipe)


@pytest.mark.skipif(not rival.available(), reason="xllamacpp is not installed")
@pytest.mark.parametrize("variant", IN_GGUF)
def test_llama_cpp_reads_the_same_text_from_the_same_file(variant: str, tmp_path: Path) -> None:
    check_llama_cpp(write_family_gguf(build(**VARIANTS[variant]), tmp_path / "t.gguf"))


def test_biases_gguf_has_no_words_for_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GGUF cannot express attention biases"):
        write_family_gguf(build(**VARIANTS["biases"]), tmp_path / "t.gguf")


@pytest.mark.parametrize("fault", ["scale missing", "scale doubled", "softcap missing", "value norm skipped"])
def test_the_comparison_would_notice(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = build()
    model: Any = load(save_model(theirs, tmp_path))
    if fault.startswith("scale"):
        model.embed.scale = 1.0 if fault == "scale missing" else model.embed.scale**2
    elif fault == "softcap missing":
        monkeypatch.setattr(type(model.config), "softcap", 0.0)
    else:
        monkeypatch.setattr(part_runs, "unweighted_norm", lambda x, eps: x)
    ids = ids_of(40)
    ((ours, _),) = our_target(model, [ids])
    with pytest.raises(AssertionError):
        assert_close(ours, their_logits(theirs, ids))


@pytest.mark.parametrize(
    ("variant", "window", "weight_format"),
    [("side-embeddings", 24, "native"), ("experts-tied", 4, "native"), ("shared-keys-wide", 4, "int8")],
)
def test_speculation_never_changes_the_text(variant: str, window: int, weight_format: Any, tmp_path: Path) -> None:
    """A window of 4 ends inside the trees."""
    target = build(**VARIANTS[variant] | {"sliding_window": window})
    check_speculation(open_pair(write_family_pair(target, tmp_path), weight_format))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": [SLIDING, FULL, FULL, SLIDING]}, "the last layer must be a full one"),
        ({"num_kv_shared_layers": 3}, "share keys that no layer before them has"),
        ({"hidden_activation": "silu"}, "'silu'"),
        ({"use_bidirectional_attention": "all"}, "sees ahead"),
        ({"per_layer_config": None}, "per_layer_config"),
        ({"hidden_size_per_layer_input": 0}, "embed_tokens_per_layer"),
        ({"attention_k_eq_v": True}, "layers.1.self_attn.v_proj"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_model(build(), tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises((ConfigError, FormatError), match=said):
        load(tmp_path)
