"""Converted models in llama.cpp, and real files converted back: the same text, the same drafts, the same acceptance."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import torch

from slipstream import LLM
from slipstream.bench import rival
from slipstream.config import EngineConfig
from slipstream.engine.llm import Completion
from slipstream.formats.gguf import read_gguf
from slipstream.formats.sources import resolve
from slipstream.tools.conversion import convert
from slipstream.tools.quantize_recipes import RecipeName
from slipstream.tools.requantize import quantize_file
from tests.checks_files import both_taus, write_real_drafter
from tests.helpers_models import smollm2_path
from tests.llama_cpp import Scored, greedy, speculate
from tests.models.test_heads import confidence_tensors, markov_tensors
from tests.oracles import (
    SHIPPED_DRAFTER,
    edit_config,
    edit_tensors,
    predictable_target,
    save_model,
    save_tokenizer,
    tiny_drafter,
    tiny_target,
    train_drafter,
)

pytestmark = pytest.mark.e2e
needs_llama_cpp = pytest.mark.skipif(not rival.available(), reason="xllamacpp is not installed")

TOKENS = 60
WIDE_TYPES: tuple[RecipeName, ...] = ("q8_0", "q6_k", "q5_k", "q4_k")


@dataclass(frozen=True)
class Pair:
    """A tiny trained target and drafters for it, as folders and as F32 GGUF files."""

    folder: Path
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = predictable_target("llama", seed=1)
    drafter = train_drafter(tiny_drafter(1), target, steps=150)
    save_model(target, folder / "target")
    save_tokenizer(folder / "target")
    edit_config(folder / "target", eos_token_id=0)
    for name in ("dflash", "dspark"):
        save_model(drafter, folder / name)
    heads = {name: 0.3 * value for name, value in markov_tensors("vanilla").items()}
    edit_tensors(folder / "dspark", **heads, **confidence_tensors(with_markov=True))
    edit_config(folder / "dspark", sample_from_anchor=False)
    convert(folder / "target", folder / "target.gguf")
    for name in ("dflash", "dspark"):
        convert(folder / name, folder / f"{name}.gguf", target=folder / "target")
    chooser = random.Random(0)
    prompts = [[chooser.randrange(3, 23) for _ in range(chooser.randrange(3, 40))] for _ in range(8)]
    return Pair(folder, prompts)


def our_answers(pair: Pair, target: str, drafter: str, count: int = 8) -> list[Completion]:
    config = EngineConfig(weight_format="fp32", draft_window=0, cache_tokens=2048, max_context=512, threads=1)
    llm = LLM(str(pair.folder / target), str(pair.folder / drafter), config=config)
    return [llm.run([llm.request(ids, max_tokens=TOKENS, mode="chain")])[0] for ids in pair.prompts[:count]]


@needs_llama_cpp
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_llama_cpp_writes_and_drafts_what_we_do(pair: Pair, name: str) -> None:
    ours = our_answers(pair, "target.gguf", f"{name}.gguf")
    theirs = speculate(
        pair.folder / "target.gguf", pair.folder / f"{name}.gguf", pair.prompts, TOKENS, 7, heads=name == "dspark"
    )
    assert sum(answer.accepted for answer in theirs) > 2 * len(theirs)
    assert [(done.text, done.stats.drafted, done.stats.accepted) for done in ours] == [
        (answer.text, answer.drafted, answer.accepted) for answer in theirs
    ]


def test_the_folder_and_the_gguf_file_are_one_pair(pair: Pair) -> None:
    from_folders = our_answers(pair, "target", "dflash", 3)
    from_files = our_answers(pair, "target.gguf", "dflash.gguf", 3)
    assert [(done.token_ids, done.step_sizes) for done in from_folders] == [
        (done.token_ids, done.step_sizes) for done in from_files
    ]


# ---- quantised files


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose matrices all divide into super-blocks, in F16 and in other types."""
    folder = tmp_path_factory.mktemp("wide")
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    target = tiny_target("llama", seed=4, **shape)
    with torch.no_grad():
        target.lm_head.weight[3:23].mul_(3.0)  # prefers plain letters, because llama.cpp holds back half characters
    save_model(target, folder / "target")
    save_tokenizer(folder / "target")
    edit_config(folder / "target", eos_token_id=0)
    convert(folder / "target", folder / "f16.gguf", type_name="f16")
    for kind in WIDE_TYPES:
        quantize_file(folder / "f16.gguf", folder / f"{kind}.gguf", kind)
    return folder


