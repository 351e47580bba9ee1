"""What each sequence proposes in a device step, decided before its draft is there: the host does not wait for it.

A plan serves several steps, and two sequences are learnt from in a step, by turns: the host's time is what batches are
slow by where a step takes a millisecond, and of sixty outcomes a few say nearly as much as all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.engine.gpu.landing import Landing
from slipstream.engine.gpu.loop import DecodeLoop
from slipstream.engine.gpu.state import NOBODY, Wish
from slipstream.engine.gpu.step import bucket, drafted_widths
from slipstream.engine.proposer import Proposer
from slipstream.engine.session import Session
from slipstream.kernels.gpu.tree_growth import CHAIN, SEEDED_TREE, TREE
from slipstream.lazy import cached_property
from slipstream.models.gpu.device_models import GpuDrafter
from slipstream.speculative.batch_gate import BatchGate
from slipstream.speculative.costs import StepShape
from slipstream.speculative.expected_gains import assumed
from slipstream.speculative.gates import EmaGate
from slipstream.speculative.policy import Offer
from slipstream.speculative.slowest_share import Pace
from slipstream.types import Decision

_FEW = 4  # sequences that the policy chooses among
_PUPILS = 2  # sequences that are learnt from in a step
_VERY_MANY = 64  # from so many on not even in every step
_SHORTEST_HELD, _LONGEST_HELD = 2, 32  # steps that a plan for few and one for many serves
_NEARLY = 0.9  # of the best rate is as good, if no graph has to be captured for it
_SPARSE = 2  # columns for each sequence that is left are too many
_LEAST_VERIFY = 0.5  # of a step is never the draft's
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
    branching: bool  # whether anybody wishes for more than a chain

    @classmethod
    def of(cls, cohort: Cohort, wishes: Sequence[Wish], decisions: Sequence[Decision], free: bool) -> Intent:
        """From what those who are there wish."""
        count = len(cohort.columns)
        spread, reasons = [NOBODY] * count, [Decision()] * count
        for place, wish, decision in zip(cohort.places, wishes, decisions, strict=True):
            spread[place], reasons[place] = wish, decision
        return cls(spread, reasons, free, any(wish.nodes > 1 and wish.shape != CHAIN for wish in wishes))

    def left_to(self, cohort: Cohort) -> Intent:
        """The same for those who are still there."""
        there = set(cohort.places)
        wishes = [wish if place in there else NOBODY for place, wish in enumerate(self.wishes)]
        return Intent(wishes, self.decisions, self.free, self.branching)

    @classmethod
    def plain(cls, cohort: Cohort, reason: str) -> Intent:
        count = len(cohort.places)
        return cls.of(cohort, [Wish()] * count, [Decision("plain", reason)] * count, free=False)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What a step gave those who were still there, and how long it took."""

    rows: int  # of each sequence
    places: Sequence[int]
    tokens: Sequence[int]  # of each of them
    seconds: float
    crowded: bool  # whether anybody waits for a column


