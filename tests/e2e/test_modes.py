"""Trees, heads and the policy on the real pair: the text never changes, and acceptance is as high as it should be."""

# mypy: disable-error-code="call-overload, unused-ignore"

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.engine.llm import LLM
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.policy import Policy
from tests import checks
from tests import checks_speculation as promises

pytestmark = pytest.mark.e2e
TOKENS = 40


def pair(draft: str = "smollm2-dspark") -> LLM:
    """The pair in this machine's default format, which is the fastest; `make verify` also runs a torch format."""
    return promises.pair_with(draft)


class FreeRows(CostTable):
    """Costs with almost free rows, independent of a busy machine's clock, so that auto always drafts."""

    def __init__(self) -> None:
        super().__init__({1: 4.25, 64: 4.36, 1024: 6.0}, {3: 0.8, 7: 0.8, 15: 0.9})

    def observe_step(self, shape: StepShape, ms: float) -> None:
        pass

    def observe_draft(self, blocks: int, slots: int, context: int, ms: float) -> None:
        pass


@pytest.fixture
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], LLM]:
    """Gives an engine a policy that has learnt nothing and whose costs make `auto` draft.

    The costs of a busy machine, or what other tests taught the policy of a shared pair, may speak against drafting.
    """

    def with_free_rows(llm: LLM) -> LLM:
        monkeypatch.setattr(llm.engine.proposer, "policy", Policy(FreeRows()))
        return llm

    return with_free_rows


@pytest.mark.parametrize(
    ("draft", "settings", "modes"),
    [
        ("smollm2-dspark", checks.GREEDY, ("chain:2", "chain:8", "tree:8", "tree:64", "auto")),
        ("smollm2-dspark", checks.SAMPLED, ("chain:4", "tree:16", "tree:64", "tree:32:seed", "auto")),
        ("smollm2-dflash", checks.GREEDY, ("tree:16", "tree:32:seed", "auto")),
        ("smollm2-dflash", checks.SAMPLED, ("chain:8", "tree:32")),
    ],
    ids=["dspark-greedy", "dspark-sampled", "dflash-greedy", "dflash-sampled"],
)
def test_text_is_the_same_in_every_mode(
    draft: str, settings: dict[str, object], modes: tuple[str, ...], always_drafting: Callable[[LLM], LLM]
) -> None:
    llm = always_drafting(pair(draft))
    reports = promises.identity_by_mode(llm, checks.eval_prompts(1), TOKENS, settings, modes)
    for mode, report in reports.items():
        assert report.ok, f"{mode}: {report.row()}"
        if mode.startswith("chain:"):
            assert len(report.speculative.verified_at) == int(mode[6:]) - 1


def test_text_is_the_same_in_a_torch_format(always_drafting: Callable[[LLM], LLM]) -> None:
    llm, modes = promises.pair_with("smollm2-dspark", weight_format="int4"), ("tree:16", "auto")
    always_drafting(llm)
    reports = promises.identity_by_mode(llm, checks.eval_prompts(1), TOKENS, checks.SAMPLED, modes)
    assert all(report.ok for report in reports.values()), {mode: report.row() for mode, report in reports.items()}


def test_a_batch_of_trees_writes_what_each_writes_alone(always_drafting: Callable[[LLM], LLM]) -> None:
    llm, prompts = always_drafting(pair()), checks.eval_prompts(4)
    reports = promises.identity_by_mode(llm, prompts, TOKENS, checks.SAMPLED, ("tree:16", "auto"), batch=4)
    assert all(report.ok for report in reports.values()), {mode: report.row() for mode, report in reports.items()}


def test_trees_keep_what_penalties_and_filters_choose() -> None:
    llm = pair()
    reports = promises.identity_by_mode(llm, checks.eval_prompts(2), TOKENS, checks.EVERYTHING, ("tree:32",))
    assert reports["tree:32"].ok, reports["tree:32"].row()


@pytest.mark.parametrize(
    ("draft", "settings"),
    [("smollm2-dspark", checks.GREEDY), ("smollm2-dflash", checks.SAMPLED)],
    ids=["dspark-greedy", "dflash-sampled"],
)
def test_wider_trees_accept_more(draft: str, settings: dict[str, object]) -> None:
    llm, prompts = pair(draft), checks.eval_prompts(3)
    chain, tree = (checks.total_tau(llm, prompts, TOKENS, mode=mode, **settings).tau for mode in ("chain", "tree:32"))
    assert tree > 1.1 * chain


