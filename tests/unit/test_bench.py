"""The bench: prompt files, interleaving, summing, and what it says about the result, on a stand-in engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slipstream.bench.measure import Plan, compare
from slipstream.bench.report import ratio_sentence
from slipstream.bench.workloads import BUILT_IN, read_prompts
from slipstream.errors import RequestError, SourceError
from slipstream.types import SamplingParams
from tests.fakes import STEP, FakeLLM

WARM_UPS = 2


def write(path: Path, *conversations: list[str]) -> str:
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in conversations), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("name", "count", "turns"), [("humaneval", 164, 1), ("gsm8k", 128, 1), ("mt-bench", 80, 2)])
def test_built_in_sets(name: str, count: int, turns: int) -> None:
    found = read_prompts(name)
    assert (len(found), {len(conversation) for conversation in found}) == (count, {turns})
    assert read_prompts(name, limit=3) == found[:3]


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


def test_sides_take_turns_at_going_first_without_the_prompt_cache() -> None:
    llm = FakeLLM("t")
    compare(llm, "t", [("a",), ("b",), ("c",)], Plan(max_tokens=20, temperature=0.5, seed=7))  # type: ignore[arg-type]
    measured = llm.requests[WARM_UPS:]
    assert [request["mode"] for request in measured] == ["plain", "chain", "chain", "plain", "plain", "chain"]
    assert all(request["cache_prompt"] is False for request in llm.requests)
    assert {(request["temperature"], request["seed"], request["max_tokens"]) for request in measured} == {(0.5, 7, 20)}


def test_all_turns_continue_with_the_plain_answer_on_both_sides(fake_engine: type[FakeLLM]) -> None:
    llm = FakeLLM("t")
    compare(llm, "t", [("a", "b")], Plan(all_turns=True))  # type: ignore[arg-type]
    plain, speculative = llm.requests[WARM_UPS + 2 :]
    assert plain["messages"] == speculative["messages"]
    assert [message["content"] for message in plain["messages"]] == ["a", "You said a, the 1th message.", "b"]


def test_the_sum_and_the_ratio() -> None:
    llm = FakeLLM("t")
    result = compare(llm, "t", [("a",), ("b",)], Plan())  # type: ignore[arg-type]
    # The fake's plain step takes 1 ms; a speculative one takes 2 ms and commits STEP tokens (fewer at the end).
    length = len("You said a, the 1th message.")
    steps = -(-(length - 1) // STEP)
    assert result.plain.stats.committed == result.speculative.stats.committed == 2 * (length - 1)
    assert result.speedup == pytest.approx((length - 1) / (2.0 * steps))
    assert result.speculative.stats.tau == pytest.approx((length - 1) / steps)
    assert result.plain.text_hash == result.speculative.text_hash
    assert (result.same, result.answers, result.near_ties) == (2, 2, 0)


def test_a_differing_text_is_explained_or_counted(
    fake_engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def explain_difference(*arguments: Any) -> SimpleNamespace:
        asked.append(arguments)
        return SimpleNamespace(is_near_tie=len(asked) == 1)

    module = ModuleType("slipstream.tools.near_tie")
    module.explain_difference = explain_difference  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.tools.near_tie", module)
    fake_engine.spoil = "!"
    result = compare(FakeLLM("t"), "t", [("a",), ("b",)], Plan())  # type: ignore[arg-type]
    assert (result.same, result.answers, result.near_ties) == (0, 2, 1)
    assert result.plain.text_hash != result.speculative.text_hash
    path, prompt_ids, plain, speculative, sampling, weight_format, exact = asked[0]
    assert exact is True
    assert (path, prompt_ids, sampling, weight_format) == (Path("t"), [ord("a")], SamplingParams(), "int4")
    assert [*plain, ord("!")] == speculative


def test_without_a_drafter_there_is_nothing_to_measure() -> None:
    with pytest.raises(RequestError, match="--draft"):
        compare(FakeLLM("t", None), "t", [("a",)], Plan())  # type: ignore[arg-type]


def test_the_ratio_sentence_is_honest(fake_engine: type[FakeLLM]) -> None:
    fake_engine.speculative_ms = 8.0
    slow = compare(FakeLLM("t"), "t", [("a",)], Plan())  # type: ignore[arg-type]
    assert "does not pay" in ratio_sentence(slow) and "costs 8.0 plain tokens" in ratio_sentence(slow)
    fake_engine.speculative_ms = 1.0
    fast = compare(FakeLLM("t"), "t", [("a",)], Plan())  # type: ignore[arg-type]
    assert "does not pay" not in ratio_sentence(fast)


def test_the_command_prints_json_and_a_table(cli: Any, fake_engine: type[FakeLLM], tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", ["a", "b"], ["c"], ["d"])
    done = cli("bench", "--prompts", prompts, "--limit", "2", "--turns", "all", "--max-tokens", "30", "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert result["identical"] == {"same": 3, "of": 3, "near_ties": 0}
    assert {"plain", "speculative", "speedup", "text_hash", "target", "draft", "describe"} <= set(result)
    assert result["speculative"]["drafted"] > 0 and result["plain"]["drafted"] == 0
    assert result["text_hash"]["plain"] == result["text_hash"]["speculative"]
    table = cli("bench", "--prompts", prompts).out
    for part in ("tok/s", "tau on novel text", "Accepted by position", "Byte floor", "All 3 texts are identical"):
        assert part in table


def test_built_in_names_are_files_of_the_package() -> None:
    folder = Path(__file__).parents[2] / "src" / "slipstream" / "data" / "prompts"
    assert {path.stem for path in folder.glob("*.jsonl")} == set(BUILT_IN)
