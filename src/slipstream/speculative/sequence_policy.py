"""What the policy knows about one sequence: its calibration, its gains, and when it may try to draft again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.speculative.calibration import Calibration, Outcome
from slipstream.speculative.draft_debt import Account
from slipstream.speculative.expected_gains import Depths, Gains, Quotient
from slipstream.types import Gate, Mode, Proposal, Verdict

MAX_AUTO_ROWS = 64
_DOUBT = 1.04  # times plain decoding's speed that drafting must promise: near break-even promises rather fail
_LONGEST_WAIT, _SHORTEST_WAIT = 8, 0.25  # times the gate's probe
_HOPELESS_GAIN = 0.15  # accepted tokens to expect of three drafted ones
_HOPELESS_FACTOR = 4  # probes grow rare faster where there is no hope
_FAR_FROM_PAYING = 0.1  # share of plain decoding's speed that is missing
_FAILED_DRAFT = 0.5  # of the gains is left after a draft that did not come
_KEPT = (0.7, 1.0)
_OBSERVED_CHILDREN = 3  # per visited row: the many unlikely children of a tree would drown the rest


@dataclass(frozen=True, slots=True)
class Memory:
    """What requests of one kind have shown; a new one starts from it."""

    calibration: Calibration = field(default_factory=Calibration)
    gains: Gains = field(default_factory=Gains)
    depths: Depths = field(default_factory=Depths)
    kept: Quotient = field(default_factory=lambda: Quotient(1.0, *_KEPT))  # of what verified drafts promised
    account: Account = field(default_factory=Account)


class SequencePolicy:
    """The policy's memory of one request; `calibration` turns the drafter's claims into chances."""

    def __init__(self, mode: Mode, gate: Gate, proposals: int, shared: Memory) -> None:
        self.gate = gate
        self.margin = gate.margin * _DOUBT
        self.proposals = proposals
        self.chains_only = mode.kind == "chain"
        self.max_nodes = _most_nodes(mode, proposals)
        self.deepest = min(proposals, self.max_nodes)
        self.shared = shared
        self.calibration = Calibration(shared.calibration)
        self.gains = Gains(shared.gains)
        self.depths = Depths(shared.depths)
        self.note = ""  # why the last plan drafted nothing
        self.asked = False  # whether the last plan drafted
        self._tried = False
        self._interval = 0  # plain tokens between probes; 0 while speculation pays
        self._wait = 0
        self._probing = False  # the last plan drafted although it did not seem to pay
        self._break_even = math.inf
        self._shadow: deque[tuple[int, float, int]] = deque()

    @property
    def backing_off(self) -> bool:
        return self._interval > 0

    @property
    def probe_due(self) -> bool:
        return self.backing_off and self._wait <= 0 and not self.shared.account.in_debt

    @property
    def probe_near(self) -> bool:
        """Close enough to the next probe to share another sequence's draft pass."""
        return self.backing_off and 2 * self._wait <= self._interval

    @property
    def tokens_to_probe(self) -> int:
        return max(0, self._wait)

    @property
    def hopeful(self) -> bool:
        """Whether there is reason to draft at all: gains that are known, or that nobody has looked for."""
        return self.gains.known or not self._tried

    def planned(self, slots: int) -> None:
        self.asked = slots > 0
        self._tried = self._tried or self.asked

    def draft_failed(self) -> None:
        """A draft was asked for and none came; a drafter that keeps failing must not be asked at every step."""
        self.gains.correct(_FAILED_DRAFT)

    @property
    def tried(self) -> bool:
        return self._tried

    @property
    def hopeless(self) -> bool:
        """Whether next to nothing of what was drafted lately, here or for others, was right."""
        return self.gains.known and self.gains.expected(3, 3, branching=False) < _HOPELESS_GAIN

    def back_off(self, outlook: float) -> None:
        """Speculation does not pay: plain decoding until the first probe.

        `outlook` is its expected speed over plain decoding. Close to break-even a probe costs next to nothing, so
        it comes early.
        """
        if not self.backing_off:
            nearness = min(1.0, max(_SHORTEST_WAIT, (1.0 - outlook) / _FAR_FROM_PAYING))
            if self.hopeless and not self._tried:
                nearness = _HOPELESS_FACTOR
            self._interval = self._wait = max(1, round(nearness * self.gate.probe))
            self._break_even = math.inf

    def probed(self, break_even: float, outlook: float) -> None:
        """A probe is under way; unless it succeeds the next one comes after as many tokens, or far more.

        `break_even` is how many tokens of the draft must turn out right for it to have been worth verifying.
        """
        self._break_even, self._probing = break_even, True
        if self._tried and outlook < 1.0 - _FAR_FROM_PAYING:
            factor = _HOPELESS_FACTOR if self.hopeless else 2
            self._interval = min(factor * self._interval, _LONGEST_WAIT * self.gate.probe)
        self._wait = self._interval

    def believed(self) -> None:
        """Drafting seems to pay again; should it still not, the next wait is neither a long one nor the shortest."""
        self._probing = False
        if self.backing_off:
            self._interval = self._wait = max(self._interval // 4, self.gate.probe)

    def _outcome(self, right: int) -> None:
        """A probe whose draft would have paid is reason to look again at once, not yet to believe."""
        if self.backing_off and right >= self._break_even:
            self.believed()
            self._wait = 0

    def paid(self) -> None:
        """The latest draft promises to pay; of a probe, made in bad times, that has to come true first."""
        if not self._probing:
            self._interval = self._wait = 0

    def learn(self, proposal: Proposal, verdict: Verdict, truth: Sequence[int]) -> None:
        """Compares a verified proposal with what the target chose (`truth`: the verdict's tokens)."""
        self._shadow.clear()
        self.shared.account.win(verdict.accepted)
        self._outcome(verdict.accepted)
        if not proposal.chances or verdict.failed:
            return
        tokens, chances = proposal.tokens, proposal.chances
        children: dict[int, list[int]] = {row: [] for row in verdict.path}
        for row, parent in enumerate(proposal.parents):
            if parent in children:
                children[parent].append(row)
        outcomes: list[Outcome] = []
        for depth, (siblings, chosen) in enumerate(zip(children.values(), truth, strict=False), start=1):
            if len(siblings) > 1:
                siblings.sort(key=chances.__getitem__, reverse=True)
            for rank, child in enumerate(siblings[:_OBSERVED_CHILDREN]):
                outcomes.append((chances[child], depth, tokens[child] == chosen, rank == 0))
        self._revalue(outcomes)

    def shadow(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Remembers a drafted chain that is not verified: the tokens to come will tell what it was worth."""
        self._shadow = deque(zip(tokens, chances, range(1, len(tokens) + 1), strict=True))

    def committed(self, tokens: Sequence[int]) -> None:
        """Every step's tokens: they bring the next probe nearer and judge the remembered chain."""
        self._wait -= len(tokens)
        self.shared.account.write(len(tokens))
        if not self._shadow:
            return
        outcomes: list[Outcome] = []
        for token in tokens:
            if not self._shadow:
                break
            drafted, claimed, depth = self._shadow.popleft()
            outcomes.append((claimed, depth, token == drafted, True))
            if token != drafted or not self._shadow:
                self._shadow.clear()
                self._outcome(depth if token == drafted else depth - 1)
        self._revalue(outcomes)

    def _revalue(self, outcomes: Sequence[Outcome]) -> None:
        """What was gained before the latest outcomes is worth as much less as trust has fallen, or more."""
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
