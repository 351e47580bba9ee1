"""DSpark checkpoints: every layout, spelling and container they come in, and what is refused."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import ConfigError, FormatError, SlipstreamError
from slipstream.models.cpu.part_runs import enter_convolution
from slipstream.models.dflash import DFlashDrafter, load_drafter
from slipstream.models.dflash_config import DFlashConfig, read_gguf, read_hf
from slipstream.models.dflash_names import gguf_spellings
from slipstream.tools.conversion import convert
from slipstream.tools.file_report import inspect_file
from slipstream.tools.quantize_recipes import RecipeName
from slipstream.tools.requantize import quantize_file
from tests.models.test_dflash2 import tiny_dflash2
from tests.models.test_heads import FOLDER_VOCAB, HIDDEN, confidence_tensors, markov_tensors, noise
from tests.models.test_pair import GGUF
from tests.oracles import MASK, edit_config, edit_tensors, save_model, tiny_drafter

RANK = 12
HEADS = markov_tensors("vanilla") | confidence_tensors(with_markov=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A DSpark drafter whose config does not mention its heads."""
    save_model(tiny_drafter(), tmp_path / "drafter")
    edit_tensors(tmp_path / "drafter", **HEADS)
    return tmp_path / "drafter"


def corrections(drafter: DFlashDrafter) -> tuple[np.ndarray, float | None]:
    """What the heads say after token 33, over the whole vocabulary."""
    assert drafter.heads is not None
    walk = drafter.heads.begin(noise(1, HIDDEN, seed=7), torch.arange(FOLDER_VOCAB)[None])
    return walk.correct(0, 33, None)[0], walk.confidence(0, 33)


def assert_same_heads(one: DFlashDrafter, other: DFlashDrafter, tolerance: float = 1e-5) -> None:
    (added, chance), (other_added, other_chance) = corrections(one), corrections(other)
    assert float(np.abs(added).max()) > 1
    np.testing.assert_allclose(added, other_added, atol=tolerance)
    assert chance == (pytest.approx(other_chance, abs=tolerance) if other_chance is not None else None)


def refusal(folder: Path, kind: type[SlipstreamError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        load_drafter(folder, "fp32")
    return caught.value.message


# ---- configurations


def read(nested: dict[str, Any] | None = None, drop: tuple[str, ...] = (), **top: Any) -> DFlashConfig:
    """A config alone, its weights unknown."""
    config: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": FOLDER_VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "block_size": 7,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1],
        "dflash_config": nested or {},
    } | top
    return read_hf({key: value for key, value in config.items() if key not in drop}, "d")


@pytest.mark.parametrize(
    "marks",
    [
        {"markov_rank": 256},
        {"dflash_config": {"markov_rank": 256}},
        {"enable_confidence_head": True},
        {"architectures": ["Qwen3DSparkModel"]},
        {"dflash_config": {"projector_type": "dspark"}},
        {"dspark_markov_rank": 256},
    ],
)
def test_a_dspark_config_without_the_key_uses_every_row(marks: dict[str, Any]) -> None:
    config = read(**marks)
    assert (config.sample_from_anchor, config.first_slot, config.proposals) == (True, 0, 7)
    explicit = read(**marks, sample_from_anchor=False)
    assert (explicit.sample_from_anchor, explicit.first_slot, explicit.proposals) == (False, 1, 6)


@pytest.mark.parametrize(
    "marks",
    [
        {},
        {"architectures": ["DFlashDraftModel"]},
        {"markov_rank": 0},
        {"markov_rank": 256, "speculators_model_type": "dspark"},
        {"selector_rank": 8, "selector_top_k": 4},
    ],
)
def test_other_configs_without_the_key_drop_the_anchor_row(marks: dict[str, Any]) -> None:
    config = read(**marks)
    assert (config.sample_from_anchor, config.first_slot, config.proposals) == (False, 1, 6)
    assert read({"sample_from_anchor": True}, **marks).proposals == 7


def test_a_block_of_one_needs_the_anchor_row() -> None:
    assert read(block_size=1, sample_from_anchor=True).proposals == 1
    with pytest.raises(ConfigError, match="block_size is 1"):
        read(block_size=1, sample_from_anchor=False)


def test_bundle_spellings_are_read() -> None:
    config = read(
        drop=("block_size", "mask_token_id", "target_layer_ids"),
        dspark_block_size=5,
        dspark_noise_token_id=9,
        dspark_target_layer_ids=[2, 0],
        dspark_markov_rank=16,
    )
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (5, 9, (2, 0))
    assert config.parts.markov_rank == 16


def test_head_keys_may_stand_at_either_level() -> None:
    keys = {
        "markov_rank": 16,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    assert read(keys).parts == read(**keys).parts
    assert read(keys).parts.markov_head_type == "rnn"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"markov_rank": 16, "markov_head_type": "lstm"}, "'lstm'"),
        ({"enable_confidence_head": True, "confidence_head_with_markov": True}, "Markov head that is not there"),
        ({"markov_rank": 16, "selector_rank": 8, "selector_top_k": 4}, "candidate selector"),
        ({"markov_rank": -1}, "markov_rank"),
        ({"selector_rank": 8, "selector_top_k": 1000}, "selector_top_k"),
        ({"conv_kernel_size": 3}, "conv_group_size"),
        ({"conv_kernel_size": 3, "conv_group_size": 7}, "groups of 7"),
        ({"draft_vocab_size": 100, "markov_rank": 16}, "draft_vocab_size"),
    ],
)
def test_senseless_heads_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**keys)


