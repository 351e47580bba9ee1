"""What each sequence proposes in a device step, decided before its draft is there: the host does not wait for it.

Few sequences are planned for and learnt from at every step. Many are so for a sample: the host's time per sequence is
what large batches are slow by, and of sixty outcomes a few say nearly as much as all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from slipstream.engine.gpu.landing import Landing
from slipstream.engine.gpu.loop import DecodeLoop
from slipstream.engine.gpu.state import NOBODY, Wish
from slipstream.engine.gpu.step import bucket
from slipstream.engine.proposer import Proposer
from slipstream.engine.session import Session
from slipstream.kernels.gpu.growth import CHAIN, SEEDED_TREE, TREE
from slipstream.kernels.gpu.rows import LEAST_ROWS
from slipstream.models.gpu_models import GpuDrafter
from slipstream.speculative.batch_gate import BatchGate
from slipstream.speculative.calibration import Calibration
from slipstream.speculative.costs import StepShape
from slipstream.speculative.gains import assumed
from slipstream.speculative.gates import EmaGate
from slipstream.speculative.policy import Offer
from slipstream.types import Decision, Proposal

_ROWS = (2, 4, 8, 16, 32, 64)  # rows of one sequence that steps are captured for
_FEW = 4  # sequences that are learnt from in a step
_VERY_MANY = 32  # from so many on not even in every step
_LONGEST_HELD = 32  # steps that a plan for many serves
_NEARLY = 0.9  # of the best rate is as good, if no graph has to be captured for it
_SPARSE = 4  # columns for each sequence that is left are too many
_TIMED_PLAIN_STEPS = 4  # one of so many plain steps in a row refreshes the cost table


@dataclass(frozen=True, eq=False)
class Cohort:
    """The sequences that decode together, for as long as they are the same.

    The device has a column for each; who leaves keeps it, empty, until the batch is laid out anew. So the others need
    not wait for that.
    """

    columns: tuple[Session, ...]
    places: tuple[int, ...]  # of those who are there

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> Cohort:
        return cls(tuple(sessions), tuple(range(len(sessions))))

    def without_others(self, sessions: Sequence[Session]) -> Cohort | None:
        """The same columns with nobody but these; None if some have no column, or the columns are too many by now.

        Nor do recurrent states stay in a column that nobody uses: theirs are somebody else's soon.
        """
        left, known = set(sessions), set(self.sessions)
        if not left <= known or _SPARSE * len(left) <= len(self.columns):
            return None
        if any(session.ticket.state.recurrent is not None for session in sessions):
            return None
        return Cohort(self.columns, tuple(place for place in self.places if self.columns[place] in left))

    @cached_property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(self.columns[place] for place in self.places)

    @cached_property
    def governed(self) -> tuple[int, ...]:
        """The places of those who have a policy."""
        return tuple(place for place in self.places if self.columns[place].speculation.policy is not None)

    @cached_property
    def speculates(self) -> bool:
        return any(session.speculation.rows > 1 for session in self.sessions)

    @cached_property
    def ema_gates(self) -> tuple[tuple[int, EmaGate], ...]:
        gates = ((place, self.columns[place].speculation.gate) for place in self.places)
        return tuple((place, gate) for place, gate in gates if isinstance(gate, EmaGate))

    @cached_property
    def sampled(self) -> bool:
        return any(not session.greedy for session in self.sessions)

    @property
    def context(self) -> int:
        return max(session.ticket.state.length for session in self.sessions)


@dataclass(frozen=True, slots=True)
class Intent:
    """A wish and the reason for it per column."""

    wishes: Sequence[Wish]
    decisions: Sequence[Decision]
    free: bool  # to draft, as far as the batch's gate is concerned

    @classmethod
    def of(cls, cohort: Cohort, wishes: Sequence[Wish], decisions: Sequence[Decision], free: bool) -> Intent:
        """From what those who are there wish."""
        count = len(cohort.columns)
        spread, reasons = [NOBODY] * count, [Decision()] * count
        for place, wish, decision in zip(cohort.places, wishes, decisions, strict=True):
            spread[place], reasons[place] = wish, decision
        return cls(spread, reasons, free)

    def left_to(self, cohort: Cohort) -> Intent:
        """The same for those who are still there."""
        there = set(cohort.places)
        wishes = [wish if place in there else NOBODY for place, wish in enumerate(self.wishes)]
        return Intent(wishes, self.decisions, self.free)

    @classmethod
    def plain(cls, cohort: Cohort, reason: str) -> Intent:
        count = len(cohort.places)
        return cls.of(cohort, [Wish()] * count, [Decision("plain", reason)] * count, free=False)


class Planner:
    """Asks gates and policy as the proposer does; rows come in buckets here, and all of a bucket cost the same."""

    def __init__(self, proposer: Proposer, loop: DecodeLoop, most_rows: int) -> None:
        self._proposer = proposer
        self._loop = loop
        self._most_rows = most_rows
        self._gate = BatchGate()
        self._cohort: Cohort | None = None
        self._plain: Intent
        self._held: Intent | None = None
        self._age = 0
        self._turn = 0
        self._plain_steps = 0

    def forget(self) -> None:
        """Something has happened to a sequence that a plan made earlier does not know of."""
        self._held = None

    def plan(self, cohort: Cohort, drafter: GpuDrafter | None, alone: bool) -> Intent:
        """What the sequences of a step wish for.

        It is not `alone` where prompts are computed before it: it waits for these, so nothing is tried or learnt.
        """
        count = len(cohort.places)
        if cohort is not self._cohort:
            # of many sequences one ends at nearly every step: a new plan each time would take longer than the steps
            known = self._cohort is not None and self._cohort.columns is cohort.columns
            self._held = self._held.left_to(cohort) if known and self._held is not None else None
            self._cohort = cohort
            self._plain = Intent.plain(cohort, "the whole batch is quicker without drafts" if cohort.governed else "")
        if not cohort.speculates:
            return self._plain
        size = len(cohort.columns)
        free = not cohort.governed or (self._gate.drafts(size) if alone else self._gate.better(size))
        if not free and len(cohort.governed) == count:
            return self._plain
        self._age += 1
        held = self._held
        if held is None or held.free != free or self._age >= min(_LONGEST_HELD, count // 2) or count <= _FEW:
            held = self._held = self._made(cohort, drafter, free)
            self._age = 0
        return held

    def _made(self, cohort: Cohort, drafter: GpuDrafter | None, free: bool) -> Intent:
        sessions = cohort.sessions
        for session in sessions:
            _tell(session)
        slots = self._slots(sessions)
        if not free:
            slots = [0 if own.speculation.policy else depth for own, depth in zip(sessions, slots, strict=True)]
        rates = self._rates(cohort, slots)
        rows = self._widest_paying(rates, bucket(len(cohort.columns)), drafter)
        widest = max(1, self._most_rows // bucket(len(cohort.columns)))
        wishes = [
            _wish(session, depth, self._proposer.proposals, rows, widest - 1)
            for session, depth in zip(sessions, slots, strict=True)
        ]
        decisions = [_decision(*each) for each in zip(sessions, wishes, strict=True)]
        return Intent.of(cohort, wishes, decisions, free)

    def _slots(self, sessions: Sequence[Session]) -> list[int]:
        """How deep each drafts. One draft serves all columns, whoever wants it: of many sequences nobody is left out,
        which would take a policy longer to decide than the step.
        """
        return self._proposer.slots(sessions) if len(sessions) <= _FEW else self._proposer.most_slots(sessions)

    def _widest_paying(self, rates: dict[int, float], batch: int, drafter: GpuDrafter | None) -> int:
        """The rows that promise most; nearly as much is enough of a step that need not be captured first."""
        if not rates:
            return 1
        ready = [rows for rows in rates if self._loop.has(batch, rows, drafter, True)]
        best, known = max(rates, key=rates.__getitem__), max(ready, key=rates.__getitem__, default=0)
        return known if known and rates[known] >= _NEARLY * rates[best] else best

    def _rates(self, cohort: Cohort, slots: Sequence[int]) -> dict[int, float]:
        """Tokens per millisecond that so many rows per sequence promise; nothing if nobody drafts."""
        sessions = cohort.sessions
        drafting = [
            (session.speculation.policy, depth) for session, depth in zip(sessions, slots, strict=True)
            if session.speculation.policy is not None and depth
        ]
        rates: dict[int, float] = {}
        if not drafting:
            return rates
        costs, context = self._proposer.policy.costs, cohort.context
        draft_ms = costs.draft_ms(len(drafting), max(depth for _, depth in drafting), context)
        batch = bucket(len(cohort.columns))
        for rows in _ROWS:
            if rows * batch > self._most_rows:
                break
            if rows * batch < LEAST_ROWS:
                continue  # padded to as many anyway
            tokens = float(len(sessions))
            for policy, depth in drafting:
                gains = policy.gains if policy.gains.known else assumed(policy.proposals)
                nodes = min(rows - 1, policy.max_nodes)
                tokens += gains.expected(nodes, depth, branching=not policy.chains_only)
            shape = StepShape(len(sessions), rows * len(sessions), context, cohort.sampled, branching=True)
            rates[rows] = tokens / (draft_ms + costs.step_ms(shape))
        return rates

    def pupils(self, cohort: Cohort) -> set[int]:
        """The places of those whose policies learn from this step; where there are many they take turns."""
        governed = cohort.governed
        if len(governed) <= _FEW:
            return set(governed)
        self._turn += 1
        if self._turn % (1 + len(governed) // _VERY_MANY):
            return set()
        first = self._turn * _FEW
        return {governed[(first + turn) % len(governed)] for turn in range(_FEW)}

    def learn(self, cohort: Cohort, proposals: dict[int, Proposal]) -> None:
        """Tells the policy what was drafted (by place), as if it had been asked after the draft."""
        offers = []
        for place, proposal in proposals.items():
            session = cohort.columns[place]
            policy = session.speculation.policy
            if policy is not None:
                chain, tree = survivals(proposal, policy.calibration)
                offers.append(Offer(policy, session.ticket.state.length, not session.greedy, tree, chain))
        if any(offer.chain for offer in offers):
            rest = len(cohort.sessions) - len(offers)
            self._proposer.policy.choose(
                offers, fixed_rows=rest, fixed_context=cohort.context, fixed_sampled=cohort.sampled
            )

    def time(
        self, cohort: Cohort, intent: Intent, rows: int, committed: int, seconds: float, captured: bool
    ) -> None:
        """Tells the batch's gate what a step of `rows` for each came to, the host's part included."""
        if cohort.governed and captured:
            self._gate.pay(len(cohort.columns), seconds)
        elif cohort.governed:
            self._gate.observe(len(cohort.columns), intent.free, rows, committed / len(cohort.places), seconds)

    def cost(self, cohort: Cohort, landing: Landing, branching: bool, committed: int, seconds: float) -> None:
        """Refreshes the cost table and the gates that go by it."""
        if not (cohort.governed or cohort.ema_gates):
            return
        # plain steps come by the hundred, and looking at each would take time
        self._plain_steps = 0 if landing.drafted else self._plain_steps + 1
        if self._plain_steps % _TIMED_PLAIN_STEPS:
            return
        policy, count, ms = self._proposer.policy, len(cohort.sessions), seconds * 1e3
        rows = count + sum(landing.nodes[place] for place in cohort.places)
        shape = StepShape(count, rows, cohort.context, cohort.sampled, branching)
        policy.costs.observe_step(shape, ms)
        if cohort.governed:
            policy.progress(committed, ms)
        if landing.drafted and cohort.ema_gates:
            plain_ms = policy.costs.step_ms(shape._replace(rows=count, branching=False))
            for place, gate in cohort.ema_gates:
                if landing.nodes[place]:
                    gate.observe(len(landing.tokens[place]), ms, plain_ms)


def _tell(session: Session) -> None:
    """Lets a policy know what was written since it was last asked."""
    speculation, ticket = session.speculation, session.ticket
    if speculation.policy is not None and ticket.generated > speculation.told:
        speculation.policy.committed(ticket.state.tokens[speculation.told - ticket.generated :])
        speculation.told = ticket.generated


def _wish(session: Session, depth: int, proposals: int, governed_rows: int, most_nodes: int) -> Wish:
    """What a sequence proposes; a batch leaves each of its sequences `most_nodes`.

    A fixed shape stays what it is up to the last token: rows too many cost nothing, a graph of another shape does.
    """
    speculation, mode = session.speculation, session.ticket.request.mode
    if not depth or not most_nodes:
        return Wish()
    policy = speculation.policy
    if policy is not None:
        nodes = min(governed_rows - 1, policy.max_nodes, most_nodes)
        shape = CHAIN if policy.chains_only else TREE
        return Wish(nodes if shape == TREE else min(nodes, depth), depth, shape, policy.calibration)
    if mode.kind == "tree":
        nodes = min(speculation.rows - 1, most_nodes)
        return Wish(nodes, proposals, SEEDED_TREE if mode.seeded else TREE)
    return Wish(min(proposals, speculation.rows - 1, most_nodes), proposals, CHAIN)


def _decision(session: Session, wish: Wish) -> Decision:
    policy = session.speculation.policy
    if not wish.nodes:
        gate = session.speculation.gate
        closed = "the gate has closed" if gate is not None and not gate.open else ""
        return Decision("plain", policy.note if policy is not None else closed)
    return Decision(f"{'chain' if wish.shape == CHAIN else 'tree'}:{wish.nodes + 1}")


def survivals(proposal: Proposal, calibration: Calibration) -> tuple[list[float], list[float]]:
    """How likely each node of the likeliest chain, and each node of the whole tree, is to be kept."""
    alive = [1.0]
    chain_end, chain = 0, []
    depths = proposal.depths
    for row in range(1, len(proposal.tokens)):
        parent = proposal.parents[row]
        alive.append(alive[parent] * calibration.chance(proposal.chances[row], depths[row]))
        # of siblings the likeliest comes first
        if parent == chain_end:
            chain_end = row
            chain.append(alive[row])
    return chain, alive[1:]
