"""What a drafter's configuration must say, what its weights must hold, and which target it may serve."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import ConfigError, FormatError, PairError, SlipstreamError
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash import DFlashDrafter, check_pair, load_drafter
from slipstream.models.dflash_config import read_gguf, read_hf
from slipstream.models.loading import load_target
from tests.oracles import FOLDER_VOCAB, MASK, edit_config, edit_tensors, save_model, tiny_drafter, tiny_target

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound drafter for the tiny target."""
    return save_model(tiny_drafter(), tmp_path / "drafter")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    """Hidden size 64, 3 layers, FOLDER_VOCAB tokens."""
    return load_target(save_model(tiny_target("llama"), tmp_path_factory.mktemp("target")), "fp32").model.config


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def nest(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Changes or removes keys of `dflash_config`."""
    nested = config_of(folder)["dflash_config"] | changes
    edit_config(folder, dflash_config={key: value for key, value in nested.items() if key not in drop})


def refusal(folder: Path, kind: type[SlipstreamError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        load_drafter(folder, "fp32")
    return one_sentence(caught.value)


def one_sentence(error: SlipstreamError) -> str:
    assert "\n" not in error.message and ". " not in error.message and not error.message.endswith(".")
    assert error.hint in str(error)
    return error.message


def pair_refusal(target: DecoderConfig, drafter: DFlashDrafter, *numbers: int) -> str:
    """The sentence with which a pair is refused; it must name these numbers."""
    with pytest.raises(PairError) as caught:
        check_pair(target, drafter)
    message = one_sentence(caught.value)
    assert {str(number) for number in numbers} <= set(re.findall(r"-?\d+", message)), message
    return message


# ---- pairs


def test_a_sound_pair_is_accepted(folder: Path, target: DecoderConfig) -> None:
    check_pair(target, load_drafter(folder, "fp32"))


def test_another_vocabulary_is_refused(folder: Path, target: DecoderConfig) -> None:
    message = pair_refusal(replace(target, vocab_size=300), load_drafter(folder, "fp32"), FOLDER_VOCAB, 300)
    assert "vocabulary" in message


def test_another_width_is_refused(folder: Path, target: DecoderConfig) -> None:
    message = pair_refusal(replace(target, hidden_size=128), load_drafter(folder, "fp32"), 64, 128)
    assert "wide" in message


def test_another_tap_width_is_refused(tmp_path: Path, target: DecoderConfig) -> None:
    """A drafter that brings its own embedding and head may have its own width, but reads the target's taps."""
    save_model(tiny_drafter(), tmp_path)
    own = torch.zeros(FOLDER_VOCAB, 64)
    edit_tensors(tmp_path, embed_tokens__weight=own, lm_head__weight=own.clone())
    drafter = load_drafter(tmp_path, "fp32")
    check_pair(target, drafter)
    assert "taps" in pair_refusal(replace(target, hidden_size=128), drafter, 64, 128)


def test_fewer_tap_ids_than_fc_reads_are_refused_as_a_pair(tmp_path: Path, target: DecoderConfig) -> None:
    """Two taps of 96 divide fc as well as three of 64 do; the target's width tells them apart."""
    save_model(tiny_drafter(taps=(0, 1, 2)), tmp_path)
    nest(tmp_path, target_layer_ids=[0, 1])
    assert "taps" in pair_refusal(target, load_drafter(tmp_path, "fp32"), 96, 64)


def test_another_layer_count_is_refused(folder: Path, target: DecoderConfig) -> None:
    message = pair_refusal(replace(target, layers=4), load_drafter(folder, "fp32"), 3, 4)
    assert "layers" in message


@pytest.mark.parametrize("taps", [[0, 3], [-2, 1]])
def test_a_tap_outside_the_target_is_refused(folder: Path, target: DecoderConfig, taps: list[int]) -> None:
    nest(folder, target_layer_ids=taps)
    outside = next(tap for tap in taps if tap not in (0, 1))
    message = pair_refusal(target, load_drafter(folder, "fp32"), outside, 2)
    assert "layer" in message


@pytest.mark.parametrize("taps", [[-1, 2], [2, 0]])
def test_the_embedding_and_the_last_layer_may_be_tapped(folder: Path, target: DecoderConfig, taps: list[int]) -> None:
    nest(folder, target_layer_ids=taps)
    drafter = load_drafter(folder, "fp32")
    check_pair(target, drafter)
    assert drafter.config.target_layer_ids == tuple(taps)


def test_a_mask_token_outside_the_vocabulary_is_refused(folder: Path, target: DecoderConfig) -> None:
    nest(folder, mask_token_id=FOLDER_VOCAB)
    drafter = load_drafter(folder, "fp32")
    assert "mask" in pair_refusal(target, drafter, FOLDER_VOCAB, target.vocab_size)
    nest(folder, mask_token_id=FOLDER_VOCAB - 1)
    check_pair(target, load_drafter(folder, "fp32"))


# ---- configurations


def test_missing_target_layer_ids_are_refused(folder: Path) -> None:
    """The count of a formula would happen to fit fc here; it is not used."""
    nest(folder, ("target_layer_ids",))
    assert "target_layer_ids" in refusal(folder)


@pytest.mark.parametrize("value", [[], "0,1", [0.5, 1], None])
def test_senseless_target_layer_ids_are_refused(folder: Path, value: object) -> None:
    nest(folder, target_layer_ids=value)
    assert "target_layer_ids" in refusal(folder)


@pytest.mark.parametrize("nested", [None, {}, {"rope_type": "default"}])
def test_a_missing_rope_theta_is_refused(folder: Path, nested: object) -> None:
    edit_config(folder, rope_parameters=nested)
    assert "rope_theta" in refusal(folder)


def test_rope_theta_is_taken_from_where_it_stands(folder: Path) -> None:
    config = config_of(folder)
    del config["rope_parameters"]
    assert read_hf(config | {"rope_theta": 1e6}, "d").rope.theta == 1e6
    both = config | {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}
    assert read_hf(both, "d").rope.theta == 1e7


def test_a_tap_count_fc_cannot_have_is_refused(folder: Path) -> None:
    nest(folder, target_layer_ids=[0, 1, 2])
    message = refusal(folder)
    assert "fc.weight" in message and "128" in message and "3 taps" in message


@pytest.mark.parametrize("key", ["mask_token_id", "block_size"])
def test_a_missing_number_is_named(folder: Path, key: str) -> None:
    nest(folder, (key,))
    edit_config(folder, [key])
    assert key in refusal(folder)


@pytest.mark.parametrize("key", ["block_size", "target_layer_ids", "mask_token_id", "num_target_layers"])
def test_speculation_keys_may_stand_at_either_level(folder: Path, key: str) -> None:
    config = config_of(folder)
    value = config["dflash_config"].pop(key, None) or config.pop(key)
    nested = dict(config["dflash_config"])
    at_top = read_hf({**config, "dflash_config": nested, key: value}, "d")
    inside = read_hf({**config, "dflash_config": {**nested, key: value}}, "d")
    assert at_top == inside
    assert (at_top.block_size, at_top.mask_token_id, at_top.target_layer_ids, at_top.num_target_layers) == (
        8,
        MASK,
        (0, 1),
        3,
    )


def test_a_block_of_one_is_refused(folder: Path) -> None:
    edit_config(folder, block_size=1)
    assert "block_size is 1" in refusal(folder)


@pytest.mark.parametrize("name", ["layers.0.self_attn.sinks", "d2t", "aux_hidden_norms.0.weight"])
def test_an_unknown_tensor_is_named(folder: Path, name: str) -> None:
    edit_tensors(folder, **{name: torch.zeros(4)})
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    edit_tensors(folder, [name])
    assert f"'{name}'" in refusal(folder, FormatError)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=128)
    assert "'layers.0.mlp.gate_proj.weight' has shape [96, 64] where the config implies [128, 64]" in refusal(folder)


