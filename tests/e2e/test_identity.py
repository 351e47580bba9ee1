"""Text is the same with and without speculation, and drafts were really accepted, on the real pair."""

from __future__ import annotations

import pytest

from slipstream.engine.llm import LLM
from tests import checks

pytestmark = pytest.mark.e2e
PROMPTS, TOKENS = 2, 48  # `make verify` has 104 prompts with answers of 256 tokens


@pytest.fixture
def llm() -> LLM:
    """The pair in this machine's default format, which is the fastest; `make verify` also runs a torch format."""
    return checks.real_pair("auto")


@pytest.mark.parametrize(
    "settings",
    [checks.GREEDY, checks.SAMPLED, checks.EVERYTHING, checks.GREEDY_PENALISED],
    ids=["greedy", "sampled", "everything", "greedy-penalised"],
)
def test_alone(llm: LLM, settings: dict[str, object]) -> None:
    report = checks.identity(llm, checks.eval_prompts(PROMPTS), TOKENS, settings)
    assert report.ok, report.row()


@pytest.mark.parametrize("settings", [checks.GREEDY, checks.EVERYTHING], ids=["greedy", "everything"])
def test_alone_in_a_torch_format(settings: dict[str, object]) -> None:
    report = checks.identity(checks.real_pair("int4"), checks.eval_prompts(2), 32, settings)
    assert report.ok, report.row()


@pytest.mark.parametrize("mode", ["chain:2", "chain:8"])
def test_narrower_widths(llm: LLM, mode: str) -> None:
    report = checks.identity(llm, checks.eval_prompts(2), TOKENS, checks.SAMPLED, mode=mode)
    assert report.ok, report.row()
    assert len(report.speculative.verified_at) == int(mode[6:]) - 1


def test_batch_of_eight_mixed_requests(llm: LLM) -> None:
    report = checks.mixed_batches(llm, checks.eval_prompts(8), TOKENS)
    assert report.ok, report.row()


def test_prefill_in_chunks_of_64(llm: LLM) -> None:
    chunked = checks.real_pair("auto", prefill_chunk=64)
    prompts = checks.eval_prompts(PROMPTS)
    report = checks.identity(chunked, prompts, TOKENS, checks.GREEDY)
    assert report.ok, report.row()
    assert report.speculative.tau == checks.total_tau(llm, prompts, TOKENS).tau


def test_after_a_prefix_hit(llm: LLM) -> None:
    report = checks.prefix_hits(llm, checks.eval_prompts(PROMPTS), TOKENS, checks.SAMPLED)
    assert report.texts.ok, report.texts.row()
    assert report.cold.cached_tokens == 0
    assert report.cached_share > 0.5
    assert report.tau_ratio == pytest.approx(1.0, abs=0.02)


def test_prompts_that_end_on_a_page(llm: LLM) -> None:
    edges = checks.page_edge_prompts(llm, checks.eval_prompts(3))
    assert [len(ids) % 64 for ids in edges] == [63, 0, 1]
    report = checks.ids_identity(llm, edges, {"max_tokens": TOKENS, "ignore_eos": True})
    assert report.ok, report.row()


@pytest.mark.parametrize("settings", [checks.GREEDY, checks.SAMPLED], ids=["greedy", "sampled"])
def test_empty_prompt(llm: LLM, settings: dict[str, object]) -> None:
    report = checks.ids_identity(llm, [llm.prompt_ids("")], {"max_tokens": TOKENS, "ignore_eos": True, **settings})
    assert report.ok, report.row()


def test_dense_fp32_differs_at_most_in_near_ties() -> None:
    report = checks.identity(checks.real_pair("fp32"), checks.eval_prompts(1), 32, checks.GREEDY)
    assert report.ok, report.row()


def test_one_target_forward_per_step_whatever_the_batch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.measure_costs()  # measuring runs forwards that belong to no step
    target = llm.engine.executor.target
    calls: list[int] = []
    forward = target.forward_logits

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "forward_logits", counted)
    for prompt in checks.eval_prompts(4):
        llm.engine.add(llm.request(llm.prompt_ids(prompt, chat=True), max_tokens=24, cache_prompt=False))
    steps = 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    assert len(calls) == steps


def test_shared_noise_accepts_more_than_greedy_drafts(llm: LLM) -> None:
    prompts, settings = (
        checks.eval_prompts(4),
        {"temperature": 1.3, "seed": 7},
    )  # hot sampling, where noise decides much
    shared = checks.total_tau(llm, prompts, 48, **settings)
    greedy = checks.total_tau(llm, prompts, 48, share_noise=False, **settings)
    assert shared.tau > 1.2 * greedy.tau