# ---- configurations and weights


def test_shapes_stand_in_for_missing_keys(folder: Path) -> None:
    drafter = load_drafter(folder, "fp32")
    parts = drafter.config.parts
    assert (parts.markov_rank, parts.markov_head_type) == (RANK, "vanilla")
    assert parts.enable_confidence_head and parts.confidence_head_with_markov
    assert (drafter.config.first_slot, drafter.config.proposals) == (0, 8)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("markov_rank", 16, "'markov_rank' is 16 but the weights say 12"),
        ("markov_rank", 0, "'markov_rank' is 0 but the weights say 12"),
        ("markov_head_type", "gated", "'markov_head_type' is 'gated' but the weights say 'vanilla'"),
        ("enable_confidence_head", False, "'enable_confidence_head' is False but the weights say True"),
        ("confidence_head_with_markov", False, "'confidence_head_with_markov' is False but the weights say True"),
    ],
)
def test_keys_at_odds_with_the_weights_are_refused(folder: Path, key: str, value: object, said: str) -> None:
    edit_config(folder, **{key: value})
    assert said in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("markov_rank", 256), ("enable_confidence_head", True), ("selector_rank", 64), ("conv_kernel_size", 4)],
)
def test_a_head_the_weights_do_not_have_is_refused(tmp_path: Path, key: str, value: object) -> None:
    save_model(tiny_drafter(), tmp_path)
    edit_config(tmp_path, **{key: value})
    message = refusal(tmp_path)
    assert f"'{key}'" in message and "no such part" in message


def test_half_a_markov_head_is_refused(folder: Path) -> None:
    edit_tensors(folder, ["markov_head.markov_w2.weight"])
    assert "markov_head.markov_w2.weight" in refusal(folder, FormatError)


def test_a_head_over_another_vocabulary_is_refused(folder: Path) -> None:
    edit_tensors(folder, **{"markov_head.markov_w2.weight": torch.zeros(100, RANK)})
    assert "markov_head.markov_w2.weight" in refusal(folder)


def test_a_confidence_head_of_an_odd_width_is_refused(folder: Path) -> None:
    edit_tensors(folder, **{"confidence_head.proj.weight": torch.zeros(1, HIDDEN + 1)})
    assert "confidence_head.proj.weight" in refusal(folder)


def test_an_unknown_head_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, **{"markov_head.joint.weight": torch.zeros(3, 3)})
    assert "markov_head.joint.weight" in refusal(folder)


# ---- names


