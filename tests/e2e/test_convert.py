"""Converted models in llama.cpp and back from real files: the same text, the same drafts, the same acceptance."""

from __future__ import annotations

import os
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
from slipstream.tools.convert import convert
from tests.helpers_models import smollm2_path
from tests.llama_cpp import Speculated, speculate, total_tau
from tests.models.test_heads import confidence_tensors, markov_tensors
from tests.oracles import (
    SHIPPED_DRAFTER,
    edit_config,
    edit_tensors,
    predictable_target,
    real_prompts,
    save_model,
    save_tokenizer,
    tiny_drafter,
    train_drafter,
)

pytestmark = pytest.mark.e2e
needs_llama_cpp = pytest.mark.skipif(not rival.available(), reason="xllamacpp is not installed")

TOKENS = 60


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


# ---- real files


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped drafter, converted to a folder and back into a GGUF file that carries the target's tokenizer."""
    folder = tmp_path_factory.mktemp("real")
    convert(SHIPPED_DRAFTER, folder / "drafter", target=smollm2_path())
    convert(folder / "drafter", folder / "drafter.gguf", target=smollm2_path())
    return folder


def test_the_shipped_drafter_survives(real: Path) -> None:
    before = {tensor.name: tensor for tensor in gguf.GGUFReader(SHIPPED_DRAFTER).tensors}
    after = {tensor.name: tensor for tensor in gguf.GGUFReader(real / "drafter.gguf").tensors}
    assert set(before) == set(after)
    for name, tensor in before.items():
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(values, torch.from_numpy(after[name].data.copy()).view(values.shape)), name
    old, new = read_gguf(SHIPPED_DRAFTER).metadata, read_gguf(real / "drafter.gguf").metadata
    speculation = {key for key in old if key.startswith("dflash.") or key == "tokenizer.ggml.mask_token_id"}
    assert {key: old[key] for key in speculation} == {key: new[key] for key in speculation}


def test_the_real_targets_tokenizer_survives_the_folder(tmp_path: Path) -> None:
    """Only the tokenizer is of interest here: its 49,152 tokens and merges, and how it cuts text."""
    from slipstream.formats.gguf_write import as_read
    from slipstream.tools.convert_vocab import folder_entries, write_folder

    original = read_gguf(smollm2_path()).metadata
    assert write_folder(original, tmp_path) == ""
    again = as_read(folder_entries(tmp_path, 49152))
    for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"):
        assert again[f"tokenizer.ggml.{key}"] == original[f"tokenizer.ggml.{key}"], key
    assert again["tokenizer.chat_template"] == original["tokenizer.chat_template"]


def real_taus(drafter: Path, prompts: int, tokens: int) -> tuple[float, float]:
    """Tokens per step of the real pair over chat prompts, ours and llama.cpp's: chains of a whole block."""
    llm = LLM("smollm2", str(drafter), config=EngineConfig(threads=len(os.sched_getaffinity(0)), draft_window=0))
    assert llm.engine._runner.drafter is not None
    size = llm.engine._runner.drafter.drafter.config.proposals
    texts = [llm.prompt_ids(prompt, chat=True) for prompt in real_prompts(prompts)]
    ours = []
    for ids in texts:
        done = llm.run([llm.request(ids, max_tokens=tokens, mode="chain")])[0]
        ours.append(Speculated(done.text, len(done.token_ids), done.stats.drafted, done.stats.accepted))
    theirs = speculate(smollm2_path(), drafter, texts, tokens, size)
    return total_tau(ours), total_tau(theirs)


@needs_llama_cpp
def test_the_real_pair_accepts_as_much_in_llama_cpp(real: Path) -> None:
    ours, theirs = real_taus(real / "drafter.gguf", prompts=3, tokens=32)
    # few tokens, and texts that part: taps one layer off would cost a third
    assert ours > 2 and abs(theirs / ours - 1) < 0.2


def test_the_command_line_converts(tmp_path: Path) -> None:
    out = tmp_path / "folder"
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli.main", "convert", str(resolve("smollm2-dspark").path), "--out", str(out),
         "--target", "smollm2", "--json"],
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
