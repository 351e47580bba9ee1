"""What speculation did, in numbers: the policy's decisions, and the counts and times of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy chose for one sequence in one step, and the estimate on which it based the choice."""

    choice: str = "plain"  # plain, chain:ROWS or tree:ROWS; a device step may find fewer nodes than it planned
    note: str = ""  # what the choice depended on besides the estimate
    expected_tokens: float | None = None  # committed tokens of this sequence
    expected_ms: float | None = None  # duration of the whole step, which all its sequences share
    plain_rate: float | None = None  # tokens per millisecond of a step that verifies no draft

    @property
    def reason(self) -> str:
        if self.plain_rate is None or (self.note and self.choice == "plain"):
            return self.note
        if self.choice == "plain":
            return f"the draft promises too little for more rows, plain {self.plain_rate:.3f}/ms"
        why = self.note or f"plain {self.plain_rate:.3f}/ms"
        return f"{self.choice} expects {self.expected_tokens:.1f} tokens in {self.expected_ms:.0f} ms, {why}"

    def to_json(self) -> dict[str, object]:
        return {
            "choice": self.choice,
            "reason": self.reason,
            "expected_tokens": None if self.expected_tokens is None else round(self.expected_tokens, 4),
            "expected_ms": None if self.expected_ms is None else round(self.expected_ms, 4),
        }


