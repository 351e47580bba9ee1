"""Every known way in which speculation breaks while the text stays right.

Each test asserts the acceptance of a healthy run, puts the fault back in, and then the same assertion must fail.
"""

# mypy: disable-error-code="attr-defined, unused-ignore"

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from slipstream.bench.workloads import read_prompts
from slipstream.cache.prefix import PrefixCache
from slipstream.config import EngineConfig
from slipstream.engine.cpu import cpu_blocks
from slipstream.engine.cpu.cpu_blocks import CpuBlocks
from slipstream.engine.draft_context import DraftContexts
from slipstream.engine.executor import ForwardResult
from slipstream.engine.llm import LLM
from slipstream.kernels.rows import AttentionPattern, RowGroup, RowPlaces, make_group
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.rope import RotaryTable
from slipstream.stats import RequestStats
from tests import checks

pytestmark = pytest.mark.e2e
TOKENS = 64
# A head repairs a part of what a fault in the backbone costs, so faults are measured on a drafter that shows them.
DRAFT = "smollm2-dflash"
Kept = Sequence[tuple[int, Sequence[int]]]  # work items, and the rows of each that are kept


@pytest.fixture
def llm() -> LLM:
    """The pair in this machine's default format, which is the fastest."""
    return checks.real_pair("auto", draft=DRAFT)


@pytest.fixture
def torch_llm() -> LLM:
    """The pair in a torch format, for faults inside a layer, which a compiled pass would not run."""
    return checks.real_pair("int4", draft=DRAFT)


@pytest.fixture(scope="module")
def healthy_tau() -> float:
    tau = measured_tau(checks.real_pair("auto", draft=DRAFT))
    assert tau > 3.0
    return tau


def code_prompts() -> list[str]:
    return [turns[0] for turns in read_prompts("humaneval", 3)]


def measured_tau(llm: LLM, prompts: int = 4, tokens: int = 64) -> float:
    """Tau on calculations, where acceptance is high and a fault shows most."""
    return checks.total_tau(llm, [turns[0] for turns in read_prompts("gsm8k", prompts)], tokens).tau


def drafter_of(llm: LLM) -> DFlashDrafter:
    block = llm.engine.executor.variants.drafter
    assert block is not None
    return block.drafter


def assert_collapsed(tau: float, healthy: float) -> None:
    """Checks that the acceptance check of a healthy run would fail."""
    assert tau < 0.93 * healthy, f"the fault costs nothing: {tau:.2f} of {healthy:.2f}"


def long_prompt(llm: LLM, length: int) -> list[int]:
    """A chat prompt of about `length` tokens: a long document, then a question about code."""
    document = "\n\n".join(turn for turns in read_prompts("mt-bench") for turn in turns) * 3
    question = code_prompts()[0]
    ids = llm.prompt_ids(question, chat=True)
    filler = llm.tokenizer.encode(document)[: length - len(ids)]
    return [*llm.prompt_ids("", chat=True)[:-4], *filler, *ids]


def run_ids(llm: LLM, ids: Sequence[int], tokens: int = TOKENS, **settings: object) -> RequestStats:
    request = llm.request(ids, max_tokens=tokens, **{"cache_prompt": False, "mode": "chain", **settings})
    return llm.run([request])[0].stats