def test_tensors_may_have_a_prefix(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({f"model.{name}": value for name, value in load_file(path).items()}, path)
    assert load_drafter(folder, "fp32").tap_width == 128


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("markov_rank", 256),
        ("selector_rank", 64),
        ("conv_kernel_size", 4),
        ("enable_confidence_head", True),
        ("draft_vocab_size", 100),
    ],
)
def test_parts_the_weights_lack_and_reduced_vocabularies_are_refused(
    folder: Path, key: str, value: object, nested: bool
) -> None:
    """They would run and never accept."""
    if nested:
        nest(folder, **{key: value})
    else:
        edit_config(folder, **{key: value})
    assert key in refusal(folder)


@pytest.mark.parametrize("nested", [True, False])
def test_a_block_may_sample_from_the_anchor(folder: Path, nested: bool) -> None:
    if nested:
        nest(folder, sample_from_anchor=True)
    else:
        edit_config(folder, sample_from_anchor=True)
    config = load_drafter(folder, "fp32").config
    assert (config.first_slot, config.proposals) == (0, 8)


def test_a_drafter_with_heads_is_paired_like_any_other(folder: Path, target: DecoderConfig) -> None:
    edit_tensors(
        folder,
        markov_head__markov_w1__weight=torch.zeros(FOLDER_VOCAB, 4),
        markov_head__markov_w2__weight=torch.zeros(FOLDER_VOCAB, 4),
    )
    drafter = load_drafter(folder, "fp32")
    check_pair(target, drafter)
    assert "vocabulary" in pair_refusal(replace(target, vocab_size=300), drafter, FOLDER_VOCAB, 300)


