"""The part of `slipstream bench` that compares this engine with llama.cpp and draws the result.

`slipstream bench --rival xllamacpp --prompts humaneval --limit 8 --max-tokens 128`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.cli.ui import Ui, bar_chart, columns_table
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.bench.floors import RowCost
    from slipstream.bench.measure import BenchPlan
    from slipstream.bench.rival_race import PrefillRace, Race
    from slipstream.bench.workloads import Conversation
    from slipstream.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Everything that one comparison with llama.cpp measured."""

    rival: dict[str, object]
    race: Race
    prefill: PrefillRace
    rows: list[RowCost]
    describe: dict[str, object]

    def to_json(self) -> dict[str, object]:
        return {
            "rival": self.rival,
            **self.race.to_json(),
            "prefill": self.prefill.to_json(),
            "rows": [cost.to_json() for cost in self.rows],
            "describe": self.describe,
        }


def race(
    ui: Ui,
    load: Callable[[], LLM],
    program: str,
    conversations: list[Conversation],
    plan: BenchPlan,
    about: Mapping[str, object],
) -> None:
    """Runs the whole comparison and prints it as JSON or draws it; without llama.cpp no model is loaded."""
    from slipstream.bench.rival import find

    find(program)
    with closing(load()) as llm:
        if not llm.speculates:
            raise RequestError(f"{about['target']} has nothing to draft with", "name a drafter with --draft")
        result = run_race(ui, llm, program, conversations, plan)
    if ui.json_output:
        ui.print_json({**about, "draft": result.describe.get("draft"), **result.to_json()})
    else:
        title = f"{about['target']} on {about['prompts']}: {result.race.prompts} answers of {plan.max_tokens} tokens"
        draw_race(ui, result, title)


def run_race(ui: Ui, llm: LLM, program: str, conversations: list[Conversation], plan: BenchPlan) -> RaceResult:
    """Measures row costs, then both sides in alternation; llama.cpp is started for this and stopped afterwards."""
    from slipstream.bench import rival
    from slipstream.bench import rival_race as bench
    from slipstream.bench.comparison_report import number_in
    from slipstream.bench.floors import row_costs

    describe = llm.describe()
    steps = llm.measure_costs()["steps_ms"]
    assert isinstance(steps, dict)
    costs = row_costs(
        steps,
        number_in(describe, "weight_bytes"),
        1e9 * number_in(describe, "bandwidth_gbs"),
        number_in(describe, "row_products"),
        number_in(describe, "peak_products"),
    )
    context = bench.context_needed(llm, conversations, plan)
    model, threads = llm.target_source.path, int(number_in(describe, "threads"))
    with rival.start(model, threads, context, program) as opponent, ui.counting("prompts", len(conversations)) as done:
        prefill = bench.race_prefill(llm, opponent)
        return RaceResult(
            opponent.describe(), bench.race(llm, opponent, conversations, plan, done), prefill, costs, describe
        )


def draw_race(ui: Ui, result: RaceResult, title: str) -> None:
    """Draws the speeds, their ratios, the prompt speeds, and the row costs beside their floors."""
    from slipstream.bench import comparison_report as report

    seen = result.race
    ui.table(title, columns_table(report.RACE_HEADS, report.race_rows(seen)))
    for line in bar_chart(
        [(side, seen.median_speed(side), f"{seen.median_speed(side):.1f} tok/s") for side in seen.samples]
    ):
        ui.line(line)
    ui.table("A step by its rows", columns_table(report.COST_HEADS, report.cost_rows(result.rows)))
    for sentence in (
        report.prefill_sentence(result.prefill),
        report.rival_sentence(result.rival, result.describe),
        report.race_texts_sentence(seen),
        report.idle_sentence(seen),
    ):
        if sentence:
            ui.line(sentence)
