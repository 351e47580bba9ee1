"""The bench: prompt files, interleaving, summing, and what it says about the result, on a stand-in engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.bench.comparison_report import identity_sentence, ratio_sentence, source_sentence
from slipstream.bench.intervals import Sample, ratio, ratio_interval
from slipstream.bench.measure import BenchPlan, Comparison, ModeRun, Turn, compare, parse_modes
from slipstream.bench.workloads import BUILT_IN, read_prompts
from slipstream.cli.ui import bar_chart
from slipstream.errors import RequestError, SourceError
from slipstream.tools import near_tie
from slipstream.tools.near_tie import NearTie
from slipstream.types import SamplingParams
from tests.fakes import STEP, FakeLLM


def write(path: Path, *conversations: list[str]) -> str:
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in conversations), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("name", "count", "turns"), [("humaneval", 164, 1), ("gsm8k", 128, 1), ("mt-bench", 80, 2)])
def test_built_in_sets(name: str, count: int, turns: int) -> None:
    found = read_prompts(name)
    assert (len(found), {len(conversation) for conversation in found}) == (count, {turns})
    assert read_prompts(name, limit=3) == found[:3]


@pytest.mark.parametrize(
    ("name", "least", "turns", "words"), [("editing", 40, {1, 2, 3}, (20, 120)), ("prose", 24, {1}, (10, 40))]
)
def test_own_sets_hold_different_prompts_of_moderate_size(
    name: str, least: int, turns: set[int], words: tuple[int, int]
) -> None:
    found = read_prompts(name)
    assert len(found) >= least and {len(conversation) for conversation in found} == turns
    assert len({conversation[0] for conversation in found}) == len(found)
    lengths = [len(" ".join(conversation).split()) for conversation in found]
    assert words[0] <= min(lengths) and max(lengths) <= words[1]
    assert all(turn == turn.strip() != "" for conversation in found for turn in conversation)


def test_the_first_prompts_of_the_editing_set_hold_several_kinds() -> None:
    """A bench with a small limit must not see one kind only."""
    first = read_prompts("editing", limit=8)
    assert len({len(conversation) for conversation in first}) > 1
    assert 0 < sum("```" in conversation[0] for conversation in first) < len(first)


def test_prompt_files_may_hold_any_text(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, not in JSON lines.
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a\u2028b"]}\n\n{"turns": ["c", "d"]}', encoding="utf-8")
    assert read_prompts(str(path)) == [("a\u2028b",), ("c", "d")]


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hello\n", b"{}\n", b'{"turns": []}\n', b'{"turns": [1]}\n', b"[1]\n", b"\xff\xfe\n"]
)
def test_bad_prompt_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"p\.jsonl"):
        read_prompts(str(path))
    with pytest.raises(SourceError):
        read_prompts(str(tmp_path))


def test_modes_take_turns_at_going_first_without_the_prompt_cache() -> None:
    llm, modes = FakeLLM("t"), ("plain", "chain:8", "auto")
    compare(llm, "t", [("a",), ("b",), ("c",)], BenchPlan(20, False, 0.5, 7, modes))  # type: ignore[arg-type]
    warm_ups, measured = llm.requests[:3], llm.requests[3:]
    assert tuple(request["mode"] for request in warm_ups) == modes
    assert [request["mode"] for request in measured] == [
        "plain",
        "chain:8",
        "auto",
        "chain:8",
        "auto",
        "plain",
        "auto",
        "plain",
        "chain:8",
    ]
    assert all(request["cache_prompt"] is False for request in llm.requests)
    assert {(request["temperature"], request["seed"], request["max_tokens"]) for request in measured} == {(0.5, 7, 20)}


def test_plain_decoding_is_always_there_and_no_mode_twice() -> None:
    assert parse_modes("chain, tree:32,chain:08,chain") == ("plain", "chain", "tree:32", "chain:8")
    assert parse_modes("auto,plain") == ("plain", "auto")


def test_the_gate_and_the_confidence_reach_the_modes_they_are_for() -> None:
    llm = FakeLLM("t")
    plan = BenchPlan(modes=("plain", "chain", "tree:8", "auto"), gate="ema", min_confidence=0.5)
    compare(llm, "t", [("a",)], plan)  # type: ignore[arg-type]
    sent = {request["mode"]: (request.get("gate"), request.get("min_confidence")) for request in llm.requests}
    assert sent == {"plain": (None, None), "chain": ("ema", 0.5), "tree:8": ("ema", 0.5), "auto": (None, 0.5)}


def test_all_turns_continue_with_the_plain_answer_in_every_mode(fake_engine: type[FakeLLM]) -> None:
    fake_engine.spoil = "!"
    llm = FakeLLM("t")
    turns: list[Turn] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_tie, "explain_difference", lambda *arguments: NearTie(0, (1, 2), margin=1.0, tolerance=0.5))
        compare(llm, "t", [("a", "b")], BenchPlan(all_turns=True), turns.append)  # type: ignore[arg-type]
    plain, speculative = llm.requests[-2:]
    assert plain["messages"] == speculative["messages"]
    assert [message["content"] for message in plain["messages"]] == ["a", "You said a, the 1th message.", "b"]
    assert [(turn.question, turn.answers["auto"].text[-1]) for turn in turns] == [("a", "!"), ("b", "!")]


def test_the_sum_and_the_ratio() -> None:
    llm = FakeLLM("t")
    result = compare(llm, "t", [("a",), ("b",)], BenchPlan(modes=("plain", "chain")))  # type: ignore[arg-type]
    # The fake's plain step takes 1 ms; a speculative one takes 2 ms and commits STEP tokens (fewer at the end).
    length = len("You said a, the 1th message.")
    steps = -(-(length - 1) // STEP)
    plain, chain = result.modes["plain"], result.modes["chain"]
    assert plain.stats.committed == chain.stats.committed == 2 * (length - 1)
    speedup = result.speedup("chain")
    assert speedup is not None and speedup.value == pytest.approx((length - 1) / (2.0 * steps))
    assert chain.stats.tau == pytest.approx((length - 1) / steps)
    assert plain.text_hash == chain.text_hash
    assert (chain.same, result.answers, chain.near_ties) == (2, 2, 0)
    assert chain.samples == [(length - 1, 2.0 * steps)] * 2


def test_the_turns_of_a_conversation_are_one_sample() -> None:
    result = compare(FakeLLM("t"), "t", [("a", "b"), ("c",)], BenchPlan(all_turns=True))  # type: ignore[arg-type]
    assert result.answers == 3
    whole, single = result.plain.samples
    assert whole[0] == 2 * single[0] == 2 * result.plain.stats.committed / 3


def test_auto_is_held_against_the_best_fixed_mode(fake_engine: type[FakeLLM]) -> None:
    fake_engine.mode_ms = {"chain": 2.0, "tree:8": 1.0, "auto": 1.25}
    modes = ("plain", "chain", "tree:8", "auto")
    result = compare(FakeLLM("t"), "t", [("a",), ("bcd",)], BenchPlan(modes=modes))  # type: ignore[arg-type]
    against = result.auto_against_best()
    assert against is not None and (against.over, against.value) == ("tree:8", pytest.approx(0.8))
    assert against.interval == pytest.approx((0.8, 0.8)), "the same on every prompt"
    found = result.to_json()["modes"]
    assert found["auto"]["vs_best"] == {"mode": "tree:8", "ratio": 0.8, "interval": [0.8, 0.8]}  # type: ignore[index]
    assert "vs_best" not in found["chain"]  # type: ignore[index]
    fake_engine.mode_ms = {"chain": 9.0, "auto": 9.0}
    slow = compare(FakeLLM("t"), "t", [("a",)], BenchPlan(modes=("plain", "chain", "auto")))  # type: ignore[arg-type]
    assert slow.best_fixed() == "plain"


def test_the_interval_holds_the_ratio_and_shrinks_with_more_prompts() -> None:
    random = np.random.default_rng(3)

    def measured(count: int) -> tuple[list[Sample], list[Sample]]:
        plain = [(100, float(time)) for time in random.normal(100.0, 2.0, count)]
        fast = [(100, 100.0 / float(speed)) for speed in random.normal(1.5, 0.3, count)]
        return fast, plain

    few, many = measured(8), measured(400)
    widths = []
    for fast, plain in (few, many):
        value, interval = ratio(fast, plain), ratio_interval(fast, plain)
        assert value is not None and interval is not None and interval[0] < value < interval[1]
        assert interval == ratio_interval(fast, plain), "the same measurements, the same interval"
        widths.append(interval[1] - interval[0])
    # The spread of the mean falls with the root of the count: 50 times as many prompts, about a seventh.
    assert widths[1] < widths[0] / 3


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random, hits, rounds = np.random.default_rng(5), 0, 120
    for _ in range(rounds):
        plain = [(100, 100.0)] * 40
        fast = [(100, 100.0 / speed) for speed in random.uniform(1.0, 2.0, 40)]
        # The ratio of sums estimates 1 / E[1 / speed] = 1 / ln 2.
        low, high = ratio_interval(fast, plain) or (0.0, 0.0)
        hits += low < 1 / np.log(2) < high
    assert 0.86 * rounds < hits < rounds


def test_no_interval_and_no_ratio_where_there_is_nothing_to_tell() -> None:
    one = [(10, 5.0)]
    assert (ratio(one, one), ratio_interval(one, one)) == (1.0, None)
    assert ratio([(0, 0.0)], one) is None and ratio([], []) is None
    assert ratio_interval([(0, 0.0)] * 3, [(4, 2.0)] * 3) is None
    # A prompt that decoded nothing may be drawn alone; such draws say nothing and are left out.
    assert ratio_interval([(0, 0.0), (8, 2.0)], [(0, 0.0), (8, 4.0)]) == (2.0, 2.0)


def test_a_differing_text_is_explained_or_counted(fake_engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def explain_difference(*arguments: Any) -> SimpleNamespace:
        asked.append(arguments)
        return SimpleNamespace(is_near_tie=len(asked) == 1)

    module = ModuleType("slipstream.tools.near_tie")
    module.explain_difference = explain_difference  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.tools.near_tie", module)
    fake_engine.spoil = "!"
    result = compare(FakeLLM("t"), "t", [("a",), ("b",)], BenchPlan())  # type: ignore[arg-type]
    auto = result.modes["auto"]
    assert (auto.same, result.answers, auto.near_ties) == (0, 2, 1)
    assert (result.plain.same, result.plain.near_ties) == (2, 0)
    assert result.plain.text_hash != auto.text_hash
    assert identity_sentence(result).startswith("0 of 2 texts") and "1 differ without a near-tie" in (
        identity_sentence(result)
    )
    path, prompt_ids, plain, speculative, sampling, weight_format, exact = asked[0]
    assert exact is True
    assert (path, prompt_ids, sampling, weight_format) == (Path("t"), [ord("a")], SamplingParams(), "int4")
    assert [*plain, ord("!")] == speculative


def test_without_a_drafter_there_is_nothing_to_measure() -> None:
    with pytest.raises(RequestError, match="--draft"):
        compare(FakeLLM("t", None), "t", [("a",)], BenchPlan())  # type: ignore[arg-type]


def test_the_report_says_where_accepted_tokens_came_from() -> None:
    result = Comparison({"plain": ModeRun(), "auto": ModeRun()})
    result.modes["auto"].stats.record_step(4, 4, 3, 4)
    assert source_sentence(result) == "", "all came from the drafter"
    result.modes["auto"].stats.record_step(6, 4, 4, 5, drafter_depth=2, drafter_accepted=1)
    said = "Mode auto kept 7 drafted tokens: 4 from the drafter, 3 from the text itself."
    assert source_sentence(result) == said
    assert source_sentence(Comparison({"plain": ModeRun(), "chain": ModeRun()})) == ""


def test_the_ratio_sentence_is_honest(fake_engine: type[FakeLLM]) -> None:
    fake_engine.speculative_ms = 8.0
    slow = compare(FakeLLM("t"), "t", [("a",)], BenchPlan())  # type: ignore[arg-type]
    assert "does not pay" in ratio_sentence(slow) and "costs 8.0 plain tokens" in ratio_sentence(slow)
    fake_engine.speculative_ms = 1.0
    fast = compare(FakeLLM("t"), "t", [("a",)], BenchPlan())  # type: ignore[arg-type]
    assert "does not pay" not in ratio_sentence(fast)


def test_the_command_prints_json_and_a_table(cli: Any, fake_engine: type[FakeLLM], tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", ["a", "b"], ["c"], ["d"])
    done = cli("bench", "--prompts", prompts, "--limit", "2", "--turns", "all", "--max-tokens", "30", "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert {"target", "draft", "modes", "describe"} <= set(result)
    assert not {"plain", "speculative", "speedup", "identical", "text_hash", "mode"} & set(result)
    plain, auto = result["modes"]["plain"], result["modes"]["auto"]
    assert auto["identical"] == {"same": 3, "of": 3, "near_ties": 0}
    assert auto["drafted"] > 0 and plain["drafted"] == 0 and plain["speedup"] == 1.0
    low, high = auto["speedup_interval"]
    assert low <= auto["speedup"] <= high and auto["vs_best"]["mode"] == "plain"
    assert plain["text_hash"] == auto["text_hash"]
    done = cli("bench", "--prompts", prompts, "--modes", "chain,tree:64:seed,auto")
    for part in ("tok/s", "novel", "Accepted by position", "Byte floor", "All 3 texts are identical", "3/3"):
        assert part in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines() if line[0] in "┏┃┡│└")
    assert "Mode auto chose chain:16 in 21 of 21 steps." in done.out and "in all 3 modes" in done.out
    assert [line.split()[0] for line in done.out.splitlines() if "█" in line and "x" in line] == [
        "plain",
        "chain",
        "tree:64:seed",
        "auto",
    ]


def test_the_bars_are_as_long_as_the_numbers_say() -> None:
    half, whole = bar_chart([("a", 1.0, "1x"), ("long", 2.0, "2x")])
    assert whole == f"long {'█' * 40} 2x"
    assert half == f"a    {'█' * 20}{' ' * 20} 1x"
    assert bar_chart([("a", 80.0, ""), ("b", 1.0, "")])[1].split() == ["b", "▌"]


def test_the_trace_holds_every_step_of_every_mode(cli: Any, fake_engine: type[FakeLLM], tmp_path: Path) -> None:
    prompts, trace = write(tmp_path / "p.jsonl", ["a"], ["c"]), tmp_path / "t.jsonl"
    done = cli("bench", "--prompts", prompts, "--modes", "chain,auto", "--trace", str(trace), "--json")
    modes = json.loads(done.out)["modes"]
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {mode: sum(line["mode"] == mode for line in lines) for mode in modes} == {
        mode: numbers["steps"] for mode, numbers in modes.items()
    }
    assert len({line["request"] for line in lines}) == 6


@pytest.mark.parametrize(("name", "magic"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_the_plot_is_a_picture_that_shows_the_modes(
    cli: Any, fake_engine: type[FakeLLM], tmp_path: Path, name: str, magic: bytes
) -> None:
    prompts, file = write(tmp_path / "p.jsonl", ["a"], ["bcd"]), tmp_path / name
    done = cli("bench", "--prompts", prompts, "--modes", "chain,tree:32,auto", "--plot", str(file), "--json")
    assert done.code == 0, done.err
    picture = file.read_bytes()
    assert picture.startswith(magic)
    if name.endswith("svg"):
        # matplotlib draws text as outlines and keeps the words as comments
        assert all(f"<!-- {mode} -->".encode() in picture for mode in ("plain", "chain", "tree:32", "auto"))


def test_built_in_names_are_files_of_the_package() -> None:
    folder = Path(__file__).parents[2] / "src" / "slipstream" / "data" / "prompts"
    assert {path.stem for path in folder.glob("*.jsonl")} == set(BUILT_IN)
