"""Measures several preparations of one pair: other weight types, or other variants of the drafter.

Every preparation is a column and runs all prompts in all modes, with one model in memory at a time. Tau is taken from
the plan's first speculative mode, and the speed-up over plain decoding from its last. Every column is compared with the
first one, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from slipstream.bench.intervals import Sample
from slipstream.bench.measure import PLAIN, BenchPlan, Comparison, Ratio, Turn, compare, turns_of
from slipstream.bench.workloads import Conversation
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

ALL_SETS = "all"
# Prompts needed for an interval; a bootstrap over fewer says almost nothing about prompts that were not asked.
LEAST_PROMPTS = 5
PromptSets = Mapping[str, Sequence[Conversation]]


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A pair that is ready to be measured, and a description of its files."""

    llm: LLM
    about: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Column:
    """One preparation of the pair; `load` raises a SlipstreamError if it is not available on this machine."""

    name: str
    load: Callable[[], AbstractContextManager[LoadedPair]]
    variant: str | None = None  # the draft variant that its requests ask for


@dataclass(slots=True)
class Cell:
    """One column on one set of prompts: one sample per prompt, summed over all runs."""

    steps: list[Sample] = field(default_factory=list)  # tokens and verify steps
    fast: list[Sample] = field(default_factory=list)  # tokens and milliseconds with speculation
    plain: list[Sample] = field(default_factory=list)  # tokens and milliseconds without it
    answers: int = 0
    same_or_near: int = 0  # answers whose texts equal plain decoding's in every mode, or differ only from a near-tie on

    def add(self, seen: Comparison, modes: Sequence[str]) -> None:
        first, last = seen.modes[modes[0]], seen.modes[modes[-1]]
        self.steps = _added(self.steps, first.steps)
        self.fast = _added(self.fast, last.samples)
        self.plain = _added(self.plain, seen.plain.samples)
        self.answers += seen.answers
        self.same_or_near += min(run.same + run.near_ties for run in seen.speculative.values())

    @property
    def tau(self) -> float:
        tokens, steps = (sum(column) for column in zip(*self.steps, strict=True))
        return tokens / steps if steps else 0.0

    def speedup(self) -> Ratio | None:
        return Ratio.of(PLAIN, self.fast, self.plain, least_prompts=LEAST_PROMPTS)


def _added(before: list[Sample], more: list[Sample]) -> list[Sample]:
    if not before:
        return list(more)
    return [(tokens + t, cost + c) for (tokens, cost), (t, c) in zip(before, more, strict=True)]


@dataclass(slots=True)
class ColumnResult:
    name: str
    about: dict[str, object] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    skipped: str = ""  # the reason why the column was not measured, or not completely


@dataclass(slots=True)
class Sweep:
    """The results of every column on every set; the first column is the reference."""

    modes: tuple[str, ...]  # without plain decoding
    sets: tuple[str, ...]
    columns: list[ColumnResult] = field(default_factory=list)
    complete: bool = False

    @property
    def reference(self) -> ColumnResult:
        return self.columns[0]

    @property
    def shown_sets(self) -> tuple[str, ...]:
        return (*self.sets, ALL_SETS) if len(self.sets) > 1 else self.sets

    def cell(self, column: ColumnResult, name: str) -> Cell | None:
        """The column's numbers on one set, or on all sets together; None until they are complete."""
        if name != ALL_SETS:
            return column.cells.get(name)
        if any(found not in column.cells for found in self.sets):
            return None
        parts = [column.cells[found] for found in self.sets]
        return Cell(
            [sample for part in parts for sample in part.steps],
            [sample for part in parts for sample in part.fast],
            [sample for part in parts for sample in part.plain],
            sum(part.answers for part in parts),
            sum(part.same_or_near for part in parts),
        )

    def tau_against(self, column: ColumnResult, name: str) -> Ratio | None:
        """Tau over the reference's tau; None for the reference itself, or if either is missing."""
        return self._against(column, name, lambda cell: (cell.steps,))

    def speedup_against(self, column: ColumnResult, name: str) -> Ratio | None:
        """The speed-up over the reference's speed-up, which cancels changes of the machine's speed between columns."""
        return self._against(column, name, lambda cell: (cell.fast, cell.plain))

    def _against(
        self, column: ColumnResult, name: str, samples: Callable[[Cell], tuple[list[Sample], ...]]
    ) -> Ratio | None:
        mine, theirs = self.cell(column, name), self.cell(self.reference, name)
        if column is self.reference or mine is None or theirs is None:
            return None
        return Ratio.of(self.reference.name, *samples(mine), *samples(theirs), least_prompts=LEAST_PROMPTS)

    def to_json(self) -> dict[str, object]:
        return {
            "complete": self.complete,
            "reference": self.reference.name if self.columns else None,
            "tau_mode": self.modes[0],
            "speed_mode": self.modes[-1],
            "columns": [
                {
                    "name": column.name,
                    "about": column.about,
                    "skipped": column.skipped or None,
                    "sets": {name: found for name in self.shown_sets if (found := self._json(column, name))},
                }
                for column in self.columns
            ],
        }

    def _json(self, column: ColumnResult, name: str) -> dict[str, object] | None:
        cell = self.cell(column, name)
        if cell is None:
            return None
        return {
            "prompts": len(cell.steps),
            "tau": round(cell.tau, 4),
            "tau_against": _ratio_json(self.tau_against(column, name)),
            "speedup": _ratio_json(cell.speedup()),
            "speedup_against": _ratio_json(self.speedup_against(column, name)),
            "same_texts": {"same": cell.same_or_near, "of": cell.answers},
        }


def _ratio_json(found: Ratio | None) -> dict[str, object] | None:
    return None if found is None else {**found.to_json(), "verdict": found.verdict}


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
        found = ColumnResult(column.name)
        result.columns.append(found)
        try:
            with column.load() as loaded:
                found.about = loaded.about
                for run in range(runs):
                    # Every run has its own seed, because the same seed would repeat the same sampled text.
                    settings = replace(plan, seed=plan.seed + run, draft_lora=column.variant)
                    for name, conversations in sets.items():
                        watch = partial(on_turn, column.name, name, run)
                        seen = compare(loaded.llm, column.name, conversations, settings, watch)
                        found.cells.setdefault(name, Cell()).add(seen, result.modes)
                        on_cell(result)
        except SlipstreamError as error:
            found.skipped = str(error)
            on_cell(result)
    result.complete = True
    on_cell(result)
    return result


def answers_of(columns: Sequence[Column], sets: PromptSets, plan: BenchPlan, runs: int) -> int:
    """How many turns each mode answers in a sweep over all columns."""
    return len(columns) * runs * sum(turns_of(conversations, plan) for conversations in sets.values())
