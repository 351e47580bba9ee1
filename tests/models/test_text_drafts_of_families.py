"""Every target family speculates from its own text, without a drafter, and writes plain decoding's text."""

# mypy: disable-error-code="attr-defined, unused-ignore"

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from slipstream import LLM
from slipstream.config import EngineConfig
from slipstream.speculative.costs import CostTable
from slipstream.speculative.policy import Policy
from tests.differential import Clock
from tests.families import ids_of
from tests.oracles import save_model, save_tokenizer, tiny_target
from tests.tiny import assert_idle
from tests.verify_families import EXACT, SPECULATING

TOKENS = 48
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(tiny_target, "llama"),
    "qwen3": partial(tiny_target, "qwen3"),
    **SPECULATING,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_without_a_drafter_speculates_and_keeps_its_text(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", Clock(random.Random(1)))  # a busy machine changes no decision
    save_tokenizer(save_model(FAMILIES[family](), tmp_path))
    config = EngineConfig(
        weight_format=EXACT, check_integrity=True, max_context=384, cache_tokens=2048, max_sequences=4, threads=1
    )
    llm = LLM(str(tmp_path), "suffix", config=config)
    # On such a machine rows cost next to nothing, so that even unlikely drafts are verified.
    llm.engine.proposer.policy = Policy(CostTable({1: 1.0, 64: 1.05}, {}))
    tensors = llm.engine.executor.memory.state_tensors
    if family.endswith("run again") and tensors is not None:
        tensors.most_kept_rows = 0
    prompts = [ids_of(12 + 9 * seed, seed) * 4 for seed in range(4)]
    settings = [{"temperature": 0.7 * (seed % 2), "seed": seed, "max_tokens": TOKENS} for seed in range(4)]
    asked = list(zip(prompts, settings, strict=True))
    plain = [llm.run([llm.request(ids, mode="plain", cache_prompt=False, **own)])[0].token_ids for ids, own in asked]
    counts: Counter[str] = Counter()
    for _ in range(2):  # the second time the prompts are found in the prefix cache
        done = llm.run([llm.request(ids, mode="auto", **own) for ids, own in asked])
        assert [each.token_ids for each in done] == plain
        for each in done:
            counts.update(each.stats.accepted_by_source)
            counts["cached"] += each.stats.cached_tokens
    assert counts["text"] > 0 and not counts["drafter"] and counts["cached"] > 0, counts
    assert_idle(llm)
