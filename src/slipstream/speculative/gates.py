"""Gates: rules that end or suspend speculation.

`EmaGate` and `EntropyGate` are published rules that end it for the rest of one request. `BatchGate` decides for a whole
batch by measured time: tokens per second with drafts against tokens per second without. Running the slower of the two
ways to measure it costs time, so that cost is counted, and such trials wait until a fixed share of the time covers
them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from slipstream.types import Gate

# The average starts well above break-even, so that the first steps cannot close the gate, and moves half-way to each
# new step. A larger share closes the gate after a single bad step.
_FIRST_EMA = 2.0
_EMA_SHARE = 0.5

# docs/log.md holds the measurements behind the batch gate; figures about a single value are repeated below.

# Steps before the first trial, for few and for many sequences. A trial of many sequences first captures graphs, which a
# batch that soon ends does not repay.
_FIRST_TRIAL_STEPS = 4, 32
# Steps of a trial of the other way, and how many more a single sequence needs, because its steps differ most.
_TRIAL_STEPS = 6.0, 16.0
_STEPS_BETWEEN_TRIALS = 128  # With fewer, trials cost more; with more, a change of the texts is noticed later.
# Steps after which a trial goes on although its first step was never reported, because that step was not timed.
_PATIENCE_STEPS = 8
_LOSS_SHARE = 0.008  # Trials may lose this share of all time.
# A trial is cut short when it has lost the time of this many steps; a single sequence may lose so many more.
_TRIAL_LOSS_STEPS = 1.5, 6.0
_REMEMBERED_STEPS = 64  # A rate is the mean over this many steps.
_REFRESH_STEPS = 8  # A rate is computed again after this many steps, because one step hardly changes it.
_KEPT_STEPS = 2  # A new trial keeps only so many old steps of the way that it tries.
# The share of spent and lost time that is kept at each step. Without it, a long spell in which trials lose little would
# cover large losses much later.
_KEPT_PER_STEP = 0.9998
# A step that takes this many times as long as steps of as many rows usually take is an outlier, for example because the
# machine ran something else. It is replaced by the usual time if it is the only one.
_OUTLIER_FACTOR = 2.0
_REQUIRED_GAIN = 1.01  # The other way must be this many times as fast before it is chosen, so that noise never decides.


class EmaGate:
    """Closes when speculative steps stay more expensive than the plain steps that they replace."""

    def __init__(self, gate: Gate) -> None:
        self.open = True
        self.ema = _FIRST_EMA
        self._gate = gate
        self._steps = 0
        self._low = 0

    def observe(self, committed: int, step_ms: float, plain_ms: float) -> None:
        """Takes in one speculative step: its committed tokens, its time, and the time of one plain step."""
        if not self.open or step_ms <= 0:
            return
        self._steps += 1
        self.ema += _EMA_SHARE * (committed * plain_ms / step_ms - self.ema)
        if self._steps <= self._gate.warmup:
            return
        self._low = self._low + 1 if self.ema < self._gate.margin else 0
        self.open = self._low < self._gate.sustain

    @property
    def reading(self) -> str:
        """The numbers of the rule, for traces."""
        return f"ema {self.ema:.2f}, threshold {self._gate.margin:g}"


class EntropyGate:
    """Closes when the target itself is unsure of its next token."""

    def __init__(self, gate: Gate) -> None:
        self.open = True
        self._gate = gate
        self._low = 0
        self._top1: float | None = None

    @property
    def reading(self) -> str:
        """The numbers of the rule, for traces."""
        seen = "unknown" if self._top1 is None else f"{self._top1:.2f}"
        return f"top-1 {seen}, thresholds {self._gate.floor:g} and {self._gate.hard:g}"

    def observe(self, top1: float) -> None:
        """Takes in the target's largest probability at the place where a step chose its bonus."""
        if not self.open:
            return
        self._top1 = top1
        self._low = self._low + 1 if top1 < self._gate.floor else 0
        self.open = self._low < self._gate.patience and top1 >= self._gate.hard


