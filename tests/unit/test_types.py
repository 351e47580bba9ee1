"""What a request may ask for, and the arithmetic of the numbers reported about it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, RequestError, SlipstreamError
from slipstream.types import MAX_SEED, Mode, Request, RequestStats, SamplingParams


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
    [("plain", Mode("plain")), ("chain", Mode()), ("chain:2", Mode("chain", 2)), ("chain:16", Mode("chain", 16))],
)
def test_modes_are_read_and_written_the_same_way(name: str, mode: Mode) -> None:
    assert Mode.parse(name) == mode
    assert str(mode) == name


@pytest.mark.parametrize(
    "name", ["", "tree", "chain:1", "chain:-4", "chain:x", "plain:4", "Chain", "chain:2:2", "chain:", "plain:"]
)
def test_an_unknown_mode_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="unknown mode") as refused:
        Mode.parse(name)
    assert "chain:ROWS" in refused.value.hint


def test_a_request_needs_a_token_a_length_and_real_stop_strings() -> None:
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        Request("r", ())
    with pytest.raises(RequestError, match="max_tokens is 0"):
        Request("r", (1,), max_tokens=0)
    with pytest.raises(RequestError, match="a stop string is empty"):
        Request("r", (1,), stop=("a", ""))
    assert Request("r", (1,), max_tokens=1, stop=("a",)).mode == Mode("chain")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_format": "int3"}, "unknown dtype 'int3'"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
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
    stats.record_step(proposed=3, accepted=1, committed=2)
    stats.record_step(proposed=5, accepted=5, committed=6)
    stats.record_step(proposed=0, accepted=0, committed=1)
    assert (stats.steps, stats.drafted, stats.accepted, stats.committed) == (3, 8, 6, 9)
    assert stats.verified_at == [2, 2, 2, 1, 1]
    assert stats.accepted_at == [2, 1, 1, 1, 1]
    assert stats.tau == 3.0 and stats.accept_rate == 0.75, "tau counts the bonus, the accept rate does not"


def test_nothing_measured_is_zero_not_an_error() -> None:
    stats = RequestStats()
    assert (stats.tau, stats.tau_novel, stats.accept_rate, stats.tokens_per_second) == (0.0, 0.0, 0.0, 0.0)
    assert stats.to_json()["accepted_per_position"] == []


def test_json_has_the_promised_names_and_values() -> None:
    stats = RequestStats(
        prompt_tokens=7, cached_tokens=4, completion_tokens=7, novel_steps=2, novel_committed=5, ttft_ms=1.23456,
        decode_ms=300.0, draft_ms=100.0, verify_ms=150.0, other_ms=50.0,
    )
    stats.record_step(3, 3, 4)
    stats.record_step(3, 1, 2)
    seen = stats.to_json()
    assert json.loads(json.dumps(seen)) == {
        "prompt_tokens": 7, "cached_tokens": 4, "completion_tokens": 7, "steps": 2, "drafted": 6, "accepted": 4,
        "tau": 3.0, "tau_novel": 2.5, "accept_rate": 0.6667, "accepted_per_position": [1.0, 0.5, 0.5],
        "ttft_ms": 1.235, "decode_ms": 300.0, "tokens_per_second": 20.0,
        "time_split_ms": {"draft": 100.0, "verify": 150.0, "other": 50.0},
    }


_STEPS = st.lists(st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=8)


@given(_STEPS, _STEPS)
def test_adding_two_requests_is_counting_their_steps_together(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    def counted(steps: list[tuple[int, int]]) -> RequestStats:
        stats = RequestStats(decode_ms=float(len(steps)), cached_tokens=len(steps), prompt_tokens=3)
        for proposed, accepted in steps:
            stats.record_step(proposed, accepted, accepted + 1)
        return stats

    total = counted(first)
    total.add(counted(second))
    expected = counted(first + second)
    expected.prompt_tokens = 6
    assert total == expected
    assert all(accepted <= verified for accepted, verified in zip(total.accepted_at, total.verified_at, strict=True))
