"""The types that all layers of the engine share: requests, proposals, verdicts and events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Literal, TypeVar

from slipstream.errors import RequestError
from slipstream.stats import Decision, RequestStats

FinishReason = Literal["stop", "length", "cancelled", "error"]
Progress = Callable[[str, int, int], None]  # takes a label, how much is done and how much there is in all
_Item = TypeVar("_Item")
MAX_SEED = 2**63 - 1
MAX_TREE_ROWS = 256  # rows of one proposal that a mode may ask for
MAX_EXPLORED = 0.2  # the largest share of all time that trials may be allowed to lose; a larger one must be a mistake
BASE_VARIANT = "base"  # the name of the drafter without an adapter
GATE_THRESHOLDS: dict[str, tuple[str, ...]] = {
    "off": (),
    "entropy": ("floor", "hard", "patience"),
    "ema": ("margin", "sustain", "warmup"),
    "auto": ("margin", "explore"),
}


def tracked(items: Sequence[_Item], label: str, progress: Progress | None) -> Iterator[_Item]:
    """Yields the same items; each time the loop asks for another, `progress` gets the number of items that are done."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(label, done, len(items))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the target's logits; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit); -100 bans the token

    def __post_init__(self) -> None:
        _require(_finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(
            _finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_finite(value) and -2 <= value <= 2, name, value, "between -2 and 2")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"between 0 and {MAX_SEED}")
        _require(self.logprobs is None or 0 <= self.logprobs <= 64, "logprobs", self.logprobs, "between 0 and 64")
        for token, bias in self.logit_bias:
            _require(-100 <= bias <= 100, f"logit_bias of token {token}", bias, "between -100 and 100")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Mode:
    """What the steps of a request verify: nothing (plain), a chain, a tree, or whatever pays most (auto).

    `width` counts rows including the anchor; 0 means the drafter's full block. A seeded tree contains the likeliest
    chain before other nodes are added. A tree with `text` also takes nodes from the sequence's own text, as auto does.
    """

    kind: Literal["plain", "chain", "tree", "auto"] = "auto"
    width: int = 0
    seeded: bool = False
    text: bool = False

    @classmethod
    def parse(cls, name: str) -> Mode:
        """Reads `plain`, `chain`, `chain:ROWS`, `tree:ROWS`, `tree:ROWS:seed`, `tree:ROWS:text` or `auto`."""
        kind, *rest = name.split(":")
        if kind in ("plain", "chain", "auto") and not rest:
            return cls(kind)  # type: ignore[arg-type]
        rows = rest[0] if rest else ""
        if kind in ("chain", "tree") and rows.isascii() and rows.isdecimal() and 2 <= int(rows) <= MAX_TREE_ROWS:
            if len(rest) == 1:
                return cls(kind, int(rows))  # type: ignore[arg-type]
            if kind == "tree" and rest[1:] in (["seed"], ["text"]):
                return cls("tree", int(rows), seeded=rest[1] == "seed", text=rest[1] == "text")
        raise RequestError(
            f"unknown mode '{name}'",
            "use plain, chain, chain:ROWS, tree:ROWS, tree:ROWS:seed, tree:ROWS:text or auto, "
            f"with 2 to {MAX_TREE_ROWS} rows",
        )

    def __str__(self) -> str:
        parts = self.kind, str(self.width or ""), "seed" if self.seeded else "text" if self.text else ""
        return ":".join(part for part in parts if part)

    @property
    def reads_text(self) -> bool:
        """Whether a sequence's own text may be a source of its drafts."""
        return self.text or self.kind == "auto"


