"""The engine around a tiny pair: no page is lost whatever happens, and speculation changes nothing but the steps."""

# mypy: disable-error-code="unused-ignore"

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS
from slipstream.engine.cpu.cpu_executor import CpuExecutor
from slipstream.engine.draft_context import DraftContexts
from slipstream.engine.executor import ForwardResult, RowWork
from slipstream.engine.llm import LLM
from slipstream.errors import IntegrityError, RequestError
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.costs import CostTable
from slipstream.speculative.draft import DraftJob
from slipstream.speculative.policy import Policy
from slipstream.types import Gate, Mode, Request, SamplingParams
from tests.tiny import BLOCK, VOCAB, ask, assert_idle, mixed_requests, page_table, prompt, random_operations, tiny_llm

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.slow
def test_a_thousand_random_operations_leak_no_page() -> None:
    report = random_operations(1000, seed=1)
    assert report.free == report.total > 0
    assert report.failed_restores == 0
    assert min(report.done[name] for name in ("add", "cancel", "fork", "release", "step")) > 60, report
    assert min(report.finished[reason] for reason in ("length", "stop", "cancelled")) > 0, report
    assert report.drafted > 500 and report.accepted > 20 and report.branched > 50, "speculation took part, with trees"
    assert report.hits > 20 and report.cached_tokens > 20 * PAGE_TOKENS, "so did the prefix cache"
    refused = sum(count for name, count in report.done.items() if name.endswith("refused"))
    assert report.largest_batch == 4 and refused > 0, "and it was crowded"


@pytest.mark.parametrize("fault", ["leak", "double release", "lost context"])
def test_the_random_driver_notices_a_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    release, commit = SequenceState.release, SequenceState.commit

    def leaky(state: SequenceState) -> None:
        state.pages = state.pages[1:]
        release(state)

    def twice(state: SequenceState) -> None:
        pages = list(state.pages)
        release(state)
        state.pages = pages
        release(state)

    def forgetful(state: SequenceState, rows: Sequence[int], new_tokens: list[int], context_rows: int) -> None:
        commit(state, rows, new_tokens, min(context_rows, 1))

    if fault == "lost context":
        monkeypatch.setattr(SequenceState, "commit", forgetful)
    else:
        monkeypatch.setattr(SequenceState, "release", leaky if fault == "leak" else twice)
    with pytest.raises(IntegrityError):
        random_operations(200, seed=1)


def test_the_engine_checks_itself_after_every_step_when_asked(llm: LLM) -> None:
    page_table(llm.engine).allocate(1)
    llm.engine.add(Request("a", prompt(5), max_tokens=2))
    with pytest.raises(IntegrityError, match="has 1 holders on record and 0 in fact"):
        llm.engine.step()


