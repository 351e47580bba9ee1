"""Holding ourselves against llama.cpp: the arithmetic and the report on given timings, and the real thing if there."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench import floors, rival
from slipstream.bench.comparison_report import (
    RACE_HEADS,
    built_for,
    cost_rows,
    idle_sentence,
    prefill_sentence,
    race_rows,
    race_sentences,
)
from slipstream.bench.measure import BenchPlan, ModeRun
from slipstream.bench.rival_race import PrefillRace, Race, Watch, race, race_prefill
from slipstream.errors import RequestError, SlipstreamError
from slipstream.stats import RequestStats
from tests.checks_cpu import Bar, bars_of, judge, judge_rows, judge_watch
from tests.fakes import FakeLLM

TIMINGS = {"cache_n": 0, "prompt_n": 16, "prompt_ms": 40.0, "predicted_n": 65, "predicted_ms": 400.0}


def side(costs: list[float], steps: int = 0) -> ModeRun:
    """A side that wrote ten tokens for each prompt, in so many milliseconds."""
    run = ModeRun()
    for prompt, ms in enumerate(costs):
        run.add(prompt, RequestStats(committed=10, decode_ms=ms, steps=steps), [1])
    return run


def sample_race(auto_ms: float = 50.0) -> Race:
    sides = {"plain": side([100.0, 80.0, 125.0], 10), "auto": side([auto_ms] * 3, 4), rival.NAME: side([200.0] * 3)}
    return Race(sides, answers=3, same=3)


def test_the_first_token_belongs_to_the_prompt() -> None:
    answer = rival.stats_of(TIMINGS)
    assert (answer.committed, answer.tokens_per_second) == (64, 160.0)
    with pytest.raises(SlipstreamError, match="prompt cache"):
        rival.stats_of({**TIMINGS, "cache_n": 3})


def test_requests_ask_for_the_same_work() -> None:
    greedy, sampled = (rival.completion_body((1, 2, 3), 9, temperature, 5) for temperature in (0.0, 0.8))
    for body in (greedy, sampled):
        assert body["prompt"] == [1, 2, 3] and body["n_predict"] == 9 and body["seed"] == 5
        assert body["ignore_eos"] is True and body["cache_prompt"] is False
    assert (greedy["samplers"], greedy["top_k"]) == (["top_k"], 1)
    assert (sampled["samplers"], sampled["temperature"]) == (["temperature"], 0.8)


def test_medians_and_ratios() -> None:
    result = sample_race()
    assert [result.median_speed(side) for side in result.modes] == [100.0, 200.0, 50.0]
    found = {(side, ratio.over): ratio for side, ratio in result.ratios()}
    assert set(found) == {("plain", rival.NAME), ("auto", rival.NAME), ("auto", "plain")}
    assert found["auto", rival.NAME].value == pytest.approx(4.0)
    assert found["plain", rival.NAME].value == pytest.approx(600 / 305)
    interval = found["plain", rival.NAME].interval
    assert interval is not None and interval[0] < 600 / 305 < interval[1]
    seen = json.loads(json.dumps(result.to_json()))
    assert seen["sides"]["plain"] == {"median_tokens_per_second": 100.0, "tokens": 30, "decode_ms": 305.0}
    assert seen["same_texts"] == {"same": 3, "of": 3} and len(seen["ratios"]) == 3
    assert seen["ratios"][2].pop("interval")
    assert seen["ratios"][2] == {"side": "auto", "over": "plain", "ratio": 2.0333}


def test_what_the_report_says() -> None:
    rows = race_rows(sample_race())
    assert [row[0] for row in rows] == ["plain", "auto", rival.NAME] and {len(row) for row in rows} == {len(RACE_HEADS)}
    assert rows[1][1:] == ("200.0", "4.00x", rows[1][3], "2.50") and rows[1][3].startswith("2.03x")
    assert rows[0][3] == "" and rows[2][1:] == ("50.0", "", "", "")
    prefill = PrefillRace(512, [1000.0, 500.0, 1000.0], [2000.0] * 3)
    assert prefill.against.value == pytest.approx(2.0)
    said = race_sentences(sample_race(), prefill, {"version": "b7", "system": "x"}, {"threads": 2})
    assert said[1:] == [
        "llama.cpp is b7 (x) on 2 threads.",
        "All 3 texts are identical with and without speculation.",
        "",
    ]
    assert "512 tok/s against llama.cpp's 256, 2.00x" in prefill_sentence(prefill)
    assert built_for("CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | REPACK = 1 | ") == "built for SSE3, AVX2, REPACK"
    assert built_for("as llama-server was built") == "as llama-server was built"


def test_row_costs_beside_their_floors() -> None:
    steps = {1: 4.0, 2: 5.0, 16: 8.0, 3: 1.0}
    costs = floors.row_costs(steps, weight_bytes=90e6, bandwidth=30e9, products=134e6, peak=1.34e12)
    assert [cost.rows for cost in costs] == [1, 2, 16]
    assert [cost.of_one for cost in costs] == [1.0, 1.25, 2.0]
    assert [cost.byte_floor_ms for cost in costs] == pytest.approx([3.0] * 3)
    assert [cost.product_floor_ms for cost in costs] == pytest.approx([0.1, 0.2, 1.6])
    wide = floors.row_costs({1: 4.0, 64: 20.0}, 90e6, 30e9, 134e6, 1.34e12)[1]
    assert wide.floor_ms == pytest.approx(6.4) and wide.to_json()["floor_share"] == pytest.approx(0.32)
    unknown = floors.row_costs(steps, 90e6, 30e9)
    assert {cost.product_floor_ms for cost in unknown} == {None} and cost_rows(unknown)[0][-1] == "-"


def test_bars_pass_and_fail() -> None:
    assert Bar("a", 1.0, 1.0, "").ok and not Bar("a", 0.999, 1.0, "").ok
    assert Bar("a", 3.0, 3.0, "", at_most=True).ok and not Bar("a", 3.1, 3.0, "", at_most=True).ok
    fast = judge(sample_race(), "humaneval", 0.0, 10)
    assert [bar.ok for bar in fast] == [True, True, True] and [bar.bar for bar in fast] == [1.0, 1.5, 2.0]
    slow = judge(sample_race(auto_ms=110.0), "gsm8k", 0.0, 10)
    assert [bar.ok for bar in slow] == [True, False, False]
    assert bars_of("mt-bench", 0.0)[1:] == bars_of("gsm8k", 0.8) == [("auto", "plain", 0.97)]
    costs = floors.row_costs({1: 4.0, 16: 10.0}, 90e6, 30e9)
    assert judge_rows(costs, amx=False).ok and not judge_rows(costs, amx=True).ok


class FixedRival(rival.Rival):
    """Answers with given timings, without a process."""

    def __init__(self, ms_per_token: float) -> None:
        self.ms, self.asked = ms_per_token, list[dict[str, Any]]()

    def ask(self, body: Any) -> Any:
        self.asked.append(body)
        count, length = body["n_predict"], len(body["prompt"])
        return {
            "timings": {
                "prompt_n": length,
                "prompt_ms": 2.0 * length,
                "predicted_n": count,
                "predicted_ms": self.ms * (count - 1),
            }
        }

    def await_start(self) -> None: ...

    def cpu_seconds(self) -> float:
        return 0.0


ANSWER_TOKENS = 12  # of an answer that may end


class RunnableFake(FakeLLM):
    """The stand-in engine with the part of its API that runs prepared requests."""

    def prompt_ids(self, messages: Any, *, chat: bool = False) -> list[int]:
        return [ord(letter) for letter in messages]

    def request(self, ids: Any, **settings: Any) -> Any:
        ends = settings["max_tokens"] if settings["ignore_eos"] else min(settings["max_tokens"], ANSWER_TOKENS)
        return ("".join(map(chr, ids)), settings | {"max_tokens": ends})

    def run(self, requests: Any) -> Any:
        return [self.complete([{"role": "user", "content": text}], settings) for text, settings in requests]


def test_sides_take_turns_and_get_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.bench.rival_race.SETTLE_SECONDS", 0.0)
    llm, opponent = RunnableFake("t"), FixedRival(4.0)
    result = race(llm, opponent, [("a",), ("b",), ("c",)], BenchPlan(max_tokens=20, seed=3))  # type: ignore[arg-type]
    timed, looked = ([each for each in llm.requests[2:] if each["ignore_eos"] is timed] for timed in (True, False))
    assert [request["mode"] for request in looked] == ["plain"] * 3
    assert [request["mode"] for request in timed] == ["plain", "auto", "auto", "plain", "plain", "auto"]
    assert {request["max_tokens"] for request in timed} == {ANSWER_TOKENS}  # not what comes after an answer's end
    assert not any(request["cache_prompt"] for request in llm.requests)
    assert [body["prompt"] for body in opponent.asked[1:]] == [[ord(letter)] for letter in "abc"]
    assert result.modes[rival.NAME].samples == [(11, 44.0)] * 3 and result.median_speed(rival.NAME) == 250.0
    assert result.median_speed("plain") == 1000.0 and result.same == 3
    assert result.tau("auto") == pytest.approx(11 / 3)


def test_prefill_counts_only_whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.bench.rival_race.SETTLE_SECONDS", 0.0)
    result = race_prefill(RunnableFake("t"), FixedRival(1.0), tokens=100, rounds=2)  # type: ignore[arg-type]
    assert (result.ours_ms, result.rival_ms) == ([5.0, 5.0], [200.0, 200.0])
    assert result.against.value == pytest.approx(40.0)
    opponent = FixedRival(1.0)
    ask = opponent.ask
    monkeypatch.setattr(opponent, "ask", lambda body: ask({**body, "prompt": body["prompt"][1:]}))
    with pytest.raises(SlipstreamError, match="99 prompt tokens of 100"):
        race_prefill(RunnableFake("t"), opponent, tokens=100, rounds=1)  # type: ignore[arg-type]


def test_the_watch_sees_who_works_in_whose_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.bench.rival_race.SETTLE_SECONDS", 0.0)
    watch = Watch(FixedRival(1.0))
    with watch.turn(rival.NAME):
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
    with watch.turn("ours"):
        time.sleep(0.02)
    # in seconds, not as a share of the turn: on a busy machine the loop waits for its core
    assert watch.stolen_s["ours"] >= 0.08 and watch.stolen_s[rival.NAME] == 0.0
    watch.turns_s[rival.NAME], watch.stolen_s["ours"] = 0.4, 0.1
    watch.turns_s["ours"], watch.others_s = 0.1, 0.05
    assert watch.to_json() == {"ours": 0.25, rival.NAME: 0.0, "others": 0.1} and judge_watch(watch)[1] is False
    watch.stolen_s["ours"] = 0.004
    assert judge_watch(watch)[1] and "trust" not in idle_sentence(Race({}, watch=watch))
    watch.others_s = 0.06
    assert not judge_watch(watch)[1] and "0.12 cores busy, so these speeds mean little" in idle_sentence(
        Race({}, watch=watch)
    )
    assert rival.process_seconds(os.getpid()) > 0.1
    assert rival.machine_seconds() >= rival.process_seconds(os.getpid())


def test_what_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"\.gguf"):
        rival.start(tmp_path, 1, 64)
    model = tmp_path / "m.gguf"
    model.touch()
    with pytest.raises(RequestError, match="there is no program"):
        rival.start(model, 1, 64, "no-such-program")
    monkeypatch.setattr(rival, "available", lambda: False)
    with pytest.raises(RequestError, match="pip install"):
        rival.start(model, 1, 64)


def test_a_program_that_ends_at_once_is_reported(tmp_path: Path) -> None:
    model, program = tmp_path / "m.gguf", tmp_path / "llama-server"
    model.touch()
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(SlipstreamError, match="ended unexpectedly"):
        rival.start(model, 1, 64, str(program))


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["--threads"] == options["--threads-batch"] == "3" and options["--parallel"] == "1"


class Handler(BaseHTTPRequestHandler):
    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({{"status": "ok"}} if self.path == "/health" else {{"build_info": "b7"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(asked["prompt"]) > int(options["--ctx-size"]):
            return self.answer({{"error": "too long"}}, 400)
        self.answer({{"timings": {{"prompt_n": len(asked["prompt"]), "prompt_ms": 4.0, "cache_n": 0,
                                 "predicted_n": asked["n_predict"], "predicted_ms": 10.0}}}})


HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def test_a_server_is_asked_over_http(tmp_path: Path) -> None:
    model, program = tmp_path / "m.gguf", tmp_path / "llama-server"
    model.touch()
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    with rival.start(model, 3, 64, str(program)) as opponent:
        assert opponent.describe() == {"name": "llama.cpp", "version": "b7", "system": "as llama-server was built"}
        answer = opponent.complete(range(40), 11)
        assert (answer.prompt_tokens, answer.ttft_ms, answer.committed, answer.decode_ms) == (40, 4.0, 10, 10.0)
        with pytest.raises(SlipstreamError, match="too long"):
            opponent.complete(range(65), 11)
        process = opponent.process
    assert process.poll() is not None


@pytest.mark.parametrize("option", [("--turns", "all"), ("--plot", "p.png"), ("--trace", "t.jsonl")])
def test_options_that_do_not_go_with_a_rival(cli: Any, option: tuple[str, str]) -> None:
    done = cli("bench", "--prompts", "gsm8k", "--rival", "xllamacpp", *option)
    assert done.code == 2 and option[0] in done.err and "--rival" in done.err


def test_the_demo_says_how_to_get_the_comparison(
    cli: Any, fake_engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rival, "available", lambda: False)
    assert cli("demo", "--max-tokens", "16").out.rstrip().endswith(f"To compare with llama.cpp: {rival.HOW_TO_GET}")
    assert json.loads(cli("demo", "--max-tokens", "16", "--json").out)["llama_cpp"] is None


def test_llama_cpp_itself() -> None:
    """Its figures are of the size its own clock and ours say, it forgets prompts, and it sleeps between requests."""
    if not rival.available():
        pytest.skip("xllamacpp is not installed")
    from slipstream.formats.sources import resolve

    model = resolve("smollm2").path
    with rival.start(model, 1, 256) as opponent:
        assert opponent.version.startswith(rival.PACKAGE) and "=" in opponent.system
        began = time.perf_counter()
        answers = [opponent.complete(range(300, 364), 24) for _ in range(2)]
        wall_ms = 1000 * (time.perf_counter() - began)
        for answer in answers:
            assert (answer.prompt_tokens, answer.committed) == (64, 23)
        timed = sum(answer.ttft_ms + answer.decode_ms for answer in answers)
        assert 0.05 * wall_ms < timed < 1.05 * wall_ms  # a wrong unit is off by 1,000
        assert opponent.complete(range(300, 310), 8, temperature=0.8, seed=3).committed == 7
        time.sleep(rival.SETTLE_SECONDS)
        used = opponent.cpu_seconds()
        time.sleep(0.5)
        assert not opponent.cpu_seconds() - used > 0.02  # NaN where the system does not tell
        with pytest.raises(SlipstreamError, match="failed"):
            opponent.complete(range(300, 900), 8)


def test_a_broken_model_is_reported(tmp_path: Path) -> None:
    if not rival.available():
        pytest.skip("xllamacpp is not installed")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SlipstreamError, match="did not start|ended unexpectedly"):
        rival.start(broken, 1, 64)
