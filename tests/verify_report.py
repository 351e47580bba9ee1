"""What a section of the verification reports: promises, what was seen, its numbers, and whether each promise holds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Origin:
    """The machine and the commit that a row was measured with."""

    machine: str
    commit: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the report."""

    promise: str
    seen: str
    ok: bool
    values: dict[str, float] = field(default_factory=dict)  # the numbers of `seen` that the page of tables shows
    measured: Origin | None = None  # None: measured here, by the process that reports


@dataclass(slots=True)
class Report:
    """Collects the rows of one section."""

    tokens: int  # the most tokens that an answer may have in the checks of text
    measured: Origin | None = None  # set by a section that judges numbers from another machine
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, promise: str, seen: str, ok: bool, **values: float) -> None:
        self.outcomes.append(Outcome(promise, seen, ok, values, self.measured))