def rename(folder: Path, spell: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({spell(name): value for name, value in load_file(path).items()}, path)


@pytest.mark.parametrize(
    "spell",
    [
        lambda name: f"model.{name}",
        lambda name: f"mtp.2.{name}" if name in HEADS else name,
        lambda name: f"mtp.11.{name}" if name in HEADS else f"model.{name}",
        lambda name: {"fc.weight": "encoder.fc.weight"}.get(name, name),
    ],
)
def test_tensors_are_found_under_their_prefixes(folder: Path, spell: Callable[[str], str]) -> None:
    plain = load_drafter(folder, "fp32")
    rename(folder, spell)
    assert_same_heads(plain, load_drafter(folder, "fp32"))


def test_two_stages_with_heads_are_refused(folder: Path) -> None:
    name = "markov_head.markov_w1.weight"
    edit_tensors(folder, [name], **{f"mtp.{stage}.{name}": HEADS[name].clone() for stage in (0, 1)})
    assert "markov_w1" in refusal(folder)


# ---- GGUF

LUCEBOX = {
    "markov_head.markov_w1.weight": "dflash.dspark.markov.w1",
    "markov_head.markov_w2.weight": "dflash.dspark.markov.w2",
    "confidence_head.proj.weight": "dflash.dspark.confidence.weight",
    "confidence_head.proj.bias": "dflash.dspark.confidence.bias",
    "fc.weight": "dflash.fc.weight",
    "hidden_norm.weight": "dflash.hidden_norm.weight",
}
LLAMA = {
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


def write_gguf(
    path: Path, tensors: dict[str, Tensor], names: dict[str, str], arch: str = "dflash", **keys: object
) -> Path:
    """A drafter as a converter would write it: the given spellings, the others llama.cpp's."""
    writer = gguf.GGUFWriter(path, arch)
    described = GGUF | {"dflash.target_layers": [1, 2]} | keys
    for key, value in (described if arch == "dflash" else lucebox_keys(described, arch)).items():
        if key == "general.architecture":
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key, value)  # type: ignore[operator]
    for name, value in tensors.items():
        writer.add_tensor(names.get(name, gguf_spellings(name)[0]), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def lucebox_keys(described: dict[str, object], arch: str) -> dict[str, object]:
    """The same facts under arch-prefixed keys, with plain layer ids."""
    special = ("block_size", "sample_from_anchor", "dspark.")
    keys: dict[str, object] = {f"{arch}.dflash.n_target_layers": 99, f"{arch}.dflash.target_layer_ids": [0, 1]}
    for key, value in described.items():
        name = key.removeprefix("dflash.")
        if key == "tokenizer.ggml.mask_token_id":
            keys[f"{arch}.dflash.mask_token_id"] = value
        elif key.startswith("dflash.") and name != "target_layers":
            keys[f"{arch}.dflash.{name}" if name.startswith(special) else f"{arch}.{name}"] = value
    return keys


DSPARK_KEYS: dict[str, object] = {
    "dflash.dspark.enabled": True,
    "dflash.dspark.markov_rank": RANK,
    "dflash.dspark.vocab_size": FOLDER_VOCAB,
    "dflash.dspark.confidence_dim": HIDDEN + RANK,
}


@pytest.mark.parametrize(("names", "keys"), [(LUCEBOX, DSPARK_KEYS), (LLAMA, {})])
@pytest.mark.parametrize("from_anchor", [None, True, False])
def test_gguf_heads_are_those_of_the_folder(
    folder: Path, names: dict[str, str], keys: dict[str, object], from_anchor: bool | None
) -> None:
    layout = {} if from_anchor is None else {"dflash.sample_from_anchor": from_anchor}
    path = write_gguf(folder.parent / "d.gguf", load_file(folder / "model.safetensors"), names, **keys, **layout)
    drafter = load_drafter(path, "fp32")
    assert drafter.config.sample_from_anchor is (from_anchor is not False)
    assert drafter.config.parts.confidence_head_with_markov
    assert_same_heads(load_drafter(folder, "fp32"), drafter)


def test_lucebox_files_are_read_under_their_own_architecture(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    path = write_gguf(folder.parent / "d.gguf", tensors, LUCEBOX, "dflash-draft", **DSPARK_KEYS)
    drafter, twin = load_drafter(path, "fp32"), write_gguf(folder.parent / "e.gguf", tensors, LUCEBOX, **DSPARK_KEYS)
    expected = load_drafter(twin, "fp32")
    assert replace(drafter.config, label="") == replace(expected.config, label="")
    assert_same_heads(load_drafter(folder, "fp32"), drafter)


@pytest.mark.parametrize(
    ("key", "value"), [("enabled", False), ("markov_rank", 16), ("vocab_size", 300), ("confidence_dim", HIDDEN)]
)
def test_gguf_keys_at_odds_with_the_weights_are_refused(folder: Path, key: str, value: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    keys = DSPARK_KEYS | {f"dflash.dspark.{key}": value}
    path = write_gguf(folder.parent / "d.gguf", tensors, LUCEBOX, **keys)
    assert f"dflash.dspark.{key}" in refusal(path)


def test_a_gguf_says_whether_it_samples_from_the_anchor() -> None:
    assert read_gguf(GGUF, "d.gguf").proposals == 7
    assert read_gguf(GGUF | {"dflash.sample_from_anchor": True}, "d.gguf").proposals == 8
    assert read_gguf(GGUF | {"dflash.markov_rank": 16}, "d.gguf").proposals == 8


# ---- packing


def wide_heads(kind: str) -> dict[str, Tensor]:
    """Heads of rank 32, so that their tables can be quantised."""
    tensors = {f"markov_head.markov_w{n}.weight": noise(FOLDER_VOCAB, 32, seed=n) for n in (1, 2)}
    if kind == "gated":
        tensors["markov_head.gate_proj.weight"] = noise(32, HIDDEN + 32, seed=3, size=0.3)
    if kind == "rnn":
        tensors["markov_head.joint_proj.weight"] = noise(96, HIDDEN + 64, seed=3, size=0.3)
        tensors["markov_head.joint_proj.bias"] = noise(96, seed=4)
    return tensors | {"confidence_head.proj.weight": noise(1, HIDDEN + 32, seed=5, size=0.2)}


def packed_as(folder: Path, recipe: RecipeName) -> None:
    convert(folder, folder / "whole.gguf")
    quantize_file(folder / "whole.gguf", folder / "d.gguf", recipe)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_a_packed_drafter_is_the_same_drafter(kind: str, from_anchor: bool, tmp_path: Path) -> None:
    save_model(tiny_drafter(), tmp_path)
    edit_tensors(tmp_path, **wide_heads(kind))
    edit_config(tmp_path, sample_from_anchor=from_anchor)
    packed_as(tmp_path, "q8_0")
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "d.gguf").tensors}
    assert stored["markov_w1.weight"] == stored["markov_w2.weight"] == "Q8_0"
    assert stored["conf_proj.weight"] == "F32"
    original, packed = load_drafter(tmp_path, "fp32"), load_drafter(tmp_path / "d.gguf", "fp32")
    assert packed.config.parts == original.config.parts
    assert packed.config.first_slot == original.config.first_slot == (0 if from_anchor else 1)
    assert_same_heads(original, packed, tolerance=0.3)
    with pytest.raises(AssertionError):
        assert_same_heads(original, packed, tolerance=1e-5)


def test_a_packed_dflash2_drafter_is_the_same_drafter(tmp_path: Path) -> None:
    nested = {"input_embedding_scale": 0.5, "output_multiplier": 0.25, "final_logit_softcapping": 3.0}
    save_model(tiny_dflash2(nested, {}), tmp_path)
    packed_as(tmp_path, "bf16")
    original, packed = load_drafter(tmp_path, "fp32"), load_drafter(tmp_path / "d.gguf", "fp32")
    assert packed.config.parts == original.config.parts
    for key in nested:
        assert getattr(packed.config, key) == getattr(original.config, key)
    for ours, theirs in zip(packed.layers, original.layers, strict=True):
        rows, entered = noise(16, HIDDEN, seed=1), []
        for convolution in (ours.sublayers[1].convolution, theirs.sublayers[1].convolution):
            assert convolution is not None
            entered.append(enter_convolution(convolution, rows)[0])
        assert float((entered[0] - entered[1]).abs().max()) < 0.1
    assert_same_heads(original, packed, tolerance=0.3)


def test_a_packed_causal_drafter_stays_causal(tmp_path: Path) -> None:
    save_model(tiny_drafter(is_causal=True), tmp_path)
    packed_as(tmp_path, "q8_0")
    packed = load_drafter(tmp_path / "d.gguf", "fp32")
    assert all(pattern.causal for pattern in packed.config.patterns)


# ---- inspecting


def test_inspect_shows_what_a_drafter_proposes_with(folder: Path) -> None:
    shown = inspect_file(folder)["drafter"]
    assert json.loads(json.dumps(shown)) == {
        "block_size": 8,
        "sample_from_anchor": True,
        "proposals": 8,
        "target_layer_ids": [0, 1],
        "mask_token_id": MASK,
        "markov_head": "vanilla, rank 12",
        "confidence_head": "hidden state and previous token",
    }


def test_inspect_shows_a_selector_and_convolutions(tmp_path: Path) -> None:
    shown = inspect_file(save_model(tiny_dflash2({}, {}), tmp_path))["drafter"]
    assert isinstance(shown, dict)
    assert (shown["candidate_selector"], shown["convolution"]) == ("rank 6, 4 candidates", "3 taps, groups of 8")
    assert "markov_head" not in shown


def test_inspect_says_why_a_drafter_cannot_be_used(folder: Path) -> None:
    edit_config(folder, markov_rank=99)
    report = inspect_file(folder)
    assert report["complete"] and "'markov_rank' is 99" in str(report["drafter"])
