"""`slipstream quantize` on small files: which tensor gets which type, what is carried over, and what is refused."""

# mypy: disable-error-code="misc, unused-ignore"

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from slipstream.cli.quantize import command
from slipstream.errors import FormatError, RequestError
from slipstream.formats.gguf import ValueKind, read_gguf
from slipstream.formats.gguf_write import Metadata, TensorPlan, entries, stored_metadata, write_gguf
from slipstream.formats.quantise import encode_rows
from slipstream.formats.weight_files import open_weights
from slipstream.tools import requantize as quantize_module
from slipstream.tools.quantize_recipes import RECIPES, Recipe, divided
from slipstream.tools.requantize import QuantizeReport, quantize_file

Tensors = dict[str, tuple[np.ndarray, str]]
METADATA = entries(
    {
        "general.architecture": "dflash",
        "general.file_type": 0,
        "dflash.rope.freq_base": 1e7,
        "dflash.target_layers": [2, 10],
        "tokenizer.ggml.tokens": ["a", "ä", ""],
        "dflash.sample_from_anchor": True,
    }
) | entries({"dflash.block_count": 2}, ValueKind.UINT16)
RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


DRAFTER: Tensors = {
    "fc.weight": (numbers(64, 512), "F32"),
    "enc.output_norm.weight": (numbers(64), "BF16"),
    "blk.0.attn_norm.weight": (numbers(64), "F32"),
    "blk.0.attn_q.weight": (numbers(64, 64), "BF16"),
    "blk.0.attn_k_norm.weight": (numbers(64), "F32"),
    "blk.0.ffn_down.weight": (numbers(64, 256), "F16"),
    "blk.0.attn_conv_base": (numbers(2, 3, 64), "F32"),
    "blk.0.attn_conv_proj.weight": (numbers(24, 64), "F32"),
    "blk.1.ffn_down.weight": (numbers(64, 48), "BF16"),
    "blk.1.ffn_up.weight": (numbers(64, 48), "F32"),
    "markov_w1.weight": (numbers(80, 32), "Q8_0"),
    "selector_hidden.weight": (numbers(32, 64), "F32"),
    "conf_proj.weight": (numbers(1, 96), "F32"),
    "output_norm.weight": (numbers(64), "F32"),
    "token_embd.weight": (numbers(80, 64), "F32"),
}


def write(path: Path, tensors: Tensors, metadata: Metadata | None = None) -> Path:
    plans = []
    for name, (values, type_name) in tensors.items():
        rows = values.reshape(-1, values.shape[-1])
        stored = rows.view(np.uint8) if type_name.startswith("I") else encode_rows(rows, type_name)
        plans.append(TensorPlan(name, type_name, values.shape, lambda stored=stored: [stored]))
    write_gguf(path, METADATA if metadata is None else metadata, plans)
    return path


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("in") / "in.gguf", DRAFTER)


def types(path: Path) -> dict[str, str]:
    return {entry.name: entry.type_name for entry in read_gguf(path).tensors}


def values_in(path: Path) -> dict[str, np.ndarray]:
    with open_weights(path) as file:
        return {name: file.tensor(name).dense().numpy() for name in file.names()}


EXACT = [name for name in DRAFTER if "norm" in name or name in ("blk.0.attn_conv_base", "conf_proj.weight")]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_writes_a_whole_file_and_keeps_vectors_exact(tmp_path: Path, drafter: Path, recipe: str) -> None:
    report = quantize_file(drafter, tmp_path / "out.gguf", recipe)  # type: ignore[arg-type]
    stored, before, after = types(report.out), values_in(drafter), values_in(report.out)
    assert list(stored) == list(DRAFTER)
    for name in EXACT:
        assert stored[name] == "F32"
        np.testing.assert_array_equal(after[name], before[name])
    for result in report.tensors:
        old, new = before[result.name].astype(np.float64), after[result.name]
        assert (result.after, result.bytes_before) == (stored[result.name], read_bytes(drafter, result.name))
        assert result.bytes_after == read_bytes(report.out, result.name)
        relative = np.sqrt(np.square(new - old).sum() / np.square(old).sum())
        assert result.relative_rms == pytest.approx(relative, rel=1e-5)
        assert result.max_error == pytest.approx(np.abs(new - old).max(), rel=1e-5)
    assert max(result.relative_rms for result in report.matrices) < 0.1
    assert any(result.max_error > 0 for result in report.matrices)


def read_bytes(path: Path, name: str) -> int:
    return next(entry.nbytes for entry in read_gguf(path).tensors if entry.name == name)


