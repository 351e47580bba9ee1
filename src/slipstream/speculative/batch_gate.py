"""Whether drafting pays for a batch as a whole, by the clock on the wall: tokens per second with drafts and without."""

from __future__ import annotations

from dataclasses import dataclass, field

_LOOK = 6  # steps that one look at a way of stepping takes
_REVISIT = 256  # steps after which the other way is looked at again
_KEPT = 0.95  # of what is remembered, at every step
_OUTLIER = 4.0  # times the usual: a graph was captured, or the machine was elsewhere


@dataclass(slots=True)
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        usual = self.seconds / sum(_KEPT**age for age in range(min(self.steps, 64))) if self.steps else seconds
        self.tokens = _KEPT * self.tokens + tokens
        self.seconds = _KEPT * self.seconds + min(seconds, _OUTLIER * usual)
        self.steps += 1

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Record:
    plain: _Rate = field(default_factory=_Rate)
    drafted: _Rate = field(default_factory=_Rate)
    steps: int = 0


class BatchGate:
    """Remembers both rates for every number of sequences; what the host does for a draft counts like anything else."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def drafts(self, batch: int) -> bool:
        """Whether the next step of so many sequences may draft."""
        record = self._records.setdefault(batch, _Record())
        record.steps += 1
        if record.drafted.steps < _LOOK:
            return True
        if record.plain.steps < _LOOK:
            return False
        better = record.drafted.value >= record.plain.value
        return better != (record.steps % _REVISIT < _LOOK)

    def observe(self, batch: int, drafted: bool, tokens: int, seconds: float) -> None:
        """What a step committed, and how long it took until the next could begin."""
        record = self._records.setdefault(batch, _Record())
        (record.drafted if drafted else record.plain).add(tokens, seconds)
