"""Converting between folders and GGUF: nothing is lost, nothing is guessed, and what comes out drafts the same."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from slipstream.cli.convert import command
from slipstream.engine.llm import LLM
from slipstream.errors import ConfigError, FormatError, PairError, RequestError, SlipstreamError, SourceError
from slipstream.formats.gguf import read_gguf
from slipstream.models.dflash import load_drafter
from slipstream.models.loading import load_target
from slipstream.text.tokenizer import Tokenizer
from slipstream.tools.conversion import convert
from tests.helpers_models import CHATML
from tests.models.test_dflash2 import tiny_dflash2
from tests.models.test_heads import confidence_tensors, markov_tensors
from tests.oracles import (
    FOLDER_VOCAB,
    MASK,
    OurDrafts,
    edit_config,
    edit_tensors,
    our_target,
    save_model,
    save_tokenizer,
    tiny_drafter,
    tiny_target,
    write_target_gguf,
)
from tests.tiny import ask, keep_threads, prompt, tiny_llm, write_pair

SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-scaling": ("llama", {"rope_parameters": LLAMA3}),
    "linear-scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3": ("qwen3", {}),
}
DRAFTERS = (
    "dflash",
    "sliding",
    "vanilla",
    "gated",
    "rnn",
    "dflash2",
    "own-tables",
    "laguna",
    "reduced",
    "causal-yarn-biased",
)
# each variant lists how it differs from the plain drafter
CHANGES: dict[str, dict[str, Any]] = {
    "sliding": {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 5},
    "causal-yarn-biased": {
        "is_causal": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.3,
        },
    },
}


def target_folder(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    family, changes = TARGETS[name]
    save_model(tiny_target(family, **changes).to(dtype), folder, **save)
    save_tokenizer(folder)
    edit_config(folder, eos_token_id=0)
    return folder


def drafter_folder(folder: Path, name: str = "dflash", dtype: torch.dtype = torch.float32) -> Path:
    if name == "dflash2":
        nested = {"input_embedding_scale": 0.5, "output_multiplier": 0.7, "final_logit_softcapping": 3.0}
        return save_model(tiny_dflash2(nested, {}).to(dtype), folder)
    save_model(tiny_drafter(**CHANGES.get(name, {})).to(dtype), folder)
    heads: dict[str, torch.Tensor] = {}
    if name in ("vanilla", "gated", "rnn"):
        heads = markov_tensors(name) | confidence_tensors(with_markov=name != "gated")
    if name == "own-tables":
        heads = {key: torch.randn(FOLDER_VOCAB, 64) for key in ("embed_tokens.weight", "lm_head.weight")}
    if name == "reduced":
        heads = {"lm_head.weight": torch.randn(90, 64)}
    if name == "laguna":
        heads = {f"aux_hidden_norms.{tap}.weight": torch.rand(64) for tap in range(2)}
        heads |= {f"layers.{layer}.self_attn.g_proj.weight": torch.randn(4, 64) for layer in range(2)}
        edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    edit_tensors(folder, **{key: value.to(dtype) for key, value in heads.items()})
    if name == "reduced":
        edit_tensors(folder, d2t=torch.arange(90) + 3)  # every second token from 3 on
        edit_config(folder, draft_vocab_size=90, target_model_type="llama")
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    """Values and types are identical, from a single file or from shards."""
    first, second = weights_of(one), weights_of(other)
    assert set(first) == set(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype and value.shape == second[name].shape, name
        assert torch.equal(value, second[name]), name


# ---- there and back


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_survives_the_round_trip_to_the_bit(name: str, tmp_path: Path) -> None:
    source = target_folder(tmp_path / "hf", name, torch.bfloat16, shard_size="40kB" if name == "llama" else "5GB")
    if name == "llama":
        assert len(list(source.glob("*.safetensors"))) > 1
    report = convert(source, tmp_path / "t.gguf")
    assert set(report.types) == {"BF16", "F32"} and not report.notes
    convert(tmp_path / "t.gguf", tmp_path / "back")
    assert_same_weights(source, tmp_path / "back")
    files = [source, tmp_path / "t.gguf", tmp_path / "back"]
    models = [load_target(file, "fp32").model for file in files]
    assert models[0].config == models[2].config
    ids = [torch.randint(3, FOLDER_VOCAB, (40,)).tolist()]
    logits = [our_target(model, ids)[0][0] for model in models]
    assert torch.equal(logits[0], logits[2])
    # a tensor of factors and a formula for them may differ in the last bit
    tolerance = 1e-4 if name == "llama3-scaling" else 0.0
    torch.testing.assert_close(logits[1], logits[0], rtol=tolerance, atol=tolerance)
    text = "Hello, 12 wörld"
    assert (
        len(
            {
                tuple(Tokenizer.load(file, read_gguf(file).metadata if file.is_file() else None).encode(text))
                for file in files
            }
        )
        == 1
    )


@pytest.mark.parametrize("naming", ["llama.cpp", "lucebox"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_survives_the_round_trip_to_the_bit(name: str, naming: str, tmp_path: Path) -> None:
    source = drafter_folder(tmp_path / "hf", name, torch.bfloat16)
    convert(source, tmp_path / "d.gguf", naming=naming)
    convert(tmp_path / "d.gguf", tmp_path / "back")
    assert_same_weights(source, tmp_path / "back")
    drafters = [load_drafter(path, "fp32") for path in (source, tmp_path / "d.gguf", tmp_path / "back")]
    table, taps = torch.randn(FOLDER_VOCAB, 64), torch.randn(9, 128)
    blocks = []
    for drafter in drafters:
        assert drafter.config.parts == drafters[0].config.parts
        for key in (
            "patterns",
            "mask_token_id",
            "target_layer_ids",
            "block_size",
            "first_slot",
            "num_target_layers",
            "attention_bias",
            "draft_vocab_size",
            "target_family",
        ):
            assert getattr(drafter.config, key) == getattr(drafters[0].config, key), key
        assert (drafter.embed is None) == (name != "own-tables")
        assert (drafter.known_tokens is None) == (name != "reduced")
        if drafter.known_tokens is not None:
            assert drafter.known_tokens.tolist() == list(range(3, 183, 2))
        ours = OurDrafts(drafter, table)
        state = ours.sequence()
        ours.add(state, taps)
        blocks.append(ours.blocks([state], [7])[0])
    assert torch.equal(blocks[0], blocks[1]) and torch.equal(blocks[0], blocks[2])


def test_queries_keys_and_values_in_one_tensor_are_taken_apart(tmp_path: Path) -> None:
    source = drafter_folder(tmp_path / "hf", "laguna")
    parts = weights_of(source)
    for layer in range(2):
        names = [f"layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        fused = {f"layers.{layer}.self_attn.qkv_proj.weight": torch.cat([parts[name] for name in names])}
        edit_tensors(source, names, **fused, t2d=torch.ones(FOLDER_VOCAB, dtype=torch.bool))
    convert(source, tmp_path / "d.gguf")
    convert(tmp_path / "d.gguf", tmp_path / "back")
    found = weights_of(tmp_path / "back")
    assert set(found) == set(parts)
    assert all(torch.equal(found[name], parts[name]) for name in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_and_mixed_ones_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path) -> None:
    source = drafter_folder(tmp_path / "hf", "vanilla", dtype)
    edit_tensors(source, norm__weight=torch.rand(64))  # one tensor of another type
    convert(source, tmp_path / "d.gguf")
    convert(tmp_path / "d.gguf", tmp_path / "back")
    assert_same_weights(source, tmp_path / "back")


def test_a_type_can_be_asked_for(tmp_path: Path) -> None:
    source = drafter_folder(tmp_path / "hf")
    for kind in ("f32", "f16", "bf16"):
        convert(source, tmp_path / f"{kind}.gguf", type_name=kind)
        types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / f"{kind}.gguf").tensors}
        assert types["fc.weight"] == kind.upper() and types["output_norm.weight"] == "F32"
    edit_tensors(source, fc__weight=torch.full((64, 128), 1e6))
    with pytest.raises(FormatError, match="fc.weight"):
        convert(source, tmp_path / "over.gguf", type_name="f16")
    assert not (tmp_path / "over.gguf").exists()


def test_quantised_files_become_full_precision(tmp_path: Path) -> None:
    model = tiny_target("qwen3")
    write_target_gguf(model, tmp_path / "q.gguf", "Q8_0")  # leaves the dequantised values in the model
    report = convert(tmp_path / "q.gguf", tmp_path / "back")
    assert set(report.types) == {"F32"} and "no tokenizer was written" in report.notes[0]
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


# ---- with the engine


def test_a_converted_pair_writes_and_drafts_the_same(tmp_path: Path) -> None:
    with keep_threads():
        llm = tiny_llm(tmp_path)
        convert(tmp_path / "target", tmp_path / "t.gguf")
        convert(tmp_path / "draft", tmp_path / "d.gguf", target=tmp_path / "target")
        convert(tmp_path / "draft", tmp_path / "l.gguf", target=tmp_path / "t.gguf", naming="lucebox")
        requests = [ask(str(seed), prompt(30 + seed, seed), mode="chain", max_tokens=40) for seed in range(3)]
        expected = [(done.token_ids, done.step_sizes) for done in llm.run(requests)]
        assert any(size > 1 for _, sizes in expected for size in sizes)
        for drafter in ("d.gguf", "l.gguf"):
            other = LLM(str(tmp_path / "t.gguf"), str(tmp_path / drafter), config=llm.config)
            assert [(done.token_ids, done.step_sizes) for done in other.run(requests)] == expected


def test_a_drafter_carries_its_targets_tokenizer(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    (target / "chat_template.jinja").write_text(CHATML)
    convert(target, tmp_path / "t.gguf")
    for name, source in (("a", target), ("b", tmp_path / "t.gguf")):
        report = convert(draft, tmp_path / f"{name}.gguf", target=source)
        assert not report.notes
        metadata = read_gguf(tmp_path / f"{name}.gguf").metadata
        assert metadata["tokenizer.ggml.mask_token_id"] == 257 and metadata["tokenizer.chat_template"] == CHATML
        original = read_gguf(tmp_path / "t.gguf").metadata
        shared = {key for key in original if key.startswith("tokenizer.")}
        assert {key: metadata[key] for key in shared} == {key: original[key] for key in shared}
    assert "llama.cpp would refuse" in convert(draft, tmp_path / "c.gguf").notes[0]


def test_a_drafter_is_held_against_its_target(tmp_path: Path) -> None:
    target, drafter = target_folder(tmp_path / "t"), drafter_folder(tmp_path / "d")
    convert(drafter, tmp_path / "good.gguf", target=target)
    for changes, words in (
        ({"vocab_size": FOLDER_VOCAB + 5}, "vocabulary"),
        ({"hidden_size": 32}, "64 wide"),
        ({"num_hidden_layers": 5}, "5 layers"),
    ):
        save_model(tiny_target("llama", **changes), tmp_path / words)
        save_tokenizer(tmp_path / words)
        with pytest.raises(PairError, match=words):
            convert(drafter, tmp_path / "bad.gguf", target=tmp_path / words)
    assert not (tmp_path / "bad.gguf").exists()


# ---- numbers come from the config


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "rope_theta": 1e6}, 1e7),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_parameters": None, "rope_theta": 2e5}, 2e5),
        ({"rope_parameters": [1e7], "rope_theta": 3e5}, 3e5),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 4e5}, 4e5),
        ({}, None),
        ({"rope_parameters": None}, None),
        ({"rope_parameters": "1e7"}, None),
    ],
)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_theta_is_the_configs_or_nobodys(kind: str, rope: dict[str, Any], theta: float | None, tmp_path: Path) -> None:
    source = (target_folder if kind == "target" else drafter_folder)(tmp_path / "hf")
    edit_config(source, drop=("rope_parameters", "rope_theta"))
    edit_config(source, **rope)
    if theta is None:
        with pytest.raises(ConfigError, match="rope_theta"):
            convert(source, tmp_path / "m.gguf")
        assert not (tmp_path / "m.gguf").exists()
        return
    convert(source, tmp_path / "m.gguf")
    arch = "llama" if kind == "target" else "dflash"
    assert read_gguf(tmp_path / "m.gguf").metadata[f"{arch}.rope.freq_base"] == theta
    convert(tmp_path / "m.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"]["rope_theta"] == theta


@pytest.mark.parametrize("count", [{"n_target_layers": 2}, {"num_target_layers": 2}, {"num_taps": 2}])
def test_a_count_of_taps_does_not_say_which(count: dict[str, int], tmp_path: Path) -> None:
    source = drafter_folder(tmp_path / "hf")
    edit_config(source, dflash_config={"mask_token_id": MASK, **count})
    with pytest.raises(ConfigError, match="no target_layer_ids"):
        convert(source, tmp_path / "d.gguf")


def test_the_mask_the_block_and_the_taps_are_required(tmp_path: Path) -> None:
    for number, (drop, nested) in enumerate(
        {
            "block_size": {"target_layer_ids": [0, 1], "mask_token_id": MASK},
            "mask_token_id": {"target_layer_ids": [0, 1]},
        }.items()
    ):
        source = drafter_folder(tmp_path / str(number))
        edit_config(source, drop=(drop,), dflash_config=nested)
        with pytest.raises(ConfigError, match=drop):
            convert(source, tmp_path / "d.gguf")
    source = drafter_folder(tmp_path / "taps")
    edit_config(source, dflash_config={"target_layer_ids": [0, 1, 2], "mask_token_id": MASK})
    with pytest.raises(ConfigError, match="does not divide into 3 taps"):
        convert(source, tmp_path / "d.gguf")


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_tensors_the_config_does_not_know_have_no_place(kind: str, tmp_path: Path) -> None:
    source = (target_folder if kind == "target" else drafter_folder)(tmp_path / "hf")
    prefix = "model." if kind == "target" else ""
    edit_tensors(source, **{f"{prefix}layers.0.self_attn.sinks": torch.ones(4)})
    with pytest.raises(ConfigError, match="self_attn.sinks"):
        convert(source, tmp_path / "m.gguf")
    edit_tensors(source, drop=(f"{prefix}layers.0.self_attn.sinks", f"{prefix}layers.1.mlp.up_proj.weight"))
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.up_proj"):
        convert(source, tmp_path / "m.gguf")
    edit_tensors(source, **{f"{prefix}layers.1.mlp.up_proj.weight": torch.ones(95, 64)})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj.*\[95, 64\].*\[96, 64\]"):
        convert(source, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": LLAMA3}, "positions"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, "linear"),
    ],
)
def test_drafters_gguf_cannot_describe_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_model(tiny_drafter(**changes), tmp_path / "hf")
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path / "hf", tmp_path / "d.gguf")


def test_a_lucebox_file_says_what_lucebox_reads(tmp_path: Path) -> None:
    convert(drafter_folder(tmp_path / "hf", "vanilla"), tmp_path / "d.gguf", naming="lucebox")
    header = read_gguf(tmp_path / "d.gguf")
    arch = header.metadata["general.architecture"]
    expected = {
        "block_size": 8,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1],
        "n_target_layers": 2,
        "n_target_features": 128,
        "dspark.enabled": True,
        "dspark.markov_rank": 12,
        "dspark.vocab_size": FOLDER_VOCAB,
        "dspark.confidence_dim": 76,
    }
    assert {key: header.metadata[f"{arch}.dflash.{key}"] for key in expected} == expected
    names = {entry.name for entry in header.tensors}
    assert {"dflash.fc.weight", "dflash.hidden_norm.weight", "dflash.dspark.markov.w1", "output_norm.weight"} <= names


# ---- asking for it


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    (tmp_path / "old.gguf").write_bytes(b"old")
    (tmp_path / "full").mkdir()
    convert(draft, tmp_path / "d.gguf")
    refused: list[tuple[type[SlipstreamError], str, dict[str, Any]]] = [
        (RequestError, "does not end in .gguf", {"source": draft, "out": tmp_path / "d.bin"}),
        (RequestError, "already exists", {"source": draft, "out": tmp_path / "old.gguf"}),
        (RequestError, "already exists", {"source": tmp_path / "d.gguf", "out": tmp_path / "full", "force": True}),
        (RequestError, "names a file", {"source": tmp_path / "d.gguf", "out": tmp_path / "e.gguf"}),
        (RequestError, "no naming", {"source": draft, "out": tmp_path / "x.gguf", "naming": "ollama"}),
        (RequestError, "no type", {"source": draft, "out": tmp_path / "x.gguf", "type_name": "q4_0"}),
        (RequestError, "not a drafter", {"source": target, "out": tmp_path / "x.gguf", "target": draft}),
        (SourceError, "no folder", {"source": draft, "out": tmp_path / "none" / "x.gguf"}),
    ]
    convert(target, tmp_path / "t.gguf")
    refused += [
        (RequestError, "one naming", {"source": tmp_path / "d.gguf", "out": tmp_path / "b", "naming": "lucebox"}),
        (RequestError, "not a drafter", {"source": tmp_path / "t.gguf", "out": tmp_path / "b", "target": draft}),
    ]
    for kind, words, asked in refused:
        with pytest.raises(kind, match=words):
            convert(**asked)
    assert (tmp_path / "old.gguf").read_bytes() == b"old" and not (tmp_path / "x.gguf").exists()
    assert not (tmp_path / "b").exists()
    convert(draft, tmp_path / "old.gguf", force=True)
    assert load_drafter(tmp_path / "old.gguf", "fp32").config.block_size == 8
    (draft / "config.json").unlink()
    with pytest.raises(SourceError, match="no config.json"):
        convert(draft, tmp_path / "x.gguf")


def test_progress_goes_through_the_tokenizer_and_every_byte(tmp_path: Path) -> None:
    source, seen = target_folder(tmp_path / "hf"), []
    report = convert(source, tmp_path / "t.gguf", progress=lambda *told: seen.append(told))
    assert seen[0][:2] == ("matching the tokenizer", 0)
    assert seen[-1] == ("writing t.gguf", report.bytes, report.bytes)
    convert(tmp_path / "t.gguf", tmp_path / "back", progress=lambda *told: seen.append(told))
    assert seen[-1] == ("writing model.safetensors", report.bytes, report.bytes)


def test_the_command_reports_what_it_wrote(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    app = typer.Typer()
    app.command()(command)
    asked = [str(draft), "--out", str(tmp_path / "d.gguf"), "--target", str(target)]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["kind"], report["format"], report["tensors"], report["notes"]) == ("drafter", "GGUF", 25, [])
    assert report["bytes"] == sum(entry.nbytes for entry in read_gguf(tmp_path / "d.gguf").tensors)
    shown = CliRunner().invoke(app, [*asked, "--force"])
    assert shown.exit_code == 0 and "drafter" in shown.stdout and "25 F32" in shown.stdout
    assert isinstance(CliRunner().invoke(app, asked).exception, RequestError)