def test_a_target_is_not_a_drafter(tmp_path: Path) -> None:
    save_model(tiny_target("qwen3"), tmp_path)
    assert "target_layer_ids" in refusal(tmp_path)


# ---- which rows see which


def patterns(folder: Path, nested: dict[str, Any], **top: Any) -> tuple[AttentionPattern, ...]:
    config = config_of(folder)
    merged = {**config, **top, "dflash_config": config["dflash_config"] | nested}
    return read_hf({key: value for key, value in merged.items() if value is not None}, "d").patterns


def test_causality_is_the_flag_then_the_nested_flag_then_the_layer_type(folder: Path) -> None:
    types = {"layer_types": [SLIDING, FULL], "sliding_window": 20}
    sliding, full = AttentionPattern(20, True), AttentionPattern(0, False)
    assert patterns(folder, {}, **types) == (sliding, full)
    assert patterns(folder, {"causal": False}, **types) == (replace(sliding, causal=False), full)
    assert patterns(folder, {"causal": True}, **types) == (sliding, replace(full, causal=True))
    assert patterns(folder, {"causal": True}, is_causal=False, **types) == (replace(sliding, causal=False), full)
    assert patterns(folder, {"causal": False}, is_causal=True, **types) == (sliding, replace(full, causal=True))


def test_without_layer_types_every_layer_is_full_unless_swa_is_asked_for(folder: Path) -> None:
    swa = {"use_swa": True, "swa_window_size": 12}
    assert patterns(folder, {}, layer_types=None) == (AttentionPattern(0, False),) * 2
    assert patterns(folder, swa, layer_types=None) == (AttentionPattern(12, False),) * 2
    assert patterns(folder, swa | {"use_swa": False}, layer_types=None) == (AttentionPattern(0, False),) * 2
    assert patterns(folder, swa, layer_types=None, is_causal=True) == (AttentionPattern(12, True),) * 2
    assert patterns(folder, swa, layer_types=[FULL, FULL]) == (AttentionPattern(0, False),) * 2


@pytest.mark.parametrize(
    ("top", "nested", "said"),
    [
        ({"layer_types": [SLIDING, FULL], "sliding_window": None}, {}, "sliding_window"),
        ({"layer_types": [SLIDING]}, {}, "layer_types"),
        ({"layer_types": ["chunked_attention", FULL]}, {}, "layer_types"),
        ({"layer_types": None}, {"use_swa": True}, "swa_window_size"),
        ({"is_causal": "no"}, {}, "is_causal"),
        ({"hidden_act": "gelu"}, {}, "gelu"),
        ({"rope_is_neox_style": False}, {}, "rope_is_neox_style"),
    ],
)
def test_a_senseless_pattern_is_refused(folder: Path, top: dict[str, Any], nested: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        patterns(folder, nested, **top)


# ---- GGUF


GGUF: dict[str, object] = {
    "general.architecture": "dflash",
    "dflash.embedding_length": 64,
    "dflash.block_count": 2,
    "dflash.feed_forward_length": 96,
    "dflash.attention.head_count": 4,
    "dflash.attention.head_count_kv": 2,
    "dflash.attention.key_length": 16,
    "dflash.attention.layer_norm_rms_epsilon": 1e-6,
    "dflash.rope.freq_base": 1e6,
    "dflash.vocab_size": FOLDER_VOCAB,
    "dflash.block_size": 8,
    "dflash.target_layers": [1, 3, 0],
    "tokenizer.ggml.mask_token_id": MASK,
}


def test_gguf_tap_ids_are_stored_one_higher() -> None:
    read = read_gguf(GGUF, "d.gguf")
    assert read.target_layer_ids == (0, 2, -1)
    assert read.patterns == (AttentionPattern(0, False),) * 2
    assert (read.rope.theta, read.block_size, read.mask_token_id) == (1e6, 8, MASK)


@pytest.mark.parametrize(
    "key",
    [
        "dflash.target_layers",
        "dflash.rope.freq_base",
        "tokenizer.ggml.mask_token_id",
        "dflash.block_size",
        "dflash.vocab_size",
        "dflash.attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_gguf_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        read_gguf({name: value for name, value in GGUF.items() if name != key}, "d.gguf")


def test_a_gguf_target_is_not_a_drafter() -> None:
    from tests.helpers_models import smollm2_path

    assert "'llama'" in refusal(smollm2_path())