@dataclass(frozen=True, slots=True)
class Gate:
    """When a request stops speculating. Each kind reads only its own thresholds.

    `ema` stops when the average of (committed tokens * plain time / step time) stays under `margin` for `sustain`
    steps, not counting the first `warmup` steps. `entropy` stops when the target's top-1 probability stays under
    `floor` for `patience` steps or falls under `hard`. `auto` compares expected tokens with measured milliseconds
    before every step and drafts where that gives more than `margin` times plain decoding's speed. Trials find out
    whether drafting has begun to pay; they may lose the share `explore` of all time; 0 forbids them.
    """

    kind: Literal["off", "entropy", "ema", "auto"] = "off"
    margin: float = 1.0
    sustain: int = 3
    warmup: int = 2
    floor: float = 0.90
    hard: float = 0.45
    patience: int = 2
    explore: float = 0.005

    @classmethod
    def parse(cls, name: str) -> Gate:
        """Reads `KIND` or `KIND:threshold=value,threshold=value`."""
        kind, _, rest = name.partition(":")
        if kind not in GATE_THRESHOLDS:
            raise RequestError(f"unknown gate '{name}'", f"use one of {', '.join(GATE_THRESHOLDS)}")
        known = GATE_THRESHOLDS[kind]
        values: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            key, _, text = part.partition("=")
            if key not in known:
                hint = f"it knows {', '.join(known)}" if known else "it has none"
                raise RequestError(f"gate '{kind}' has no threshold '{key}'", hint)
            try:
                values[key] = int(text) if key in ("sustain", "warmup", "patience") else float(text)
            except ValueError:
                raise RequestError(f"threshold '{key}' of gate '{kind}' is '{text}'", "give a number") from None
        return cls(kind, **values)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        _require(_finite(self.margin) and self.margin > 0, "margin", self.margin, "above 0")
        for name in ("floor", "hard"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        for name in ("sustain", "patience"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(self.warmup >= 0, "warmup", self.warmup, "0 or more")
        _require(0 <= self.explore <= MAX_EXPLORED, "explore", self.explore, f"between 0 and {MAX_EXPLORED}")

    def __str__(self) -> str:
        default = Gate()
        names = [name for name in GATE_THRESHOLDS[self.kind] if getattr(self, name) != getattr(default, name)]
        return ":".join([self.kind, *([",".join(f"{n}={getattr(self, n)}" for n in names)] if names else [])])


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer must have, in a notation that llguidance reads; `grammar.notations` makes common ones."""

    kind: Literal["json_schema", "lark", "regex"]
    grammar: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning before an answer. A constraint holds only after it, and a budget ends it by force."""

    budget: int | None = None  # tokens of reasoning, after which the engine writes the end tag
    opened: bool = True  # whether the prompt has opened it; otherwise it begins where the model writes the start tag
    start: str = "<think>"
    end: str = "</think>"

    def __post_init__(self) -> None:
        _require(self.budget is None or self.budget >= 0, "thinking budget", self.budget, "0 or more")
        _require(bool(self.start and self.end), "thinking tag", "empty", "some text")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and everything that decides its text. A request does not change once the engine has it."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: Mode = field(default_factory=Mode)
    gate: Gate = field(default_factory=lambda: Gate("auto"))
    min_confidence: float = 0.0  # cuts a chain before the first slot with less confidence; 0 switches this off
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    share_noise: bool = True
    cache_prompt: bool = True
    constraint: Constraint | None = None
    thinking: Thinking | None = None  # set if the model reasons before it answers
    priority: int = 0  # a larger priority is served first
    draft_lora: str = BASE_VARIANT  # the drafter's variant that drafts for this request

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(0 <= self.min_confidence <= 1, "min_confidence", self.min_confidence, "between 0 and 1")
        if self.mode.kind == "auto" and self.gate.kind != "auto":
            raise RequestError(f"mode auto contradicts gate '{self.gate}'", "name a mode, such as chain or tree:32")
        if self.mode.seeded and self.gate.kind == "auto":
            raise RequestError(f"gate auto grows trees without the seed of '{self.mode}'", "leave one of them out")
        if self.mode.kind == "plain" and self.gate.kind != "off":
            raise RequestError(f"plain decoding has nothing to gate with '{self.gate}'", "leave the gate out")
        if not self.prompt_ids:
            raise RequestError("the prompt has no tokens", "give at least one token, such as the model's BOS")
        if any(not text for text in self.stop):
            raise RequestError("a stop string is empty", "leave it out")


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One emitted token: whether it was drafted, and its log-probabilities if the request asked for them."""

    id: int
    drafted: bool = False
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class GenEvent:
    """What one engine step did for one request; the last event of a request carries its finish reason.

    `texts` has the characters that became certain with each token. Joined, they differ from `text` where characters are
    held back because a stop string may begin with them, and where a stop string was found.
    """

    request_id: str
    tokens: list[TokenOut]
    text: str
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str | None = None
    step: StepRecord | None = None
    texts: list[str] = field(default_factory=list)


class Source(IntEnum):
    """Where a drafted token comes from."""

    DRAFTER = 0
    TEXT = 1  # the text of the sequence itself went on in this way before; the drafter did not offer the token


@dataclass(frozen=True, slots=True)
class Proposal:
    """The rows to verify: row 0 is the anchor, and every other row is a drafted token after its parent row."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # row of each row's parent; parents[0] is -1, and a parent precedes its children
    claims: tuple[float, ...] = ()  # the source's probability of each token given its parent; estimates use it
    sources: tuple[Source, ...] = ()  # where each row comes from; empty if all come from the drafter

    @property
    def nodes(self) -> int:
        return len(self.tokens) - 1

    def source(self, row: int) -> Source:
        return self.sources[row] if self.sources else Source.DRAFTER

    @property
    def branching(self) -> bool:
        rows = len(self.parents)
        return rows > 2 and self.parents != tuple(range(-1, rows - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        return _depths(self.parents)

    @property
    def depth(self) -> int:
        """The depth of the deepest row; the anchor's depth is 0."""
        return max(_depths(self.parents))

    @property
    def drafter_depth(self) -> int:
        """The depth of the deepest row that the drafter has drafted; 0 if there is none."""
        if not self.sources:
            return self.depth
        own = (depth for depth, source in zip(self.depths, self.sources, strict=True) if source != Source.TEXT)
        return max(own, default=0)


# The result is cached because small trees have few shapes and every step asks for the depths of every sequence's tree.
@lru_cache(maxsize=4096)
def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return tuple(depths)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying one proposal: the rows that are kept, and the target's own next token.

    `tokens` are the drafted tokens of the kept path and then the target's token (the bonus). There is no bonus if the
    target's logits allow no choice; `failed` is set then.
    """

    path: tuple[int, ...]  # rows from the anchor to the last accepted one
    tokens: tuple[int, ...]
    failed: bool = False

    @property
    def accepted(self) -> int:
        return len(self.path) - 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decoding step of one request, as traces and drawings show it."""

    position: int  # the anchor's position
    proposal: Proposal
    verdict: Verdict
    decision: Decision
    draft_ms: float
    verify_ms: float

    def to_json(self) -> dict[str, object]:
        return {
            "position": self.position,
            "proposal": {
                "tokens": list(self.proposal.tokens),
                "parents": list(self.proposal.parents),
                # The anchor was not drafted, so it has no source.
                "sources": [None, *(self.proposal.source(row + 1).name.lower() for row in range(self.proposal.nodes))],
            },
            "verdict": {
                "path": list(self.verdict.path),
                "tokens": list(self.verdict.tokens),
                "accepted": self.verdict.accepted,
                "failed": self.verdict.failed,
            },
            "policy": self.decision.to_json(),
            "times_ms": {"draft": round(self.draft_ms, 4), "verify": round(self.verify_ms, 4)},
        }


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value}", f"it must be {allowed}")
