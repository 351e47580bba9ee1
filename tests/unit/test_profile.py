"""The profile of decoding steps: the clock, what it clocks in a real engine, and how the result is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.profiled_modes import Profiled, launch_rows, launch_title, phase_rows, sentences
from slipstream.cache.sequence import SequenceState
from slipstream.engine import profiler as engine_profile
from slipstream.engine.llm import LLM
from slipstream.engine.profiler import PHASES, DeviceProfile, PhaseClock, StepProfile, read_bytes
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.draft import BlockDrafter
from tests.tiny import prompt, tiny_llm, write_pair

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}a:"


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the clock by one that advances one second whenever it is read."""
    counted = iter(range(1000))
    monkeypatch.setattr(engine_profile.time, "perf_counter", lambda: float(next(counted)))
    yield


def test_a_phase_inside_another_takes_over(ticks: None) -> None:
    clock = PhaseClock()
    inner = clock.timed("heads", lambda: None)
    outer = clock.timed("draft", inner)
    clock.start()
    outer()
    inner()
    # between two looks one second passes: host, draft, heads, draft, host, heads, host
    assert clock.stop() == {"host": 3.0, "draft": 2.0, "heads": 2.0}


def test_a_phase_that_fails_ends(ticks: None) -> None:
    clock = PhaseClock()

    def fail() -> None:
        raise ValueError

    clock.start()
    with pytest.raises(ValueError):
        clock.timed("verify", fail)()
    assert clock.stop() == {"host": 2.0, "verify": 1.0}


