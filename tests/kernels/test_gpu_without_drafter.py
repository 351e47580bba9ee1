"""A target without a drafter on a GPU (torch's kernels): it decodes plainly, and drafts from the text are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine import devices
from slipstream.engine.llm import LLM
from slipstream.errors import ConfigError, RequestError
from tests.fakes import cli
from tests.tiny import assert_idle, keep_threads, tiny_llm, write_pair

__all__ = ["cli"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "gpu_device", lambda: DEVICE)
    with keep_threads():
        yield


def gpu_llm(folder: Path, draft: bool | str) -> LLM:
    return tiny_llm(folder, draft=draft, weight_format="bf16", device="cuda", kernels="reference")


def test_a_target_without_a_drafter_decodes_plainly(tmp_path: Path) -> None:
    llm = gpu_llm(tmp_path, "auto")
    assert (llm.draft_source, llm.speculates, llm.draft_label) == (None, False, None)
    done = llm.generate("abcabcabc", max_tokens=12, ignore_eos=True)
    assert len(done.token_ids) == 12 and done.stats.policy.choices == {"plain": 11}
    with pytest.raises(RequestError, match="mode 'auto' needs a drafter .*use mode plain"):
        llm.generate("abc", mode="auto")
    assert_idle(llm)


def test_a_pair_drafts_with_its_drafter_alone(tmp_path: Path) -> None:
    llm = gpu_llm(tmp_path, True)
    done = llm.generate("abcabcabc" * 9, mode="auto", max_tokens=60, ignore_eos=True)
    counts = done.stats.accepted_by_source
    assert llm.draft_source == "drafter" and counts["text"] == counts["both"] == 0
    assert done.text == llm.generate("abcabcabc" * 9, mode="plain", max_tokens=60, ignore_eos=True).text


def test_drafts_from_the_text_are_refused_in_one_sentence_before_anything_is_loaded(cli: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^--draft suffix needs the CPU, and this would run on a GPU"):
        LLM(str(tmp_path / "there is no such model"), "suffix")
    target, _ = write_pair(tmp_path)
    done = cli("generate", "--target", str(target), "--draft", "suffix", "--prompt", "x")
    assert (done.code, done.out) == (2, "")
    assert done.err.strip().endswith("--draft suffix needs the CPU, and this would run on a GPU (add --device cpu)")
    done = cli("generate", "--target", str(target), "--draft", "suffix", "--prompt", "x", "--device", "cpu", "--json")
    assert done.code == 0
