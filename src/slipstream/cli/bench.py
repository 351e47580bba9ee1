"""`slipstream bench`: measures plain decoding against any number of speculative modes over a file of prompts.

`slipstream bench --prompts humaneval --limit 8 --max-tokens 128 --modes chain,chain:8,tree:32,auto`

With --sweep it compares weight types of the pair instead, and with --draft-lora it compares adapters of the drafter
(cli/bench_sweep.py). With --rival it compares the pair with llama.cpp (cli/bench_race.py), and with --profile it shows
where a step's time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slipstream.cli import options as o
from slipstream.cli.bench_race import race
from slipstream.cli.bench_sweep import MODES as SWEEP_MODES
from slipstream.cli.bench_sweep import (
    Adapters,
    OutFolder,
    PairComparison,
    Runs,
    Sides,
    SweepFlag,
    compare_pairs,
    read_sets,
)
from slipstream.cli.trace import Trace
from slipstream.cli.ui import Ui, bar_chart, bars, policy_line
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.bench.measure import BenchPlan, Comparison, Turn
    from slipstream.bench.workloads import Conversation
    from slipstream.engine.llm import LLM


Prompts = Annotated[
    str | None,
    typer.Option(
        help="A .jsonl file, or humaneval, gsm8k, mt-bench, editing or prose; a list of them if pairs are compared.",
        show_default="the first three if pairs are compared",
    ),
]
Limit = Annotated[int, typer.Option(min=0, help="Use only the first K prompts; 0 uses all.")]
Turns = Annotated[
    Literal["first", "all"], typer.Option(help="Ask only the first turn, or play the whole conversation.")
]
Modes = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        show_default=f"plain,auto; {SWEEP_MODES} if pairs are compared",
        help="Modes to compare, as in generate --mode; plain is always measured.",
    ),
]
GateForModes = Annotated[
    str | None, typer.Option("--gate", metavar="NAME", help="The gate of the modes other than plain and auto.")
]
RivalName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Race llama.cpp on the target's GGUF file: xllamacpp, or the path of a llama-server."
    ),
]
ProfileFlag = Annotated[
    bool, typer.Option("--profile", help="Show where a decoding step's time goes instead of comparing speeds.")
]
PlotFile = Annotated[str | None, typer.Option(metavar="FILE", help="Draw the result into a .png or .svg file.")]


def command(
    sides: Sides = None,
    prompts: Prompts = None,
    target: o.Target = "smollm2",
    draft: o.Draft = "auto",
    max_tokens: o.MaxTokens = 256,
    limit: Limit = 0,
    turns: Turns = "first",
    modes: Modes = None,
    gate: GateForModes = None,
    confidence: o.Confidence = None,
    rival: RivalName = None,
    profiling: ProfileFlag = False,
    sweep: SweepFlag = False,
    draft_lora: Adapters = None,
    runs: Runs = None,
    out: OutFolder = None,
    plot: PlotFile = None,
    trace: o.TraceFile = None,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.DeviceName = "auto",
    kernels: o.KernelChoice = "triton",
    no_graphs: o.NoGraphs = False,
    exact: o.Exact = False,
    threads: o.Threads = 0,
    max_context: o.MaxContext = 0,
    draft_window: o.DraftWindow = None,
    no_text_drafts: o.NoTextDrafts = False,
    json_output: o.JsonOutput = False,
) -> None:
    """Measure plain decoding against speculation in alternation, and check that the texts agree."""
    from slipstream.bench.measure import BenchPlan, parse_modes
    from slipstream.bench.workloads import read_prompts

    ui = Ui(json_output)
    comparing = PairComparison(sweep, sides or (), draft_lora or (), runs, out)
    given = {
        "--rival": rival is not None,
        "--profile": profiling,
        "--plot": plot is not None,
        "--trace": trace is not None,
    }
    comparing.check(given)
    chosen = parse_modes(modes or (SWEEP_MODES if comparing.wanted else "plain,auto"))
    plan = BenchPlan(max_tokens, turns == "all", temperature, seed, chosen, gate, confidence)
    config = o.engine_config(
        dtype, threads, max_context, draft_window, device, kernels, no_graphs, exact, no_text_drafts
    )
    about: dict[str, object] = {"target": target, "prompts": prompts, **plan.to_json()}
    if comparing.wanted:
        compare_pairs(ui, comparing, target, draft, config, plan, read_sets(prompts, limit), about)
        return
    if prompts is None:
        raise RequestError("there are no prompts to measure on", "name a set or a file with --prompts")
    conversations = read_prompts(prompts, limit)
    about["count"] = len(conversations)
    load = partial(o.load, ui, target, draft, config)
    if profiling:
        o.refuse_beside("--profile", given)
        _profile(ui, load, conversations, plan, about)
    elif rival is not None:
        o.refuse_beside("--rival", {"--turns all": plan.all_turns, **given})
        race(ui, load, rival, conversations, plan, about)
    else:
        _compare_modes(ui, load, conversations, plan, about, plot, trace)


def _profile(
    ui: Ui, load: Callable[[], LLM], conversations: list[Conversation], plan: BenchPlan, about: Mapping[str, object]
) -> None:
    """Decodes the prompts in every mode and prints how long each phase of their steps took."""
    from slipstream.bench import profiled_modes as bench
    from slipstream.bench.measure import turns_of

    with load() as llm, ui.counting("answers", turns_of(conversations, plan)) as advance:
        result = bench.profile_modes(llm, conversations, plan, advance)
    if ui.json_output:
        ui.print_json({**about, **result.to_json()})
        return
    title = f"{about['target']} on {about['prompts']}: milliseconds of a decoding step over {result.turns} turns"
    heads = ("phase", *result.columns)
    ui.table(title, heads, bench.phase_rows(result))
    launches = bench.launch_rows(result)
    if launches:
        ui.table(bench.launch_title(result), heads, launches)
    ui.lines(bench.sentences(result))


def _compare_modes(
    ui: Ui,
    load: Callable[[], LLM],
    conversations: list[Conversation],
    plan: BenchPlan,
    about: Mapping[str, object],
    plot: str | None,
    trace: str | None,
) -> None:
    from slipstream.bench.measure import compare, turns_of
    from slipstream.bench.plot import check_plot_path, write_plot

    plot_path, target = None if plot is None else check_plot_path(plot), str(about["target"])
    with Trace(trace) as steps_file, load() as llm, ui.counting("answers", turns_of(conversations, plan)) as advance:

        def on_turn(turn: Turn) -> None:
            # The trace is written after the turn, because writing during it would count as decoding time.
            for mode, answer in turn.answers.items():
                for event in answer.events:
                    steps_file.record(mode, event, llm.tokenizer)
            advance()

        result = compare(llm, target, conversations, plan, on_turn)
        describe = llm.describe()
    title = f"{target} on {about['prompts']}: {result.answers} answers of up to {plan.max_tokens} tokens"
    if ui.json_output:
        ui.print_json({**about, "draft": describe.get("draft"), **result.to_json(), "describe": describe})
    else:
        draw(ui, result, describe, title)
    if plot_path is not None:
        write_plot(result, plot_path, title)


def draw(ui: Ui, result: Comparison, describe: Mapping[str, object], title: str) -> None:
    """Draws the table, the speed-ups as bars and the acceptance by position, and says in sentences what they mean."""
    from slipstream.bench import comparison_report as report

    ui.table(title, report.HEADS, report.rows(result))
    speedups = [(name, found) for name in result.modes if (found := result.speedup(name)) is not None]
    ui.lines(bar_chart([(name, found.value, report.ratio_text(found)) for name, found in speedups]))
    width = max(map(len, result.modes))
    shares = {name: report.per_position(run.stats) for name, run in result.speculative.items()}
    if any(shares.values()):
        ui.line("Accepted by position:")
    for name, row in shares.items():
        if row:
            ui.line(f"{name:<{width}} {bars(row)}  {row[0]:.0%} at 1, {row[-1]:.0%} at {len(row)}")
    if "auto" in result.modes:
        ui.line(f"Mode auto chose {policy_line(result.modes['auto'].stats.policy)}.")
    ui.lines(report.sentences(result, describe))
