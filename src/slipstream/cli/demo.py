"""`slipstream demo`: the default pair answers a few prompts plainly and as the policy likes, and both speeds are shown.

`slipstream demo`
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.bench import draw
from slipstream.cli.tint import Tint
from slipstream.cli.ui import DRAFTED_STYLE, Ui

if TYPE_CHECKING:
    from slipstream.bench.measure import Turn
    from slipstream.engine.llm import LLM

_TARGET = "smollm2"
_SHOWN_CHARACTERS = 400


def command(
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    threads: o.Threads = 0,
    json_output: o.JsonOutput = False,
) -> None:
    """See the default pair write the same text with and without its drafter."""
    from slipstream.bench.measure import Plan, compare
    from slipstream.bench.workloads import BUILT_IN, read_prompts

    ui = Ui(json_output)
    plan = Plan(max_tokens=max_tokens)
    conversations = [read_prompts(name, limit=1)[0] for name in BUILT_IN]
    with closing(o.load(ui, _TARGET, "auto", o.engine_config("auto", threads, 0, None))) as llm:
        describe = llm.describe()
        if not json_output:
            ui.line(f"{describe['target']} with {describe['draft']} on {describe['threads']} threads")
            ui.line(f"Weights in {describe['weight_format']}: {describe['format_choice']}")
            ui.line("Coloured text was drafted and accepted; the rest is the target's own.")
        result = compare(
            llm, _TARGET, conversations, plan, lambda turn: None if json_output else _show(ui, llm, turn)
        )
    if json_output:
        ui.print_json({
            "target": _TARGET, "draft": describe["draft"], "max_tokens": max_tokens,
            **result.to_json(), "describe": describe,
        })
    else:
        ui.line()
        draw(ui, result, describe, f"{_TARGET}: {result.answers} answers of up to {max_tokens} tokens, interleaved")


def _show(ui: Ui, llm: LLM, turn: Turn) -> None:
    """The beginning of one answer, tinted like in chat, and both speeds."""
    from slipstream.text.detokenize import IncrementalDetokenizer

    question = " ".join(turn.question.split())
    ui.line()
    ui.line(f"> {question if len(question) <= 100 else question[:99] + '…'}")
    tint = Tint(IncrementalDetokenizer(llm.tokenizer))
    plain, auto = turn.answers["plain"], turn.answers["auto"]
    for text, drafted in tint.spans(auto.tokens, auto.text[:_SHOWN_CHARACTERS]):
        ui.write(text, DRAFTED_STYLE if drafted else None)
    ui.write(" …\n" if len(auto.text) > _SHOWN_CHARACTERS else "\n")
    ui.line(
        f"plain {plain.stats.tokens_per_second:.1f} tok/s · auto {auto.stats.tokens_per_second:.1f} tok/s · "
        f"tau {auto.stats.tau:.2f} · {'same text' if turn.same('auto') else 'different text'}"
    )
