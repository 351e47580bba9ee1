"""Drafts from the text in device steps (torch's kernels): texts stay plain decoding's, and such drafts are accepted."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from slipstream.engine import devices
from slipstream.engine.llm import LLM, Completion
from slipstream.errors import RequestError
from slipstream.grammar import notations as grammars
from slipstream.kernels.gpu import text_match
from slipstream.speculative import estimate
from slipstream.speculative.costs import CostTable
from slipstream.speculative.policy import Policy
from slipstream.speculative.text_drafts import MOST_TEXT_NODES
from slipstream.types import Source
from tests.differential import Clock
from tests.tiny import assert_idle, keep_threads, mixed_requests, prompt, tiny_llm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SOURCES: dict[str, bool | str] = {"the pair": True, "the text alone": "suffix"}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Device steps on any machine, whose policy and gates see the same times however busy it is."""
    monkeypatch.setattr(devices, "gpu_device", lambda: DEVICE)
    monkeypatch.setattr(time, "perf_counter", Clock(random.Random(1)))
    with keep_threads():
        yield


def gpu_llm(folder: Path, draft: bool | str, **settings: Any) -> LLM:
    return tiny_llm(folder, draft=draft, weight_format="bf16", device="cuda", kernels="reference", **settings)


@pytest.fixture(params=SOURCES)
def speculating(request: pytest.FixtureRequest, tmp_path: Path) -> LLM:
    return gpu_llm(tmp_path, SOURCES[request.param])


def answer(llm: LLM, ids: Sequence[int], mode: str, **settings: Any) -> Completion:
    asked = {"max_tokens": 60, "ignore_eos": True, "seed": 5, **settings}
    return llm.run([llm.request(ids, mode=mode, **asked)])[0]


def from_text(done: Completion) -> int:
    counts = done.stats.accepted_by_source
    assert sum(counts.values()) == done.stats.accepted
    return counts["text"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["auto", "tree:12:text"])
def test_the_text_is_plain_decodings(speculating: LLM, mode: str, temperature: float) -> None:
    accepted = 0
    for seed in range(3):
        ids, settings = prompt(30, seed) * 3, {"temperature": temperature, "seed": seed}
        done, plain = (answer(speculating, ids, each, **settings) for each in (mode, "plain"))
        assert (done.token_ids, done.finish_reason) == (plain.token_ids, plain.finish_reason)
        accepted += from_text(done)
    assert accepted > 0
    assert_idle(speculating)


def test_a_batch_writes_what_each_request_writes_alone(speculating: LLM) -> None:
    found = {}
    for mode in ("plain", "auto"):
        requests = mixed_requests(mode)
        found[mode] = [(done.token_ids, done.finish_reason) for done in speculating.run(requests)]
    assert found["auto"] == found["plain"]
    assert_idle(speculating)


def test_a_prefix_hit_brings_the_text_that_drafts(speculating: LLM) -> None:
    ids = prompt(64, 1) * 3 + prompt(9, 1)
    cold, warm = (answer(speculating, ids, "tree:16:text") for _ in range(2))
    assert warm.stats.cached_tokens >= 128
    assert (warm.token_ids, from_text(warm)) == (cold.token_ids, from_text(cold)) and from_text(cold) > 0


def test_a_paused_sequence_reads_its_own_text_again(speculating: LLM) -> None:
    llm, asked = speculating, {"max_tokens": 60, "ignore_eos": True, "mode": "tree:16:text"}
    alone = answer(llm, prompt(30, 1) * 3, "tree:16:text")
    paused, other = llm.request(prompt(30, 1) * 3, **asked), llm.request(prompt(40, 2) * 2, **asked)
    tokens: list[int] = []
    for request in (paused, other):
        llm.engine.add(request)
    steps = 0
    while llm.engine.has_work:
        steps += 1
        if steps == 6:
            llm.engine.pause(paused.id)
        if steps == 12:
            llm.engine.resume(paused.id)
        for event in llm.engine.step():
            tokens += [token.id for token in event.tokens if event.request_id == paused.id]
    assert tokens == alone.token_ids


def test_a_constraint_is_kept_by_drafts_of_the_host(speculating: LLM) -> None:
    ids = speculating.prompt_ids("abab" * 9)
    constraint = grammars.regex("[ab]{30,60}")
    done, plain = (answer(speculating, ids, mode, constraint=constraint) for mode in ("auto", "plain"))
    assert done.text == plain.text and set(done.text) <= {"a", "b"}
    assert from_text(done) > 0


def test_a_text_that_is_not_stored_drafts_nothing(tmp_path: Path) -> None:
    """The fault that would go unnoticed: the text stays right, and drafts from the prompt are gone."""
    llm, short = gpu_llm(tmp_path, "suffix"), {"max_tokens": 3, "cache_prompt": False}
    likely = answer(llm, prompt(90, 1), "plain", max_tokens=1).token_ids  # what the tiny model writes everywhere
    ids = likely * 40
    plain, seeing = (answer(llm, ids, mode, **short) for mode in ("plain", "tree:16:text"))
    llm = gpu_llm(tmp_path, "suffix")
    executor: Any = llm.engine.executor
    with patch.object(executor.memory, "store_tokens"):
        blind = answer(llm, ids, "tree:16:text", **short)
    assert blind.token_ids == seeing.token_ids == plain.token_ids
    assert (seeing.stats.steps, blind.stats.steps) == (1, 2)


