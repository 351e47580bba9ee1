"""The included pair in other types: the written files load, speculate, and accept about as much as the original."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.engine.llm import LLM
from slipstream.formats.quantise import encode_rows
from slipstream.formats.quants import decode_rows
from slipstream.formats.sources import resolve
from slipstream.formats.weight_files import open_weights
from slipstream.stats import RequestStats
from slipstream.tools.quantize_recipes import RecipeName
from slipstream.tools.requantize import QuantizeReport, quantize_file
from tests import checks
from tests.ggml_oracle import Ggml

pytestmark = pytest.mark.e2e
PROMPTS, TOKENS = 4, 40


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def quantised(source: str, folder: Path, recipe: RecipeName) -> QuantizeReport:
    return quantize_file(resolve(source).path, folder / f"{source}.{recipe}.gguf", recipe)


def engine(target: str, draft: str) -> LLM:
    return LLM(target, draft, config=EngineConfig(check_integrity=True))


def acceptance(llm: LLM) -> RequestStats:
    return checks.total_tau(llm, checks.eval_prompts(PROMPTS), TOKENS)


@cache
def shipped() -> RequestStats:
    return acceptance(engine("smollm2", "smollm2-dspark"))


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_real_weights_lose_no_more_than_with_llama_cpp(type_name: str) -> None:
    ggml = Ggml()
    with open_weights(resolve("smollm2-dspark").path) as file:
        values = file.tensor("blk.2.ffn_down.weight").dense().numpy()  # rows of 1536 values are six super-blocks
    ours = decode_rows(encode_rows(values, type_name), type_name)
    theirs = decode_rows(ggml.encode(values, type_name), type_name)
    assert np.square(ours - values).sum() <= 1.001 * np.square(theirs - values).sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("recipe", "least"), [("q4-mix", 0.9), ("q4_k_m", 0.93)])
def test_a_quantised_drafter_accepts_nearly_as_much(made: Path, recipe: RecipeName, least: float) -> None:
    report = quantised("smollm2-dspark", made, recipe)
    after = acceptance(engine("smollm2", str(report.out)))
    assert report.out.stat().st_size < report.source.stat().st_size
    assert after.completion_tokens == shipped().completion_tokens  # the target is the same, and so is the text
    assert least * shipped().tau < after.tau < 1.1 * shipped().tau, (after.tau, shipped().tau)


def test_a_quantised_target_keeps_its_drafter(made: Path) -> None:
    report = quantised("smollm2", made, "q8_0")
    # The source has 4 bits, so a finer type adds almost nothing.
    assert 0 < max(result.relative_rms for result in report.tensors) < 0.01
    llm = engine(str(report.out), "smollm2-dspark")
    found = checks.identity(llm, checks.eval_prompts(PROMPTS), TOKENS, checks.GREEDY)
    assert found.ok, found.row()
    assert found.speculative.tau == pytest.approx(shipped().tau, rel=0.1)
