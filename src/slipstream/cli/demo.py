"""`slipstream demo`: the default pair answers a few prompts plainly and speculatively, and both speeds are shown.

`slipstream demo`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.bench import draw
from slipstream.cli.tint import Tint
from slipstream.cli.ui import DRAFTED_STYLE, Ui

if TYPE_CHECKING:
    from slipstream.bench.measure import Pair
    from slipstream.engine.llm import LLM

_TARGET = "smollm2"
_SHOWN_CHARACTERS = 400
_MODES = ("chain", "chain:8", "chain:4")


def command(
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    threads: o.Threads = 0,
    json_output: o.JsonOutput = False,
) -> None:
    """See the default pair write the same text with and without its drafter."""
    from slipstream.bench.measure import Plan, compare, fastest_mode
    from slipstream.bench.workloads import BUILT_IN, read_prompts

    ui = Ui(json_output)
    conversations = [read_prompts(name, limit=1)[0] for name in BUILT_IN]
    llm = o.load(ui, _TARGET, "auto", o.engine_config("auto", threads, 0, None))
    try:
        describe = llm.describe()
        with ui.counting("choosing the verify width", 0):
            mode = fastest_mode(llm, conversations[0], _MODES, max_tokens)
        plan = Plan(max_tokens=max_tokens, mode=mode)
        if not json_output:
            ui.line(f"{describe['target']} with {describe['draft']} on {describe['threads']} threads")
            ui.line(f"Weights in {describe['weight_format']}: {describe['format_choice']}")
            ui.line(f"Speculating in mode {mode}, the fastest here of {', '.join(_MODES)}")
            ui.line("Coloured text was drafted and accepted; the rest is the target's own.")
        result = compare(
            llm, _TARGET, conversations, plan, lambda pair: None if json_output else _show(ui, llm, pair)
        )
    finally:
        llm.close()
    if json_output:
        ui.print_json({
            "target": _TARGET, "draft": describe["draft"], "max_tokens": max_tokens, "mode": mode,
            **result.to_json(), "describe": describe,
        })
    else:
        ui.line()
        draw(ui, result, describe, f"{_TARGET}: {result.answers} answers of up to {max_tokens} tokens, interleaved")


def _show(ui: Ui, llm: LLM, pair: Pair) -> None:
    """The beginning of one answer, tinted like in chat, and both speeds."""
    from slipstream.text.detokenize import IncrementalDetokenizer

    question = " ".join(pair.question.split())
    ui.line()
    ui.line(f"> {question if len(question) <= 100 else question[:99] + '…'}")
    tint = Tint(IncrementalDetokenizer(llm.tokenizer))
    for text, drafted in tint.spans(pair.speculative.tokens, pair.speculative.text[:_SHOWN_CHARACTERS]):
        ui.write(text, DRAFTED_STYLE if drafted else None)
    ui.write(" …\n" if len(pair.speculative.text) > _SHOWN_CHARACTERS else "\n")
    plain, speculative = pair.plain.stats, pair.speculative.stats
    ui.line(
        f"plain {plain.tokens_per_second:.1f} tok/s · speculative {speculative.tokens_per_second:.1f} tok/s · "
        f"tau {speculative.tau:.2f} · {'same text' if pair.same else 'different text'}"
    )