@pytest.mark.parametrize("mode", ["chain", "chain:2", "chain:5", "tree:16", "tree:64", "tree:6:seed", "tree:32:seed"])
def test_a_mixed_batch_writes_the_same_text_with_and_without_speculation(folder: Path, mode: str) -> None:
    plain = tiny_llm(folder, weight_format="int8").run(mixed_requests("plain"))
    llm = tiny_llm(folder, weight_format="int8")
    drafted = llm.run(mixed_requests(mode))
    for mine, other in zip(drafted, plain, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert [t.logprob for t in mine.tokens] == [t.logprob for t in other.tokens]
        assert [t.top_logprobs for t in mine.tokens] == [t.top_logprobs for t in other.tokens]
        assert mine.stats.committed == mine.stats.completion_tokens - 1, "prefill yields the first token"
        assert sum(mine.step_sizes) == mine.stats.committed and len(mine.step_sizes) == mine.stats.steps
        assert sum(token.drafted for token in mine.tokens) == mine.stats.accepted
    assert sum(done.stats.accepted for done in drafted) > 5, "drafts were accepted"
    assert sum(done.stats.steps for done in drafted) < sum(done.stats.steps for done in plain)
    assert sum(done.stats.drafted for done in plain) == 0
    assert_idle(llm)


def test_modes_and_gates_may_be_mixed_in_one_batch(folder: Path) -> None:
    plain = tiny_llm(folder, weight_format="int8").run(mixed_requests("plain"))
    modes = ("auto", "chain", "tree:24", "tree:24:seed", "plain", "auto", "tree:9", "chain:3")
    gates = ("auto", "ema", "auto", "entropy", "off", "auto", "ema:warmup=0,sustain=1,margin=50", "entropy:hard=1")
    requests = [
        replace(request, mode=Mode.parse(mode), gate=Gate.parse(gate))
        for request, mode, gate in zip(mixed_requests("plain"), modes, gates, strict=True)
    ]
    llm = tiny_llm(folder, weight_format="int8")
    for mine, other in zip(llm.run(requests), plain, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert [t.top_logprobs for t in mine.tokens] == [t.top_logprobs for t in other.tokens]
    assert_idle(llm)


@pytest.mark.parametrize("mode", ["chain", "tree:24"])
def test_each_request_alone_writes_what_it_wrote_in_the_batch(folder: Path, mode: str) -> None:
    together = tiny_llm(folder, weight_format="int8").run(mixed_requests(mode))
    llm = tiny_llm(folder, weight_format="int8", prefill_chunk=256, step_rows=512)
    for request, done in zip(mixed_requests(mode), together, strict=True):
        alone = llm.run([request])[0]
        assert alone.token_ids == done.token_ids
        assert (alone.stats.drafted, alone.stats.accepted) == (done.stats.drafted, done.stats.accepted)


@pytest.mark.parametrize("mode", ["chain", "tree:24"])
def test_a_prefix_hit_keeps_text_and_acceptance(llm: LLM, mode: str) -> None:
    sampling = SamplingParams(temperature=0.8, seed=7)
    cold, warm = (llm.run([ask(name, prompt(150, 5), sampling, mode, max_tokens=60)])[0] for name in ("cold", "warm"))
    assert (cold.stats.cached_tokens, warm.stats.cached_tokens) == (0, 2 * PAGE_TOKENS)
    assert warm.token_ids == cold.token_ids
    assert warm.stats.accepted_at == cold.stats.accepted_at and warm.stats.accepted > 0
    assert llm.engine.prefix is not None and llm.engine.prefix.hits == 1


def test_pages_of_a_plain_request_serve_no_drafting_one(llm: LLM) -> None:
    done = [
        llm.run([ask(f"r{index}", prompt(150, 5), mode=mode, max_tokens=10)])[0].stats.cached_tokens
        for index, mode in enumerate(["plain", "plain", "chain", "tree:8", "plain"])
    ]
    assert done == [0, 128, 0, 128, 128]


def test_an_answers_pages_serve_the_next_turn_only_where_decoding_sums_like_prefill(folder: Path) -> None:
    for weight_format, cached in (("int8", 2 * PAGE_TOKENS), ("fp32", PAGE_TOKENS)):
        llm = tiny_llm(folder, weight_format=weight_format)
        first = llm.run([ask("first", prompt(70), mode="tree:24", max_tokens=80)])[0]
        turn = prompt(70) + tuple(first.token_ids) + prompt(5, 9)
        assert llm.run([ask("second", turn, max_tokens=4)])[0].stats.cached_tokens == cached


def test_one_target_forward_and_one_draft_pass_per_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    forward, draft = CpuExecutor.forward, DraftContexts.draft

    def counted_forward(executor: CpuExecutor, works: Sequence[RowWork]) -> ForwardResult:
        calls.append(("f", len(works)))
        return forward(executor, works)

    def counted_draft(contexts: DraftContexts, jobs: Sequence[DraftJob]) -> list[BlockDrafts | None]:
        calls.append(("p", len(jobs)))
        return draft(contexts, jobs)

    monkeypatch.setattr(CpuExecutor, "forward", counted_forward)
    monkeypatch.setattr(DraftContexts, "draft", counted_draft)
    for index in range(4):
        llm.engine.add(ask(f"r{index}", prompt(20, index), mode="tree:12" if index % 2 else "chain"))
    while llm.engine.has_work:
        calls.clear()
        drafting = sum(not each.prefilling and each.room > 1 for each in llm.engine.scheduler.running)
        llm.engine.step()
        assert [name for name, _ in calls] == (["p", "f"] if drafting else ["f"])
        assert calls[0][1] == drafting or not drafting
        if len(llm.engine.scheduler.running) == 4:
            assert calls[-1] == ("f", 4)


def test_cancelling_gives_everything_back_at_the_next_step(llm: LLM) -> None:
    for index in range(6):
        llm.engine.add(Request(f"r{index}", prompt(100, index), max_tokens=50))
    for _ in range(5):
        llm.engine.step()
    assert len(llm.engine.scheduler.running) == 4 and len(llm.engine.scheduler.waiting) == 2
    assert all(llm.engine.cancel(f"r{index}") for index in range(6))
    ended = {event.request_id: event.finish_reason for event in llm.engine.step()}
    assert ended == {f"r{index}": "cancelled" for index in range(6)}
    assert not llm.engine.cancel("r0")
    assert_idle(llm)


def test_a_stream_left_early_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("hello", max_tokens=40)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_a_batch_with_a_request_that_is_refused_leaves_nothing_running(llm: LLM) -> None:
    good, bad = Request("good", prompt(5), max_tokens=40), Request("bad", (VOCAB,), max_tokens=4)
    with pytest.raises(RequestError, match=f"token {VOCAB} is not in the vocabulary"):
        llm.run([good, bad])
    assert_idle(llm)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("r", (-1,)), "token -1 is not in the vocabulary"),
        (Request("r", prompt(600)), "the prompt has 600 tokens, the context holds 512"),
        (ask("r", prompt(5), mode=f"chain:{BLOCK + 1}"), f"wider than the {BLOCK} rows this drafter can fill"),
        (replace(ask("r", prompt(5)), min_confidence=0.5), "this drafter has no confidence head"),
        (Request("taken", prompt(5)), "'taken' is running already"),
    ],
)
def test_what_can_never_run_is_refused_at_once(llm: LLM, request_: Request, said: str) -> None:
    llm.engine.add(Request("taken", prompt(5), max_tokens=2))
    with pytest.raises(RequestError, match=said):
        llm.engine.add(request_)
    while llm.engine.has_work:
        llm.engine.step()
    assert_idle(llm)


