"""One measurement for several preparations of a pair: other weight types, or other variants of the drafter.

Every preparation, a column, runs all prompts in all modes, one model in memory at a time. Tau is that of the plan's
first speculative mode, the speed-up over plain decoding that of its last. Columns are held against the first, prompt by
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from slipstream.bench.intervals import Sample, ratio, ratio_interval
from slipstream.bench.measure import PLAIN, Comparison, Plan, Ratio, Turn, compare, turns_of
from slipstream.bench.workloads import Conversation
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

ALL_SETS = "all"
LEAST_PROMPTS = 5  # resampling fewer says next to nothing about the prompts that were not asked
PromptSets = Mapping[str, Sequence[Conversation]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pair ready to be measured, and what its files are made of."""

    llm: LLM
    about: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Column:
    """One preparation of the pair. Loading it raises our own error where it cannot be had here."""

    name: str
    load: Callable[[], AbstractContextManager[Loaded]]
    variant: str | None = None  # the drafter's variant its requests ask for


@dataclass(slots=True)
class Cell:
    """One column on one set of prompts, all runs together: a sample per prompt."""

    steps: list[Sample] = field(default_factory=list)  # tokens and verify steps
    fast: list[Sample] = field(default_factory=list)  # tokens and milliseconds, speculative
    plain: list[Sample] = field(default_factory=list)
    answers: int = 0
    same: int = 0  # answers whose texts equal plain decoding's in every mode, near-ties included

    def add(self, seen: Comparison, modes: Sequence[str]) -> None:
        first, last = seen.modes[modes[0]], seen.modes[modes[-1]]
        self.steps = _added(self.steps, first.steps)
        self.fast = _added(self.fast, last.samples)
        self.plain = _added(self.plain, seen.plain.samples)
        self.answers += seen.answers
        self.same += min(run.same + run.near_ties for run in seen.speculative.values())

    @property
    def tau(self) -> float:
        tokens, steps = (sum(column) for column in zip(*self.steps, strict=True))
        return tokens / steps if steps else 0.0

    def speedup(self) -> Ratio | None:
        return _ratio(PLAIN, self.fast, self.plain)


def _added(before: list[Sample], more: list[Sample]) -> list[Sample]:
    if not before:
        return list(more)
    return [(tokens + t, cost + c) for (tokens, cost), (t, c) in zip(before, more, strict=True)]


def _ratio(over: str, *sides: Sequence[Sample]) -> Ratio | None:
    value = ratio(*sides)
    interval = ratio_interval(*sides) if len(sides[0]) >= LEAST_PROMPTS else None
    return None if value is None else Ratio(over, value, interval)


@dataclass(slots=True)
class ColumnResult:
    name: str
    about: dict[str, object] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    skipped: str = ""  # why it was not measured, or not to its end


@dataclass(slots=True)
class Sweep:
    """What every column gave on every set; the first column is the reference."""

    modes: tuple[str, ...]  # the speculative ones
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
        """The column's numbers on a set, or on all of them together; None as long as they are not all there."""
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
            sum(part.same for part in parts),
        )

    def tau_against(self, column: ColumnResult, name: str) -> Ratio | None:
        """Tau over the reference's; None for the reference itself and where either is missing."""
        mine, theirs = self._pair(column, name)
        return None if mine is None or theirs is None else _ratio(self.reference.name, mine.steps, theirs.steps)

    def speedup_against(self, column: ColumnResult, name: str) -> Ratio | None:
        """The speed-up over the reference's speed-up: plain decoding beside each cancels what the machine did."""
        mine, theirs = self._pair(column, name)
        if mine is None or theirs is None:
            return None
        return _ratio(self.reference.name, mine.fast, mine.plain, theirs.fast, theirs.plain)

    def _pair(self, column: ColumnResult, name: str) -> tuple[Cell | None, Cell | None]:
        if column is self.reference:
            return None, None
        return self.cell(column, name), self.cell(self.reference, name)

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
            "tau_against": ratio_json(self.tau_against(column, name)),
            "speedup": ratio_json(cell.speedup()),
            "speedup_against": ratio_json(self.speedup_against(column, name)),
            "same_texts": {"same": cell.same, "of": cell.answers},
        }


def ratio_json(found: Ratio | None) -> dict[str, object] | None:
    if found is None:
        return None
    known = found.to_json()
    return {"over": known.pop("mode"), **known, "verdict": found.verdict}


OnTurn = Callable[[str, str, int, Turn], None]


def run_sweep(
    columns: Sequence[Column],
    sets: PromptSets,
    plan: Plan,
    runs: int,
    on_turn: OnTurn = lambda column, name, run, turn: None,
    on_cell: Callable[[Sweep], None] = lambda sweep: None,
) -> Sweep:
    """Measures column after column; `on_cell` sees the result whenever there is more of it.

    A column that cannot be loaded, or fails, is noted with the reason, and the others go on.
    """
    result = Sweep(tuple(mode for mode in plan.modes if mode != PLAIN), tuple(sets))
    for column in columns:
        found = ColumnResult(column.name)
        result.columns.append(found)
        try:
            with column.load() as loaded:
                found.about = loaded.about
                for run in range(runs):
                    # another seed each time: sampled text would otherwise only repeat itself
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


def answers_of(columns: Sequence[Column], sets: PromptSets, plan: Plan, runs: int) -> int:
    """How many turns a sweep answers in every mode, all columns together."""
    return len(columns) * runs * sum(turns_of(conversations, plan) for conversations in sets.values())
