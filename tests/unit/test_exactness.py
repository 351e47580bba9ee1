"""The probe that decides whether speculative text is promised to the bit, and the fp64 proof for where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.llm import LLM
from slipstream.kernels.cpu import exactness
from slipstream.kernels.cpu.linear import Int8Matrix
from slipstream.kernels.noise import gumbel_rows
from slipstream.kernels.rows import RowGroup
from slipstream.tools.near_tie import explain_difference, gumbel_noise, next_logits
from slipstream.types import SamplingParams
from tests.tiny import keep_threads, tiny_llm, write_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    write_pair(path)
    return path


def uneven(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the same function, but with last bits that depend on the number of rows."""

    def changed(*args: object, **kwargs: object) -> Tensor:
        out = function(*args, **kwargs)
        return out * (1 + 2.0**-22) if out.shape[0] > 1 else out

    return changed


def test_int8_products_pass_and_uneven_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = Int8Matrix(torch.randn(48, 64, generator=torch.Generator().manual_seed(1)))
    assert exactness.matrix_is_exact(matrix)
    monkeypatch.setattr(Int8Matrix, "__call__", uneven(Int8Matrix.__call__))
    assert not exactness.matrix_is_exact(matrix)


def test_uneven_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "attention", uneven(exactness.attention))
    assert not exactness.attention_is_exact(6, 2, 32)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 64)])
def test_the_attention_of_this_machine_is_exact(heads: int, kv_heads: int, dim: int) -> None:
    assert exactness.attention_is_exact(heads, kv_heads, dim)


def test_attention_that_is_uneven_only_in_trees_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = exactness.attention

    def changed(queries: Tensor, keys: Tensor, values: Tensor, groups: Sequence[RowGroup], scale: float) -> Tensor:
        out = attend(queries, keys, values, groups, scale)
        return out * (1 + 2.0**-22) if groups[0].parents is not None else out

    monkeypatch.setattr(exactness, "attention", changed)
    assert not exactness.attention_is_exact(6, 2, 32)


def test_an_engine_promises_exactness_only_where_the_probe_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keep_threads():
        assert not tiny_llm(folder, weight_format="fp32").exact
        monkeypatch.setattr(exactness, "attention", uneven(exactness.attention))
        assert not tiny_llm(folder, weight_format="int8").exact


def test_the_independent_forward_agrees_with_the_engine(folder: Path) -> None:
    with keep_threads():
        llm = tiny_llm(folder, weight_format="fp32")
        ids = llm.prompt_ids("The quick brown fox jumps over the lazy dog." * 3)
        seen = llm.run([llm.request(ids, max_tokens=1, logprobs=8, mode="plain")])[0].tokens[0].top_logprobs
    logits = next_logits(llm.target_source.path, ids)
    log_probabilities = logits - np.logaddexp.reduce(logits)
    assert [token for token, _ in seen] == np.argsort(-log_probabilities)[:8].tolist()
    assert [value for _, value in seen] == pytest.approx(log_probabilities[[t for t, _ in seen]].tolist(), abs=1e-4)


def test_the_independent_noise_is_the_engines() -> None:
    ours = gumbel_rows(2**40 + 12345, range(77, 78), 1003)[0]
    assert gumbel_noise(2**40 + 12345, 77, 1003) == pytest.approx(ours.tolist(), abs=1e-4)


def explain(llm: LLM, first: list[int], second: list[int], exact: bool, **sampling: float) -> float:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    tie = explain_difference(llm.target_source.path, (1, 2, 3), first, second, params, "fp32", exact)
    assert tie.is_near_tie == (tie.margin <= (0 if exact else 1e-3))
    return tie.margin


def test_a_margin_is_that_of_the_two_tokens(folder: Path) -> None:
    with keep_threads():
        llm = tiny_llm(folder, weight_format="fp32")
    logits = next_logits(llm.target_source.path, [1, 2, 3, 7])
    best, second = np.argsort(-logits)[:2].tolist()
    gap = float(logits[best] - logits[second])
    assert explain(llm, [7, best, 5], [7, second, 5], exact=False) == pytest.approx(gap)
    assert explain(llm, [7, best], [7, second], exact=True) == pytest.approx(gap)
    noisy = logits / 0.8 + gumbel_noise(9, 4, len(logits))
    best, worst = int(noisy.argmax()), int(noisy.argmin())
    seen = explain(llm, [7, best], [7, worst], exact=False, temperature=0.8, seed=9)
    assert seen == pytest.approx(float(noisy[best] - noisy[worst]))


@pytest.mark.parametrize("sampling", [{"top_p": 0.9, "temperature": 1.0}, {"repetition_penalty": 1.2}])
def test_what_the_proof_does_not_cover_is_no_near_tie(folder: Path, sampling: dict[str, float]) -> None:
    with keep_threads():
        llm = tiny_llm(folder, weight_format="fp32")
    assert explain(llm, [7], [8], exact=False, **sampling) == math.inf
    assert explain(llm, [7], [7, 8], exact=False) == math.inf, "a text that merely ends earlier"
