"""`slipstream demo`: the default pair answers a few prompts in modes plain and auto, and both speeds are shown.

`slipstream demo`
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.bench import draw
from slipstream.cli.ui import DRAFTED_STYLE, DraftTint, Ui

if TYPE_CHECKING:
    from slipstream.bench.measure import Comparison, Turn
    from slipstream.bench.rival import Rival, RivalAnswer
    from slipstream.engine.llm import LLM

_TARGET = "smollm2"
_SHOWN_CHARACTERS = 400  # the beginning of each answer that is shown; longer answers would hide the speeds
_CONTEXT = 1024  # tokens for the longest built-in prompt that the demo shows, with room to spare


@dataclass(slots=True)
class _Opponent:
    """llama.cpp on the same prompts, if it is installed."""

    process: Rival
    answers: list[RivalAnswer] = field(default_factory=list)

    def answer(self, llm: LLM, turn: Turn) -> RivalAnswer:
        from slipstream.bench.rival import SETTLE_SECONDS

        length = len(turn.answers["plain"].token_ids)
        time.sleep(SETTLE_SECONDS)
        self.answers.append(self.process.complete(llm.prompt_ids(turn.history, chat=True), length))
        time.sleep(SETTLE_SECONDS)
        return self.answers[-1]

    def speed(self) -> float:
        tokens, ms = (sum(getattr(answer, name) for answer in self.answers) for name in ("tokens", "decode_ms"))
        return 1000 * tokens / ms if ms else 0.0

    def to_json(self) -> dict[str, object]:
        return {**self.process.describe(), "tokens_per_second": round(self.speed(), 3)}

    def sentence(self, result: Comparison) -> str:
        from slipstream.bench.comparison_report import built_for

        theirs, about = self.speed(), self.process.describe()
        ours = {mode: run.stats.tokens_per_second for mode, run in result.modes.items()}
        ratios = " and ".join(f"{speed / theirs:.2f} times in mode {mode}" for mode, speed in ours.items() if theirs)
        return (
            f"llama.cpp ({about['version']}, {built_for(str(about['system']))}) decodes at {theirs:.1f} tok/s on the "
            f"same file and threads" + (f"; Slipstream runs at {ratios} that speed." if ratios else ".")
        )


def command(
    max_tokens: Annotated[int, typer.Option(help="The most tokens of each answer.")] = 128,
    threads: o.Threads = 0,
    json_output: o.JsonOutput = False,
) -> None:
    """Watch the default pair write the same text with and without its drafter."""
    from slipstream.bench import rival
    from slipstream.bench.measure import BenchPlan, compare
    from slipstream.bench.workloads import PUBLIC, read_prompts

    ui = Ui(json_output)
    plan = BenchPlan(max_tokens=max_tokens)
    conversations = [read_prompts(name, limit=1)[0] for name in PUBLIC]
    with closing(o.load(ui, _TARGET, "auto", o.engine_config(threads=threads))) as llm, ExitStack() as stack:
        describe = llm.describe()
        if not json_output:
            ui.line(f"{describe['target']} with {describe['draft']} on {describe['threads']} threads")
            ui.line(f"Weights in {describe['weight_format']}: {describe['format_choice']}")
            ui.line("Coloured text was drafted and accepted; the target itself wrote the rest.")
        opponent = _opponent(llm, int(str(describe["threads"])), max_tokens, stack)

        def on_turn(turn: Turn) -> None:
            theirs = opponent.answer(llm, turn) if opponent else None
            if not json_output:
                _show(ui, turn, theirs)

        result = compare(llm, _TARGET, conversations, plan, on_turn)
    if json_output:
        ui.print_json(
            {
                "target": _TARGET,
                "draft": describe["draft"],
                "max_tokens": max_tokens,
                **result.to_json(),
                "describe": describe,
                "llama_cpp": opponent.to_json() if opponent else None,
            }
        )
    else:
        ui.line()
        draw(ui, result, describe, f"{_TARGET}: {result.answers} answers of up to {max_tokens} tokens, interleaved")
        if opponent:
            ui.line(opponent.sentence(result))
        elif not rival.available():
            ui.line(f"To compare with llama.cpp: {rival.HOW_TO_GET}")


def _opponent(llm: LLM, threads: int, max_tokens: int, stack: ExitStack) -> _Opponent | None:
    """llama.cpp on the same file, warmed up; None if it is missing, cannot read this file or does not start."""
    from slipstream.bench import rival
    from slipstream.errors import SlipstreamError

    model = llm.target_source.path
    if not rival.available() or not rival.is_model(model):
        return None
    try:
        process = stack.enter_context(rival.start(model, threads, _CONTEXT + max_tokens))
        process.complete([1] * 8, 8)
    except SlipstreamError:
        return None  # the demo shows this engine, so an opponent that cannot run here does not end it
    return _Opponent(process)


def _show(ui: Ui, turn: Turn, theirs: RivalAnswer | None) -> None:
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
