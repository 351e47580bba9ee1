"""The nouns every layer shares: requests, proposals, verdicts, events and the numbers reported about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from slipstream.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_SEED = 2**63 - 1


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

    def __post_init__(self) -> None:
        _require(_finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(
            _finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty", self.repetition_penalty, "above 0 (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_finite(value) and -2 <= value <= 2, name, value, "between -2 and 2")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"between 0 and {MAX_SEED}")
        _require(self.logprobs is None or 0 <= self.logprobs <= 64, "logprobs", self.logprobs, "between 0 and 64")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Mode:
    """How a request is decoded: plain, or a chain verified at a width in rows (the anchor counted; 0: full block)."""

    kind: Literal["plain", "chain"] = "chain"
    width: int = 0

    @classmethod
    def parse(cls, name: str) -> Mode:
        """Reads `plain`, `chain` or `chain:ROWS`."""
        kind, colon, size = name.partition(":")
        if kind == "plain" and not colon:
            return cls("plain")
        if kind == "chain" and (not colon or (size.isascii() and size.isdecimal() and int(size) >= 2)):
            return cls("chain", int(size) if size else 0)
        raise RequestError(f"unknown mode '{name}'", "use plain, chain or chain:ROWS with at least 2 rows")

    def __str__(self) -> str:
        return f"{self.kind}:{self.width}" if self.width else self.kind


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and everything that decides its text; immutable once handed to the engine."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: Mode = field(default_factory=Mode)
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    share_noise: bool = True
    cache_prompt: bool = True

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        if not self.prompt_ids:
            raise RequestError("the prompt has no tokens", "give at least one token, such as the model's BOS")
        if any(not text for text in self.stop):
            raise RequestError("a stop string is empty", "leave it out")


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One emitted token: whether it was drafted, and its log-probabilities where the request asked for them."""

    id: int
    drafted: bool = False
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class GenEvent:
    """What one engine step did for one request; the last event of a request carries its finish reason."""

    request_id: str
    tokens: list[TokenOut]
    text: str
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying one proposal: drafted tokens kept, then the target's own next token."""

    accepted: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class RequestStats:
    """What speculation did for one request (or, summed, for several).

    `tau` is committed tokens per verify step, the bonus included; `accept_rate` is accepted over drafted, the
    bonus excluded. Prefill yields the first token and is not a step.
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
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0

    def record_step(self, proposed: int, accepted: int, committed: int) -> None:
        """Counts one verify step of `proposed` drafted tokens of which the first `accepted` were kept."""
        self.steps += 1
        self.drafted += proposed
        self.accepted += accepted
        self.committed += committed
        missing = proposed - len(self.verified_at)
        if missing > 0:
            self.verified_at += [0] * missing
            self.accepted_at += [0] * missing
        for slot in range(proposed):
            self.verified_at[slot] += 1
            self.accepted_at[slot] += slot < accepted

    def add(self, other: RequestStats) -> None:
        """Adds another request's counts; times add up too, so rates become averages."""
        longest = max(len(self.verified_at), len(other.verified_at))
        for name in ("verified_at", "accepted_at"):
            mine, theirs = getattr(self, name), getattr(other, name)
            padded = [*mine, *[0] * (longest - len(mine))]
            setattr(self, name, [a + b for a, b in zip(padded, [*theirs, *[0] * (longest - len(theirs))], strict=True)])
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def tau(self) -> float:
        return self.committed / self.steps if self.steps else 0.0

    @property
    def tau_novel(self) -> float:
        return self.novel_committed / self.novel_steps if self.novel_steps else 0.0

    @property
    def accept_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first over the time after the first."""
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
            "tau": round(self.tau, 4),
            "tau_novel": round(self.tau_novel, 4),
            "accept_rate": round(self.accept_rate, 4),
            "accepted_per_position": per_position,
            "ttft_ms": round(self.ttft_ms, 3),
            "decode_ms": round(self.decode_ms, 3),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "time_split_ms": {
                "draft": round(self.draft_ms, 3), "verify": round(self.verify_ms, 3), "other": round(self.other_ms, 3),
            },
        }


_SUMMED = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "steps", "drafted", "accepted", "committed",
    "novel_steps", "novel_committed", "ttft_ms", "decode_ms", "draft_ms", "verify_ms", "other_ms",
)


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value}", f"it must be {allowed}")
