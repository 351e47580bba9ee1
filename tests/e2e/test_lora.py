"""Draft LoRA variants of the real drafter: the text never changes, and each request drafts with its own variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.llm import LLM
from slipstream.formats.sources import pair_draft, resolve
from slipstream.stats import RequestStats
from slipstream.types import Proposal, Request, Verdict
from tests import checks
from tests.adapters import write_random_adapter

pytestmark = pytest.mark.e2e
TOKENS = 16
MODULES = {"voice": ("q_proj", "o_proj", "mlp"), "keys": ("k_proj", "v_proj"), "all": ()}
Steps = list[tuple[int, Proposal, Verdict]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    drafter, folder = resolve(str(pair_draft("smollm2"))).path, tmp_path_factory.mktemp("adapters")
    sources = [
        f"{name}={write_random_adapter(folder / name, drafter, modules, seed=number)}"
        for number, (name, modules) in enumerate(MODULES.items())
    ]
    with closing(LLM("smollm2", draft_lora=sources, config=EngineConfig(check_integrity=True))) as made:
        yield made


def run(llm: LLM, requests: Sequence[Request]) -> list[tuple[list[int], Steps, RequestStats]]:
    """Tokens, steps and statistics of requests that run together."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    steps: dict[str, Steps] = {request.id: [] for request in requests}
    stats: dict[str, RequestStats] = {}
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        for event in llm.engine.step():
            tokens[event.request_id] += [token.id for token in event.tokens]
            if event.step is not None:
                steps[event.request_id].append((event.step.position, event.step.proposal, event.step.verdict))
            if event.stats is not None:
                stats[event.request_id] = event.stats
    return [(tokens[request.id], steps[request.id], stats[request.id]) for request in requests]


@pytest.mark.parametrize(("mode", "settings"), [("chain", checks.SAMPLED), ("tree:16", checks.GREEDY)])
def test_variants_share_a_batch_and_nothing_else(llm: LLM, mode: str, settings: dict[str, object]) -> None:
    assert llm.draft_variants == ["base", *MODULES]
    prompts = [llm.prompt_ids(text, chat=True) for text in checks.eval_prompts(1 + (mode == "chain"))]
    common = {**settings, "max_tokens": TOKENS, "cache_prompt": False, "ignore_eos": True}
    requests = [
        llm.request(ids, mode=mode, draft_lora=name, **common) for ids in prompts for name in llm.draft_variants
    ]
    plain = run(llm, [llm.request(ids, mode="plain", **common) for ids in prompts])
    drafted: dict[str, list[Steps]] = {name: [] for name in llm.draft_variants}
    for place, (request, mixed) in enumerate(zip(requests, run(llm, requests), strict=True)):
        alone = run(llm, [replace(request, id=f"{request.id} alone")])[0]
        assert mixed[:2] == alone[:2], f"{request.draft_lora} drafts differently than alone"
        assert mixed[0] == plain[place // len(llm.draft_variants)][0], f"{request.draft_lora} changes the text"
        assert mixed[2].draft_lora == request.draft_lora
        drafted[request.draft_lora].append(mixed[1])
    assert all(drafted[a] != drafted[b] for a in drafted for b in drafted if a < b), "two variants draft alike"


def test_a_cached_prompt_brings_only_ones_own_draft_context(llm: LLM) -> None:
    ids = checks.long_prompt(llm, 3 * PAGE_TOKENS, "What is this about?")
    cached = {}
    for name in llm.draft_variants:
        settings = {"mode": "chain", "draft_lora": name, "max_tokens": 12}
        turns = [run(llm, [llm.request(ids, **settings, cache_prompt=kept)])[0] for kept in (False, True, True)]
        assert turns[0][:2] == turns[1][:2] == turns[2][:2], "drafts differ after a cached prompt"
        cached[name] = [stats.cached_tokens for _, _, stats in turns]
    whole = (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert cached["base"] == cached["keys"] == cached["all"] == [0, 0, whole]
    assert cached["voice"] == [0, whole, whole], "its draft context equals the base's, so the base's pages serve it"
    assert run(llm, [llm.request(ids, mode="chain", max_tokens=1)])[0][2].cached_tokens == whole, (
        "the contexts of variants replace each other"
    )