class Planner:
    """Asks gates and policy as the proposer does; rows come in buckets here, and all of a bucket cost the same."""

    def __init__(self, proposer: Proposer, loop: DecodeLoop, most_rows: int) -> None:
        self._proposer = proposer
        self._loop = loop
        self._most_rows = most_rows
        self._gate = BatchGate()
        self._paces: dict[int, Pace] = {}
        self._paced: tuple[Session, ...] = ()
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
        longest = min(_LONGEST_HELD, max(_SHORTEST_HELD, count // 2))
        if held is None or held.free != free or self._age >= longest:
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
            (session.speculation.policy, depth)
            for session, depth in zip(sessions, slots, strict=True)
            if session.speculation.policy is not None and depth
        ]
        rates: dict[int, float] = {}
        if not drafting:
            return rates
        costs, context = self._proposer.policy.costs, cohort.context
        draft_ms = costs.draft_ms(len(drafting), max(depth for _, depth in drafting), context)
        for rows in drafted_widths(bucket(len(cohort.columns)), self._most_rows):
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
        if len(governed) <= _PUPILS:
            return set(governed)
        self._turn += 1
        lesson, break_time = divmod(self._turn, 1 + len(governed) // _VERY_MANY)
        if break_time:
            return set()
        first = lesson * _PUPILS
        return {governed[(first + turn) % len(governed)] for turn in range(_PUPILS)}

    def learn(self, cohort: Cohort, landing: Landing, intent: Intent, places: Iterable[int]) -> None:
        """Tells the policy what was drafted for the sequences at these places."""
        offers = []
        for place in places:
            session = cohort.columns[place]
            policy = session.speculation.policy
            if policy is not None and landing.nodes[place] > 0:
                parents, tree = landing.parents(place), landing.survivals(place)
                chain = first_children(parents, tree)
                offers.append(Offer(policy, session.ticket.state.length, not session.greedy, tree[1:], chain))
        if offers:
            self._proposer.policy.verified(offers, _shape(cohort, landing, intent), _drafting(cohort, landing))

    def time(self, cohort: Cohort, intent: Intent, step: TimedStep, captured: bool) -> None:
        """Tells the batch's gate what a step came to, the host's part included."""
        size = len(cohort.columns)
        if not cohort.governed:
            return
        if captured:
            self._gate.pay(size, step.seconds)
            return
        tokens = sum(step.tokens) / len(cohort.places)
        if intent.free and size > _FEW:  # of few the policy has chosen who drafts
            share = self._pace(cohort).slowest_share(step.places, step.tokens)
            # while others wait for a column, whoever is done early makes room
            tokens *= 1.0 if step.crowded else share
        self._gate.observe(size, intent.free, step.rows, tokens, step.seconds)

    def _pace(self, cohort: Cohort) -> Pace:
        """How the sequences of a batch differ; what is known of one says something about the next of its size."""
        pace = self._paces.setdefault(bucket(len(cohort.columns)), Pace())
        if self._paced is not cohort.columns:
            self._paced = cohort.columns
            pace.restart(len(cohort.columns))
        return pace

    def cost(self, cohort: Cohort, landing: Landing, intent: Intent, committed: int, seconds: float) -> None:
        """Refreshes the cost table and the gates that go by it."""
        if not (cohort.governed or cohort.ema_gates):
            return
        # plain steps come by the hundred, and looking at each would take time
        self._plain_steps = 0 if landing.drafted else self._plain_steps + 1
        if self._plain_steps % _TIMED_PLAIN_STEPS:
            return
        policy, ms = self._proposer.policy, seconds * 1e3
        shape = _shape(cohort, landing, intent)
        # a draft has a price of its own
        drafting = _drafting(cohort, landing)
        draft_ms = policy.costs.draft_ms(drafting, self._proposer.proposals, shape.context) if drafting else 0.0
        policy.costs.observe_step(shape, max(_LEAST_VERIFY * ms, ms - draft_ms))
        if cohort.governed:
            policy.progress(committed, ms)
        if landing.drafted and cohort.ema_gates:
            plain_ms = policy.costs.step_ms(shape._replace(rows=shape.batch, branching=False))
            for place, gate in cohort.ema_gates:
                if landing.nodes[place]:
                    gate.observe(landing.taken[place], ms, plain_ms)


def _drafting(cohort: Cohort, landing: Landing) -> int:
    """For how many sequences something was drafted."""
    return sum(landing.nodes[place] > 0 for place in cohort.places)


def _shape(cohort: Cohort, landing: Landing, intent: Intent) -> StepShape:
    """The step as its costs are known by."""
    count = len(cohort.places)
    rows = count + sum(landing.nodes[place] for place in cohort.places)
    return StepShape(count, rows, cohort.context, cohort.sampled, intent.branching and rows > count)


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


def first_children(parents: Sequence[int], values: Sequence[float]) -> list[float]:
    """The values of the likeliest chain in a tree: of siblings the likeliest comes first."""
    end, chain = 0, []
    for row, parent in enumerate(parents):
        if parent == end and row:
            end = row
            chain.append(values[row])
    return chain
