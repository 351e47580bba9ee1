"""Measures several preparations of one pair: other weight types, or other variants of the drafter.

Every preparation is a column and runs all prompts in all modes, with one model in memory at a time. Tau is taken from
the plan's first speculative mode, and the speed-up over plain decoding from its last. Every column is compared with the
first one, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from slipstream.bench.intervals import Sample
from slipstream.bench.measure import PLAIN, BenchPlan, Comparison, Ratio, Turn, compare
from slipstream.bench.workloads import Conversation
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

ALL_SETS = "all"
# Prompts needed for an interval; a bootstrap over fewer says almost nothing about prompts that were not asked.
LEAST_PROMPTS = 5
PromptSets = Mapping[str, Sequence[Conversation]]
LoadedPair = tuple["LLM", dict[str, object]]  # a pair that is ready to be measured, and a description of its files


@dataclass(slots=True)
class Column:
    """One preparation of the pair, and what was measured with it.

    `load` raises a SlipstreamError if the preparation is not available on this machine.
    """

    name: str
    load: Callable[[], AbstractContextManager[LoadedPair]]
    variant: str | None = None  # the draft variant that its requests ask for
    about: dict[str, object] = field(default_factory=dict)
    seen: dict[str, list[Comparison]] = field(default_factory=dict)  # by set of prompts, one per run
    skipped: str = ""  # the reason why the column was not measured, or not completely


@dataclass(frozen=True, slots=True)
class Cell:
    """The numbers of one column on one set; those against the reference are None for the reference itself."""

    prompts: int
    tau: float
    tau_against: Ratio | None
    speedup: Ratio | None
    speedup_against: Ratio | None  # speed-up over speed-up, which cancels changes of the machine's speed
    answers: int
    # Answers whose texts equal plain decoding's or differ only from a near-tie on; the mode with the fewest counts.
    same_or_near: int

    def to_json(self) -> dict[str, object]:
        return {
            "prompts": self.prompts,
            "tau": round(self.tau, 4),
            "tau_against": _ratio_json(self.tau_against),
            "speedup": _ratio_json(self.speedup),
            "speedup_against": _ratio_json(self.speedup_against),
            "same_texts": {"same": self.same_or_near, "of": self.answers},
        }


def _ratio_json(found: Ratio | None) -> dict[str, object] | None:
    return None if found is None else {**found.to_json(), "verdict": found.verdict}


@dataclass(slots=True)
class Sweep:
    """The results of every column on every set; the first column is the reference."""

    modes: tuple[str, ...]  # without plain decoding
    sets: tuple[str, ...]
    columns: list[Column] = field(default_factory=list)  # those whose measurement has begun
    complete: bool = False

    def cells(self) -> Iterator[tuple[str, Column, Cell]]:
        """Every set, column and cell that is complete, set after set, and then those of all sets together."""
        for name in (*self.sets, ALL_SETS) if len(self.sets) > 1 else self.sets:
            for column in self.columns:
                cell = self.cell(column, name)
                if cell is not None:
                    yield name, column, cell

    def cell(self, column: Column, name: str) -> Cell | None:
        """The column's numbers on one set, or on all sets together; None until they are complete."""
        sets, reference = self.sets if name == ALL_SETS else (name,), self.columns[0]
        if not column.seen.keys() >= set(sets):
            return None

        def samples(mode: str, cost: str, column: Column = column) -> list[Sample]:
            """One sample per prompt, summed over all runs."""
            return [
                (sum(tokens for tokens, _ in runs), sum(cost for _, cost in runs))
                for found in sets
                for runs in zip(*(getattr(seen.modes[mode], cost) for seen in column.seen[found]), strict=True)
            ]

        def against(*sides: tuple[str, str]) -> Ratio | None:
            if column is reference or not reference.seen.keys() >= set(sets):
                return None
            both = [samples(*side, of) for of in (column, reference) for side in sides]
            return Ratio.of(reference.name, *both, least_prompts=LEAST_PROMPTS)

        tau, fast, plain = (self.modes[0], "steps"), (self.modes[-1], "samples"), (PLAIN, "samples")
        steps, runs = samples(*tau), [seen for found in sets for seen in column.seen[found]]
        verified = sum(count for _, count in steps)
        return Cell(
            len(steps),
            sum(tokens for tokens, _ in steps) / verified if verified else 0.0,
            against(tau),
            Ratio.of(PLAIN, samples(*fast), samples(*plain), least_prompts=LEAST_PROMPTS),
            against(fast, plain),
            sum(seen.answers for seen in runs),
            sum(min(run.same + run.near_ties for run in seen.speculative.values()) for seen in runs),
        )

    def to_json(self) -> dict[str, object]:
        columns: dict[str, dict[str, object]] = {column.name: {} for column in self.columns}
        for name, column, cell in self.cells():
            columns[column.name][name] = cell.to_json()
        return {
            "complete": self.complete,
            "reference": self.columns[0].name if self.columns else None,
            "tau_mode": self.modes[0],
            "speed_mode": self.modes[-1],
            "columns": [
                {
                    "name": column.name,
                    "about": column.about,
                    "skipped": column.skipped or None,
                    "sets": columns[column.name],
                }
                for column in self.columns
            ],
        }


OnTurn = Callable[[str, str, int, Turn], None]


def run_sweep(
    columns: Sequence[Column],
    sets: PromptSets,
    plan: BenchPlan,
    runs: int,
    on_turn: OnTurn = lambda column, name, run, turn: None,
    on_cell: Callable[[Sweep], None] = lambda sweep: None,
) -> Sweep:
    """Measures column after column; `on_cell` gets the result so far after every set of prompts.

    If a column cannot be loaded or fails, its reason is recorded, and the other columns are still measured.
    """
    result = Sweep(tuple(mode for mode in plan.modes if mode != PLAIN), tuple(sets))
    for column in columns:
        result.columns.append(column)
        try:
            with column.load() as (llm, column.about):
                for run in range(runs):
                    # Every run has its own seed, because the same seed would repeat the same sampled text.
                    settings = replace(plan, seed=plan.seed + run, draft_lora=column.variant)
                    for name, conversations in sets.items():
                        watch = partial(on_turn, column.name, name, run)
                        seen = compare(llm, column.name, conversations, settings, watch)
                        column.seen.setdefault(name, []).append(seen)
                        on_cell(result)
        except SlipstreamError as error:
            column.skipped = str(error)
            on_cell(result)
    result.complete = True
    on_cell(result)
    return result
