"""What a section of the verification says: promises, what was seen, and whether they hold."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One line of the report: what was promised, what was seen, and whether it holds."""

    promise: str
    seen: str
    ok: bool


@dataclass(slots=True)
class Report:
    tokens: int  # of each answer in the checks of text
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, promise: str, seen: str, ok: bool) -> None:
        self.outcomes.append(Outcome(promise, seen, ok))
