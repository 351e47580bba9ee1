"""The part of `slipstream bench` that compares weight types of one pair, or adapters of its drafter.

`slipstream bench --sweep draft=bf16,q8_0,q4-mix --prompts humaneval,gsm8k --limit 16 --runs 2`
`slipstream bench --draft-lora code.gguf,chat.gguf,base --prompts mt-bench`
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.bench.measure import BenchPlan, Turn
    from slipstream.bench.pair_sweep import Column
    from slipstream.bench.workloads import Conversation
    from slipstream.config import EngineConfig

_comparing = partial(typer.Option, rich_help_panel="Comparing pairs")
Sides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SIDE=TYPE,...", show_default=False, help="Types for --sweep: draft=..., target=..."),
]
SweepFlag = Annotated[
    bool,
    _comparing(
        "--sweep", help="Compare weight types, whose files are made first: --sweep draft=bf16,q8_0,q4-mix target=as-is"
    ),
]
Adapters = Annotated[
    list[str] | None,
    _comparing(
        "--draft-lora",
        metavar="[NAME=]PATH[@SCALE],...",
        show_default=False,
        help="Compare adapters of the drafter; 'base' is none. The first is the reference. Repeatable.",
    ),
]
Runs = Annotated[int | None, _comparing(min=1, help="Measure every pair this often.", show_default="1")]
OutFolder = Annotated[
    str | None,
    _comparing(
        "--out",
        metavar="FOLDER",
        show_default="sweep-DATE-TIME",
        help="The folder that keeps tables, numbers, plots, logs and made files.",
    ),
]
MODES = "chain,auto"  # whole chains give a comparable tau, and auto gives the speed that users see


@dataclass(frozen=True, slots=True)
class PairComparison:
    """What the user wants compared, and where the result goes."""

    sweep: bool
    sides: Sequence[str]
    adapters: Sequence[str]
    runs: int | None
    out: str | None

    @property
    def wanted(self) -> bool:
        return self.sweep or bool(self.adapters)

    def check(self, others: Mapping[str, bool]) -> None:
        """Refuses options that do not go together; `others` says which options of the plain bench were given."""
        for option, given in (("--runs", self.runs), ("--out", self.out)):
            if given is not None and not self.wanted:
                raise RequestError(f"{option} needs something to compare", "add --sweep or --draft-lora")
        if self.sides and not self.sweep:
            raise RequestError(f"bench does not know '{self.sides[0]}'", "put --sweep before it")
        if self.adapters:
            o.refuse_beside("--draft-lora", {"--sweep": self.sweep, **others})
        elif self.sweep:
            o.refuse_beside("--sweep", others)


def compare_pairs(
    ui: Ui,
    comparing: PairComparison,
    target: str,
    draft: str,
    config: EngineConfig,
    plan: BenchPlan,
    sets: Mapping[str, list[Conversation]],
    about: Mapping[str, object],
) -> None:
    """Measures the whole comparison, keeps it in a folder and prints it; `sets` holds the prompts by their name."""
    from slipstream.bench.measure import turns_of
    from slipstream.bench.pair_sweep import run_sweep
    from slipstream.bench.sweep_columns import QuantFiles, parse_sweep, split_adapters, variant_columns
    from slipstream.bench.sweep_report import SweepFolder, sentences, tables

    asked = parse_sweep(comparing.sides) if comparing.sweep else {}
    adapters = split_adapters(comparing.adapters) if comparing.adapters else []
    path = Path(comparing.out or time.strftime("sweep-%Y%m%d-%H%M%S")).expanduser()
    runs = comparing.runs or 1
    what = " ".join(comparing.sides) if comparing.sweep else ", ".join(adapters)
    title = f"{target}: {what}; {runs} x up to {plan.max_tokens} tokens a prompt"
    folder = SweepFolder(path, title, {**about, "prompts": list(sets), "runs": runs})
    with ExitStack() as stack:
        columns: list[Column]
        if comparing.sweep:
            files = QuantFiles(
                target,
                draft,
                path / "models",
                config,
                config.max_context or plan.max_tokens,
                lambda target_file, draft_file: o.load(ui, target_file, draft_file, config),
                ui.loading,
            )
            columns = files.columns(asked)
        else:
            llm = stack.enter_context(o.load(ui, target, draft, config, adapters))
            columns = variant_columns(llm, adapters)
        answers = len(columns) * runs * sum(turns_of(conversations, plan) for conversations in sets.values())
        advance = stack.enter_context(ui.counting("answers", answers))

        def on_turn(column: str, name: str, run: int, turn: Turn) -> None:
            folder.log(column, name, run, turn)
            advance()

        try:
            result = run_sweep(columns, sets, plan, runs, on_turn, folder.write)
        except KeyboardInterrupt:
            ui.note(f"The sweep was interrupted; what was measured so far is in {folder.path}.")
            raise
        finally:
            folder.draw()
    if ui.json_output:
        ui.print_json({**about, "folder": str(folder.path), **result.to_json()})
        return
    for name, heads, rows in tables(result, title):
        ui.table(name, heads, rows)
    ui.lines([*sentences(result), f"The results are in {folder.path}."])


def read_sets(prompts: str | None, limit: int) -> dict[str, list[Conversation]]:
    """The prompts of each named set; the public sets if none is named."""
    from slipstream.bench.workloads import PUBLIC, read_prompts

    names = PUBLIC if prompts is None else tuple(name.strip() for name in prompts.split(","))
    return {name: read_prompts(name, limit) for name in names}