def test_the_markov_head_accepts_more_than_its_backbone_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompts = pair(), checks.eval_prompts(6)
    with_head = checks.total_tau(llm, prompts, TOKENS).tau
    drafter = llm.engine.executor.variants.drafter
    assert drafter is not None
    monkeypatch.setattr(drafter.drafter, "heads", None)
    assert with_head > 1.05 * checks.total_tau(llm, prompts, TOKENS).tau


def test_a_stop_string_inside_a_tree_path_ends_the_text_where_plain_decoding_does() -> None:
    llm = pair()
    prompt = promises.set_prompts("gsm8k", 1)[0]
    common = {"chat": True, "max_tokens": 96, "stop": ("the",), "cache_prompt": False}
    plain = llm.generate(prompt, mode="plain", **common)
    tree = llm.generate(prompt, mode="tree:32", **common)
    assert plain.finish_reason == "stop"
    assert (tree.text, tree.token_ids) == (plain.text, plain.token_ids)


def test_a_shuffled_drafter_is_given_up_within_64_tokens() -> None:
    llm = promises.shuffled_pair()
    steps = promises.speculative_tokens(llm, promises.set_prompts("humaneval", 1)[0], 128)
    assert any(nodes for _, nodes in steps), "a drafter without a record was never tried"
    later = [nodes for written, nodes in steps if written >= 64]
    # Trials go on, but rarely; drafting that goes on would fill most of these steps.
    assert sum(nodes > 0 for nodes in later) <= len(later) // 16, steps


def test_an_exchanged_cost_table_changes_the_choice_in_the_middle_of_a_request() -> None:
    llm = pair()
    proposer = llm.engine.proposer
    shared, proposer.policy = proposer.policy, Policy(promises.rows_are_dear())
    try:
        nodes: list[int] = []
        prompt = promises.set_prompts("gsm8k", 1)[0]
        for event in llm.stream(prompt, chat=True, mode="auto", max_tokens=96, ignore_eos=True):
            if event.step is not None:
                nodes.append(event.step.proposal.nodes)
            # Observed steps would teach the table this machine's true costs.
            proposer.policy.costs = promises.rows_are_dear() if len(nodes) < 24 else promises.rows_are_free()
    finally:
        proposer.policy = shared
    before, after = nodes[4:24], nodes[30:]
    assert sum(before) <= 4, nodes
    assert sum(after) / len(after) > 16, nodes


def test_auto_says_why(always_drafting: Callable[[LLM], LLM]) -> None:
    llm = always_drafting(pair())
    done = llm.generate(promises.set_prompts("gsm8k", 1)[0], chat=True, mode="auto", max_tokens=64)
    policy = done.stats.to_json()["policy"]
    assert isinstance(policy, dict)
    assert sum(policy["choices"].values()) == done.stats.steps
    assert policy["expected_ms_per_step"] > 0 and policy["expected_tokens_per_step"] >= 1
    assert "/ms" in policy["last_reason"] or "left to commit" in policy["last_reason"]


@pytest.mark.parametrize("gate", ["ema:margin=50", "entropy:floor=1,hard=1"])
def test_a_published_gate_closes_for_the_rest_of_the_request(gate: str) -> None:
    llm = pair()
    prompt = promises.set_prompts("humaneval", 1)[0]
    events = list(llm.stream(prompt, chat=True, mode="chain", gate=gate, max_tokens=64))
    nodes = [event.step.proposal.nodes for event in events if event.step is not None]
    first_plain = nodes.index(0)
    assert 1 <= first_plain <= 8, "no text can satisfy these thresholds, so the gate must close early"
    assert not any(nodes[first_plain:])
    plain = llm.generate(prompt, chat=True, mode="plain", max_tokens=64)
    assert [token.id for event in events for token in event.tokens] == plain.token_ids


def test_a_long_conversation_is_the_same_with_and_without_the_prefix_cache() -> None:
    llm = pair()
    seen = promises.long_conversation(llm, document_tokens=700, tokens=24, mode="tree:16")
    assert seen.cached_tokens > 1400
    assert seen.texts[0] == seen.texts[1]
    assert seen.steps[0] == seen.steps[1], "other drafts are accepted"
