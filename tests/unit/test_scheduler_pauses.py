"""A text does not depend on scheduling: quanta, pauses, lost pages and cancelled neighbours leave it as it is alone."""

# mypy: disable-error-code="return-value, unused-ignore"

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.config import PAGE_TOKENS
from slipstream.engine.llm import LLM
from slipstream.speculative.sampling import RowSampler
from slipstream.types import Proposal, Request
from tests.tiny import ask, assert_idle, mixed_requests, prompt, tiny_llm

pytestmark = pytest.mark.usefixtures("threads")


def crowded(folder: Path, pages: int = 14) -> LLM:
    """Two slots, short quanta and few pages."""
    llm = tiny_llm(folder, weight_format="int8", max_sequences=2, cache_tokens=pages * PAGE_TOKENS)
    llm.engine.scheduler.limits = replace(llm.engine.scheduler.limits, quantum=4)
    return llm


def alone(folder: Path, requests: list[Request]) -> dict[str, list[int]]:
    llm = tiny_llm(folder, weight_format="int8")
    return {request.id: llm.run([request])[0].token_ids for request in requests}


def drive(
    llm: LLM, requests: list[Request], rng: random.Random, cancelled: str
) -> tuple[dict[str, list[int]], set[str]]:
    """Runs everything while requests are paused and resumed at random and one is cancelled on the way.

    Returns the texts and the phases that were seen.
    """
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    phases: set[str] = set()
    for request in requests:
        llm.engine.add(request)
    for step in range(2000):
        if not llm.engine.has_work:
            return texts, phases
        for event in llm.engine.step():
            texts[event.request_id] += [token.id for token in event.tokens]
        for name, sequence in llm.engine.sequences.items():
            phases.add(sequence.phase)
            if rng.random() < 0.1:
                assert llm.engine.resume(name) if sequence.where == "paused" else llm.engine.pause(name)
        if step == 12:
            assert llm.engine.cancel(cancelled)
    raise AssertionError("never ended")


@pytest.mark.parametrize(("mode", "seed"), [("plain", 0), ("tree:16", 1), ("auto", 2)])
def test_texts_are_the_same_however_they_are_scheduled(folder: Path, mode: str, seed: int) -> None:
    requests = [replace(request, priority=index % 3 - 1) for index, request in enumerate(mixed_requests(mode))]
    expected = alone(folder, requests)
    llm = crowded(folder)
    got, phases = drive(llm, requests, random.Random(seed), cancelled="e")
    assert {"waiting", "prefill", "decode", "yielded", "paused"} <= phases
    cut = got.pop("e")
    assert cut == expected.pop("e")[: len(cut)]
    assert got == expected
    assert_idle(llm)


@pytest.mark.parametrize(("mode", "after"), [("plain", 9), ("chain", 2), ("tree:16", 4)])
def test_a_paused_request_that_lost_its_pages_goes_on_to_the_same_text(folder: Path, mode: str, after: int) -> None:
    request = ask("r", prompt(150, 1), mode=mode, max_tokens=60)
    expected = alone(folder, [request])["r"]
    llm = crowded(folder, pages=8)
    llm.engine.add(request)
    got: list[int] = []
    for _ in range(after):
        got += [token.id for event in llm.engine.step() for token in event.tokens]
    assert llm.engine.pause("r")
    large = ask("large", prompt(300, 2), mode="plain", max_tokens=40)
    assert len(llm.run([large])[0].token_ids) == 40
    assert llm.engine.sequences["r"].phase == "paused-evicted"
    assert llm.engine.resume("r") and not llm.engine.resume("r")
    while llm.engine.has_work:
        got += [token.id for event in llm.engine.step() for token in event.tokens]
    assert got == expected
    assert_idle(llm)


def test_a_page_of_a_paused_request_that_a_running_one_stands_on_is_not_counted_on(folder: Path) -> None:
    """Both compute the same first page; the cache keeps the paused one's, and after it the running one's second."""
    first = prompt(PAGE_TOKENS, 1)
    paused = ask("paused", (*first, *prompt(6, 2)), mode="plain", max_tokens=20)
    running = ask("running", (*first, *prompt(PAGE_TOKENS + 12, 3)), mode="plain", max_tokens=20)
    large = ask("large", prompt(260, 4), mode="plain", max_tokens=40)
    expected = alone(folder, [paused, running, large])
    llm = crowded(folder, pages=8)  # 2 for the first, 3 for the second; 5 would be there without the page in question
    got: dict[str, list[int]] = {name: [] for name in expected}
    llm.engine.add(paused)
    llm.engine.add(running)
    while not got["running"]:
        for event in llm.engine.step():
            got[event.request_id] += [token.id for token in event.tokens]
    assert llm.engine.pause("paused")
    llm.engine.add(large)
    while llm.engine.has_work:
        for event in llm.engine.step():
            got[event.request_id] += [token.id for token in event.tokens]
        if llm.engine.has_work and not llm.engine.busy:
            assert llm.engine.resume("paused")
    assert got == expected
    assert_idle(llm)


def test_paused_requests_leave_the_engine_idle_and_can_be_cancelled(llm: LLM) -> None:
    llm.engine.add(ask("r", prompt(20), max_tokens=60))
    llm.engine.step()
    assert not llm.engine.resume("r") and not llm.engine.pause("unknown")
    assert llm.engine.pause("r") and llm.engine.pause("r")
    assert llm.engine.has_work and not llm.engine.busy
    assert llm.engine.step() == []
    assert llm.engine.cancel("r") and llm.engine.busy
    assert [event.finish_reason for event in llm.engine.step()] == ["cancelled"]
    assert not llm.engine.resume("r")
    assert_idle(llm)


@pytest.mark.parametrize(("mode", "after"), [("plain", 0), ("tree:16", 5)])
def test_a_request_whose_own_sampling_fails_ends_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, after: int
) -> None:
    requests = [ask(name, prompt(30, index), mode=mode) for index, name in enumerate(("good", "bad", "fine"))]
    expected = alone(folder, requests)
    llm = tiny_llm(folder, weight_format="int8")
    choose = RowSampler.choose

    def failing(sampler: RowSampler, logits: torch.Tensor, first: int, proposal: Proposal | None) -> torch.Tensor:
        session = llm.engine.sequences.get("bad")
        if session is not None and session.sampler is sampler and session.generated >= after:
            raise ValueError("its grammar is broken")
        return choose(sampler, logits, first, proposal)

    monkeypatch.setattr(RowSampler, "choose", failing)
    good, bad, fine = llm.run(requests)
    assert (good.token_ids, fine.token_ids) == (expected["good"], expected["fine"])
    assert bad.finish_reason == "error" and bad.error is not None and "ValueError: its grammar is broken" in bad.error
    assert bad.token_ids == expected["bad"][: len(bad.token_ids)] and len(bad.token_ids) >= after
    assert any("request bad failed" in record.getMessage() for record in caplog.records)
    assert_idle(llm)