def test_drafts_teach_what_the_text_is_worth(tmp_path: Path) -> None:
    llm = gpu_llm(tmp_path, "suffix")
    before = llm.engine.proposer.policy.sequence
    taught: list[Any] = []

    def watched(*given: Any, **named: Any) -> Any:
        taught.append(before(*given, **named))
        return taught[-1]

    llm.engine.proposer.policy.sequence = watched  # type: ignore[method-assign]
    done = answer(llm, prompt(30, 1) * 3, "auto", max_tokens=120)
    chances = [taught[0].estimate.chance(0.9, 1, source) for source in Source]
    assert done.stats.drafted > 0 and taught[0].by_slots.drafts and chances[1] != chances[0]


def test_a_target_without_a_drafter_drafts_from_its_text(tmp_path: Path) -> None:
    llm = gpu_llm(tmp_path, "auto")
    assert (llm.draft_source, llm.speculates, llm.draft_label) == ("suffix", True, "suffix")
    for mode in ("chain", "tree:8"):
        with pytest.raises(RequestError, match=f"mode '{mode}' needs a drafter .*use mode auto"):
            llm.generate("abc", mode=mode)


def test_a_target_without_any_source_of_drafts_decodes_plainly(tmp_path: Path) -> None:
    llm = gpu_llm(tmp_path, "auto", text_drafts=False)
    assert (llm.draft_source, llm.speculates, llm.draft_label) == (None, False, None)
    done = llm.generate("abcabcabc", max_tokens=12, ignore_eos=True)
    assert len(done.token_ids) == 12 and done.stats.policy.choices == {"plain": 11}
    with pytest.raises(RequestError, match="mode 'auto' needs a drafter .*use mode plain"):
        llm.generate("abc", mode="auto")
    assert_idle(llm)


def test_the_text_can_be_left_out_beside_a_drafter(tmp_path: Path) -> None:
    llm = gpu_llm(tmp_path, True, text_drafts=False)
    done = answer(llm, prompt(30, 1) * 3, "auto")
    assert from_text(done) == 0
    with pytest.raises(RequestError, match="'tree:8:text' needs drafts from the text .*leave --no-text-drafts and"):
        answer(llm, prompt(30, 1), "tree:8:text")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_that_repeats_itself_is_drafted_from_in_most_steps(tmp_path: Path, temperature: float) -> None:
    llm = gpu_llm(tmp_path, "suffix")
    llm.engine.proposer.policy = Policy(CostTable({1: 1.0, 16: 1.04, 64: 1.2}, {1: 0.01, MOST_TEXT_NODES: 0.01}))
    done = answer(llm, prompt(30, 1) * 3, "auto", max_tokens=150, temperature=temperature)
    choices = done.stats.policy.choices
    if temperature == 0.0:  # the tiny model then repeats itself for ever
        assert choices.get("plain", 0) <= 3 and done.stats.tau > 4
    plain = answer(llm, prompt(30, 1) * 3, "plain", max_tokens=150, temperature=temperature)
    assert done.token_ids == plain.token_ids


@pytest.mark.parametrize("found", [True, False], ids=["wrong tokens", "no tokens"])
def test_a_text_that_is_never_right_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    def wrong(stored: Any, rows: Any, wishes: Any, page_tokens: int, longest: int, draft: Any) -> None:
        usual(stored, rows, wishes, page_tokens, longest, draft)
        draft.tokens.fill_(200)  # which the tiny model does not write
        draft.counts.mul_(found)

    usual = text_match.match_text_reference
    monkeypatch.setattr(text_match, "match_text_reference", wrong)
    llm = gpu_llm(tmp_path, "suffix")
    llm.engine.proposer.policy = Policy(CostTable({1: 1.0, 16: 1.3, 64: 1.5}, {1: 0.01, MOST_TEXT_NODES: 0.01}))
    done = answer(llm, prompt(30, 1) * 3, "auto", max_tokens=200, gate="auto:explore=0")
    drafted = sum(count for choice, count in done.stats.policy.choices.items() if choice != "plain")
    assert done.stats.accepted == 0 and 0 < drafted < 20, done.stats.policy.choices


def test_more_rows_than_a_gpu_verifies_are_refused(tmp_path: Path) -> None:
    llm = gpu_llm(tmp_path, True)
    for mode in ("tree:65", "tree:100:text"):
        with pytest.raises(RequestError, match=f"'{mode}' is wider than the 64 rows that a GPU verifies"):
            answer(llm, prompt(9), mode)
    assert answer(llm, prompt(9), "tree:64:text", max_tokens=4).token_ids


def test_claims_of_a_text_are_learnt_in_the_bins_that_price_them(tmp_path: Path) -> None:
    llm, learnt = gpu_llm(tmp_path, "suffix"), list[tuple[float, float]]()
    usual = estimate.Estimate.learn

    def learn(own: estimate.Estimate, outcomes: Sequence[estimate.DraftOutcome]) -> None:
        for known in (9, 24):
            claim = known / (known + 1)
            learnt.extend((claim, each.claimed) for each in outcomes if abs(each.claimed - claim) < 1e-6)
        usual(own, outcomes)

    with patch.object(estimate.Estimate, "learn", learn):
        answer(llm, prompt(30, 1) * 3, "auto", max_tokens=60)
    assert learnt and all(told >= claim for claim, told in learnt)
