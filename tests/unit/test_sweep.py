"""Comparing preparations of one pair: what is asked, what is made, what is kept, and what a difference is worth."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.bench.intervals import Sample, ratio, ratio_interval
from slipstream.bench.measure import BenchPlan, Comparison, ModeRun, Ratio
from slipstream.bench.pair_sweep import ALL_SETS, Column, LoadedPair, Sweep, run_sweep
from slipstream.bench.sweep_columns import QuantFiles, parse_sweep, split_adapters
from slipstream.bench.sweep_report import Rows, SweepFolder, markdown, tables
from slipstream.config import EngineConfig
from slipstream.errors import RequestError, SlipstreamError
from slipstream.tools.conversion import convert
from tests.fakes import FakeLLM
from tests.tiny import write_pair

PLAN = BenchPlan(24, modes=("plain", "chain", "auto"))
SETS = {"one": [(letter,) for letter in "abcde"], "two": [("longer",)] * 5}


# ---- differences


def samples(values: Sequence[float]) -> list[Sample]:
    return [(100, 100 / value) for value in values]


def test_a_difference_is_real_only_beyond_what_the_prompts_vary() -> None:
    random = np.random.default_rng(1)
    easy = random.uniform(2.0, 6.0, 40)  # prompts differ far more than the columns do
    mine = [samples(easy * random.normal(factor, 0.02, 40)) for factor in (1.0, 1.0, 0.95)]
    reference, same, worse = mine
    assert Ratio("r", 1.0, ratio_interval(same, reference)).verdict == "within noise"
    assert Ratio("r", 0.95, ratio_interval(worse, reference)).verdict == "real"
    assert Ratio("r", 0.95, None).verdict == "too few prompts"
    # were the prompts not paired, such a difference would drown
    shuffled = [worse[place] for place in random.permutation(40)]
    assert Ratio("r", 0.95, ratio_interval(shuffled, reference)).verdict == "within noise"


def test_a_ratio_of_ratios_cancels_what_both_sides_of_it_share() -> None:
    fast, plain = samples([3.0] * 6), samples([2.0] * 6)
    slower_machine = [(tokens, 1.7 * cost) for tokens, cost in fast], [(tokens, 1.7 * cost) for tokens, cost in plain]
    assert ratio(fast, plain, *slower_machine) == pytest.approx(1.0)
    assert ratio_interval(fast, plain, *slower_machine) == pytest.approx((1.0, 1.0))
    assert ratio(samples([6.0] * 6), plain, fast, plain) == pytest.approx(2.0)


# ---- measuring


def column(name: str, llm: FakeLLM, variant: str | None = None) -> Column:
    return Column(name, lambda: nullcontext((llm, {})), variant)  # type: ignore[arg-type]


def test_every_column_answers_every_prompt_in_every_run_with_its_own_variant() -> None:
    llm = FakeLLM("t")
    result = run_sweep([column("a", llm, "first"), column("b", llm, "second")], SETS, PLAN, runs=2)
    asked = [(request.get("draft_lora"), request["mode"], request["seed"]) for request in llm.requests]
    for variant in ("first", "second"):
        for mode in ("chain", "auto"):
            seeds = [seed for name, how, seed in asked if (name, how) == (variant, mode)]
            assert (seeds.count(0), seeds.count(1)) == (12, 12), "ten answers and a warm-up for each set"
    assert {name for name, mode, _ in asked if mode == "plain"} == {None}
    cell = result.cell(result.columns[0], ALL_SETS)
    assert result.complete and cell is not None
    assert (cell.prompts, cell.answers, cell.same_or_near) == (10, 20, 20)
    assert cell.tau == pytest.approx(23 / 6)


def test_the_first_mode_gives_tau_and_the_last_the_speed(fake_engine: type[FakeLLM]) -> None:
    fake_engine.mode_ms = {"chain": 50.0, "auto": 0.5}
    result = run_sweep([column("a", FakeLLM("t"))], SETS, PLAN, runs=1)
    cell = result.cell(result.columns[0], "one")
    assert cell is not None and cell.speedup is not None
    assert cell.speedup.value == pytest.approx(23 / (6 * 0.5)) and cell.tau == pytest.approx(23 / 6)


def test_a_column_that_cannot_be_had_is_a_row_and_the_others_go_on() -> None:
    @contextmanager
    def impossible() -> Iterator[LoadedPair]:
        raise SlipstreamError("it needs 9 MiB and 1 MiB are free")
        yield  # pragma: no cover

    columns = [column("a", FakeLLM("t")), Column("b", impossible), column("c", FakeLLM("t"))]
    result = run_sweep(columns, SETS, PLAN, runs=1)
    assert [(found.name, bool(found.seen)) for found in result.columns] == [("a", True), ("b", False), ("c", True)]
    assert "b was not measured: it needs 9 MiB" in markdown(result, "t")
    assert {row[1] for row in tau_rows(result)} == {"a", "c"}


def swept(**taus: list[float]) -> Sweep:
    columns = [Column(name, nullcontext) for name in taus]  # type: ignore[arg-type]
    for column, values in zip(columns, taus.values(), strict=True):
        plain, fast = ModeRun(samples=samples([1.0] * len(values))), ModeRun(samples=samples(values))
        fast.steps = fast.samples
        column.seen["s"] = [Comparison({"plain": plain, "chain": fast})]
    return Sweep(("chain",), ("s",), columns)


def tau_rows(sweep: Sweep) -> Rows:
    return tables(sweep, "t")[0][2]


def test_few_prompts_get_no_verdict() -> None:
    few = swept(a=[2.0] * 4, b=[1.0] * 4)
    assert tau_rows(few)[1][3:] == ("-50.0%", "too few prompts")
    enough = swept(a=[2.0] * 5, b=[1.0] * 5)
    assert tau_rows(enough) == [
        ("s", "a", "2.000", "reference", ""),
        ("s", "b", "1.000", "-50.0% [-50.0%, -50.0%]", "real"),
    ]


# ---- what is asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["draft=bf16"], "two types"),
        ([], "two types"),
        (["draft=q8_0,q8_0"], "two types"),
        (["drafter=bf16,q8_0"], "cannot be swept"),
        (["q8_0,q4_0"], "cannot be swept"),
        (["draft=bf16,q8_0", "draft=q4_0,q4_1"], "cannot be swept"),
        (["draft=bf16,q3_x"], "q4-mix"),
        (["draft=bf16,"], "no weight type ''"),
    ],
)
def test_senseless_sweeps_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_sweep(words)


def test_a_grid_needs_several_types_on_both_sides(tmp_path: Path) -> None:
    files = QuantFiles("smollm2", "auto", tmp_path, EngineConfig(), 64, lambda target, draft: FakeLLM(target))  # type: ignore[arg-type, return-value]

    def names(*words: str) -> list[str]:
        return [found.name for found in files.columns(parse_sweep(words))]

    assert names("draft=Q8_0,bf16,q8_0", "target=as-is") == ["draft=q8_0", "draft=bf16"]
    assert names("draft=q8_0,bf16", "target=as-is,q4_0") == [
        "draft=q8_0 target=as-is",
        "draft=bf16 target=as-is",
        "draft=q8_0 target=q4_0",
        "draft=bf16 target=q4_0",
    ]


def test_adapters_may_be_listed_or_repeated() -> None:
    assert split_adapters(["a,b=c@2", "base"]) == ["a", "b=c@2", "base"]
    for given in (["a,a"], ["a,"], ["base"]):
        with pytest.raises(RequestError):
            split_adapters(given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sweep", "draft=q8_0,bf16", "--draft-lora", "a"], "--sweep does not go with --draft-lora"),
        (["--sweep", "draft=q8_0,bf16", "--plot", "p.png"], "--plot does not go with --sweep"),
        (["--draft-lora", "a", "--rival", "xllamacpp"], "--rival does not go with --draft-lora"),
        (["--prompts", "gsm8k", "draft=q8_0,bf16"], "put --sweep before it"),
        (["--prompts", "gsm8k", "--runs", "2"], "--runs needs something to compare"),
        (["--prompts", "gsm8k", "--out", "folder"], "--out needs something to compare"),
        (["--sweep"], "two types"),
        (["--sweep", "draft=q8_0,bf16", "--prompts", "gsm8k,nowhere"], "nowhere"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    cli: Any, fake_engine: type[FakeLLM], arguments: list[str], said: str
) -> None:
    done = cli("bench", *arguments)
    assert done.code == 2 and said in done.err and not fake_engine.made


# ---- what is made and kept


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair as two F32 GGUF files."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = write_pair(folder)
    convert(target, folder / "t.gguf")
    convert(draft, folder / "d.gguf")
    return folder


def sweep_command(pair: Path, *words: str) -> list[str]:
    return ["bench", "--sweep", *words, "--target", str(pair / "t.gguf"), "--draft", str(pair / "d.gguf")]


def prompt_file(path: Path) -> str:
    path.write_text("".join(json.dumps({"turns": [letter]}) + "\n" for letter in "abcdef"), encoding="utf-8")
    return str(path)


def test_the_sweep_makes_files_and_keeps_everything(
    cli: Any, fake_engine: type[FakeLLM], pair: Path, tmp_path: Path
) -> None:
    prompts, out = prompt_file(tmp_path / "p.jsonl"), tmp_path / "out"
    command = sweep_command(pair, "draft=as-is,q8_0,q4-mix", "target=q4_0")
    done = cli(*command, "--prompts", prompts, "--runs", "2", "--out", str(out), "--json")
    assert done.code == 0, done.err
    assert {path.name for path in out.iterdir()} == {"sweep.json", "sweep.md", "sweep.png", "logs", "models"}
    assert sorted(path.name for path in (out / "models").iterdir()) == [
        "draft-d.q4-mix.gguf",
        "draft-d.q8_0.gguf",
        "target-t.q4_0.gguf",
    ]
    assert all(llm.closed for llm in fake_engine.made) and [llm.draft for llm in fake_engine.made] == [
        str(pair / "d.gguf"),
        str(out / "models" / "draft-d.q8_0.gguf"),
        str(out / "models" / "draft-d.q4-mix.gguf"),
    ]
    kept, printed = json.loads((out / "sweep.json").read_text()), json.loads(done.out)
    assert kept["columns"] == printed["columns"] and kept["complete"] and printed["folder"] == str(out)
    by_name = {found["name"]: found for found in kept["columns"]}
    assert by_name["draft=q8_0"]["about"]["draft"]["how"] == "quantised"
    assert "Q8_0" in by_name["draft=q8_0"]["about"]["draft"]["weights"]
    assert by_name["draft=q4-mix"]["sets"][prompts]["tau_against"] == {
        "over": "draft=as-is",
        "ratio": 1.0,
        "interval": [1.0, 1.0],
        "verdict": "within noise",
    }
    logs = sorted(path.name for path in (out / "logs").iterdir())
    assert logs[:2] == ["01-draft=as-is-p-run1.jsonl", "01-draft=as-is-p-run2.jsonl"] and len(logs) == 6
    lines = [json.loads(line) for line in (out / "logs" / logs[0]).read_text().splitlines()]
    assert [(line["prompt"], line["mode"]) for line in lines[:3]] == [(0, "plain"), (0, "chain"), (0, "auto")]
    assert len(lines) == 18 and all(line["same"] for line in lines)
    assert "| p | draft=q4-mix | " in (out / "sweep.md").read_text()
    again = cli(*command, "--prompts", prompts, "--out", str(out))
    assert again.code == 2 and "already holds a sweep" in again.err


def test_requantising_is_said(cli: Any, fake_engine: type[FakeLLM], pair: Path, tmp_path: Path) -> None:
    from slipstream.tools.requantize import quantize_file

    coarse = quantize_file(pair / "d.gguf", tmp_path / "coarse.gguf", "q8_0").out
    prompts, out = prompt_file(tmp_path / "p.jsonl"), tmp_path / "out"
    done = cli(
        *sweep_command(pair, "draft=q4_0,bf16,q8_0"), "--draft", str(coarse), "--prompts", prompts, "--out", str(out)
    )
    assert done.code == 0, done.err
    for kind, how in (("q4_0", "requantised"), ("bf16", "unpacked"), ("q8_0", "copied")):
        row = next(line for line in (out / "sweep.md").read_text().splitlines() if line.startswith(f"| draft={kind} |"))
        assert f"{how} from Q8_0" in row


def test_what_does_not_fit_is_skipped_with_the_reason(
    cli: Any, fake_engine: type[FakeLLM], pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.tools import fit

    needed = fit.fit(str(pair / "t.gguf"), str(pair / "d.gguf"), context=256).total_bytes
    monkeypatch.setattr(fit, "available_bytes", lambda: needed - 1)
    done = cli(
        *sweep_command(pair, "draft=as-is,q4_0"),
        "--prompts",
        prompt_file(tmp_path / "p.jsonl"),
        "--out",
        str(tmp_path / "out"),
    )
    assert done.code == 0, done.err
    assert "draft=as-is was not measured: the pair needs " in done.out
    assert [Path(llm.draft or "").name for llm in fake_engine.made] == ["draft-d.q4_0.gguf"]


def test_an_interrupted_sweep_keeps_what_it_has(
    cli: Any, fake_engine: type[FakeLLM], pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fake_engine.complete

    def interrupted(self: FakeLLM, *arguments: Any) -> Any:
        if len(fake_engine.made) == 2:
            raise KeyboardInterrupt
        return whole(self, *arguments)

    monkeypatch.setattr(fake_engine, "complete", interrupted)
    out = tmp_path / "out"
    done = cli(
        *sweep_command(pair, "draft=as-is,q4_0"), "--prompts", prompt_file(tmp_path / "p.jsonl"), "--out", str(out)
    )
    assert done.code == 130 and f"what was measured so far is in {out}" in done.err
    kept = json.loads((out / "sweep.json").read_text())
    assert not kept["complete"] and kept["columns"][0]["sets"] and (out / "sweep.png").is_file()
    assert "The sweep is not complete." in (out / "sweep.md").read_text()


def test_variants_of_the_drafter_are_compared_with_the_first(
    cli: Any, fake_engine: type[FakeLLM], tmp_path: Path
) -> None:
    prompts, out = prompt_file(tmp_path / "p.jsonl"), tmp_path / "out"
    done = cli(
        "bench",
        "--draft-lora",
        "code=c.gguf,base",
        "--draft-lora",
        "chat=d.gguf@0.5",
        "--prompts",
        prompts,
        "--out",
        str(out),
        "--json",
    )
    assert done.code == 0, done.err
    (llm,) = fake_engine.made
    assert list(llm.draft_lora) == ["code=c.gguf", "chat=d.gguf@0.5"] and llm.closed
    found = json.loads(done.out)
    assert [column["name"] for column in found["columns"]] == ["code", "base", "chat"]
    assert [column["about"] for column in found["columns"]] == [
        {"adapter": "code=c.gguf"},
        {},
        {"adapter": "chat=d.gguf@0.5"},
    ]
    asked = [request.get("draft_lora") for request in llm.requests if request["mode"] == "chain"]
    assert asked == ["code"] * 7 + ["base"] * 7 + ["chat"] * 7


def test_one_adapter_is_held_against_none(cli: Any, fake_engine: type[FakeLLM], tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "p.jsonl")
    done = cli("bench", "--draft-lora", "code=c.gguf", "--prompts", prompts, "--out", str(tmp_path / "out"), "--json")
    assert [column["name"] for column in json.loads(done.out)["columns"]] == ["base", "code"]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    cli: Any, fake_engine: type[FakeLLM], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = cli("bench", "--draft-lora", "c.gguf", "--prompts", "gsm8k", "--out", str(tmp_path / "file" / "out"))
    assert done.code == 2 and "cannot write to" in done.err and not fake_engine.made


def test_names_that_are_no_file_names_still_get_a_log(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path, "t", {})
    run_sweep([column("../a b", FakeLLM("t"))], {"../p/q.jsonl": [("x",)]}, PLAN, 1, folder.log)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["01-..-a-b-q-run1.jsonl"]