def test_drafting_without_a_drafter_is_refused(folder: Path) -> None:
    llm = tiny_llm(folder, draft=False)
    for mode in ("chain", "tree:8", "auto"):
        with pytest.raises(RequestError, match=f"mode '{mode}' needs a drafter"):
            llm.engine.add(ask("r", prompt(5), mode=mode))
    assert len(llm.generate("hello", max_tokens=5).token_ids) == 5


def test_every_step_of_a_policy_s_sequences_counts_as_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials may lose a share of all time, so plain steps that refresh no costs count as well."""
    progress = Mock()
    monkeypatch.setattr(llm.engine.proposer.policy, "progress", progress)
    done = llm.run([ask("r", prompt(9), mode="auto", max_tokens=40), ask("other", prompt(8), mode="plain")])[0]
    steps = [call.args for call in progress.call_args_list]
    assert len(steps) == done.stats.steps
    assert sum(tokens for tokens, _ in steps) >= len(done.token_ids) - 1 and all(ms > 0 for _, ms in steps)


@pytest.mark.parametrize(("draft_ms", "trial"), [(0.5, False), (140.0, True)])
def test_draft_context_that_plain_steps_left_is_no_part_of_a_draft_s_cost(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, draft_ms: float, trial: bool
) -> None:
    """Drafts would otherwise look dearer the more rarely they are made; for a trial, the budget of trials pays."""
    write, slow_ms = llm.engine.contexts.write_waiting, 150.0

    def slow(states: Sequence[SequenceState]) -> None:
        time.sleep(slow_ms / 1e3)
        write(states)

    costs = CostTable({1: 50.0, 64: 51.0}, {15: draft_ms})
    policy, observe, charge = Policy(costs), Mock(), Mock()
    monkeypatch.setattr(costs, "observe_draft", observe)
    monkeypatch.setattr(policy, "charge", charge)
    monkeypatch.setattr(llm.engine.proposer, "policy", policy)
    monkeypatch.setattr(llm.engine.proposer, "text_drafts", False)  # a sequence with drafts from its text tries none
    monkeypatch.setattr(llm.engine.contexts, "write_waiting", slow)
    llm.run([ask("r", prompt(9), mode="auto", max_tokens=40)])
    drafts, charged = ([call.args[-1] for call in mock.call_args_list] for mock in (observe, charge))
    assert min(drafts, default=0.0) < slow_ms
    assert bool(drafts) or trial  # every fourth draft is timed, and trials are few
    assert bool(charged) == trial and min(charged, default=slow_ms) >= slow_ms


def test_an_answer_ends_where_the_context_ends(llm: LLM) -> None:
    done = llm.run([Request("r", prompt(500), max_tokens=100)])[0]
    assert (len(done.token_ids), done.finish_reason) == (12, "length")
    assert_idle(llm)


@pytest.mark.parametrize("mode", ["chain", "tree:40", "tree:5:seed", "auto"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, BLOCK, BLOCK + 1])
def test_a_block_never_writes_more_than_was_asked_for(llm: LLM, max_tokens: int, mode: str) -> None:
    done = llm.run([ask("r", prompt(9), SamplingParams(temperature=0.8, seed=2), mode, max_tokens)])[0]
    assert len(done.token_ids) == done.stats.completion_tokens == max_tokens
