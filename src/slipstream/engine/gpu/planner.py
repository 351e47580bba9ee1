"""What each sequence proposes in a device step, decided before its draft is there: the host does not wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.gpu.state import Wish
from slipstream.engine.gpu.step import bucket
from slipstream.engine.proposer import Proposer
from slipstream.engine.session import Session
from slipstream.kernels.gpu.growth import CHAIN, SEEDED_TREE, TREE
from slipstream.kernels.gpu.rows import LEAST_ROWS
from slipstream.speculative.batch_gate import BatchGate
from slipstream.speculative.calibration import Calibration
from slipstream.speculative.costs import StepShape
from slipstream.speculative.gains import assumed
from slipstream.speculative.policy import Offer
from slipstream.types import Decision, Proposal

_ROWS = (2, 4, 8, 16, 32, 64)  # rows of one sequence that steps are captured for


class Planner:
    """Asks gates and policy as the proposer does; rows come in buckets here, and all of a bucket cost the same."""

    def __init__(self, proposer: Proposer, most_rows: int) -> None:
        self._proposer = proposer
        self._most_rows = most_rows
        self._gate = BatchGate()

    def observe(self, sessions: Sequence[Session], drafted: bool, tokens: int, seconds: float) -> None:
        """What a step of these sequences came to, the host's part included."""
        if any(session.speculation.policy is not None for session in sessions):
            self._gate.observe(len(sessions), drafted, tokens, seconds)

    def plan(self, sessions: Sequence[Session]) -> tuple[list[Wish], list[Decision]]:
        """A wish and the reason for it per sequence."""
        slots = self._proposer.slots(sessions)
        if any(session.speculation.policy is not None for session in sessions) and not self._gate.drafts(len(sessions)):
            slots = [
                0 if session.speculation.policy is not None else count
                for session, count in zip(sessions, slots, strict=True)
            ]
        rows = self._governed_rows(sessions, slots)
        widest = max(1, self._most_rows // bucket(len(sessions)))
        wishes, decisions = [], []
        for session, depth in zip(sessions, slots, strict=True):
            wish = _wish(session, depth, self._proposer.proposals, rows, widest - 1)
            wishes.append(wish)
            decisions.append(_decision(session, wish))
        return wishes, decisions

    def _governed_rows(self, sessions: Sequence[Session], slots: Sequence[int]) -> int:
        """Rows per sequence that promise the most tokens per millisecond."""
        drafting = [
            (session.speculation.policy, depth) for session, depth in zip(sessions, slots, strict=True)
            if session.speculation.policy is not None and depth
        ]
        if not drafting:
            return 1
        costs = self._proposer.policy.costs
        context = max(session.ticket.state.length for session in sessions)
        sampled = any(not session.greedy for session in sessions)
        draft_ms = costs.draft_ms(len(drafting), max(depth for _, depth in drafting), context)
        best, best_rate = _ROWS[0], 0.0
        batch = bucket(len(sessions))
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
            shape = StepShape(len(sessions), rows * len(sessions), context, sampled, branching=True)
            rate = tokens / (draft_ms + costs.step_ms(shape))
            if rate > best_rate:
                best, best_rate = rows, rate
        return best

    def learn(self, sessions: Sequence[Session], proposals: Sequence[Proposal]) -> None:
        """Tells the policy what was drafted, as if it had been asked after the draft."""
        offers = []
        for session, proposal in zip(sessions, proposals, strict=True):
            policy = session.speculation.policy
            if policy is not None:
                chain, tree = survivals(proposal, policy.calibration)
                offers.append(Offer(policy, session.ticket.state.length, not session.greedy, tree, chain))
        if any(offer.chain for offer in offers):
            self._proposer.policy.choose(offers)


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
    for row in range(1, len(proposal.tokens)):
        parent = proposal.parents[row]
        alive.append(alive[parent] * calibration.chance(proposal.chances[row], proposal.depths[row]))
        # of siblings the likeliest comes first
        if parent == chain_end:
            chain_end = row
            chain.append(alive[row])
    return chain, alive[1:]
