"""Qwen3 with experts against `transformers` and llama.cpp, and its text with and without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slipstream.bench import rival
from slipstream.errors import ConfigError, FormatError
from slipstream.models.cpu.part_runs import run_expert_block
from slipstream.models.loading import load_target
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
from tests.oracles import edit_config, edit_tensors, save_model

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "renormalised-tied": {"norm_topk_prob": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "dense-layers": {"mlp_only_layers": [1], "num_key_value_heads": 1, "num_experts_per_tok": 1},
    "every-second": {"decoder_sparse_step": 2, "norm_topk_prob": True, "attention_bias": True},
}


def build(seed: int = 5, **changes: Any) -> PreTrainedModel:
    settings = family_settings(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32)
    return randomise(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings | changes)), seed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_however_the_rows_are_cut(variant: str, tmp_path: Path) -> None:
    theirs = build(**VARIANTS[variant])
    check_logits(load(save_model(theirs, tmp_path)), theirs)


def test_older_configs_mean_the_same(tmp_path: Path) -> None:
    theirs = build()
    save_model(theirs, tmp_path)
    edit_config(tmp_path, ["num_local_experts"], num_experts=6)
    check_logits(load(tmp_path), theirs, chunks=())


def test_taps_are_what_each_layer_leaves(tmp_path: Path) -> None:
    theirs = build()
    check_taps(load(save_model(theirs, tmp_path)), theirs)


@pytest.mark.parametrize("recipe", [None, "q8_0"])
def test_logits_match_from_gguf(recipe: Any, tmp_path: Path) -> None:
    check_gguf(build(norm_topk_prob=True), tmp_path / "t.gguf", recipe)


@pytest.mark.skipif(not rival.available(), reason="xllamacpp is not installed")
def test_llama_cpp_reads_the_same_text_from_the_same_file(tmp_path: Path) -> None:
    check_llama_cpp(write_family_gguf(build(norm_topk_prob=True), tmp_path / "t.gguf"))


@pytest.mark.parametrize("variant", ["plain", "dense-layers"])
def test_what_llama_cpp_would_compute_otherwise_is_not_converted(variant: str, tmp_path: Path) -> None:
    """Its files have experts in every layer, whose shares add up to one."""
    with pytest.raises(ConfigError, match="GGUF cannot express how its experts|which of its layers"):
        write_family_gguf(build(**VARIANTS[variant]), tmp_path / "t.gguf")


@pytest.mark.parametrize("weight_format", ["native", "int8"])
def test_speculation_never_changes_the_text(weight_format: Any, tmp_path: Path) -> None:
    check_speculation(open_pair(write_family_pair(build(), tmp_path), weight_format))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 7}, "7 of 6 experts"),
        ({"moe_intermediate_size": 48}, "experts.0.gate_proj"),
        ({"norm_topk_prob": None}, "norm_topk_prob"),
        ({"mlp_only_layers": [0]}, "layers.0.mlp.gate_proj"),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_model(build(), tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises((ConfigError, FormatError), match=said):
        load(tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_model(build(), tmp_path)
    edit_tensors(tmp_path, ["model.layers.1.mlp.experts.4.up_proj.weight"])
    with pytest.raises(FormatError, match="experts.4.up_proj"):
        load(tmp_path)


def test_a_row_is_answered_alike_whatever_its_neighbours(tmp_path: Path) -> None:
    """Bit for bit, in a format that promises it: the experts of the rows beside it must not matter."""
    model = load_target(save_model(build(), tmp_path), "int8").model
    block: Any = model.layers[0].parts[1]
    rows = torch.randn(33, 64, generator=torch.Generator().manual_seed(2))
    together = run_expert_block(block, rows)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(3))
    assert torch.equal(run_expert_block(block, rows[order]), together[order])
    for row in range(33):
        assert torch.equal(run_expert_block(block, rows[row : row + 1])[0], together[row])
