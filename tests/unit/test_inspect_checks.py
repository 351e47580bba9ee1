"""The checks of inspect: whole and sane files pass, each kind of damage is named, base models are told from tuned."""

from __future__ import annotations

import json
import math
import random
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import SlipstreamError
from slipstream.formats.gguf import read_gguf
from slipstream.formats.sources import resolve
from slipstream.models.dflash_names import gguf_spellings
from slipstream.tools.checks import Check, check_file, sample_rows
from slipstream.tools.file_report import inspect_file
from slipstream.tools.instruct import InstructReport, check_instruct
from slipstream.tools.model_file import open_model
from slipstream.tools.tensor_compare import compare_files
from tests.fuzz_formats import flip_bits, hostile_gguf, move_pieces, put_integers, truncate
from tests.helpers_models import CHATML, smollm2_path
from tests.tiny import EOS

SHIPPED = [resolve(name).path for name in ("smollm2-dflash", "smollm2-dspark")]


def failures(checks: list[Check]) -> list[str]:
    return [f"{check.name}: {problem}" for check in checks for problem in check.problems]


def copied(folder: Path, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the tiny target or drafter with some tensors changed."""
    copy = tmp_path / name
    shutil.copytree(folder / name, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


def set_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.mark.parametrize("path", [smollm2_path(), *SHIPPED], ids=lambda path: path.name)
def test_the_shipped_files_pass(path: Path) -> None:
    checks = check_file(path)
    assert [check.name for check in checks] == ["data", "metadata", "tensors", "values"]
    assert failures(checks) == [] and all(check.passed and check.seen for check in checks)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_whole_folder_passes(folder: Path, name: str) -> None:
    assert failures(check_file(folder / name)) == []


def test_tensors_are_listed_in_the_order_of_a_layer(folder: Path) -> None:
    """Converted files have this order; with another one, the same conversion would write other bytes."""
    with open_model(folder / "target") as model:
        first = [name for name in model.expected if name.startswith("model.layers.0.")]
    norms = [place for place, name in enumerate(first) if "layernorm" in name]
    assert norms == [norms[0], norms[0] + 1]
    assert all("self_attn" in name for name in first[: norms[0]]) and all(
        "mlp" in name for name in first[norms[1] + 1 :]
    )


def test_truncation_stops_everything_else(tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    end = max(entry.end for entry in read_gguf(SHIPPED[0]).tensors)
    short.write_bytes(SHIPPED[0].read_bytes()[: end - 7])
    checks = check_file(short)
    assert [check.name for check in checks] == ["data"] and "7 bytes early" in failures(checks)[0]
    short.write_bytes(SHIPPED[0].read_bytes()[:300])
    assert "header" in failures(check_file(short))[0]
    short.write_bytes(b"something else entirely, forty bytes of it")
    assert "not a GGUF file" in failures(check_file(short))[0]


def test_missing_unknown_and_misshapen_tensors_are_all_listed(folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        del tensors["layers.1.mlp.up_proj.weight"], tensors["hidden_norm.weight"]
        tensors["layers.0.mystery.weight"] = torch.ones(2)
        tensors["layers.0.self_attn.q_proj.bias"] = torch.ones(32)
        tensors["norm.weight"] = torch.ones(31)

    problems = named(check_file(copied(folder, tmp_path, "draft", change)), "tensors").problems
    assert [problem.split(":")[0] for problem in problems] == [
        "missing",
        "unknown",
        "not what the configuration implies",
        "misshapen",
    ]
    assert "hidden_norm.weight" in problems[0] and "layers.1.mlp.up_proj.weight" in problems[0]
    assert "layers.0.mystery.weight" in problems[1] and "q_proj.bias" in problems[2]
    assert problems[3] == "misshapen: norm.weight is [31] and should be [32]"


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("draft", {"rope_theta": 1.5}, "rope theta is 1.5"),
        ("draft", {"rope_theta": math.inf}, "rope theta is inf"),
        ("draft", {"rms_norm_eps": 0.5}, "epsilon"),
        ("draft", {"dflash_config": {"target_layer_ids": [1, 0], "mask_token_id": 257}}, "not ascending"),
        ("draft", {"dflash_config": {"target_layer_ids": [0, 5], "mask_token_id": 257}}, "layer 5"),
        ("draft", {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 272}}, "mask token 272"),
        ("draft", {"dflash_config": {"mask_token_id": 257}}, "no target_layer_ids"),
        ("draft", {"block_size": 1000}, "block of 1000"),
        ("target", {"rope_theta": None}, "no rope_theta"),
        ("target", {"eos_token_id": 4000}, "special token 4000"),
        ("target", {"model_type": "mamba"}, "'mamba' is not a supported target"),
        ("target", {"num_hidden_layers": 10**9}, "claims 1000000000 layers"),
    ],
)
def test_insane_metadata_is_named(folder: Path, tmp_path: Path, name: str, config: dict[str, Any], said: str) -> None:
    copy = copied(folder, tmp_path, name, lambda tensors: None)
    set_config(copy, **config)
    assert any(said in problem for problem in failures(check_file(copy))), failures(check_file(copy))


def test_a_target_without_a_tokenizer_or_with_too_large_a_one_is_named(folder: Path, tmp_path: Path) -> None:
    copy = copied(folder, tmp_path, "target", lambda tensors: None)
    (copy / "tokenizer.json").unlink()
    assert "no tokenizer" in named(check_file(copy), "metadata").problems[0]

    def shrink(tensors: dict[str, Any]) -> None:
        for table in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[table] = tensors[table][:200].clone()

    small = copied(folder, tmp_path / "small", "target", shrink)
    set_config(small, vocab_size=200, eos_token_id=2)
    assert any("257 tokens" in problem for problem in named(check_file(small), "metadata").problems)


def test_values_that_are_none_and_empty_tensors_are_named(folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"][3] = math.nan
        tensors["lm_head.weight"][-1, 0] = math.inf  # the last row is always looked at
        tensors["model.layers.0.mlp.up_proj.weight"].zero_()

    problems = named(check_file(copied(folder, tmp_path, "target", change)), "values").problems
    assert problems[0].startswith("not finite: ") and "model.norm.weight (1 of 32 sampled)" in problems[0]
    assert "lm_head.weight" in problems[0]
    assert problems[1] == "nothing but zeros: model.layers.0.mlp.up_proj.weight"


def test_a_sample_has_the_first_and_the_last_row() -> None:
    with open_model(smollm2_path()) as model:
        table = model.file.tensor("token_embd.weight")
        sample = sample_rows(table)
        assert sample.shape == (32, 576)
        assert torch.equal(sample[[0, -1]], table.rows(torch.tensor([0, 49151])).dense())


# ---- hostile files


def drafter_gguf(folder: Path, path: Path, layers: int = 2) -> None:
    """The tiny drafter as llama.cpp would write it."""
    writer = gguf.GGUFWriter(path, "dflash")
    config = json.loads((folder / "draft" / "config.json").read_text())
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_uint32("dflash.block_size", config["block_size"])
    writer.add_array("dflash.target_layers", [1, 2])
    writer.add_uint32("tokenizer.ggml.mask_token_id", 257)
    for name, tensor in load_file(folder / "draft" / "model.safetensors").items():
        writer.add_tensor(gguf_spellings(name)[0], tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_false_count_of_layers_is_refused_before_lists_are_made_of_it(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    drafter_gguf(folder, path, layers=2**31)
    tracemalloc.start()
    try:
        problem = named(check_file(path), "metadata").problems[0]
        described = inspect_file(path)["drafter"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "claims 2147483648 layers but has 25 tensors" in problem
    assert "claims 2147483648 layers" in described["problem"]  # type: ignore[index]
    assert peak < 8 << 20


def test_damaged_files_are_told_and_never_crash_anything(folder: Path, tmp_path: Path) -> None:
    whole, case = tmp_path / "whole.gguf", tmp_path / "case.gguf"
    drafter_gguf(folder, whole)
    assert failures(check_file(whole)) == []
    data, chooser = whole.read_bytes(), random.Random(5)
    header = read_gguf(whole).data_offset
    ways = (flip_bits, put_integers, move_pieces, truncate, hostile_gguf)
    outcomes: Counter[str] = Counter()
    for number in range(200):
        damage = ways[number % len(ways)]
        # most of the bytes are weights, which may be anything: the damage goes where claims are made
        damaged = damage(chooser, data[:header]) + data[header:] if damage is not truncate else damage(chooser, data)
        case.write_bytes(damaged)
        outcomes["well" if all(check.passed for check in check_file(case)) else "problems"] += 1
        try:
            compare_files(whole, case)
            outcomes["compared"] += 1
        except SlipstreamError:
            outcomes["refused"] += 1
    assert outcomes["problems"] > 100 and outcomes["refused"] > 50 and outcomes["compared"] > 5, outcomes


# ---- base or instruct


def target(folder: Path, tmp_path: Path, name: str, template: str | None, **config: object) -> Path:
    """The tiny target under another name, with the files that tell a tuned model from its base."""
    copy = tmp_path / name
    shutil.copytree(folder / "target", copy)
    backend = json.loads((copy / "tokenizer.json").read_text())
    backend["added_tokens"].append(backend["added_tokens"][0] | {"id": EOS + 1, "content": "<|im_end|>"})
    (copy / "tokenizer.json").write_text(json.dumps(backend))
    if template is not None:
        (copy / "chat_template.jinja").write_text(template)
    set_config(copy, **config)
    return copy


def says(report: InstructReport) -> list[str]:
    return [witness.says for witness in report.witnesses[:3]]


def test_the_shipped_pair_is_accepted() -> None:
    report = check_instruct(smollm2_path(), SHIPPED[1])
    assert (report.verdict, report.wanted, report.refused) == ("instruct", "instruct", "")
    assert says(report) == ["instruct"] * 3 and "does not name its target" in report.witnesses[3].seen


@pytest.mark.parametrize(
    ("name", "template", "eos", "verdict", "witnesses"),
    [
        ("Tiny-Instruct", CHATML, EOS + 1, "instruct", ["instruct", "instruct", "instruct"]),
        ("Tiny", CHATML, [EOS, EOS + 1], "instruct", ["instruct", "instruct", "nothing"]),
        ("Tiny", None, EOS, "base", ["base", "nothing", "nothing"]),
        ("Tiny-Base", CHATML, EOS, "base", ["instruct", "base", "base"]),
        ("Tiny", CHATML, EOS, "base", ["instruct", "base", "nothing"]),  # the template of its sibling came along
        ("Tiny-it", CHATML, EOS, "instruct", ["instruct", "base", "instruct"]),
        ("Tiny", "{{ messages[0]['content'] + eos_token }}", EOS, "instruct", ["instruct", "instruct", "nothing"]),
        ("Tiny-Chat", None, EOS + 1, "base", ["base", "instruct", "instruct"]),  # it has no template for a question
    ],
)
def test_base_models_are_told_from_tuned_ones(
    folder: Path, tmp_path: Path, name: str, template: str | None, eos: object, verdict: str, witnesses: list[str]
) -> None:
    report = check_instruct(target(folder, tmp_path, name, template, eos_token_id=eos), folder / "draft")
    assert (report.verdict, says(report)) == (verdict, witnesses)
    assert bool(report.refused) == (verdict == "base")
    if report.refused:
        assert report.refused.startswith(f"{name} is the base model")


def test_a_drafter_of_a_base_model_wants_that(folder: Path, tmp_path: Path) -> None:
    base = target(folder, tmp_path, "Tiny-Base", None, eos_token_id=EOS)
    draft = tmp_path / "draft"
    shutil.copytree(folder / "draft", draft)
    set_config(draft, base_model_name_or_path="owner/Tiny-Base")
    report = check_instruct(base, draft)
    assert (report.verdict, report.wanted, report.refused) == ("base", "base", "")
    set_config(draft, base_model_name_or_path="owner/Tiny-Instruct")
    assert "trained on the instruct one: no chat template" in check_instruct(base, draft).refused


# ---- the command


def test_the_command_exits_with_1_and_lists_what_is_wrong(cli: Any, folder: Path, tmp_path: Path) -> None:
    done = cli("inspect", "smollm2-dspark", "--check", "--json")
    report = json.loads(done.out)
    assert (done.code, report["passed"]) == (0, True)
    assert [check["name"] for check in report["check"]] == ["data", "metadata", "tensors", "values"]

    def change(tensors: dict[str, Any]) -> None:
        del tensors["fc.weight"]

    copy = copied(folder, tmp_path, "draft", change)
    done = cli("inspect", str(copy), "--check")
    assert done.code == 1 and "FAIL" in done.out and "fc.weight" in done.out
    done = cli("inspect", str(folder / "target"), "--check-instruct", "--draft", str(folder / "draft"))
    assert done.code == 1 and "Refused: target is the base model" in done.out and "no chat template" in done.out
    done = cli("inspect", "smollm2", "--check-instruct", "--json")
    assert done.code == 0 and json.loads(done.out)["instruct"]["verdict"] == "instruct"
