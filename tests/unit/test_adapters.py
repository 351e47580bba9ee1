"""Reading adapters: files of PEFT and llama.cpp, what a user types, and every fault that a file can have."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import ConfigError, FormatError, SlipstreamError, SourceError
from slipstream.formats.adapters import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    AdapterFile,
    AdapterPair,
    AdapterSource,
    parse_source,
    read_adapter,
)
from tests import fuzz_adapters
from tests.adapters import RANK, factors, gguf_tensors, noise, peft_tensors, write_gguf_adapter, write_peft
from tests.helpers_models import write_gguf
from tests.tiny import HIDDEN, VOCAB

FC = factors((HIDDEN, 2 * HIDDEN))
Q, K = "layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj"
PAIRS = {Q: factors((HIDDEN, HIDDEN), seed=3), K: factors((16, HIDDEN), seed=5)}


def by_name(adapter: AdapterFile) -> dict[str, AdapterPair]:
    return {pair.name: pair for pair in adapter.pairs}


def peft(folder: Path, tensors: dict[str, Tensor] | None = None, scale: float = 1.0, **config: Any) -> AdapterFile:
    return read_adapter(AdapterSource("a", write_peft(folder, tensors or peft_tensors(PAIRS), **config), scale))


def refusal(source: Path, kind: type[SlipstreamError]) -> str:
    with pytest.raises(kind) as caught:
        read_adapter(AdapterSource("a", source))
    assert caught.value.hint
    return caught.value.message


# ---- what a user types


def test_a_source_is_read_from_text(tmp_path: Path) -> None:
    assert parse_source("some/code.gguf") == AdapterSource("code", Path("some/code.gguf"))
    assert parse_source("mine=some/code.gguf@0.5") == AdapterSource("mine", Path("some/code.gguf"), 0.5)
    assert parse_source("/x/folder@-2") == AdapterSource("folder", Path("/x/folder"), -2.0)
    assert parse_source("n=/x/user@host").path == Path("/x/user@host")


def test_a_path_that_exists_is_meant_as_it_stands(tmp_path: Path) -> None:
    odd = tmp_path / "name=v@2.gguf"
    odd.touch()
    with pytest.raises(SourceError, match="cannot be the name"):
        parse_source(str(odd))
    assert parse_source(f"good={odd}") == AdapterSource("good", odd)
    assert parse_source(f"good={odd}@3") == AdapterSource("good", odd, 3.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base=x.gguf", "cannot be called 'base'"),
        ("some/base.gguf", "cannot be called 'base'"),
        ("x.gguf@nan", "scale"),
        ("x.gguf@inf", "scale"),
        ("a=", "names no adapter"),
        ("", "names no adapter"),
        ("some/my adapter", "cannot be the name"),
        ("@2", "names no adapter"),
    ],
)
def test_senseless_sources_are_refused(text: str, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        parse_source(text)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no adapter" in refusal(tmp_path / "nothing", SourceError)
    assert "there is no adapter" in refusal(parse_source("a=~nobody-of-this-name/x").path, SourceError)
    assert "there is no adapter" in refusal(parse_source("a=" + "x" * 5000).path, SourceError)
    assert "holds no adapter" in refusal(tmp_path, SourceError)


# ---- PEFT


def test_a_peft_folder_is_read(tmp_path: Path) -> None:
    adapter = peft(tmp_path, scale=0.5)
    found = by_name(adapter)
    assert list(found) == [f"{K}.weight", f"{Q}.weight"] or list(found) == [f"{Q}.weight", f"{K}.weight"]
    for module, (a, b) in PAIRS.items():
        pair = found[f"{module}.weight"]
        assert torch.equal(pair.down.dense(), a) and torch.equal(pair.up.dense(), b)
        assert (pair.down.shape[0], pair.factor) == (RANK, 0.5 * 8 / RANK)
    as_file = read_adapter(AdapterSource("a", tmp_path / PEFT_WEIGHTS, 0.5))
    assert as_file.fingerprint == adapter.fingerprint and adapter.architecture is None


def test_ranks_alphas_and_rslora(tmp_path: Path) -> None:
    tensors = peft_tensors({Q: factors((HIDDEN, HIDDEN), rank=9), K: PAIRS[K]})
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {f"^{K}$": 3, "k_proj": 100}}
    plain = by_name(peft(tmp_path / "plain", tensors, **patterns))
    rooted = by_name(peft(tmp_path / "root", tensors, use_rslora=True, **patterns))
    assert (plain[f"{Q}.weight"].down.shape[0], plain[f"{Q}.weight"].factor) == (9, 8 / 9)
    assert plain[f"{K}.weight"].factor == 3 / RANK
    assert rooted[f"{Q}.weight"].factor == 8 / 3
    assert rooted[f"{K}.weight"].factor == 3 / math.sqrt(RANK)


def test_a_pattern_names_whole_modules_only(tmp_path: Path) -> None:
    found = by_name(peft(tmp_path, alpha_pattern={"proj": 3, "1.self_attn.k_proj": 5, "^self_attn.q_proj": 7}))
    assert found[f"{Q}.weight"].factor == 8 / RANK
    assert found[f"{K}.weight"].factor == 5 / RANK


def test_an_alpha_of_zero_is_zero_to_peft_and_none_to_llama_cpp(tmp_path: Path) -> None:
    assert {pair.factor for pair in peft(tmp_path / "p", lora_alpha=0).pairs} == {0.0}
    for name, alpha in (("zero", 0.0), ("missing", None)):
        path = write_gguf_adapter(tmp_path / f"{name}.gguf", gguf_tensors(PAIRS), alpha)
        assert {pair.factor for pair in read_adapter(AdapterSource("a", path, 3.0)).pairs} == {3.0}


def test_an_embedding_pair_is_turned_over(tmp_path: Path) -> None:
    a, b = factors((VOCAB, HIDDEN), embedding=True)
    (pair,) = peft(tmp_path, peft_tensors({"embed_tokens": (a, b)}, ["embed_tokens"])).pairs
    assert (pair.up.shape, pair.down.shape) == ((VOCAB, RANK), (RANK, HIDDEN))
    assert torch.equal(pair.up.dense() @ pair.down.dense(), a.t() @ b.t())


def test_how_the_base_stores_its_weights_does_not_matter(tmp_path: Path) -> None:
    one, other = peft(tmp_path / "a"), peft(tmp_path / "b", fan_in_fan_out=True)
    for pair, twin in zip(one.pairs, other.pairs, strict=True):
        assert (pair.name, pair.factor) == (twin.name, twin.factor)
        assert torch.equal(pair.up.dense(), twin.up.dense())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"modules_to_save": ["lm_head", "norm"]}, "lm_head, norm"),
        ({"bias": "all"}, "'all'"),
        ({"bias": "lora_only"}, "'lora_only'"),
        ({"use_dora": True}, "'use_dora'"),
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"peft_type": None}, "type None"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"layer_replication": [[0, 1]]}, "'layer_replication'"),
        ({"lora_bias": True}, "'lora_bias'"),
        ({"r": 0}, "r 0"),
        ({"r": -4}, "r -4"),
        ({"r": 4.0}, "r 4.0"),
        ({"r": True}, "r True"),
        ({"r": None}, "r None"),
        ({"r": 10**9}, "r 1000000000"),
        ({"lora_alpha": "8"}, "lora_alpha '8'"),
        ({"lora_alpha": None}, "alpha None"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"lora_alpha": True}, "lora_alpha True"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj 0"),
        ({"rank_pattern": [4]}, "'rank_pattern'"),
        ({"alpha_pattern": {"k_proj": "x"}}, "alpha_pattern.k_proj 'x'"),
        ({"use_rslora": 1}, "use_rslora 1"),
        ({"rank_pattern": {"(a+)+$": 4}}, "(a+)+$"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices'"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_its_key(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(write_peft(tmp_path, peft_tensors(PAIRS), **config), ConfigError)


def test_ranks_must_be_those_of_the_config(tmp_path: Path) -> None:
    said = refusal(write_peft(tmp_path, peft_tensors(PAIRS), rank_pattern={"k_proj": 2}), FormatError)
    assert f"{K}.lora_A.weight' has rank 4" in said and "says 2" in said


def test_target_modules_and_tensors_must_agree(tmp_path: Path) -> None:
    tensors = peft_tensors(PAIRS)
    assert "'up_proj'" in refusal(
        write_peft(tmp_path / "a", tensors, target_modules=["q_proj", "k_proj", "up_proj"]), FormatError
    )
    assert f"'{K}'" in refusal(write_peft(tmp_path / "b", tensors, target_modules=["q_proj"]), FormatError)
    for targets in ("all-linear", r".*\.(q|k)_proj", ["self_attn.q_proj", K]):
        assert len(peft(tmp_path / "c", tensors, target_modules=targets).pairs) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("base_model.model.norm.weight", "norm.weight"),
        ("base_model.model.embed_tokens.base_layer.weight", "base_layer"),
        (f"base_model.model.{Q}.lora_magnitude_vector", "DoRA"),
        (f"base_model.model.{Q}.lora_A.bias", "lora_A.bias"),
    ],
)
def test_other_tensors_are_refused(name: str, said: str, tmp_path: Path) -> None:
    tensors = peft_tensors(PAIRS) | {name: noise(HIDDEN)}
    assert said in refusal(write_peft(tmp_path, tensors, target_modules="all-linear"), FormatError)


def test_files_of_a_peft_folder_that_are_missing(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a", peft_tensors(PAIRS))
    (folder / PEFT_WEIGHTS).rename(folder / "adapter_model.bin")
    assert PEFT_WEIGHTS in refusal(folder, SourceError)
    folder = write_peft(tmp_path / "b", peft_tensors(PAIRS))
    (folder / PEFT_CONFIG).unlink()
    assert PEFT_CONFIG in refusal(folder / PEFT_WEIGHTS, SourceError)
    (folder / PEFT_CONFIG).write_text("[]")
    assert "not a JSON object" in refusal(folder, FormatError)
    assert "no LoRA tensors" in refusal(write_peft(tmp_path / "c", {}), FormatError)


# ---- GGUF


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_a_gguf_adapter_is_read(kind: str, tmp_path: Path) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", gguf_tensors(PAIRS), 6.0, kind)
    for place in (path, tmp_path):
        found = by_name(read_adapter(AdapterSource("a", place, 2.0)))
        assert list(found) == ["blk.0.attn_q.weight", "blk.1.attn_k.weight"]
        for pair, (a, b) in zip(found.values(), PAIRS.values(), strict=True):
            assert (pair.down.shape[0], pair.factor) == (RANK, 2.0 * 6 / RANK)
            assert float((pair.down.dense() - a).abs().max()) <= (0.0 if kind == "F32" else 0.01)
            assert pair.up.shape == b.shape


def test_a_pair_of_rank_one_may_lack_a_dimension(tmp_path: Path) -> None:
    a, b = noise(HIDDEN), noise(16, 1)
    path = write_gguf_adapter(tmp_path / "a.gguf", {"blk.0.attn_k.weight.lora_a": a, "blk.0.attn_k.weight.lora_b": b})
    (pair,) = read_adapter(AdapterSource("a", path)).pairs
    assert (pair.down.shape[0], pair.factor) == (1, 8.0)
    assert torch.equal(pair.up.dense() @ pair.down.dense(), b @ a[None])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"general__type": "model"}, "general.type 'model'"),
        ({"adapter__type": "ia3"}, "adapter.type 'ia3'"),
        ({"adapter__alora__invocation_tokens": "x"}, "certain tokens"),
    ],
)
def test_other_gguf_files_are_refused(keys: dict[str, str], said: str, tmp_path: Path) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", gguf_tensors(PAIRS), **keys)
    assert said in refusal(path, ConfigError)


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    assert "general.type" in refusal(tmp_path / "model.gguf", ConfigError)


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.attn_q.weight.lora_c", "lora_a"])
def test_other_tensors_of_a_gguf_are_refused(name: str, tmp_path: Path) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", gguf_tensors(PAIRS) | {name: noise(4, 4)})
    assert f"'{name}'" in refusal(path, FormatError)


def test_a_type_no_writer_uses(tmp_path: Path) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", gguf_tensors({"fc": FC}), kind="Q4_0")
    assert "fc.weight.lora_a' is of type Q4_0" in refusal(path, FormatError)
    tensors = {name: tensor.to(torch.int32) for name, tensor in peft_tensors({"fc": FC}).items()}
    assert "is of type I32" in refusal(write_peft(tmp_path / "p", tensors), FormatError)


# ---- both


@pytest.mark.parametrize(("side", "lacking"), [("a", "B"), ("b", "A")])
def test_a_factor_without_its_partner(side: str, lacking: str, tmp_path: Path) -> None:
    stored = gguf_tensors(PAIRS)
    del stored[f"blk.1.attn_k.weight.lora_{lacking.lower()}"]
    said = refusal(write_gguf_adapter(tmp_path / "a.gguf", stored), FormatError)
    assert f"blk.1.attn_k.weight.lora_{side}' has no partner: its {lacking} is missing" in said
    tensors = peft_tensors(PAIRS)
    del tensors[f"base_model.model.{K}.lora_{lacking}.weight"]
    said = refusal(write_peft(tmp_path / "p", tensors), FormatError)
    assert f"{K}.lora_{side.upper()}.weight' has no partner" in said


def test_factors_without_a_common_rank(tmp_path: Path) -> None:
    stored = gguf_tensors({Q: (noise(4, HIDDEN), noise(HIDDEN, 5))})
    said = refusal(write_gguf_adapter(tmp_path / "a.gguf", stored), FormatError)
    assert "blk.0.attn_q.weight.lora_a' [4, 32]" in said and "lora_b' [32, 5]" in said


def test_no_rank_at_all(tmp_path: Path) -> None:
    tensors = peft_tensors({Q: (torch.empty(0, HIDDEN), torch.empty(HIDDEN, 0))})
    assert f"{Q}.lora_A.weight' has shape [0, 32]" in refusal(write_peft(tmp_path, tensors), FormatError)
    tensors = peft_tensors({Q: (noise(2, 2, HIDDEN), noise(HIDDEN, 2))})
    assert "has shape [2, 2, 32]" in refusal(write_peft(tmp_path, tensors), FormatError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_no_numbers(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in peft_tensors(PAIRS).items()}
    tensors[f"base_model.model.{K}.lora_B.weight"][15, 3] = value
    assert f"{K}.lora_B.weight' holds NaN or infinity" in refusal(write_peft(tmp_path, tensors), FormatError)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    gguf_path = write_gguf_adapter(tmp_path / "a.gguf", gguf_tensors(PAIRS))
    folder = write_peft(tmp_path / "p", peft_tensors(PAIRS))
    for path, source in ((gguf_path, gguf_path), (folder / PEFT_WEIGHTS, folder)):
        whole = path.read_bytes()
        for keep in (len(whole) - 1, len(whole) // 2, 20, 1):
            path.write_bytes(whole[:keep])
            assert refusal(source, FormatError)
    path.write_bytes(b"")
    assert "empty" in refusal(folder, FormatError)


def test_a_fingerprint_names_every_byte(tmp_path: Path) -> None:
    first, again = peft(tmp_path / "a"), peft(tmp_path / "b")
    assert first.fingerprint == again.fingerprint
    config = json.loads((tmp_path / "b" / PEFT_CONFIG).read_text()) | {"lora_alpha": 9}
    (tmp_path / "b" / PEFT_CONFIG).write_text(json.dumps(config))
    other_alpha = read_adapter(AdapterSource("a", tmp_path / "b"))
    tensors = peft_tensors(PAIRS)
    tensors[f"base_model.model.{Q}.lora_A.weight"][0, 0] += 1e-6
    other_value = peft(tmp_path / "c", tensors)
    assert len({first.fingerprint, other_alpha.fingerprint, other_value.fingerprint}) == 3


def test_damaged_adapters_merge_or_are_refused() -> None:
    report = fuzz_adapters.run(200, seed=1)
    assert not report.failures, "\n".join(report.failures[:10])
    assert report.cases == 200
    # both outcomes must occur, or the damage is too heavy or too light to test anything
    assert report.loaded > 10
    assert report.refused > 50