@pytest.mark.parametrize("mode", ["plain", "chain", "tree:16"])
def test_real_steps_are_split_into_phases(threads: None, llm: LLM, mode: str) -> None:
    settings = {"max_tokens": 40, "mode": mode, "cache_prompt": False}
    expected = llm.run([llm.request(prompt(70, 3), **settings)])[0]
    methods = BlockDrafts.grow, SequenceState.commit, BlockDrafter.draft
    profiler = llm.profiler()
    began = time.perf_counter()
    with profiler:
        found = llm.run([llm.request(prompt(70, 3), **settings)])[0]
    wall_ms = 1e3 * (time.perf_counter() - began)
    assert found.token_ids == expected.token_ids
    profiles = profiler.profiles()
    assert sum(profile.steps for profile in profiles.values()) == found.stats.steps
    for profile in profiles.values():
        assert sum(profile.phases_ms.values()) == pytest.approx(profile.step_ms)
        assert 0 < profile.step_ms * (profile.steps - 2 * (profile.steps // 4)) < wall_ms
        assert min(profile.phases_ms[name] for name in ("verify", "accept", "host")) > 0
        assert 69 < profile.context < 110
    drafting = profiles.get("drafting")
    assert (drafting is None) == (mode == "plain")
    if drafting is not None:
        assert min(drafting.phases_ms[name] for name in ("draft", "tree", "context write")) > 0
    if mode == "tree:16":
        assert drafting is not None and drafting.rows > 8
    if "plain" in profiles:
        assert profiles["plain"].phases_ms["draft"] == 0 and profiles["plain"].rows == 1
    assert (BlockDrafts.grow, SequenceState.commit, BlockDrafter.draft) == methods, "the engine stays wrapped"
    assert not {"step", "_sample", "_choose"} & (vars(llm.engine).keys() | vars(llm.engine.proposer).keys())


def test_answers_add_up_and_nothing_is_clocked_in_between(threads: None, llm: LLM) -> None:
    profiler, steps = llm.profiler(), 0
    for seed in (1, 2):
        request = llm.request(prompt(20, seed), max_tokens=12, mode="chain", cache_prompt=False)
        with profiler:
            steps += llm.run([request])[0].stats.steps
        llm.run([llm.request(prompt(20, seed), max_tokens=12, mode="plain", cache_prompt=False)])
    assert sum(profile.steps for profile in profiler.profiles().values()) == steps


def test_slow_and_quick_steps_do_not_count(threads: None, llm: LLM) -> None:
    profiler = llm.profiler()
    seconds = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0, 0.0]
    for second in seconds:
        profiler.add("plain", engine_profile.ClockedStep({"verify": second, "host": second}, 1, 10))
    profile = profiler.profiles()["plain"]
    assert (profile.steps, profile.step_ms, profile.phases_ms["verify"]) == (8, 7000.0, 3500.0)


def test_a_step_reads_every_weight_and_what_its_rows_see(threads: None, llm: LLM) -> None:
    executor = llm.engine.executor
    target, drafter = executor.target, executor.variants.drafter
    assert drafter is not None
    token = 2 * 2 * 8 * 4  # keys and values, two heads of eight numbers in fp32
    assert read_bytes(target, None, 0, 4) == target.step_bytes
    assert read_bytes(target, None, 100, 4) == target.step_bytes + 2 * 100 * token
    drafted = read_bytes(target, drafter, 100, 4) - read_bytes(target, None, 100, 4)
    # one draft layer sees 48 tokens back, the other all of them
    assert drafted == drafter.drafter.step_bytes + target.draft_head.nbytes + (48 + 100) * token


def profile(step_ms: float, steps: int = 90, device: DeviceProfile | None = None) -> StepProfile:
    phases = dict.fromkeys(PHASES, 0.0) | {"verify": 0.75 * step_ms, "host": 0.25 * step_ms}
    return StepProfile(steps, 16.0, 128.0, step_ms, phases, 2e6, device)


def told(modes: dict[str, dict[str, StepProfile]]) -> Profiled:
    return Profiled(modes, {"bandwidth_gbs": 4.0, "draft": "d"}, 3)


def test_the_table_holds_phases_and_the_floor() -> None:
    result = told({"plain": {"plain": profile(2.0)}, "auto": {"drafting": profile(20.0), "plain": profile(4.0, 45)}})
    assert list(result.columns) == ["plain", "auto, drafting", "auto, plain"]
    rows = {row[0]: row[1:] for row in phase_rows(result)}
    assert rows["verify"] == ("1.500 75%", "15.00 75%", "3.000 75%")
    assert rows["whole step"] == ("2.000 100%", "20.00 100%", "4.000 100%")
    # two million bytes at four billion a second
    assert rows["floor"] == ("0.500 25%", "0.500 2%", "0.500 12%")
    assert rows["GB/s"] == ("1.0", "0.1", "0.5")
    assert "draft" not in rows and "device busy" not in rows
    assert launch_rows(result) == [] and len(sentences(result)) == 1
    found: Any = json.loads(json.dumps(result.to_json()))
    plain = found["modes"]["plain"]["plain"]
    assert (plain["achieved_gbs"], plain["floor_share"], plain["device"]) == (1.0, 0.25, None)


def test_a_kind_of_step_that_hardly_occurs_has_no_column() -> None:
    result = told({"chain": {"drafting": profile(2.0, 90), "plain": profile(1.0, 4)}})
    assert list(result.columns) == ["chain"]
    modes: Any = result.to_json()["modes"]
    assert modes["chain"]["plain"]["steps"] == 4


def test_a_device_tells_launches_and_where_it_was_replayed() -> None:
    device = DeviceProfile(1.5, 256, {"draft": 40, "verify": 300}, "kernels")
    result = told({"plain": {"plain": profile(2.0)}, "chain": {"drafting": profile(2.0, device=device)}})
    assert launch_rows(result) == [("draft", "-", "40"), ("verify", "-", "300"), ("whole step", "-", "340")]
    assert launch_title(result).startswith("Kernels ")
    assert ("device busy", "", "1.500 75%") in phase_rows(result)
    assert "context of 256 tokens" in sentences(result)[1]
    blind = DeviceProfile(1.5, 256, {}, "kernels")
    assert "no kernels" in sentences(told({"plain": {"plain": profile(2.0, device=blind)}}))[-1]


def test_the_command_profiles_a_pair(threads: None, tmp_path: Path, cli: Any) -> None:
    target, draft = write_pair(tmp_path)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"turns": ["hello", "and now?"]}) + "\n")
    arguments = (
        "bench",
        "--profile",
        "--target",
        str(target),
        "--draft",
        str(draft),
        "--prompts",
        str(prompts),
        "--turns",
        "all",
        "--max-tokens",
        "12",
        "--modes",
        "chain",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--threads",
        "1",
    )
    shown = cli(*arguments)
    assert shown.code == 0, shown.err
    assert all(word in shown.out for word in ("verify", "context write", "whole step", "chain", "GB/s measured"))
    found = json.loads(cli(*arguments, "--json").out)
    assert found["answers"] == 2 and set(found["modes"]) == {"plain", "chain"}
    assert found["modes"]["chain"]["drafting"]["phases_ms"]["draft"] > 0
    assert 0 < found["modes"]["plain"]["plain"]["floor_share"] < 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rival", "xllamacpp"], "--rival does not go with --profile"),
        (["--trace", "t.jsonl"], "--trace does not go with --profile"),
        (["--plot", "t.png"], "--plot does not go with --profile"),
        (["--sweep", "draft=q8_0"], "--profile does not go with --sweep"),
    ],
)
def test_what_does_not_go_with_a_profile_is_refused(cli: Any, arguments: list[str], said: str) -> None:
    done = cli("bench", "--profile", "--prompts", "gsm8k", *arguments)
    assert (done.code, done.out) == (2, "") and said in done.err


def test_a_target_that_nothing_drafts_for_is_refused(threads: None, folder: Path) -> None:
    from slipstream.bench.measure import BenchPlan
    from slipstream.bench.profiled_modes import profile_modes
    from slipstream.errors import RequestError

    with pytest.raises(RequestError, match="without drafts"):
        profile_modes(tiny_llm(folder, draft=False), [("a",)], BenchPlan())