def test_metadata_is_carried_over_with_its_types(tmp_path: Path, drafter: Path) -> None:
    report = quantize_file(drafter, tmp_path / "out.gguf", "q5_k")
    old, new = stored_metadata(drafter), stored_metadata(report.out)
    changed = {"general.file_type", "general.quantization_version"}
    kept = [[item for item in stored.items() if item[0] not in changed] for stored in (new, old)]
    assert kept[0] == kept[1]
    written = read_gguf(report.out).metadata
    assert written["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q5_K_S
    assert written["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    floats = quantize_file(drafter, tmp_path / "floats.gguf", "bf16")
    assert "general.quantization_version" not in read_gguf(floats.out).metadata


def test_file_types_are_ggufs() -> None:
    names = {"q4_k": "Q4_K_S", "q5_k": "Q5_K_S", "q4_k_m": "Q4_K_M", "q4-mix": "Q4_0"}
    for recipe, (_, number) in RECIPES.items():
        assert gguf.LlamaFileType(number).name == f"MOSTLY_{names.get(recipe, recipe.upper())}"


def test_what_rows_do_not_divide_falls_back_by_name(tmp_path: Path, drafter: Path) -> None:
    report = quantize_file(drafter, tmp_path / "out.gguf", "q4_k")
    got = {result.name: result for result in report.tensors}
    assert got["fc.weight"].after == got["blk.0.ffn_down.weight"].after == "Q4_K"
    assert (got["blk.0.attn_q.weight"].after, got["blk.0.attn_q.weight"].wanted) == ("Q5_0", "Q4_K")
    assert got["blk.0.attn_q.weight"].reason == "rows of 64 do not divide by 256"
    # rows of 48: a bfloat16 tensor stays what it is, another becomes float16
    assert (got["blk.1.ffn_down.weight"].after, got["blk.1.ffn_up.weight"].after) == ("BF16", "F16")
    assert got["blk.1.ffn_up.weight"].reason == "rows of 48 do not divide by 32"
    matrices = {name: values.size for name, (values, _) in DRAFTER.items() if name not in EXACT}
    served = matrices["fc.weight"] + matrices["blk.0.ffn_down.weight"]
    assert report.share == pytest.approx(served / sum(matrices.values()))


@pytest.mark.parametrize(
    ("wanted", "width", "got"),
    [
        ("Q4_K", 256, "Q4_K"),
        ("Q4_K", 288, "Q5_0"),
        ("Q5_K", 288, "Q5_1"),
        ("Q6_K", 288, "Q8_0"),
        ("Q6_K", 300, "F16"),
        ("Q4_0", 32, "Q4_0"),
        ("Q8_0", 40, "F16"),
        ("BF16", 7, "BF16"),
    ],
)
def test_fallbacks(wanted: str, width: int, got: str) -> None:
    choice = divided(wanted, width, "F32")
    assert (choice.type_name, choice.wanted, bool(choice.reason)) == (got, wanted, got != wanted)


def test_q4_mix_keeps_what_surrounds_the_layers_finer(tmp_path: Path, drafter: Path) -> None:
    stored = types(quantize_file(drafter, tmp_path / "out.gguf", "q4-mix").out)
    assert stored["blk.0.attn_q.weight"] == stored["blk.0.ffn_down.weight"] == "Q4_0"
    for name in (
        "fc.weight",
        "markov_w1.weight",
        "selector_hidden.weight",
        "token_embd.weight",
        "blk.0.attn_conv_proj.weight",
    ):
        assert stored[name] == "Q8_0"


def test_q4_k_m_gives_more_bits_to_the_layers_llama_cpp_gives_them() -> None:
    names = [f"blk.{i}.{part}.weight" for i in range(28) for part in ("attn_v", "attn_q", "ffn_down", "ffn_up")]
    recipe = Recipe("q4_k_m", [*names, "token_embd.weight"])

    def finer(part: str) -> set[int]:
        chosen = {i: recipe.choose(f"blk.{i}.{part}.weight", (256, 256), "BF16") for i in range(28)}
        assert {choice.type_name for choice in chosen.values()} <= {"Q4_K", "Q6_K"}
        return {i for i, choice in chosen.items() if choice.type_name == "Q6_K"}

    # the layers published Q4_K_M files of 28-layer models have in Q6_K
    assert finer("attn_v") == finer("ffn_down") == {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    assert finer("attn_q") == finer("ffn_up") == set()
    table = recipe.choose("token_embd.weight", (256, 256), "BF16")
    assert table.type_name == "Q6_K"  # it is the output head as well
    separate = Recipe("q4_k_m", [*names, "token_embd.weight", "output.weight"])
    head, table = (separate.choose(name, (256, 256), "BF16") for name in ("output.weight", "token_embd.weight"))
    assert (head.type_name, table.type_name) == ("Q6_K", "Q4_K")


def test_what_has_its_type_is_copied_to_the_byte(tmp_path: Path) -> None:
    source = write(tmp_path / "in.gguf", {"blk.0.attn_q.weight": (numbers(33, 512), "F32")})
    once = quantize_file(source, tmp_path / "once.gguf", "q4_k")
    twice = quantize_file(once.out, tmp_path / "twice.gguf", "q4_k")
    assert once.out.read_bytes() == twice.out.read_bytes()
    assert twice.tensors[0].relative_rms == 0 < once.tensors[0].relative_rms


def test_a_quantised_file_is_quantised_again(tmp_path: Path) -> None:
    source = write(tmp_path / "in.gguf", {"blk.0.attn_q.weight": (numbers(33, 512), "Q4_1")})
    report = quantize_file(source, tmp_path / "out.gguf", "q8_0")
    assert types(report.out) == {"blk.0.attn_q.weight": "Q8_0"}
    assert report.tensors[0].relative_rms < 0.006


def test_integers_and_experts(tmp_path: Path) -> None:
    ids = np.arange(40, dtype=np.int32)[None]
    tensors: Tensors = {
        "d2t": (ids[0], "I32"),
        "blk.0.ffn_up_exps.weight": (numbers(3, 8, 256), "F32"),
        "blk.0.ffn_gate_inp.weight": (numbers(3, 256), "F32"),
    }
    report = quantize_file(write(tmp_path / "in.gguf", tensors), tmp_path / "out.gguf", "q6_k")
    assert list(types(report.out).values()) == ["I32", "Q6_K", "F32"]
    after = values_in(report.out)
    np.testing.assert_array_equal(after["d2t"], ids[0])
    assert after["blk.0.ffn_up_exps.weight"].shape == (3, 8, 256)
    assert report.tensors[1].relative_rms < 0.02


def test_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.gguf", {"blk.0.attn_q.weight": (numbers(2048, 1024), "F32")})  # 8 MiB
    monkeypatch.setattr(quantize_module, "CHUNK_ELEMENTS", 2**16)
    tracemalloc.start()
    try:
        quantize_file(source, tmp_path / "out.gguf", "q8_0")
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("recipe", "stored"), [("q4_0", "F32"), ("f16", "F16")])
def test_a_damaged_tensor_is_named_and_leaves_nothing_behind(tmp_path: Path, recipe: str, stored: str) -> None:
    values = numbers(4, 64)
    rows = values.astype(np.float16 if stored == "F16" else np.float32)
    rows[2, 5] = np.nan
    plan = TensorPlan("blk.0.attn_v.weight", stored, (4, 64), lambda: [rows.view(np.uint8)])
    write_gguf(tmp_path / "in.gguf", METADATA, [plan])
    with pytest.raises(FormatError, match=r"'blk\.0\.attn_v\.weight'.*not finite"):
        quantize_file(tmp_path / "in.gguf", tmp_path / "out.gguf", recipe)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_what_would_destroy_a_file_is_refused(tmp_path: Path, drafter: Path) -> None:
    source = tmp_path / "in.gguf"
    source.write_bytes(drafter.read_bytes())
    (tmp_path / "link.gguf").symlink_to(source)
    for out in (source, tmp_path / "link.gguf", tmp_path / "." / "in.gguf"):
        with pytest.raises(RequestError, match="is the file that is read"):
            quantize_file(source, out, "q8_0", force=True)
    assert source.read_bytes() == drafter.read_bytes()
    other = tmp_path / "out.gguf"
    other.write_text("precious")
    with pytest.raises(RequestError, match="--force"):
        quantize_file(source, other, "q8_0")
    assert other.read_text() == "precious"
    quantize_file(source, other, "q8_0", force=True)
    assert types(other)["fc.weight"] == "Q8_0"
    with pytest.raises(RequestError, match="is a folder"):
        quantize_file(source, tmp_path, "q8_0", force=True)


def test_only_gguf_files_are_taken(tmp_path: Path) -> None:
    save_file({"w": numbers(4, 32)}, tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(FormatError, match="slipstream convert"):
            quantize_file(source, tmp_path / "out.gguf", "q8_0")


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_prints_a_table_or_json(tmp_path: Path, drafter: Path) -> None:
    text = run(str(drafter), str(tmp_path / "a.gguf"), "--type", "q4_k")
    assert "F32 → Q4_K" in text and "blk.1.ffn_up.weight" in text
    assert "of the weights in matrices have the type q4_k asks for" in text
    assert "4 matrices are Q5_0 instead of Q4_K: rows of 64 do not divide by 256" in text
    said = json.loads(run(str(drafter), str(tmp_path / "b.gguf"), "--type", "q4_k", "--json"))
    report: QuantizeReport = quantize_file(drafter, tmp_path / "c.gguf", "q4_k")
    assert said == report.to_json() | {"out": str(tmp_path / "b.gguf")}
    assert said["bytes_after"] == (tmp_path / "b.gguf").stat().st_size < said["bytes_before"]
    assert f"{said['share']:.1%} of the weights" in text
    again = (str(drafter), str(tmp_path / "b.gguf"), "--type", "q4_k", "--json", "--force", "--no-tensors")
    brief = json.loads(run(*again))
    assert set(said) - set(brief) == {"tensors"}
