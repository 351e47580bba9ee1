"""The part of `slipstream bench` that compares this engine with llama.cpp and draws the result.

`slipstream bench --rival xllamacpp --prompts humaneval --limit 8 --max-tokens 128`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from slipstream.cli.ui import Ui, bar_chart
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.bench.measure import BenchPlan
    from slipstream.bench.workloads import Conversation
    from slipstream.engine.llm import LLM


def race(
    ui: Ui,
    load: Callable[[], LLM],
    program: str,
    conversations: list[Conversation],
    plan: BenchPlan,
    about: Mapping[str, object],
) -> None:
    """Measures what steps of several sizes cost, then both sides in alternation; prints the result as JSON or draws it.

    llama.cpp is started for this and stopped afterwards. If it is missing, an error is raised before a model is loaded.
    """
    from slipstream.bench import comparison_report as report
    from slipstream.bench import rival
    from slipstream.bench import rival_race as bench
    from slipstream.bench.floors import measured_costs

    rival.find(program)
    with load() as llm:
        if not llm.speculates:
            raise RequestError(f"{about['target']} has nothing to draft with", "name a drafter with --draft")
        describe = llm.describe()
        costs = measured_costs(llm.measure_costs(), describe)
        context = bench.context_needed(llm, conversations, plan)
        with (
            rival.start(llm.target_source.path, llm.threads, context, program) as opponent,
            ui.counting("prompts", len(conversations)) as done,
        ):
            prefill = bench.race_prefill(llm, opponent)
            seen, theirs = bench.race(llm, opponent, conversations, plan, done), opponent.describe()
    if ui.json_output:
        results = {"prefill": prefill.to_json(), "rows": [cost.to_json() for cost in costs], "describe": describe}
        ui.print_json({**about, "draft": describe["draft"], "rival": theirs, **seen.to_json(), **results})
        return
    title = f"{about['target']} on {about['prompts']}: {seen.answers} answers of {plan.max_tokens} tokens"
    ui.table(title, report.RACE_HEADS, report.race_rows(seen))
    speeds = {side: seen.median_speed(side) for side in seen.modes}
    ui.lines(bar_chart([(side, speed, f"{speed:.1f} tok/s") for side, speed in speeds.items()]))
    ui.table("A step by its rows", report.COST_HEADS, report.cost_rows(costs))
    ui.lines(report.race_sentences(seen, prefill, theirs, describe))
