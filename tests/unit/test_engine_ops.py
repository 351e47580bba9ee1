"""The engine around a tiny pair: no page is lost whatever happens, and speculation changes nothing but the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS
from slipstream.engine.llm import LLM
from slipstream.engine.runner import ForwardResult, RowWork, Runner
from slipstream.errors import IntegrityError, RequestError
from slipstream.speculative.draft import DraftJob
from slipstream.types import Mode, Request, SamplingParams
from tests.tiny import BLOCK, EOS, VOCAB, keep_threads, page_table, random_operations, tiny_llm, write_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    write_pair(path)
    return path


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with keep_threads():
        yield


@pytest.fixture
def llm(folder: Path) -> LLM:
    """The pair in int8, where speculative text must equal plain text to the bit."""
    return tiny_llm(folder, weight_format="int8")


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def assert_idle(llm: LLM) -> None:
    """Nothing runs, and once the prefix cache lets go every page is free."""
    assert not llm.engine.has_work
    llm.engine.scheduler.check()
    if llm.engine.prefix is not None:
        llm.engine.prefix.clear()
    assert page_table(llm.engine).free == page_table(llm.engine).total


def test_a_thousand_random_operations_leak_no_page() -> None:
    report = random_operations(1000, seed=1)
    assert report.free == report.total > 0
    assert report.failed_restores == 0
    assert min(report.done[name] for name in ("add", "cancel", "fork", "release", "step")) > 60, report
    assert min(report.finished[reason] for reason in ("length", "stop", "cancelled")) > 0, report
    assert report.drafted > 500 and report.accepted > 20, "speculation took part"
    assert report.hits > 20 and report.cached_tokens > 20 * PAGE_TOKENS, "so did the prefix cache"
    assert report.largest_batch == 4 and report.done["fork refused"] > 0, "and it was crowded"


@pytest.mark.parametrize("fault", ["leak", "double release", "lost context"])
def test_the_random_driver_notices_a_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    release, commit = SequenceState.release, SequenceState.commit

    def leaky(state: SequenceState) -> None:
        state.pages = state.pages[1:]
        release(state)

    def twice(state: SequenceState) -> None:
        pages = list(state.pages)
        release(state)
        state._table.release(pages)

    def forgetful(state: SequenceState, rows: int, new_tokens: list[int], context_rows: int) -> None:
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


def mixed_requests(mode: str) -> list[Request]:
    """Eight requests, each with settings of its own, some on page and chunk borders."""
    greedy, sampled = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    shaped = SamplingParams(temperature=1.2, repetition_penalty=1.1, presence_penalty=0.2, seed=3, logprobs=2)
    requests = [
        Request("a", prompt(3, 1), greedy, max_tokens=30),
        Request("b", prompt(PAGE_TOKENS, 2), sampled, max_tokens=40),
        Request("c", prompt(PAGE_TOKENS + 1, 3), shaped, max_tokens=33),
        Request("d", prompt(2 * PAGE_TOKENS, 4), greedy, max_tokens=25),
        Request("e", prompt(150, 5), sampled, max_tokens=50, stop_token_ids=frozenset({EOS})),
        Request("f", prompt(1, 6), sampled, max_tokens=PAGE_TOKENS + 5, stop=("CCCC",)),
        Request("g", prompt(40, 7), shaped, max_tokens=1),
        Request("h", prompt(40, 8), SamplingParams(frequency_penalty=0.5), max_tokens=20),
    ]
    return [replace(request, mode=Mode.parse(mode)) for request in requests]


@pytest.mark.parametrize("mode", ["chain", "chain:2", "chain:5"])
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


def test_each_request_alone_writes_what_it_wrote_in_the_batch(folder: Path) -> None:
    together = tiny_llm(folder, weight_format="int8").run(mixed_requests("chain"))
    llm = tiny_llm(folder, weight_format="int8", prefill_chunk=256, step_rows=512)
    for request, done in zip(mixed_requests("chain"), together, strict=True):
        alone = llm.run([request])[0]
        assert alone.token_ids == done.token_ids
        assert (alone.stats.drafted, alone.stats.accepted) == (done.stats.drafted, done.stats.accepted)


def test_a_prefix_hit_keeps_text_and_acceptance(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.8, seed=7)
    cold, warm = (
        llm.run([Request(name, prompt(150, 5), sampling, max_tokens=60)])[0] for name in ("cold", "warm")
    )
    assert (cold.stats.cached_tokens, warm.stats.cached_tokens) == (0, 2 * PAGE_TOKENS)
    assert warm.token_ids == cold.token_ids
    assert warm.stats.accepted_at == cold.stats.accepted_at and warm.stats.accepted > 0
    assert llm.engine.prefix is not None and llm.engine.prefix.hits == 1


def test_pages_of_a_plain_request_serve_no_drafting_one(llm: LLM) -> None:
    done = [
        llm.run([Request(f"r{index}", prompt(150, 5), mode=Mode.parse(mode), max_tokens=10)])[0].stats.cached_tokens
        for index, mode in enumerate(["plain", "plain", "chain", "chain", "plain"])
    ]
    assert done == [0, 128, 0, 128, 128]


def test_an_answers_pages_serve_the_next_turn_only_where_decoding_sums_like_prefill(folder: Path) -> None:
    for weight_format, cached in (("int8", 2 * PAGE_TOKENS), ("fp32", PAGE_TOKENS)):
        llm = tiny_llm(folder, weight_format=weight_format)
        first = llm.run([Request("first", prompt(70), max_tokens=80)])[0]
        turn = prompt(70) + tuple(first.token_ids) + prompt(5, 9)
        assert llm.run([Request("second", turn, max_tokens=4)])[0].stats.cached_tokens == cached


def test_one_target_forward_and_one_draft_pass_per_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    forward, propose = Runner.forward, Runner.propose

    def counted_forward(runner: Runner, works: Sequence[RowWork]) -> ForwardResult:
        calls.append(("f", len(works)))
        return forward(runner, works)

    def counted_propose(runner: Runner, jobs: Sequence[DraftJob]) -> list[torch.Tensor]:
        calls.append(("p", len(jobs)))
        return propose(runner, jobs)

    monkeypatch.setattr(Runner, "forward", counted_forward)
    monkeypatch.setattr(Runner, "propose", counted_propose)
    for index in range(4):
        llm.engine.add(Request(f"r{index}", prompt(20, index), max_tokens=30))
    while llm.engine.has_work:
        calls.clear()
        llm.engine.step()
        assert [name for name, _ in calls] == ["p", "f"]
        if len(llm.engine.scheduler.running) == 4:
            assert calls[1] == ("f", 4)


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
        (Request("r", prompt(5), mode=Mode("chain", BLOCK + 1)), f"wider than the drafter's block of {BLOCK} rows"),
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
    with pytest.raises(RequestError, match="mode 'chain' needs a drafter"):
        llm.engine.add(Request("r", prompt(5)))
    assert len(llm.generate("hello", max_tokens=5).token_ids) == 5


def test_an_answer_ends_where_the_context_ends(llm: LLM) -> None:
    done = llm.run([Request("r", prompt(500), max_tokens=100)])[0]
    assert (len(done.token_ids), done.finish_reason) == (12, "length")
    assert_idle(llm)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, BLOCK, BLOCK + 1])
def test_a_block_never_writes_more_than_was_asked_for(llm: LLM, max_tokens: int) -> None:
    done = llm.run([Request("r", prompt(9), SamplingParams(temperature=0.8, seed=2), max_tokens=max_tokens)])[0]
    assert len(done.token_ids) == done.stats.completion_tokens == max_tokens
