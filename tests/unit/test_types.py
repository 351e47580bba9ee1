"""What a request may ask for, and the arithmetic of the numbers reported about it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, RequestError, SlipstreamError
from slipstream.stats import Decision, PolicyStats, RequestStats
from slipstream.types import (
    MAX_SEED,
    MAX_TREE_ROWS,
    Gate,
    Mode,
    Proposal,
    Request,
    SamplingParams,
    Source,
    StepRecord,
    Verdict,
)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1 (it must be 0 or more)"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1 (it must be 0 (off) or more)"),
        ({"top_p": 0.0}, "top_p is 0.0 (it must be above 0 and at most 1)"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.01}, "min_p is -0.01 (it must be between 0 and 1)"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0 (it must be above 0 (1 is off))"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5 (it must be between -2 and 2)"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": MAX_SEED + 1}, f"seed is {MAX_SEED + 1}"),
        ({"logprobs": 65}, "logprobs is 65 (it must be between 0 and 64)"),
        ({"logprobs": -1}, "logprobs is -1"),
    ],
)
def test_a_sampling_setting_out_of_range_is_refused_by_name(settings: dict[str, float], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**settings)  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_the_borders_of_every_range_are_allowed() -> None:
    upper = SamplingParams(top_p=1.0, min_p=1.0, presence_penalty=-2, frequency_penalty=2, seed=MAX_SEED, logprobs=64)
    assert (upper.seed, upper.logprobs) == (MAX_SEED, 64)
    assert SamplingParams(min_p=0.0, seed=0, logprobs=0).logprobs == 0


def test_greedy_and_penalised_say_what_they_mean() -> None:
    assert SamplingParams().greedy and not SamplingParams(temperature=0.01).greedy
    assert not SamplingParams(temperature=1.0, top_k=3, top_p=0.5).penalised
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", 0.1), ("frequency_penalty", -0.1)):
        assert SamplingParams(**{name: value}).penalised  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("plain", Mode("plain")),
        ("chain", Mode("chain")),
        ("chain:2", Mode("chain", 2)),
        ("chain:16", Mode("chain", 16)),
        ("auto", Mode()),
        ("tree:2", Mode("tree", 2)),
        (f"tree:{MAX_TREE_ROWS}", Mode("tree", MAX_TREE_ROWS)),
        ("tree:64:seed", Mode("tree", 64, seeded=True)),
        ("tree:16:text", Mode("tree", 16, text=True)),
    ],
)
def test_modes_are_read_and_written_the_same_way(name: str, mode: Mode) -> None:
    assert Mode.parse(name) == mode
    assert str(mode) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "tree",
        "chain:1",
        "chain:-4",
        "chain:x",
        "plain:4",
        "Chain",
        "chain:2:2",
        "chain:",
        "plain:",
        "tree:",
        "tree:1",
        f"tree:{MAX_TREE_ROWS + 1}",
        "tree:8:seeded",
        "tree:8:seed:seed",
        "tree:seed",
        "chain:8:seed",
        "chain:8:text",
        "tree:8:seed:text",
        "auto:8",
        "tree:\u0664",
        "tree: 8",
    ],
)
def test_an_unknown_mode_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="unknown mode") as refused:
        Mode.parse(name)
    assert "chain:ROWS" in refused.value.hint and "tree:ROWS:seed" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("off", Gate()),
        ("ema", Gate("ema")),
        ("auto", Gate("auto")),
        ("entropy", Gate("entropy")),
        ("ema:margin=1.25,sustain=5,warmup=0", Gate("ema", margin=1.25, sustain=5, warmup=0)),
        ("entropy:floor=0.5,hard=0.25,patience=4", Gate("entropy", floor=0.5, hard=0.25, patience=4)),
        ("auto:margin=1.1,explore=0.05", Gate("auto", margin=1.1, explore=0.05)),
        ("auto:explore=0.0", Gate("auto", explore=0.0)),
    ],
)
def test_gates_are_read_and_written_the_same_way(name: str, gate: Gate) -> None:
    assert Gate.parse(name) == gate
    assert str(gate) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "unknown gate"),
        ("EMA", "unknown gate"),
        ("ema:floor=1", "gate 'ema' has no threshold 'floor'"),
        ("off:margin=1", "gate 'off' has no threshold 'margin'"),
        ("ema:margin", "threshold 'margin'"),
        ("ema:sustain=1.5", "threshold 'sustain' of gate 'ema' is '1.5'"),
        ("ema:margin=0", "margin is 0.0"),
        ("ema:margin=nan", "margin is nan"),
        ("ema:sustain=0", "sustain is 0"),
        ("ema:warmup=-1", "warmup is -1"),
        ("entropy:floor=1.5", "floor is 1.5"),
        ("entropy:hard=nan", "hard is nan"),
        ("auto:explore=0.21", "explore is 0.21"),
        ("auto:explore=-0.01", "explore is -0.01"),
        ("auto:explore=nan", "explore is nan"),
        ("auto:explore=some", "threshold 'explore' of gate 'auto' is 'some'"),
        ("auto:probe=16", "gate 'auto' has no threshold 'probe'"),
    ],
)
def test_a_gate_that_means_nothing_is_refused(name: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Gate.parse(name)


def test_mode_and_gate_must_not_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="without the seed of 'tree:8:seed'"):
        Request("r", (1,), mode=Mode.parse("tree:8:seed"), gate=Gate("auto"))
    with pytest.raises(RequestError, match="mode auto contradicts gate 'ema'"):
        Request("r", (1,), gate=Gate("ema"))
    with pytest.raises(RequestError, match="plain decoding has nothing to gate"):
        Request("r", (1,), mode=Mode("plain"), gate=Gate("entropy"))
    for kind in ("off", "ema", "entropy", "auto"):
        assert Request("r", (1,), mode=Mode("tree", 8), gate=Gate(kind)).gate.kind == kind
    with pytest.raises(RequestError, match="min_confidence is 1.5"):
        Request("r", (1,), min_confidence=1.5)


def test_a_request_needs_a_token_a_length_and_real_stop_strings() -> None:
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        Request("r", ())
    with pytest.raises(RequestError, match="max_tokens is 0"):
        Request("r", (1,), max_tokens=0)
    with pytest.raises(RequestError, match="a stop string is empty"):
        Request("r", (1,), stop=("a", ""))
    assert Request("r", (1,), max_tokens=1, stop=("a",)).mode == Mode("auto")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_format": "int3"}, "unknown dtype 'int3'"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"prefill_chunk": -1}, "prefill_chunk is -1"),
        ({"step_rows": 0}, "step_rows is 0"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"cache_tokens": -1}, "cache_tokens is -1"),
        ({"max_context": -1}, "max_context is -1"),
        ({"threads": -1}, "threads is -1"),
        ({"draft_window": -1}, "draft_window is -1"),
    ],
)
def test_an_engine_setting_out_of_range_is_refused_by_name(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**settings)  # type: ignore[arg-type]


def test_an_error_is_one_sentence_with_its_hint() -> None:
    assert str(SlipstreamError("it broke", "mend it")) == "it broke (mend it)"
    assert str(SlipstreamError("it broke")) == "it broke"


def test_steps_are_counted_per_slot() -> None:
    stats = RequestStats()
    stats.record_step(proposed=3, depth=3, accepted=1, committed=2)
    stats.record_step(proposed=5, depth=5, accepted=5, committed=6)
    stats.record_step(proposed=0, depth=0, accepted=0, committed=1)
    assert (stats.steps, stats.drafted, stats.accepted, stats.committed) == (3, 8, 6, 9)
    assert stats.verified_at == [2, 2, 2, 1, 1]
    assert stats.accepted_at == [2, 1, 1, 1, 1]
    assert stats.tau == 3.0 and stats.accept_rate == 0.75, "tau counts the bonus, the accept rate does not"


def test_a_tree_counts_per_depth_and_not_per_row() -> None:
    stats = RequestStats()
    stats.record_step(proposed=12, depth=3, accepted=2, committed=3)
    stats.record_step(proposed=7, depth=1, accepted=0, committed=1)
    assert (stats.drafted, stats.accepted) == (19, 2)
    assert (stats.verified_at, stats.accepted_at) == ([2, 1, 1], [1, 1, 0])


def test_nothing_measured_is_zero_not_an_error() -> None:
    stats = RequestStats()
    assert (stats.tau, stats.tau_novel, stats.accept_rate, stats.tokens_per_second) == (0.0, 0.0, 0.0, 0.0)
    assert stats.to_json()["accepted_per_position"] == []


def test_json_has_the_promised_names_and_values() -> None:
    stats = RequestStats(
        prompt_tokens=7,
        cached_tokens=4,
        completion_tokens=7,
        novel_steps=2,
        novel_committed=5,
        ttft_ms=1.23456,
        decode_ms=300.0,
        draft_ms=100.0,
        verify_ms=150.0,
        other_ms=50.0,
    )
    stats.record_step(3, 3, 3, 4, drafter_depth=2, drafter_accepted=2)
    stats.record_step(3, 3, 1, 2)
    stats.bad_drafts, stats.draft_lora = 2, "poet"
    stats.policy.record(Decision("chain:4", "it pays", 3.5, 2.0), 4)
    stats.policy.record(Decision("plain", "", 1.0, 1.0), 2)
    seen = stats.to_json()
    assert json.loads(json.dumps(seen)) == {
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "completion_tokens": 7,
        "steps": 2,
        "drafted": 6,
        "accepted": 4,
        "accepted_by_source": {"drafter": 3, "text": 1},
        "tau": 3.0,
        "tau_novel": 2.5,
        "accept_rate": 0.6667,
        "accepted_per_position": [1.0, 0.5, 0.5],
        "ttft_ms": 1.235,
        "decode_ms": 300.0,
        "tokens_per_second": 20.0,
        "time_split_ms": {"draft": 100.0, "verify": 150.0, "other": 50.0},
        "bad_drafts": 2,
        "draft_lora": "poet",
        "policy": {
            "choices": {"chain:4": 1, "plain": 1},
            "expected_tokens_per_step": 2.25,
            "committed_tokens_per_step": 3.0,
            "expected_ms_per_step": 1.5,
            "last_reason": "it pays",
        },
    }


def test_a_decision_without_an_estimate_is_counted_but_not_averaged() -> None:
    policy = PolicyStats()
    policy.record(Decision("tree:16", "first", 4.0, 2.0), 5)
    policy.record(Decision("tree:16"), 1)
    policy.record(Decision(), 1)
    assert list(policy.to_json()["choices"].items()) == [("tree:16", 2), ("plain", 1)]  # type: ignore[attr-defined]
    assert (policy.estimated_steps, policy.expected_tokens, policy.estimated_tokens) == (1, 4.0, 5)
    assert policy.last_reason == "first"


def test_a_proposal_knows_its_depths_and_whether_it_branches() -> None:
    alone, chain = Proposal((5,), (-1,)), Proposal((5, 6, 7), (-1, 0, 1))
    tree, star = Proposal((5, 6, 7, 8, 9), (-1, 0, 1, 1, 3)), Proposal((5, 6, 7), (-1, 0, 0))
    assert [p.branching for p in (alone, chain, tree, star)] == [False, False, True, True]
    assert [p.depths for p in (alone, chain, tree, star)] == [(0,), (0, 1, 2), (0, 1, 2, 2, 3), (0, 1, 1)]
    assert [p.nodes for p in (alone, chain, tree, star)] == [0, 2, 4, 2]


def test_a_proposal_knows_how_deep_the_drafter_went() -> None:
    drafter, text = Source.DRAFTER, Source.TEXT
    chain = (-1, 0, 1, 2)
    assert Proposal((5, 6, 7, 8), chain).drafter_depth == 3
    assert Proposal((5, 6, 7, 8), chain, (), (drafter, drafter, drafter, text)).drafter_depth == 2
    assert Proposal((5, 6, 7, 8), chain, (), (text, text, text, text)).drafter_depth == 0
    assert Proposal((5, 6), (-1, 0)).source(1) == drafter
    assert Proposal((5, 6), (-1, 0), (), (drafter, text)).source(1) == text


def test_accepted_tokens_are_counted_by_source_and_sums_keep_them_apart() -> None:
    one, two = RequestStats(), RequestStats()
    one.record_step(6, 3, 3, 4, drafter_depth=2, drafter_accepted=1)
    one.record_step(4, 4, 2, 3)
    two.record_step(5, 5, 5, 6, drafter_depth=0, drafter_accepted=0)
    assert one.accepted_by_source == {"drafter": 3, "text": 2}
    assert (one.drafter_verified_at, one.drafter_accepted_at) == ([2, 2, 1, 1], [2, 1, 0, 0])
    one.add(two)
    assert one.accepted_by_source == {"drafter": 3, "text": 7} and one.accepted == 10
    assert (one.verified_at, one.accepted_at) == ([3, 3, 3, 2, 1], [3, 3, 2, 1, 1])
    assert (one.drafter_verified_at, one.drafter_accepted_at) == ([2, 2, 1, 1, 0], [2, 1, 0, 0, 0])


def test_a_step_record_is_plain_json() -> None:
    step = StepRecord(
        17,
        Proposal((5, 6, 7), (-1, 0, 0), (1.0, 0.6, 0.3), (Source.TEXT, Source.DRAFTER, Source.TEXT)),
        Verdict((0, 2), (7, 9)),
        Decision("tree:3", "it pays", 1.91236, 4.00004),
        1.23456,
        2.0,
    )
    assert json.loads(json.dumps(step.to_json())) == {
        "position": 17,
        "proposal": {"tokens": [5, 6, 7], "parents": [-1, 0, 0], "sources": [None, "drafter", "text"]},
        "verdict": {"path": [0, 2], "tokens": [7, 9], "accepted": 1, "failed": False},
        "policy": {"choice": "tree:3", "reason": "it pays", "expected_tokens": 1.9124, "expected_ms": 4.0},
        "times_ms": {"draft": 1.2346, "verify": 2.0},
    }


_STEPS = st.lists(
    st.integers(0, 6).flatmap(lambda n: st.tuples(st.integers(n, 2 * n), st.just(n), st.integers(0, n))), max_size=8
)


@given(_STEPS, _STEPS)
def test_adding_two_requests_is_counting_their_steps_together(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]]
) -> None:
    def counted(steps: list[tuple[int, int, int]]) -> RequestStats:
        stats = RequestStats(decode_ms=float(len(steps)), cached_tokens=len(steps), prompt_tokens=3)
        for proposed, depth, accepted in steps:
            stats.record_step(proposed, depth, accepted, accepted + 1)
            stats.bad_drafts += proposed == 0
            stats.policy.record(Decision(f"tree:{proposed}", f"{depth}", float(proposed), 2.0), accepted + 1)
        return stats

    total = counted(first)
    total.add(counted(second))
    expected = counted(first + second)
    expected.prompt_tokens = 6
    assert total == expected
    assert all(accepted <= verified for accepted, verified in zip(total.accepted_at, total.verified_at, strict=True))
