"""NaN and Inf in the logits of drafts and of the target: they slow down or end their own request and no other."""

# mypy: disable-error-code="attr-defined, unused-ignore"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.config import PAGE_TOKENS
from slipstream.engine.cpu.cpu_executor import CpuExecutor
from slipstream.engine.executor import ForwardResult, RowWork
from slipstream.engine.llm import LLM
from slipstream.speculative.costs import CostTable
from slipstream.types import SamplingParams
from tests.tiny import VOCAB, ask, assert_idle, mixed_requests, prompt, tiny_llm

pytestmark = pytest.mark.usefixtures("threads")


def broken_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch, passes: range, value: float) -> None:
    """Puts `value` into the drafter's logits of the first sequence in these draft passes."""
    assert llm.engine.executor.variants.drafter is not None
    drafter, count = llm.engine.executor.variants.drafter.drafter, iter(range(10**6))
    shape = drafter.shape_logits

    def broken(logits: torch.Tensor) -> torch.Tensor:
        shaped = shape(logits).clone()
        if next(count) in passes:
            shaped[0, 5] = value
        return shaped

    monkeypatch.setattr(drafter, "shape_logits", broken)


@pytest.mark.parametrize("mode", ["chain", "tree:24", "tree:24:seed", "auto"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_draft_costs_a_step_its_speculation_and_nothing_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, value: float
) -> None:
    llm.measure_costs()  # its own draft passes are not the ones to break
    # so small a model decodes faster than it drafts; here the policy is not to notice
    monkeypatch.setattr(llm.engine.proposer.policy, "costs", CostTable({1: 50.0, 64: 51.0}, {15: 0.5}))
    monkeypatch.setattr(CostTable, "observe_step", lambda *_: None)
    monkeypatch.setattr(CostTable, "observe_draft", lambda *_: None)
    request = ask("r", prompt(20), SamplingParams(temperature=0.8, seed=2), mode, max_tokens=40)
    plain = llm.run([ask("plain", prompt(20), request.sampling, "plain", max_tokens=40)])[0]
    healthy = llm.run([request])[0]
    assert healthy.stats.bad_drafts == 0 and not caplog.records
    with monkeypatch.context() as patch:
        broken_drafts(llm, patch, range(1, 4), value)
        done = llm.run([request])[0]
    assert (done.token_ids, done.text, done.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert done.stats.bad_drafts == 3 if mode != "auto" else 1 <= done.stats.bad_drafts <= 3
    assert done.stats.steps >= healthy.stats.steps or mode == "auto"
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "request r" in warnings[0].getMessage(), "once per request, not per step"
    assert done.stats.drafted > 0, "the steps before and after it do speculate"
    later = llm.run([request])[0]
    assert (later.token_ids, later.stats.bad_drafts) == (healthy.token_ids, 0)
    if mode != "auto":
        assert later.stats.accepted_at == healthy.stats.accepted_at, "pages it used are as good as new"
    assert_idle(llm)


def test_every_draft_broken_is_plain_decoding(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = llm.run(mixed_requests("plain"))
    broken_drafts(llm, monkeypatch, range(10**6), math.nan)
    alone = [llm.run([request])[0] for request in mixed_requests("tree:16")]
    for mine, other in zip(alone, plain, strict=True):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert mine.stats.drafted == 0
        assert mine.stats.bad_drafts >= mine.stats.steps - 1, "the last token needs no draft"
    assert_idle(llm)


def break_target(llm: LLM, monkeypatch: pytest.MonkeyPatch, victim: str, after: int, value: float) -> None:
    """Once `victim` has written `after` tokens its rows come out as `value`: the logits, and (NaN) their keys too."""
    forward = CpuExecutor.forward

    def broken(executor: CpuExecutor, works: Sequence[RowWork]) -> ForwardResult:
        result = forward(executor, works)
        ticket = llm.engine.sequences.get(victim)
        for work, logits in zip(works, result.logits, strict=True):
            if ticket is None or work.state is not ticket.state or ticket.generated < after or not work.logit_rows:
                continue
            logits[:, 9:12] = value
            if math.isnan(value):
                for row in range(work.rows):
                    page, offset = work.state.place(work.start + row)
                    for pool in (tensor for layer in executor.memory.target for tensor in layer):
                        pool[page, :, offset] = value
        return result

    monkeypatch.setattr(CpuExecutor, "forward", broken)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("mode", ["plain", "chain", "tree:24", "auto"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_target_that_is_no_number_ends_its_own_request_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: float, mode: str, after: int
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=4)
    requests = [ask(name, prompt(70 + index, index), sampling, mode, max_tokens=20) for index, name in enumerate("abc")]
    healthy = tiny_llm(folder, weight_format="int8").run(requests)
    llm = tiny_llm(folder, weight_format="int8", cache_tokens=12 * PAGE_TOKENS)
    llm.measure_costs()
    with monkeypatch.context() as patch:
        break_target(llm, patch, "b", after, value)
        done = llm.run(requests)
    for index in (0, 2):
        assert (done[index].token_ids, done[index].finish_reason) == (healthy[index].token_ids, "length")
    ended = done[1]
    assert ended.finish_reason == "error" and ended.error is not None and "not numbers" in ended.error
    assert after <= len(ended.token_ids) < 20
    assert ended.token_ids == healthy[1].token_ids[: len(ended.token_ids)], "what was written before stays"
    assert ended.stats.completion_tokens == len(ended.token_ids)
    assert finite_pools(llm), "no page keeps a NaN"
    llm.engine.scheduler.check()
    again = llm.run([replace(request, id=f"{request.id}2") for request in requests])
    assert [each.token_ids for each in again] == [each.token_ids for each in healthy], "nor a later request"
    assert_idle(llm)


@pytest.mark.parametrize("mode", ["plain", "chain", "tree:24"])
def test_minus_infinity_is_what_masks_write_and_legal(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    texts = []
    for chosen in ("plain", mode):
        llm = tiny_llm(folder, weight_format="int8")
        with monkeypatch.context() as patch:
            break_target(llm, patch, "r", 0, -math.inf)
            done = llm.run([ask("r", prompt(20), SamplingParams(temperature=1.5, seed=4), chosen, max_tokens=40)])[0]
        assert (done.finish_reason, len(done.token_ids), done.error) == ("length", 40, None)
        assert not set(done.token_ids) & set(range(9, 12)), "masked tokens are never written"
        texts.append(done.token_ids)
    assert texts[0] == texts[1]


def finite_pools(llm: LLM) -> bool:
    return all(bool(tensor.isfinite().all()) for layer in llm.engine.executor.memory.target for tensor in layer)


@pytest.mark.parametrize("mode", ["plain", "chain", "tree:24"])
@pytest.mark.parametrize("after", [5, 6, 7])
def test_an_answer_that_ended_in_an_error_serves_no_later_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, mode: str, after: int
) -> None:
    """The broken row is the last of a page or stands beside its border; a next turn would take that page over."""
    request = ask("first", prompt(122, 3), mode=mode, max_tokens=20)
    healthy = llm.run([request])[0]
    turn = ask("second", request.prompt_ids + tuple(healthy.token_ids[:12]), mode=mode, max_tokens=5)
    expected = llm.run([turn])[0]
    assert llm.engine.prefix is not None
    llm.engine.prefix.clear()
    with monkeypatch.context() as patch:
        break_target(llm, patch, "first", after, math.nan)
        assert llm.run([request])[0].finish_reason == "error"
    assert finite_pools(llm)
    done = llm.run([turn])[0]
    assert (done.token_ids, done.finish_reason) == (expected.token_ids, "length")
    assert_idle(llm)


def poison(llm: LLM, monkeypatch: pytest.MonkeyPatch, tokens: set[int]) -> set[int]:
    """Makes the embedding of these tokens NaN, as in a damaged file; returns those the target has met since."""
    target, met = llm.engine.executor.target, set()
    embed = target.embed

    def poisoned(ids: torch.Tensor) -> torch.Tensor:
        rows = embed(ids).clone()
        for row, token in enumerate(ids.tolist()):
            if token in tokens:
                met.add(token)
                rows[row] = math.nan
        return rows

    monkeypatch.setattr(target, "embed", poisoned)
    return met


@pytest.mark.parametrize("mode", ["chain", "tree:64"])
def test_a_rejected_draft_that_is_no_number_leaves_no_trace(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Tokens the text never holds may still be drafted, and what the target makes of them must not matter."""
    request = ask("r", prompt(20), mode=mode, max_tokens=40)
    healthy = llm.run([request])[0]
    with monkeypatch.context() as patch:
        met = poison(llm, patch, set(range(VOCAB)) - {*request.prompt_ids, *healthy.token_ids})
        done = llm.run([replace(request, id="again")])[0]
    assert met, "such a token was drafted"
    assert (done.token_ids, done.finish_reason) == (healthy.token_ids, healthy.finish_reason)
    assert finite_pools(llm), "whoever gets the pages next must find numbers"
    assert_idle(llm)


@pytest.mark.parametrize("mode", ["chain", "tree:24"])
def test_a_stop_token_that_is_no_number_leaves_no_trace(llm: LLM, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """It may be drafted and accepted: its own row is computed then, although nothing is asked of it any more."""
    sampling = SamplingParams(temperature=0.8, seed=5)
    healthy = llm.run([ask("r", prompt(20), sampling, mode, max_tokens=40)])[0]
    stop = next(t.id for i, t in enumerate(healthy.tokens) if t.drafted and t.id not in healthy.token_ids[:i])
    end = healthy.token_ids.index(stop) + 1
    request = replace(ask("again", prompt(20), sampling, mode, max_tokens=40), stop_token_ids=frozenset({stop}))
    assert stop not in request.prompt_ids
    with monkeypatch.context() as patch:
        met = poison(llm, patch, {stop})
        done = llm.run([request])[0]
    assert met == {stop}, "it was drafted"
    assert (done.token_ids, done.finish_reason) == (healthy.token_ids[:end], "stop")
    assert finite_pools(llm)
    assert_idle(llm)