@dataclass(slots=True)
class PolicyStats:
    """How often a policy made each choice, what it expected, and what the steps really committed."""

    choices: dict[str, int] = field(default_factory=dict)
    expected_tokens: float = 0.0
    expected_ms: float = 0.0
    estimated_steps: int = 0
    estimated_tokens: int = 0  # tokens that the estimated steps committed in fact
    last: Decision = Decision()  # the last one that has a reason

    @property
    def last_reason(self) -> str:
        return self.last.reason

    def record(self, decision: Decision, committed: int) -> None:
        self.choices[decision.choice] = self.choices.get(decision.choice, 0) + 1
        if decision.note or decision.plain_rate is not None:
            self.last = decision
        if decision.expected_tokens is not None and decision.expected_ms is not None:
            self.expected_tokens += decision.expected_tokens
            self.expected_ms += decision.expected_ms
            self.estimated_steps += 1
            self.estimated_tokens += committed

    def add(self, other: PolicyStats) -> None:
        for choice, count in other.choices.items():
            self.choices[choice] = self.choices.get(choice, 0) + count
        for name in ("expected_tokens", "expected_ms", "estimated_steps", "estimated_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.last_reason:
            self.last = other.last

    def to_json(self) -> dict[str, object]:
        steps = max(1, self.estimated_steps)
        return {
            "choices": dict(sorted(self.choices.items(), key=lambda item: -item[1])),
            "expected_tokens_per_step": round(self.expected_tokens / steps, 4),
            "committed_tokens_per_step": round(self.estimated_tokens / steps, 4),
            "expected_ms_per_step": round(self.expected_ms / steps, 4),
            "last_reason": self.last_reason,
        }


@dataclass(slots=True)
class RequestStats:
    """What speculation did for one request or, as a sum, for several.

    `tau` is the committed tokens per verify step, including the bonus; `accept_rate` is accepted over drafted tokens,
    without the bonus. Prefill gives the first token and does not count as a step.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    novel_steps: int = 0
    novel_committed: int = 0
    verified_at: list[int] = field(default_factory=list)  # by depth: the steps that verified a node so deep
    accepted_at: list[int] = field(default_factory=list)  # by depth: the steps that accepted a node so deep
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    bad_drafts: int = 0  # steps that ran without the drafter's nodes because its logits were not finite
    draft_lora: str | None = None  # the drafter's variant; None for plain decoding and for sums
    policy: PolicyStats = field(default_factory=PolicyStats)
    # the parts of `verified_at` and `accepted_at` at depths that only nodes from the text reached
    text_verified_at: list[int] = field(default_factory=list)
    text_accepted_at: list[int] = field(default_factory=list)

    def record_step(
        self,
        proposed: int,
        depth: int,
        accepted: int,
        committed: int,
        drafter_depth: int | None = None,
        drafter_accepted: int | None = None,
    ) -> None:
        """Counts one verify step that proposed `proposed` tokens up to `depth` deep and kept `accepted` of them.

        If the sequence's text has drafted too, `drafter_depth` and `drafter_accepted` count only the drafter's nodes.
        """
        self.steps += 1
        self.drafted += proposed
        self.accepted += accepted
        self.committed += committed
        own_depth = depth if drafter_depth is None else drafter_depth
        own_accepted = accepted if drafter_accepted is None else drafter_accepted
        for counts, begin, end in (
            (self.verified_at, 0, depth),
            (self.accepted_at, 0, accepted),
            (self.text_verified_at, own_depth, depth),
            (self.text_accepted_at, own_accepted, accepted),
        ):
            counts += [0] * (depth - len(counts))
            for slot in range(begin, end):
                counts[slot] += 1

    def add(self, other: RequestStats) -> None:
        """Adds the counts and times of another request; rates of the sum are therefore averages."""
        for name in ("verified_at", "accepted_at", "text_verified_at", "text_accepted_at"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [one + another for one, another in pairs])
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.policy.add(other.policy)

    @property
    def tau(self) -> float:
        return self.committed / self.steps if self.steps else 0.0

    @property
    def tau_novel(self) -> float:
        return self.novel_committed / self.novel_steps if self.novel_steps else 0.0

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """The accepted tokens by what had drafted them; a token that both had drafted counts as the drafter's."""
        text = sum(self.text_accepted_at)
        return {"drafter": self.accepted - text, "text": text}

    @property
    def drafter_verified_at(self) -> list[int]:
        """The steps in which the drafter's own nodes reached each position."""
        return [a - b for a, b in zip_longest(self.verified_at, self.text_verified_at, fillvalue=0)]

    @property
    def drafter_accepted_at(self) -> list[int]:
        """The steps in which a node of the drafter's own was accepted at each position."""
        return [a - b for a, b in zip_longest(self.accepted_at, self.text_accepted_at, fillvalue=0)]

    @property
    def accept_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: the tokens after the first one over the time after the first one."""
        return 1000.0 * self.committed / self.decode_ms if self.decode_ms else 0.0

    def to_json(self) -> dict[str, object]:
        per_position = [round(a / v, 4) if v else 0.0 for a, v in zip(self.accepted_at, self.verified_at, strict=True)]
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_by_source": self.accepted_by_source,
            "tau": round(self.tau, 4),
            "tau_novel": round(self.tau_novel, 4),
            "accept_rate": round(self.accept_rate, 4),
            "accepted_per_position": per_position,
            "ttft_ms": round(self.ttft_ms, 3),
            "decode_ms": round(self.decode_ms, 3),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "time_split_ms": {
                "draft": round(self.draft_ms, 3),
                "verify": round(self.verify_ms, 3),
                "other": round(self.other_ms, 3),
            },
            "bad_drafts": self.bad_drafts,
            "draft_lora": self.draft_lora,
            "policy": self.policy.to_json(),
        }


_SUMMED = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "steps",
    "drafted",
    "accepted",
    "committed",
    "novel_steps",
    "novel_committed",
    "ttft_ms",
    "decode_ms",
    "draft_ms",
    "verify_ms",
    "other_ms",
    "bad_drafts",
)


# Tokens that must repeat for a step to count as old text. With fewer, common phrases would count as loops; with more, a
# short loop would count as new text for too long. All recorded values of tau_novel use 8, so values with another number
# cannot be compared with them.
NGRAM_TOKENS = 8


def novel_steps(token_ids: Sequence[int], step_sizes: Sequence[int], ngram: int = NGRAM_TOKENS) -> tuple[int, int]:
    """Counts the verify steps that wrote new text, and the tokens that these steps committed.

    Small models fall into loops, and a loop is easy to draft, so tau over all steps flatters the drafter. A step counts
    as new text if its next `ngram` tokens did not occur earlier in the completion. `token_ids` is the whole completion,
    `step_sizes` the tokens that each step committed. The first token comes from prefill and belongs to no step. A step
    with fewer than `ngram` tokens left after its beginning is not counted.
    """
    written: set[tuple[int, ...]] = set()
    ends = ngram  # `written` holds all n-grams that end before this position
    position = 1
    steps = committed = 0
    for size in step_sizes:
        while ends <= position:
            written.add(tuple(token_ids[ends - ngram : ends]))
            ends += 1
        gram = tuple(token_ids[position : position + ngram])
        if len(gram) < ngram:
            break
        if gram not in written:
            steps += 1
            committed += size
        position += size
    return steps, committed
