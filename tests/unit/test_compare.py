"""What compare says about files that are the same, quantised, damaged or another model's, and about their logits."""

# mypy: disable-error-code="arg-type, misc, unused-ignore"

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from slipstream.cli import compare as cli_compare
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, FormatError, RequestError
from slipstream.formats.gguf import read_gguf
from slipstream.formats.sources import resolve
from slipstream.models.dflash_names import gguf_spellings
from slipstream.tools import tensor_compare as compare_module
from slipstream.tools.authors_drafter import AuthorBlocks
from slipstream.tools.logits import LogitComparison, compare_drafters, load_blocks, write_passages
from slipstream.tools.tensor_compare import TensorDifference, compare_files, mark_outliers
from tests.oracles import edit_tensors, save_model, save_tokenizer, tiny_drafter, tiny_target, write_target_gguf
from tests.tiny import write_pair

pytestmark = pytest.mark.usefixtures("threads")

Q_PROJ, K_PROJ = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a llama as safetensors (hf), and GGUF files of it: f32.gguf, q8.gguf and q4.gguf."""
    folder = tmp_path_factory.mktemp("llama")
    for kind, name in (("F32", "f32"), ("Q8_0", "q8"), ("Q4_0", "q4")):
        model = tiny_target("llama", num_key_value_heads=4)
        if name == "f32":
            save_model(model, folder / "hf")
        with torch.no_grad():
            write_target_gguf(model, folder / f"{name}.gguf", kind)
    return folder


def damaged(llama: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the safetensors with some tensors changed."""
    copy = tmp_path / "copy"
    shutil.copytree(llama / "hf", copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "model.safetensors")
    return copy


def test_the_same_file_is_no_distance_from_itself(llama: Path, folder: Path) -> None:
    for path in (llama / "hf", llama / "q4.gguf", folder / "draft"):
        found = compare_files(path, path)
        assert found.largest_error == found.mean_error == 0
        assert not (found.outliers or found.missing or found.extra or found.shapes or found.settings or found.notes)
        assert all(tensor.max_error == tensor.row_error == 0 for tensor in found.tensors)


