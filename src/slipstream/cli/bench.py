"""`slipstream bench`: plain decoding against speculation over a file of prompts.

`slipstream bench --prompts humaneval --limit 8 --max-tokens 128`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui, bars, columns_table

if TYPE_CHECKING:
    from slipstream.bench.measure import Comparison


def command(
    prompts: Annotated[str, typer.Option(help="A .jsonl file, or humaneval, gsm8k or mt-bench.")],
    target: o.Target = "smollm2",
    draft: o.Draft = "auto",
    max_tokens: o.MaxTokens = 256,
    limit: Annotated[int, typer.Option(min=0, help="Use the first K prompts; 0 is all.")] = 0,
    turns: Annotated[
        Literal["first", "all"], typer.Option(help="Ask the first turn only, or play the whole conversation.")
    ] = "first",
    mode: Annotated[str, typer.Option(metavar="NAME", help="How to speculate: chain or chain:ROWS.")] = "chain",
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    threads: o.Threads = 0,
    max_context: o.MaxContext = 0,
    draft_window: o.DraftWindow = None,
    json_output: o.JsonOutput = False,
) -> None:
    """Measure plain decoding against speculation, interleaved, and check that the texts agree."""
    from slipstream.bench.measure import Plan, compare, turns_of
    from slipstream.bench.workloads import read_prompts

    ui = Ui(json_output)
    plan = Plan(max_tokens=max_tokens, all_turns=turns == "all", temperature=temperature, seed=seed, mode=mode)
    conversations = read_prompts(prompts, limit)
    llm = o.load(ui, target, draft, o.engine_config(dtype, threads, max_context, draft_window))
    try:
        with ui.counting("answers", turns_of(conversations, plan)) as advance:
            result = compare(llm, target, conversations, plan, lambda pair: advance())
        describe = llm.describe()
    finally:
        llm.close()
    if json_output:
        ui.print_json({
            "target": target, "draft": describe.get("draft"),
            "prompts": prompts, "count": len(conversations), "turns": turns, "max_tokens": max_tokens, "mode": mode,
            "temperature": temperature, "seed": seed,
            **result.to_json(), "describe": describe,
        })
    else:
        draw(ui, result, describe, f"{target} on {prompts}: {result.answers} answers of up to {max_tokens} tokens")


def draw(ui: Ui, result: Comparison, describe: Mapping[str, object], title: str) -> None:
    """The table, the acceptance by position, and what they mean in sentences."""
    from slipstream.bench import report

    ui.table(title, columns_table(report.HEADS, report.rows(result)))
    shares = report.per_position(result.speculative.stats)
    if shares:
        ui.line(f"Accepted by position: {bars(shares)}  {shares[0]:.0%} at 1, {shares[-1]:.0%} at {len(shares)}")
    for sentence in (
        report.ratio_sentence(result), report.identity_sentence(result), report.floor_sentence(describe, result),
    ):
        if sentence:
            ui.line(sentence)
