"""Whether drafting pays for a batch as a whole, by the clock on the wall: tokens per second with drafts and without.

Looking at the worse of the two ways costs time, so what it costs is counted, and looks wait until they are paid for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

_FIRST = 4, 32  # steps until the very first look: before it nobody knows what plain decoding yields; of many sequences
_LOOK = 6.0, 16.0  # steps of a look at the other way, and how many more for one sequence, whose steps differ most
_REVISIT = 128  # steps between two looks at least
_PATIENCE = 8  # steps until a look whose first step is not told goes on: that one was not worth timing
_SHARE = 0.008  # of all time may be lost on looks
_LOSS = 1.5, 6.0  # steps' time that a look may lose before it is cut short; for one sequence so much more
_MEMORY = 64  # steps that are remembered
_REFRESHED = 8  # steps after which a rate is worked out again
_RECALLED = 2  # of them when a new look begins
_HORIZON = 0.9998  # kept of times spent and lost, so that a long quiet spell does not pay for a wild one
_OUTLIER = 2.0  # times what steps of as many rows usually take: the machine was elsewhere, unless there are several
_GAIN = 1.01  # by which the other way must be quicker


class _Rate:
    """Tokens of a sequence per second, of late."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=_MEMORY)  # rows, tokens, seconds
        self._added = 0
        self.value = 0.0
        self.step_seconds = 0.0

    @property
    def known(self) -> bool:
        return bool(self._steps)

    def add(self, rows: int, tokens: float, seconds: float) -> None:
        self._steps.append((rows, tokens, seconds))
        self._added += 1
        if len(self._steps) > _REFRESHED and self._added % _REFRESHED:
            return  # one step hardly moves many
        times: dict[int, list[float]] = {}
        for each, _, taken in self._steps:
            times.setdefault(each, []).append(taken)
        total = 0.0
        for group in times.values():
            usual = median_low(group)
            ordinary = [taken for taken in group if taken < _OUTLIER * usual]
            once = len(ordinary) == len(group) - 1
            total += sum(ordinary) + usual if once else sum(group)
        self.step_seconds = total / len(self._steps)
        self.value = sum(tokens for _, tokens, _ in self._steps) / total

    def forget(self) -> None:
        """All but the last few steps."""
        while len(self._steps) > _RECALLED:
            self._steps.popleft()


@dataclass(slots=True)
class _Record:
    """Both ways of one size of batch, and the look that may be under way."""

    plain: _Rate = field(default_factory=_Rate)
    free: _Rate = field(default_factory=_Rate)
    drafting: bool = False  # the better way, as far as anybody knows
    left: int = 0  # steps of a look that are still to be planned
    tried: bool = True  # whether the first of them has been told: the others wait for that
    looks: int = 0
    since: int = 0  # steps since the last look
    spent: float = 0.0
    lost: float = 0.0
    look_lost: float = 0.0
    last: bool | None = None  # how the last step that was told went

    def begin_look(self, batch: int) -> None:
        self.left, self.since, self.look_lost, self.tried = round(_for_batch(_LOOK, batch)), 0, 0.0, False
        self.looks += 1
        self.rate(not self.drafting).forget()

    def rate(self, drafting: bool) -> _Rate:
        return self.free if drafting else self.plain

    def due(self, batch: int) -> bool:
        """Whether the other way is to be looked at now, and the look paid for."""
        own, other = self.rate(self.drafting), self.rate(not self.drafting)
        if not own.known or self.since < (_REVISIT if self.looks else _first_look(batch)):
            return False
        if not other.known:
            return True
        each = max(0.0, 1.0 - other.value / own.value) * other.step_seconds
        # a look that is cut short has one step more in flight
        price = min(_for_batch(_LOOK, batch) * each, _for_batch(_LOSS, batch) * own.step_seconds + 2 * each)
        return self.lost + price <= _SHARE * self.spent


class BatchGate:
    """Remembers both ways for every size of batch; what the host does for a draft counts like anything else.

    Sizes are doublings, as graphs are; a step is asked for before the last one has been told.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def drafts(self, batch: int) -> bool:
        """Whether the next step of so many sequences may draft."""
        record = self._record(batch)
        begins = not record.left and record.due(batch)
        if begins:
            record.begin_look(batch)
        if record.left and (begins or record.tried or record.since > _PATIENCE):
            record.left -= 1
            return not record.drafting
        record.since += 1
        return record.drafting

    def better(self, batch: int) -> bool:
        """Whether drafting is the better way as far as anybody knows; nothing is tried for it."""
        return self._record(batch).drafting

    def observe(self, batch: int, drafting: bool, rows: int, tokens: float, seconds: float) -> None:
        """What a step that might draft, or might not, gave a sequence, and how long until the next could begin.

        `rows` of a sequence are what the times of steps depend on most.
        """
        record = self._record(batch)
        best = record.rate(record.drafting)
        record.spent = _HORIZON * record.spent + seconds
        record.lost *= _HORIZON
        first, record.last = record.last != drafting, drafting
        if drafting != record.drafting and best.known:
            record.tried = True
            loss = seconds - tokens / best.value
            record.lost += max(0.0, loss)
            record.look_lost += loss
            if record.left and record.look_lost > _for_batch(_LOSS, batch) * best.step_seconds:
                record.left, first = 0, False
        # the host still works for the step before while the first of a kind runs
        if not first:
            record.rate(drafting).add(rows, tokens, seconds)
            self._choose(record)

    def pay(self, batch: int, seconds: float) -> None:
        """A step that first had to be captured: that is a loss like any other, and says nothing else."""
        record = self._record(batch)
        record.lost += seconds
        record.spent += seconds

    @staticmethod
    def _choose(record: _Record) -> None:
        own, other = record.rate(record.drafting), record.rate(not record.drafting)
        if not record.left and other.known and other.value > _GAIN * own.value:
            record.drafting = not record.drafting
            record.since = 0

    def _record(self, batch: int) -> _Record:
        return self._records.setdefault((batch - 1).bit_length(), _Record())


def _first_look(batch: int) -> int:
    """Steps before it: what many sequences need has to be captured, which a batch that is soon gone is not worth."""
    few, many = _FIRST
    return min(many, max(few, 2 * batch - few))


def _for_batch(sizes: tuple[float, float], batch: int) -> float:
    """What many sequences need, and more of it the fewer there are."""
    return sizes[0] + sizes[1] / batch
