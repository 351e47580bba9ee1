"""What the policy knows about one sequence: its calibration, its gains, and when it may try to draft again.

`DraftDebt` limits what all requests of a kind may lose by drafts that do not pay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.speculative.calibration import Calibration, DraftOutcome
from slipstream.speculative.expected_gains import BoundedRatio, DepthGains, ExpectedGains
from slipstream.types import Gate, Mode, Proposal, Verdict

# Rows that one sequence may verify in auto mode. A GPU's matmuls of up to 64 rows agree bit for bit with those
# of fewer rows; a larger value would leave that range.
MAX_AUTO_ROWS = 64
# docs/log.md holds the measurements behind the policy; figures about a single value are repeated below.

# Drafting must promise this many times plain decoding's speed, because promises near break-even tend to fail. In
# replays it raised MT-Bench at temperature 0.8 from 0.982 to 0.987 of plain decoding's speed; 1.07 gave no more.
_REQUIRED_SPEEDUP = 1.04
# The longest and the shortest wait between two probes, in units of the gate's probe interval. Longer waits notice a
# text that becomes easy too late; shorter waits cost time on hopeless texts. Other longest waits changed speeds by less
# than 2 % in replays.
_LONGEST_WAIT, _SHORTEST_WAIT = 8, 0.25
_HOPELESS_GAIN = 0.15  # A sequence that expects fewer accepted tokens than this of three drafted ones is hopeless.
# A hopeless sequence waits this many times as long after each probe; others wait twice as long.
_HOPELESS_FACTOR = 4
# Waits are short, and do not grow, where less than this share of plain decoding's speed is missing. With 0.25 MT-Bench
# ran at 0.950 of plain decoding's speed, with 0.1 at 0.990 (greedy).
_FAR_FROM_PAYING = 0.1
_FAILED_DRAFT = 0.5  # This share of the expected gains is left after a draft that did not come.
# Bounds for the share of the promised tokens that verified drafts really committed. The lower bound keeps a bad spell
# from ending all drafting, the upper one keeps luck from promising more than the calibration does.
_KEPT_PROMISES = (0.7, 1.0)
# Children per visited row from which the calibration learns. With all children, the many unlikely ones of a tree would
# drown the likely ones.
_OBSERVED_CHILDREN = 3

# Drafting may lose this share of all tokens. A larger share makes losing texts slower, a smaller one notices too late
# that drafting has begun to pay. With this debt MT-Bench ran at 0.96 to 1.0 of plain decoding's speed and HumanEval at
# 1.47 to 1.69, without it at 0.96 to 0.99 and 1.65 to 1.68; noise was 3 points wide.
_LOSS_SHARE = 0.006
_FREE_START_TOKENS = 12.0  # Drafting may lose these tokens at the start, because nothing is known about it yet.
_SAVED_TOKENS = 4.0  # At most this many tokens won in good times are saved for bad times.
_MOST_DEBT_TOKENS = 1.0  # The debt is capped here, so that every kind of request may probe again after some time.
_KEPT_PER_TOKEN = 0.999  # Written and lost tokens fade by this factor per token: losses and savings are forgotten.


class DraftDebt:
    """What drafting has lost, in tokens that plain decoding would have made in its time.

    All requests of one kind share one debt, so that many short answers do not each pay to learn the same thing.
    """

    def __init__(self) -> None:
        self._written = 0.0
        self._lost = -_FREE_START_TOKENS

    @property
    def exceeded(self) -> bool:
        """Whether drafting has lost more than its share; then sequences that expect no gain wait with their probes."""
        return self._lost > _LOSS_SHARE * self._written

    def write(self, tokens: int) -> None:
        """Takes in that this many tokens were written, with or without drafting."""
        kept = _KEPT_PER_TOKEN**tokens
        self._written = kept * self._written + tokens
        self._lost *= kept

    def lose(self, tokens: float) -> None:
        """Takes in that a draft used the time of this many plain tokens."""
        self._lost = min(_MOST_DEBT_TOKENS, self._lost + tokens)

    def win(self, tokens: int) -> None:
        """Takes in that this many drafted tokens were accepted."""
        self._lost = min(self._lost, max(-_SAVED_TOKENS, self._lost - tokens))


@dataclass(frozen=True, slots=True)
class SharedRecord:
    """What requests of one kind have shown; a new request of the kind starts from it."""

    calibration: Calibration = field(default_factory=Calibration)
    gains: ExpectedGains = field(default_factory=ExpectedGains)
    depths: DepthGains = field(default_factory=DepthGains)
    # the share of the promised tokens that verified drafts committed
    kept: BoundedRatio = field(default_factory=lambda: BoundedRatio(1.0, *_KEPT_PROMISES))
    debt: DraftDebt = field(default_factory=DraftDebt)


class SequencePolicy:
    """The policy's memory of one request; `calibration` turns the drafter's claims into acceptance probabilities."""

    def __init__(self, mode: Mode, gate: Gate, proposals: int, shared: SharedRecord) -> None:
        self.gate = gate
        self.margin = gate.margin * _REQUIRED_SPEEDUP
        self.proposals = proposals
        self.chains_only = mode.kind == "chain"
        self.max_nodes = _most_nodes(mode, proposals)
        self.deepest = min(proposals, self.max_nodes)
        self.shared = shared
        self.calibration = Calibration(shared.calibration)
        self.gains = ExpectedGains(shared.gains)
        self.depths = DepthGains(shared.depths)
        self.note = ""  # why the last plan drafted nothing for this sequence
        self.asked = False  # whether the last plan drafted for this sequence
        self._tried = False
        self._interval = 0  # tokens between two probes; 0 while speculation pays
        self._wait = 0
        self._probing = False  # whether the last plan drafted although it did not seem to pay
        self._break_even = math.inf
        self._shadow: deque[tuple[int, float, int]] = deque()

    @property
    def backing_off(self) -> bool:
        return self._interval > 0

    @property
    def probe_due(self) -> bool:
        return self.backing_off and self._wait <= 0 and not self.shared.debt.exceeded

    @property
    def probe_near(self) -> bool:
        """Whether the next probe is close enough for this sequence to take part in another sequence's draft pass."""
        return self.backing_off and 2 * self._wait <= self._interval

    @property
    def tokens_to_probe(self) -> int:
        return max(0, self._wait)

    @property
    def hopeful(self) -> bool:
        """Whether there is reason to draft at all: the gains are known, or the sequence has never drafted."""
        return self.gains.known or not self._tried

    def planned(self, slots: int) -> None:
        self.asked = slots > 0
        self._tried = self._tried or self.asked

    def draft_failed(self) -> None:
        """Takes in that a requested draft did not come, so that a failing drafter is not asked in every step."""
        self.gains.correct(_FAILED_DRAFT)

    @property
    def tried(self) -> bool:
        return self._tried

    @property
    def hopeless(self) -> bool:
        """Whether almost no recently drafted token was accepted, in this request or in others of its kind."""
        return self.gains.known and self.gains.expected(3, 3, branching=False) < _HOPELESS_GAIN

    def back_off(self, outlook: float) -> None:
        """Begins to decode plainly until the first probe, because speculation does not pay.

        `outlook` is the expected speed over plain decoding. Close to break-even a probe costs almost nothing, so the
        first probe comes early.
        """
        if not self.backing_off:
            nearness = min(1.0, max(_SHORTEST_WAIT, (1.0 - outlook) / _FAR_FROM_PAYING))
            if self.hopeless and not self._tried:
                nearness = _HOPELESS_FACTOR
            self._interval = self._wait = max(1, round(nearness * self.gate.probe))
            self._break_even = math.inf

    def probed(self, break_even: float, outlook: float) -> None:
        """Begins a probe; unless it succeeds, the next one comes after the same wait or a much longer one.

        `break_even` is how many tokens of the draft must be accepted for the draft to be worth verifying.
        """
        self._break_even, self._probing = break_even, True
        if self._tried and outlook < 1.0 - _FAR_FROM_PAYING:
            factor = _HOPELESS_FACTOR if self.hopeless else 2
            self._interval = min(factor * self._interval, _LONGEST_WAIT * self.gate.probe)
        self._wait = self._interval

    def believed(self) -> None:
        """Takes in that drafting seems to pay again; if it does not, the next wait is a medium one."""
        self._probing = False
        if self.backing_off:
            self._interval = self._wait = max(self._interval // 4, self.gate.probe)

    def _outcome(self, right: int) -> None:
        """Takes in a probe's accepted tokens; a probe that would have paid is followed by another one at once."""
        if self.backing_off and right >= self._break_even:
            self.believed()
            self._wait = 0

    def paid(self) -> None:
        """Takes in that the latest draft promises to pay; the promise of a probe counts only once it has come true."""
        if not self._probing:
            self._interval = self._wait = 0

    def learn(self, proposal: Proposal, verdict: Verdict, truth: Sequence[int]) -> None:
        """Compares a verified proposal with the tokens that the target chose (`truth`, the tokens of the verdict)."""
        self._shadow.clear()
        self.shared.debt.win(verdict.accepted)
        self._outcome(verdict.accepted)
        if not proposal.chances or verdict.failed:
            return
        tokens, chances = proposal.tokens, proposal.chances
        children: dict[int, list[int]] = {row: [] for row in verdict.path}
        for row, parent in enumerate(proposal.parents):
            if parent in children:
                children[parent].append(row)
        outcomes: list[DraftOutcome] = []
        for depth, (siblings, chosen) in enumerate(zip(children.values(), truth, strict=False), start=1):
            if len(siblings) > 1:
                siblings.sort(key=chances.__getitem__, reverse=True)
            for rank, child in enumerate(siblings[:_OBSERVED_CHILDREN]):
                outcomes.append((chances[child], depth, tokens[child] == chosen, rank == 0))
        self._revalue(outcomes)

    def shadow(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Remembers a drafted chain that is not verified, so that the tokens to come show what it was worth."""
        self._shadow = deque(zip(tokens, chances, range(1, len(tokens) + 1), strict=True))

    def committed(self, tokens: Sequence[int]) -> None:
        """Takes in the tokens of a step: they bring the next probe nearer and judge the remembered chain."""
        self._wait -= len(tokens)
        self.shared.debt.write(len(tokens))
        if not self._shadow:
            return
        outcomes: list[DraftOutcome] = []
        for token in tokens:
            if not self._shadow:
                break
            drafted, claimed, depth = self._shadow.popleft()
            outcomes.append((claimed, depth, token == drafted, True))
            if token != drafted or not self._shadow:
                self._shadow.clear()
                self._outcome(depth if token == drafted else depth - 1)
        self._revalue(outcomes)

    def _revalue(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learns from outcomes, and scales earlier gains by the factor by which trust in the drafter has changed."""
        own, shared = self.calibration.learn(outcomes)
        self.gains.correct(own)
        self.shared.gains.correct(shared)


def _most_nodes(mode: Mode, proposals: int) -> int:
    if mode.kind == "plain" or proposals < 1:
        return 0
    if mode.kind == "auto":
        return MAX_AUTO_ROWS - 1
    nodes = mode.width - 1 if mode.width else proposals
    return min(nodes, proposals) if mode.kind == "chain" else nodes