def test_1_prefix_restored_without_its_draft_context(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = checks.eval_prompts(2)
    report = checks.prefix_hits(llm, prompts, TOKENS, checks.GREEDY)
    assert report.cached_share > 0.5
    assert report.tau_ratio == pytest.approx(1.0, abs=0.02)

    take = PrefixCache.take

    def forgetful(self: PrefixCache, tokens: Sequence[int], draft_key: str | None) -> list[int]:
        pages = take(self, tokens, draft_key)
        llm.engine.executor.memory.draft_keys[:, pages] = 0
        llm.engine.executor.memory.draft_values[:, pages] = 0
        return pages

    monkeypatch.setattr(PrefixCache, "take", forgetful)
    assert_collapsed(checks.prefix_hits(llm, prompts, TOKENS, checks.GREEDY).tau_ratio, 1.0)


def test_1b_pages_of_a_plain_request_are_no_hit_for_a_drafting_one(llm: LLM) -> None:
    assert llm.engine.prefix is not None
    llm.engine.prefix.clear()
    ids = long_prompt(llm, 300)
    cold = run_ids(llm, ids)
    run_ids(llm, ids, mode="plain", cache_prompt=True)
    after_plain = run_ids(llm, ids, cache_prompt=True)
    assert (after_plain.cached_tokens, after_plain.accepted) == (0, cold.accepted)
    enriched = run_ids(llm, ids, cache_prompt=True)
    assert enriched.cached_tokens > 200
    assert enriched.accepted == cold.accepted
    assert run_ids(llm, ids, mode="plain", cache_prompt=True).cached_tokens > 200


def test_2_taps_kept_only_for_the_last_prefill_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = checks.real_pair("auto", prefill_chunk=64, draft=DRAFT)
    ids = long_prompt(llm, 300)
    healthy = run_ids(llm, ids).tau
    assert healthy == run_ids(checks.real_pair("auto", draft=DRAFT), ids).tau

    write = DraftContexts.write

    def last_chunk_only(self: DraftContexts, result: ForwardResult, kept: Kept) -> None:
        if result.logits[0].shape[0]:
            write(self, result, kept)

    llm.engine.executor.memory.draft_keys.zero_()
    llm.engine.executor.memory.draft_values.zero_()
    monkeypatch.setattr(DraftContexts, "write", last_chunk_only)
    assert_collapsed(run_ids(llm, ids).tau, healthy)


def test_3_two_sequences_in_one_batch_write_one_tap_buffer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = code_prompts()
    alone = [checks.total_tau(llm, [prompt], TOKENS).accepted for prompt in prompts]

    def together() -> list[int]:
        done = llm.generate(prompts, chat=True, max_tokens=TOKENS, mode="chain", cache_prompt=False)
        return [completion.stats.accepted for completion in done]

    # The last bits of drafts, unlike those of the target, depend on the other sequences of the pass.
    assert sum(together()) == pytest.approx(sum(alone), rel=0.05)

    write = DraftContexts.write

    def first_rows_for_all(self: DraftContexts, result: ForwardResult, kept: Kept) -> None:
        if result.taps is not None:
            taps = result.taps.clone()
            for item, rows in kept:
                taps[[result.starts[item] + row for row in rows]] = result.taps[list(rows)]
            result = result._replace(taps=taps)
        write(self, result, kept)

    monkeypatch.setattr(DraftContexts, "write", first_rows_for_all)
    assert_collapsed(sum(together()), sum(alone))


def test_4_rollback_that_forgets_the_draft_context(
    llm: LLM, healthy_tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_tau(llm) == healthy_tau
    write = DraftContexts.write

    def prefill_only(self: DraftContexts, result: ForwardResult, kept: Kept) -> None:
        if sum(work.rows for work in result.works) > 16:
            write(self, result, kept)  # decoding then leaves the keys of the rejected block after

    monkeypatch.setattr(DraftContexts, "write", prefill_only)
    assert_collapsed(measured_tau(llm), healthy_tau)


def test_4b_a_trees_draft_context_made_of_its_first_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [llm.prompt_ids(turns[0], chat=True) for turns in read_prompts("gsm8k", 3)]

    def accepted() -> int:
        return sum(run_ids(llm, each, mode="tree:32").accepted for each in ids)

    healthy = accepted()
    write = DraftContexts.write

    def in_row_order(self: DraftContexts, result: ForwardResult, kept: Kept) -> None:
        write(self, result, [(item, range(len(rows))) for item, rows in kept])

    monkeypatch.setattr(DraftContexts, "write", in_row_order)
    assert_collapsed(accepted(), healthy)


def test_5_no_ring_wraps_at_4096(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = long_prompt(llm, 4100)
    assert 4096 < len(ids) < 4160
    healthy = run_ids(llm, ids, cache_prompt=True).tau
    assert healthy > 0.75 * run_ids(llm, ids[-1000:]).tau

    pools, write = llm.engine.executor.memory, CpuBlocks.write_context

    def wrapped(self: CpuBlocks, taps: Tensor, places: RowPlaces) -> None:
        pages = list(places.page_list)
        for row, position in enumerate(places.position_list):
            if position >= 4096:
                for pool in (pools.draft_keys, pools.draft_values):
                    pool[:, pages[row], :, places.offset_list[row]] = 0  # the healthy run may have written here
                pages[row] = (pages[row] + 1) % pools.draft_keys.shape[1]  # any page except the right one
        write(self, taps, RowPlaces(places.position_list, pages, places.offset_list, places.end))

    monkeypatch.setattr(CpuBlocks, "write_context", wrapped)
    broken = run_ids(llm, ids, cache_prompt=True)
    assert broken.cached_tokens == 4096, "the fault must be in what is computed anew"
    assert_collapsed(broken.tau, healthy)


def test_6_drafter_sees_no_more_context_than_it_was_trained_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.draft_window == 480 and llm.engine.prefix is not None
    llm.engine.prefix.clear()
    ids = long_prompt(llm, 2500)
    healthy = run_ids(llm, ids, cache_prompt=True).tau
    block = llm.engine.executor.variants.drafter
    monkeypatch.setattr(block, "window", 0)
    assert_collapsed(run_ids(llm, ids, cache_prompt=True).tau, healthy)


def test_7_wrong_rope_theta(llm: LLM, healthy_tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(llm)
    assert drafter.config.rope.theta == 100_000
    wrong = dataclasses.replace(drafter.config.rope, theta=1_000_000.0)
    monkeypatch.setattr(drafter, "rotary", RotaryTable(wrong))
    assert_collapsed(measured_tau(llm), healthy_tau)


def test_7_embedding_scale_applied_twice(llm: LLM, healthy_tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(llm)
    monkeypatch.setattr(drafter, "config", dataclasses.replace(drafter.config, input_embedding_scale=73.0**2))
    assert_collapsed(measured_tau(llm), healthy_tau)


def test_7_context_without_its_norm(torch_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = measured_tau(torch_llm, prompts=2, tokens=48)
    drafter = drafter_of(torch_llm)
    project, unnormed = drafter.fc, {}

    def remember(taps: Tensor) -> Tensor:
        unnormed["rows"] = project(taps)
        return unnormed["rows"]

    kv = drafter.context_kv
    monkeypatch.setattr(drafter, "fc", remember)
    monkeypatch.setattr(drafter, "context_kv", lambda normed: kv(unnormed["rows"]))
    assert_collapsed(measured_tau(torch_llm, prompts=2, tokens=48), healthy)


@pytest.mark.parametrize("shift", [-1, 1])
def test_7_taps_off_by_one(llm: LLM, healthy_tau: float, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    drafter = drafter_of(llm)
    taps = tuple(layer + shift for layer in drafter.config.target_layer_ids)
    monkeypatch.setattr(llm.engine.executor, "tapped_layers", taps)
    assert_collapsed(measured_tau(llm), healthy_tau)


def test_7_causal_block_where_the_drafter_is_bidirectional(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = checks.real_pair("auto")
    healthy_tau = measured_tau(llm)

    def causal(*args: object, **kwargs: object) -> RowGroup:
        group = make_group(*args, **kwargs)  # type: ignore[arg-type]
        return dataclasses.replace(group, pattern=AttentionPattern(group.pattern.window, causal=True))

    monkeypatch.setattr(cpu_blocks, "make_group", causal)
    assert_collapsed(measured_tau(llm), healthy_tau)


def test_9_sums_that_depend_on_the_row_count(torch_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = checks.eval_prompts(1)
    assert checks.identity(torch_llm, prompts, TOKENS, checks.GREEDY).ok
    for layer in torch_llm.engine.executor.target.layers:
        mlp: Any = layer.parts[1]
        monkeypatch.setattr(mlp, "down", _uneven(mlp.down))
    assert not checks.identity(torch_llm, prompts, TOKENS, checks.GREEDY).ok


def _uneven(matrix: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Adds differences of the size of bf16 between one row and several, as split-K kernels have them."""

    def product(rows: Tensor) -> Tensor:
        out = matrix(rows)
        return out if rows.shape[0] == 1 else out * (1 + 2.0**-7)

    return product


def test_10_a_reader_that_goes_away_harms_nobody(llm: LLM, healthy_tau: float) -> None:
    stream = llm.stream(code_prompts()[0], chat=True, max_tokens=TOKENS)
    next(stream)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    llm.engine.scheduler.check()
    assert measured_tau(llm) == healthy_tau


def test_12_state_left_over_from_the_last_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = code_prompts()

    def second_after_first() -> int:
        run_ids(llm, long_prompt(llm, 600))
        return checks.total_tau(llm, prompts[1:], TOKENS).accepted

    fresh = LLM("smollm2", DRAFT, config=EngineConfig(weight_format=llm.engine.executor.target.weight_format))
    alone = checks.total_tau(fresh, prompts[1:], TOKENS).accepted
    assert second_after_first() == alone

    write = DraftContexts.write

    def keeps_the_old_prompt(self: DraftContexts, result: ForwardResult, kept: Kept) -> None:
        if result.works[0].start > 0:
            write(self, result, kept)

    run_ids(llm, long_prompt(llm, 600))
    monkeypatch.setattr(DraftContexts, "write", keeps_the_old_prompt)
    assert_collapsed(checks.total_tau(llm, prompts[1:], TOKENS).accepted, alone)