def test_a_llama_gguf_is_compared_in_the_order_of_the_checkpoint(llama: Path) -> None:
    found = compare_files(llama / "hf", llama / "f32.gguf")
    assert found.largest_error == 0 and not found.settings and not found.missing and not found.extra
    stored = {tensor.name for tensor in found.tensors}
    assert {Q_PROJ, K_PROJ, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= stored
    assert len(stored) == 3 * 9 + 3


@pytest.mark.parametrize(("name", "least", "most"), [("q8", 0.002, 0.01), ("q4", 0.03, 0.12)])
def test_a_quantised_file_shows_the_error_of_its_type(llama: Path, name: str, least: float, most: float) -> None:
    found = compare_files(llama / "hf", llama / f"{name}.gguf")
    matrices = [tensor for tensor in found.tensors if len(tensor.shape) == 2]
    assert all(least < tensor.relative_rms < most for tensor in matrices)
    assert all(tensor.relative_rms == 0 for tensor in found.tensors if len(tensor.shape) == 1)
    assert not found.outliers
    # by the definition, on one of them
    raw = next(t for t in gguf.GGUFReader(llama / f"{name}.gguf").tensors if t.name == "blk.2.ffn_down.weight")
    theirs = np.asarray(gguf.quants.dequantize(raw.data, raw.tensor_type), np.float64)
    mine = load_file(llama / "hf" / "model.safetensors")["model.layers.2.mlp.down_proj.weight"].double().numpy()
    seen = next(tensor for tensor in matrices if tensor.name == "model.layers.2.mlp.down_proj.weight")
    assert math.isclose(seen.relative_rms, float(np.linalg.norm(mine - theirs) / np.linalg.norm(mine)), rel_tol=1e-9)
    assert math.isclose(seen.max_error, float(np.abs(mine - theirs).max()), rel_tol=1e-9)


@pytest.mark.parametrize("other", ["hf", "q8.gguf", "q4.gguf"])
def test_one_wrong_row_is_the_outlier(llama: Path, tmp_path: Path, other: str) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"][200] = tensors["lm_head.weight"][201]

    found = compare_files(damaged(llama, tmp_path, spoil), llama / other)
    (outlier,) = found.outliers
    assert (outlier.name, outlier.worst_row) == ("lm_head.weight", 200)
    assert outlier.row_error > 0.5


@pytest.mark.parametrize("other", ["hf", "q4.gguf"])
def test_swapped_queries_and_keys_are_found_and_named(llama: Path, tmp_path: Path, other: str) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        tensors[Q_PROJ], tensors[K_PROJ] = tensors[K_PROJ], tensors[Q_PROJ]

    found = compare_files(llama / other, damaged(llama, tmp_path, swap))
    said = {tensor.name: tensor.explanation for tensor in found.outliers}
    assert set(said) == {Q_PROJ, K_PROJ}
    assert K_PROJ in said[Q_PROJ] and Q_PROJ in said[K_PROJ]


def test_rows_in_the_wrong_rotary_order_are_found_and_named(llama: Path, tmp_path: Path) -> None:
    def interleave(tensors: dict[str, Any]) -> None:
        rows = tensors[Q_PROJ]
        tensors[Q_PROJ] = rows.view(4, 2, 8, -1).transpose(1, 2).reshape(rows.shape)

    found = compare_files(llama / "q8.gguf", damaged(llama, tmp_path, interleave))
    (outlier,) = found.outliers
    assert outlier.name == Q_PROJ and "rotary order" in outlier.explanation


def test_a_scaled_tensor_is_named_as_one(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    found = compare_files(llama / "hf", damaged(llama, tmp_path, lambda tensors: tensors[name].mul_(4.0)))
    assert [(t.name, t.explanation) for t in found.outliers] == [(name, "it is scaled by 4")]


def test_missing_extra_misshapen_and_not_finite_tensors_are_told(llama: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.odd.weight"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.ones(65)
        tensors[Q_PROJ][3, 5] = math.nan

    found = compare_files(llama / "hf", damaged(llama, tmp_path, change))
    assert found.missing == ["model.layers.0.mlp.up_proj.weight"]
    assert found.extra == ["model.layers.0.mlp.odd.weight"]
    assert found.shapes == [("model.norm.weight", (64,), (65,))]
    (outlier,) = found.outliers
    assert (outlier.name, outlier.non_finite, outlier.relative_rms) == (Q_PROJ, 1, math.inf)
    assert found.largest_error == math.inf
    json.dumps(found.to_json(), allow_nan=False)


def test_other_settings_are_told(llama: Path, tmp_path: Path) -> None:
    copy = damaged(llama, tmp_path, lambda tensors: None)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 1e6
    (copy / "config.json").write_text(json.dumps(config))
    found = compare_files(llama / "f32.gguf", copy)
    assert found.settings == [("rope.theta", 10000.0, 1e6)] and found.largest_error == 0


def drafter_gguf(folder: Path, path: Path, spelling: int) -> None:
    """The tiny drafter's tensors under one of the GGUF spellings, without a usable configuration."""
    writer = gguf.GGUFWriter(path, "dflash")
    for name, tensor in load_file(folder / "draft" / "model.safetensors").items():
        writer.add_tensor(gguf_spellings(name)[spelling % len(gguf_spellings(name))], tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("spelling", [0, 1])
def test_drafters_are_matched_under_every_naming_even_without_a_config(
    folder: Path, tmp_path: Path, spelling: int
) -> None:
    drafter_gguf(folder, tmp_path / "d.gguf", spelling)
    found = compare_files(folder / "draft", tmp_path / "d.gguf")
    assert len(found.tensors) == 25 and found.largest_error == 0
    assert len(found.notes) == 1 and "d.gguf" in found.notes[0]  # its configuration cannot be read


def test_a_drafter_is_not_compared_with_a_target(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a drafter and target a target"):
        compare_files(folder / "draft", folder / "target")


def test_a_truncated_file_is_refused(llama: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    end = max(entry.end for entry in read_gguf(llama / "q8.gguf").tensors)
    short.write_bytes((llama / "q8.gguf").read_bytes()[: end - 1])
    with pytest.raises(FormatError, match="1 bytes early"):
        compare_files(llama / "q8.gguf", short)


def test_memory_stays_within_rows(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare_files(llama / "hf", llama / "q4.gguf").to_json()
    largest, read = 0, compare_module.dense_values

    def watched(tensor: Any) -> Any:
        nonlocal largest
        largest = max(largest, math.prod(tensor.shape))
        return read(tensor)

    monkeypatch.setattr(compare_module, "CHUNK_ELEMENTS", 640)
    monkeypatch.setattr(compare_module, "dense_values", watched)
    pieces = compare_files(llama / "hf", llama / "q4.gguf").to_json()
    assert largest <= 640
    for one, two in zip(whole["tensors"], pieces["tensors"], strict=True):  # type: ignore[call-overload]
        assert math.isclose(one["relative_rms"], two["relative_rms"], rel_tol=1e-9)
        assert (one["name"], one["worst_row"], one["max_error"]) == (two["name"], two["worst_row"], two["max_error"])


def difference(name: str, rms: float, row: float, types: tuple[str, str] = ("F32", "Q4_0")) -> TensorDifference:
    return TensorDifference(name, types, (4, 4), 16, rms, 0.1, 2, row)


def test_outliers_are_judged_among_their_own_types() -> None:
    coarse = [difference(f"c{index}", 0.09, 0.2) for index in range(5)]
    fine = [difference(f"f{index}", 0.006, 0.02, ("F32", "Q8_0")) for index in range(4)]
    assert not any(tensor.outlier for tensor in mark_outliers(coarse + fine))
    odd = difference("odd", 0.03, 0.05, ("F32", "Q8_0"))
    assert [t.name for t in mark_outliers([*coarse, *fine, odd]) if t.outlier] == ["odd"]
    # alone in its types, but no quantisation does that
    alone = mark_outliers([*coarse, difference("alone", 0.9, 0.9, ("F32", "F16"))])
    assert [t.name for t in alone if t.outlier] == ["alone"]


# ---- what the command says


def run(capsys: pytest.CaptureFixture[str], *paths: Path, **options: Any) -> tuple[int, Any]:
    code = 0
    try:
        cli_compare.command(*map(str, paths), json_output=True, **options)
    except typer.Exit as end:
        code = end.exit_code
    return code, json.loads(capsys.readouterr().out)


def test_the_exit_code_tells_an_error_above_the_limit(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = llama / "hf", llama / "q8.gguf"
    assert run(capsys, *pair)[0] == 0
    code, report = run(capsys, *pair, max_error=0.01)
    assert code == 0 and report["tensors"]["largest_error"] < 0.01 and report["logits"] == []
    assert run(capsys, *pair, max_error=0.001)[0] == 1
    cli_compare.command(str(pair[0]), str(pair[1]))
    drawn = capsys.readouterr().out
    assert "relative RMS" in drawn and "0 outliers" in drawn and "--all" in drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "nothing to compare with"),
        ({"reference": "dflash"}, "--logits"),
        ({"reference": "dflash", "logits": True, "max_error": 0.1}, "two files"),
    ],
)
def test_contradictory_options_are_refused(folder: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        cli_compare.command(str(folder / "draft"), **arguments)


# ---- logits


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny pairs whose drafters fit the first one's target."""
    folder = tmp_path_factory.mktemp("pairs")
    for seed in (0, 1):
        write_pair(folder / str(seed), seed)
    (folder / "prompts.jsonl").write_text('{"turns": ["hello there"]}\n{"turns": ["ABAB"]}\n')
    return folder / "0", folder / "1"


def logit_options(pair: Path) -> dict[str, Any]:
    return {
        "logits": True,
        "prompts": str(pair.parent / "prompts.jsonl"),
        "limit": 0,
        "max_tokens": 40,
        "dtype": "fp32",
        "threads": 1,
    }


def test_a_drafter_agrees_with_itself_and_with_the_authors(
    pairs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    draft = pairs[0] / "draft"
    _, report = run(
        capsys, draft, draft, target=str(pairs[0] / "target"), reference="dflash", **logit_options(pairs[0])
    )
    itself, *authors = report["logits"]
    assert itself["rows"] > 300 and itself["answer_tokens"] == 80
    assert (itself["max_difference"], itself["mean_kl"], itself["top1_agreement"]) == (0, 0, 1)
    assert len(authors) == 2
    for run_ in authors:
        assert run_["first"] == "dflash (authors)"
        assert 0 < run_["max_difference"] < 1e-4 and run_["mean_kl"] < 1e-9 and run_["top1_agreement"] == 1
        assert run_["tau_first"] == run_["tau_second"] == itself["tau_first"]


def test_the_taus_are_those_the_engine_measures(pairs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target, config = str(pairs[0] / "target"), EngineConfig("fp32", threads=1)
    drafts = [pair / "draft" for pair in pairs]
    _, report = run(capsys, *drafts, target=target, **logit_options(pairs[0]))
    (found,) = report["logits"]
    assert found["top1_agreement"] < 0.5 and found["mean_kl"] > 0.1
    measured = [write_passages(target, str(draft), ["hello there", "ABAB"], config, 40)[1] for draft in drafts]
    assert [found["tau_first"], found["tau_second"]] == pytest.approx(measured)
    assert measured[0] != measured[1]


def test_two_targets_are_compared_on_the_firsts_answers(
    pairs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (pair / "target" for pair in pairs)
    options = logit_options(pairs[0])
    _, same = run(capsys, first, first, draft=str(pairs[0] / "draft"), **options)
    (found,) = same["logits"]
    assert (found["max_difference"], found["top1_agreement"], found["rows"]) == (0, 1, 80)
    assert found["tau_first"] == found["tau_second"] > 1
    _, other = run(capsys, first, second, draft="none", **options)
    (found,) = other["logits"]
    assert found["max_difference"] > 1 and found["top1_agreement"] < 1 and found["tau_first"] is None
    assert "tau was not measured" in found["notes"][0]
    with pytest.raises(RequestError, match="holds a drafter"):
        cli_compare.command(str(first), str(second), reference="dflash", **options)


def test_dflash2_drafters_agree_with_the_authors(tmp_path: Path) -> None:
    """Convolutions and the candidate selector, whose choices depend on the token before."""
    import dflash.model as authors
    from transformers import Qwen3Config

    from tests.oracles import randomised

    target = tiny_target("qwen3")
    save_model(target, tmp_path / "target")
    save_tokenizer(tmp_path / "target")
    plain = tiny_drafter().config.to_dict()
    settings = plain | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": plain["dflash_config"]
        | {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 16},
    }
    model = randomised(authors.DFlash2DraftModel(Qwen3Config(**settings)), 3)
    model.save_pretrained(tmp_path / "draft")
    passages, _ = write_passages(str(tmp_path / "target"), None, ["a tiny text"], EngineConfig("fp32", threads=1), 24)
    (ours,) = load_blocks(tmp_path / "target", [("ours", tmp_path / "draft")], "fp32")
    found = compare_drafters(AuthorBlocks(ours, tmp_path / "draft"), ours, passages, "fp32")
    assert found.rows > 50 and found.max_difference < 1e-3 and found.agreement == 1
    edit_tensors(
        tmp_path / "draft",
        candidate_selector__hidden_projection__weight=torch.randn(8, 64),
        layers__0__mlp_conv__base_kernel=torch.randn(2, 3, 64),
    )
    (spoiled,) = load_blocks(tmp_path / "target", [("spoiled", tmp_path / "draft")], "fp32")
    found = compare_drafters(ours, spoiled, passages, "fp32")
    assert found.agreement < 1 and found.max_difference > 1e-2


def test_logits_that_are_no_numbers_are_counted_and_left_out() -> None:
    result = LogitComparison("a", "b", "drafter", "fp32")
    first = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    second = torch.tensor([[1.0, 2.5], [math.nan, 0.0], [0.0, math.inf]])
    result.add(first, second, ([1, 0, 1], [1, 0, 1]))
    assert (result.rows, result.non_finite, result.same, result.max_difference) == (1, 2, 1, 0.5)
    # by the definition: sum p log(p / q) of softmax(1, 2) and softmax(1, 2.5)
    p, q = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-1.5))
    assert result.mean_divergence == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    result.add(first * math.nan, second, ([0, 0, 0], [0, 0, 0]))
    assert (result.rows, result.non_finite) == (1, 5)
    json.dumps(result.to_json(), allow_nan=False)


def test_a_package_that_is_not_there_is_one_sentence(pairs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "dflash.model", None)
    (ours,) = load_blocks(pairs[0] / "target", [("ours", pairs[0] / "draft")], "fp32")
    with pytest.raises(Exception, match="pip install --no-deps dflash"):
        AuthorBlocks(ours, pairs[0] / "draft")


def test_the_shipped_drafters_differ_where_they_should() -> None:
    plain, dspark = (resolve(name).path for name in ("smollm2-dflash", "smollm2-dspark"))
    found = compare_files(plain, dspark)
    assert found.extra == ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"] and not found.missing
    assert ("parts.markov_rank", 0, 128) in found.settings
    assert 0 < found.mean_error < 0.5 and found.largest_error == math.inf