@needs_llama_cpp
def test_llama_cpp_reads_the_types_we_write(wide: Path) -> None:
    chooser = random.Random(1)
    prompts = [[chooser.randrange(3, 259) for _ in range(20)] for _ in range(12)]
    scores = {kind: greedy(wide / f"{kind}.gguf", prompts) for kind in ("f16", *WIDE_TYPES)}
    errors = [_distance(scores["f16"], scores[kind]) for kind in WIDE_TYPES]
    # One bit less about doubles the error of a type.
    assert 0 < errors[0] < errors[1] < errors[2] < errors[3] < 0.5 and errors[0] < 0.05, errors
    for kind in WIDE_TYPES:
        # The weights are the same, but llama.cpp also rounds activations to 8 bits.
        assert _distance(_our_scores(wide / f"{kind}.gguf", prompts), scores[kind]) < 0.1, kind


def _our_scores(path: Path, prompts: list[list[int]]) -> list[Scored]:
    llm = LLM(str(path), None, config=EngineConfig(weight_format="fp32", cache_tokens=2048, max_context=512, threads=1))
    done = llm.run([llm.request(ids, max_tokens=1, logprobs=5) for ids in prompts])
    return [Scored(dict(answer.tokens[0].top_logprobs or ())) for answer in done]


def _distance(mine: list[Scored], theirs: list[Scored]) -> float:
    """The mean difference of the log-probabilities of the tokens that both rank among the first."""
    found = [
        abs(a.log_probabilities[token] - b.log_probabilities[token])
        for a, b in zip(mine, theirs, strict=True)
        for token in a.log_probabilities.keys() & b.log_probabilities.keys()
    ]
    return sum(found) / len(found)


# ---- real files


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The included plain drafter, converted through a folder into a GGUF file with the target's tokenizer."""
    return write_real_drafter("smollm2-dflash", tmp_path_factory.mktemp("real"))


def test_the_shipped_drafter_survives(real: Path) -> None:
    before = {tensor.name: tensor for tensor in gguf.GGUFReader(SHIPPED_DRAFTER).tensors}
    after = {tensor.name: tensor for tensor in gguf.GGUFReader(real).tensors}
    assert set(before) == set(after)
    for name, tensor in before.items():
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(values, torch.from_numpy(after[name].data.copy()).view(values.shape)), name
    old, new = read_gguf(SHIPPED_DRAFTER).metadata, read_gguf(real).metadata
    speculation = {key for key in old if key.startswith("dflash.") or key == "tokenizer.ggml.mask_token_id"}
    assert {key: old[key] for key in speculation} == {key: new[key] for key in speculation}


def test_the_real_targets_tokenizer_survives_the_folder(tmp_path: Path) -> None:
    """Checks only the tokenizer: its 49,152 tokens and merges, and how it splits text."""
    from slipstream.formats.gguf_write import as_read
    from slipstream.tools.convert_vocab import folder_entries, write_folder

    original = read_gguf(smollm2_path()).metadata
    assert write_folder(original, tmp_path) == ""
    again = as_read(folder_entries(tmp_path, 49152))
    for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"):
        assert again[f"tokenizer.ggml.{key}"] == original[f"tokenizer.ggml.{key}"], key
    assert again["tokenizer.chat_template"] == original["tokenizer.chat_template"]


@needs_llama_cpp
def test_the_real_pair_accepts_as_much_in_llama_cpp(real: Path) -> None:
    seen = both_taus(smollm2_path(), real, prompts=2, tokens=40)
    # The tolerance is wide, because there are few tokens and texts differ; taps one layer off would cost a third.
    assert min(seen.taus) > 2 and abs(seen.against.value - 1) < 0.25, seen.row()


def test_the_command_line_converts(tmp_path: Path) -> None:
    out = tmp_path / "folder"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "slipstream.cli.main",
            "convert",
            str(resolve("smollm2-dspark").path),
            "--out",
            str(out),
            "--target",
            "smollm2",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
