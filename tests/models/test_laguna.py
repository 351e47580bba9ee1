"""Laguna against `transformers` and llama.cpp, and its text with and without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LagunaConfig, LagunaForCausalLM, PreTrainedModel

from slipstream.bench import rival
from slipstream.errors import ConfigError, FormatError
from tests.families import (
    check_gguf,
    check_llama_cpp,
    check_logits,
    check_speculation,
    check_taps,
    family_settings,
    load,
    open_pair,
    randomise,
    write_family_pair,
)
from tests.family_gguf import write_family_gguf
from tests.oracles import edit_config, save_model

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "partial_rotary_factor": 0.5,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "per-head": {},
    "per-element": {
        "gating": "per-element",
        "rope_parameters": {FULL: YARN | {"attention_factor": 1.4}, SLIDING: PLAIN},
    },
    "all-full-dense": {"layer_types": None, "mlp_layer_types": ["dense"] * 4, "num_attention_heads_per_layer": None},
    "biases-capped-tied": {
        "attention_bias": True,
        "moe_router_logit_softcapping": 1.5,
        "tie_word_embeddings": True,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "rope_parameters": {
            FULL: PLAIN | {"partial_rotary_factor": 0.25},
            SLIDING: PLAIN | {"partial_rotary_factor": 0.5},
        },
    },
}


def build(seed: int = 6, **changes: Any) -> PreTrainedModel:
    settings = family_settings(
        num_hidden_layers=4,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        moe_routed_scaling_factor=2.5,
        sliding_window=24,
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        num_attention_heads_per_layer=[4, 6, 6, 4],
        rope_parameters={FULL: YARN, SLIDING: PLAIN},
    )
    return randomise(LagunaForCausalLM(LagunaConfig(**settings | changes)), seed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_however_the_rows_are_cut(variant: str, tmp_path: Path) -> None:
    theirs = build(**VARIANTS[variant])
    check_logits(load(save_model(theirs, tmp_path)), theirs)


def test_taps_are_what_each_layer_leaves(tmp_path: Path) -> None:
    theirs = build()
    check_taps(load(save_model(theirs, tmp_path)), theirs)


@pytest.mark.parametrize(("gating", "recipe"), [(True, "q8_0"), ("per-element", None)])
def test_logits_match_from_gguf(gating: bool | str, recipe: Any, tmp_path: Path) -> None:
    check_gguf(build(gating=gating), tmp_path / "t.gguf", recipe)


@pytest.mark.skipif(not rival.available(), reason="xllamacpp is not installed")
@pytest.mark.parametrize("gating", [True, "per-element"])
def test_llama_cpp_reads_the_same_text_from_the_same_file(gating: bool | str, tmp_path: Path) -> None:
    check_llama_cpp(write_family_gguf(build(gating=gating), tmp_path / "t.gguf"))


def test_a_router_gguf_has_no_words_for_is_not_converted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GGUF cannot express how its experts"):
        write_family_gguf(build(moe_router_logit_softcapping=1.5), tmp_path / "t.gguf")


@pytest.mark.parametrize(("window", "weight_format"), [(24, "native"), (4, "int8")])
def test_speculation_never_changes_the_text(window: int, weight_format: Any, tmp_path: Path) -> None:
    """A window of 4 ends inside the trees."""
    check_speculation(open_pair(write_family_pair(build(sliding_window=window), tmp_path), weight_format))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gating": "per-element"}, "g_proj"),
        ({"gating": "sigmoid"}, "'sigmoid'"),
        ({"num_attention_heads_per_layer": [4, 6, 6]}, "each of 4 layers"),
        ({"num_attention_heads_per_layer": [4, 8, 6, 4]}, "layers.1.self_attn.q_proj"),
        ({"num_attention_heads_per_layer": [4, 5, 6, 4]}, "5 attention heads cannot share 2"),
        ({"layer_types": [FULL, SLIDING, SLIDING, "linear_attention"]}, "layer_types"),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, "layers.1.mlp"),
        ({"rope_parameters": {FULL: PLAIN}}, "rope_theta"),
        ({"moe_apply_router_weight_on_input": True}, "router weights"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_model(build(), tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises((ConfigError, FormatError), match=said):
        load(tmp_path)