class _Rate:
    """Tokens per second of one sequence, over the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=_REMEMBERED_STEPS)  # rows, tokens, seconds
        self._added = 0
        self.value = 0.0
        self.step_seconds = 0.0

    @property
    def known(self) -> bool:
        return bool(self._steps)

    def add(self, rows: int, tokens: float, seconds: float) -> None:
        self._steps.append((rows, tokens, seconds))
        self._added += 1
        if len(self._steps) > _REFRESH_STEPS and self._added % _REFRESH_STEPS:
            return  # one step hardly changes the mean of many
        times: dict[int, list[float]] = {}
        for each, _, taken in self._steps:
            times.setdefault(each, []).append(taken)
        total = 0.0
        for group in times.values():
            usual = median_low(group)
            ordinary = [taken for taken in group if taken < _OUTLIER_FACTOR * usual]
            once = len(ordinary) == len(group) - 1
            total += sum(ordinary) + usual if once else sum(group)
        self.step_seconds = total / len(self._steps)
        self.value = sum(tokens for _, tokens, _ in self._steps) / total

    def forget(self) -> None:
        """Drops all but the last few steps."""
        while len(self._steps) > _KEPT_STEPS:
            self._steps.popleft()


@dataclass(slots=True)
class _Record:
    """Both ways of decoding one size of batch, and the trial that may be running."""

    plain: _Rate = field(default_factory=_Rate)
    free: _Rate = field(default_factory=_Rate)  # the rate of steps that may draft
    drafting: bool = False  # whether drafting is the faster way according to the measured rates
    left: int = 0  # steps of the running trial that have not been planned yet
    tried: bool = True  # whether the trial's first step has been reported; the other steps of the trial wait for it
    trials: int = 0
    since: int = 0  # steps since the last trial
    spent: float = 0.0  # seconds of all steps; old steps fade
    lost: float = 0.0  # seconds that trials and captures have lost; old ones fade
    trial_lost: float = 0.0  # seconds that the running trial has lost
    last: bool | None = None  # whether the last reported step drafted

    def begin_trial(self, batch: int) -> None:
        self.left, self.since, self.trial_lost, self.tried = round(_for_batch(_TRIAL_STEPS, batch)), 0, 0.0, False
        self.trials += 1
        self.rate(not self.drafting).forget()

    def rate(self, drafting: bool) -> _Rate:
        return self.free if drafting else self.plain

    def due(self, batch: int) -> bool:
        """Whether the other way is to be tried now, and the time that this may lose is covered."""
        own, other = self.rate(self.drafting), self.rate(not self.drafting)
        if not own.known or self.since < (_STEPS_BETWEEN_TRIALS if self.trials else _first_trial(batch)):
            return False
        if not other.known:
            return True
        each = max(0.0, 1.0 - other.value / own.value) * other.step_seconds
        # When a trial is cut short, one more step of it is already in flight.
        whole, cut = _for_batch(_TRIAL_STEPS, batch), _for_batch(_TRIAL_LOSS_STEPS, batch)
        price = min(whole * each, cut * own.step_seconds + 2 * each)
        return self.lost + price <= _LOSS_SHARE * self.spent


class BatchGate:
    """Remembers the speed with and without drafts for every size of batch; the host's work counts like any other time.

    Sizes are rounded up to powers of two, as those of captured graphs are. A step is planned before the result of the
    one before it is reported.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def drafts(self, batch: int) -> bool:
        """Whether the next step of `batch` sequences may draft; the call counts as that step."""
        record = self._record(batch)
        begins = not record.left and record.due(batch)
        if begins:
            record.begin_trial(batch)
        if record.left and (begins or record.tried or record.since > _PATIENCE_STEPS):
            record.left -= 1
            return not record.drafting
        record.since += 1
        return record.drafting

    def better(self, batch: int) -> bool:
        """Whether drafting is the faster way according to the measured rates; the call starts no trial."""
        return self._record(batch).drafting

    def observe(self, batch: int, drafting: bool, rows: int, tokens: float, seconds: float) -> None:
        """Takes in how many tokens a step gave one sequence, and how many seconds passed until the next could begin.

        `drafting` is whether the step drafted. `rows` is the rows per sequence, on which a step's time depends most.
        """
        record = self._record(batch)
        best = record.rate(record.drafting)
        record.spent = _KEPT_PER_STEP * record.spent + seconds
        record.lost *= _KEPT_PER_STEP
        first, record.last = record.last != drafting, drafting
        if drafting != record.drafting and best.known:
            record.tried = True
            loss = seconds - tokens / best.value
            record.lost += max(0.0, loss)
            record.trial_lost += loss
            if record.left and record.trial_lost > _for_batch(_TRIAL_LOSS_STEPS, batch) * best.step_seconds:
                record.left, first = 0, False
        # The first step after a change is not timed, because the host still works for the step before while it runs.
        if not first:
            record.rate(drafting).add(rows, tokens, seconds)
            self._choose(record)

    def pay(self, batch: int, seconds: float) -> None:
        """Takes in the time of a step that first had to be captured: it counts as lost and changes no rate."""
        record = self._record(batch)
        record.lost += seconds
        record.spent += seconds

    @staticmethod
    def _choose(record: _Record) -> None:
        own, other = record.rate(record.drafting), record.rate(not record.drafting)
        if not record.left and other.known and other.value > _REQUIRED_GAIN * own.value:
            record.drafting = not record.drafting
            record.since = 0

    def _record(self, batch: int) -> _Record:
        return self._records.setdefault((batch - 1).bit_length(), _Record())


def _first_trial(batch: int) -> int:
    """Steps before the first trial; more sequences wait longer, because their graphs have to be captured first."""
    few, many = _FIRST_TRIAL_STEPS
    return min(many, max(few, 2 * batch - few))


def _for_batch(sizes: tuple[float, float], batch: int) -> float:
    """The value for many sequences plus the part that grows the fewer sequences there are."""
    return sizes[0] + sizes[1] / batch
