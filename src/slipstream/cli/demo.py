"""`slipstream demo`: the default pair answers a few prompts in modes plain and auto, and both speeds are shown.

`slipstream demo`
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.bench import draw
from slipstream.cli.ui import DRAFTED_STYLE, DraftTint, Ui
from slipstream.stats import RequestStats

if TYPE_CHECKING:
    from slipstream.bench.measure import Turn
    from slipstream.bench.rival import Rival
    from slipstream.engine.llm import LLM

_TARGET = "smollm2"
_SHOWN_CHARACTERS = 400  # the beginning of each answer that is shown; longer answers would hide the speeds
_CONTEXT = 1024  # tokens for the longest built-in prompt that the demo shows, with room to spare


def command(
    max_tokens: Annotated[int, typer.Option(help="The most tokens of each answer.")] = 128,
    threads: o.Threads = 0,
    json_output: o.JsonOutput = False,
) -> None:
    """Watch the default pair write the same text with and without its drafter."""
    from slipstream.bench import rival
    from slipstream.bench.comparison_report import built_for
    from slipstream.bench.measure import BenchPlan, compare
    from slipstream.bench.workloads import PUBLIC, read_prompts

    ui = Ui(json_output)
    plan = BenchPlan(max_tokens=max_tokens)
    conversations = [read_prompts(name, limit=1)[0] for name in PUBLIC]
    total = RequestStats()  # the sum of llama.cpp's answers
    with o.load(ui, _TARGET, "auto", o.engine_config(threads=threads)) as llm, ExitStack() as stack:
        describe = llm.describe()
        if not json_output:
            ui.line(f"{describe['target']} with {describe['draft']} on {describe['threads']} threads")
            ui.line(f"Weights in {describe['weight_format']}: {describe['format_choice']}")
            ui.line("Coloured text was drafted and accepted; the target itself wrote the rest.")
        opponent = _opponent(llm, int(str(describe["threads"])), max_tokens, stack)

        def on_turn(turn: Turn) -> None:
            theirs = None
            if opponent is not None:
                time.sleep(rival.SETTLE_SECONDS)
                length = len(turn.answers["plain"].token_ids)
                theirs = opponent.complete(llm.prompt_ids(turn.history, chat=True), length)
                total.add(theirs)
                time.sleep(rival.SETTLE_SECONDS)
            if not json_output:
                _show(ui, turn, theirs)

        result = compare(llm, _TARGET, conversations, plan, on_turn)
    speed, about = total.tokens_per_second, opponent.describe() if opponent else {}
    if json_output:
        ui.print_json(
            {
                "target": _TARGET,
                "draft": describe["draft"],
                "max_tokens": max_tokens,
                **result.to_json(),
                "describe": describe,
                "llama_cpp": about | {"tokens_per_second": round(speed, 3)} if about else None,
            }
        )
    else:
        ui.line()
        draw(ui, result, describe, f"{_TARGET}: {result.answers} answers of up to {max_tokens} tokens, interleaved")
        if about:
            ours = {mode: run.stats.tokens_per_second / speed for mode, run in result.modes.items() if speed}
            ratios = " and ".join(f"{ratio:.2f} times in mode {mode}" for mode, ratio in ours.items())
            ui.line(
                f"llama.cpp ({about['version']}, {built_for(str(about['system']))}) decodes at {speed:.1f} tok/s on "
                f"the same file and threads" + (f"; Slipstream runs at {ratios} that speed." if ratios else ".")
            )
        elif not rival.available():
            ui.line(f"To compare with llama.cpp: {rival.HOW_TO_GET}")


def _opponent(llm: LLM, threads: int, max_tokens: int, stack: ExitStack) -> Rival | None:
    """llama.cpp on the same file, warmed up; None if it is missing, cannot read this file or does not start."""
    from slipstream.bench import rival
    from slipstream.errors import SlipstreamError

    try:
        process = stack.enter_context(rival.start(llm.target_source.path, threads, _CONTEXT + max_tokens))
        process.complete([1] * 8, 8)
    except SlipstreamError:
        return None  # the demo shows this engine, so an opponent that cannot run here does not end it
    return process


def _show(ui: Ui, turn: Turn, theirs: RequestStats | None) -> None:
    """Shows the beginning of one answer, tinted as in chat, and all speeds."""
    question = " ".join(turn.question.split())
    ui.line()
    ui.line(f"> {question if len(question) <= 100 else question[:99] + '…'}")
    plain, auto = turn.answers["plain"], turn.answers["auto"]
    for text, drafted in DraftTint().spans(auto.tokens, auto.texts, auto.text[:_SHOWN_CHARACTERS]):
        ui.write(text, DRAFTED_STYLE if drafted else None)
    ui.write(" …\n" if len(auto.text) > _SHOWN_CHARACTERS else "\n")
    ui.line(
        f"plain {plain.stats.tokens_per_second:.1f} tok/s · auto {auto.stats.tokens_per_second:.1f} tok/s · "
        f"tau {auto.stats.tau:.2f} · {'same text' if turn.same('auto') else 'different text'}"
        f"{f' · llama.cpp {theirs.tokens_per_second:.1f} tok/s' if theirs else ''}"
    )
