"""Compares the acceptance of live requests with what the drafter promises, so that a broken drafter is noticed.

A broken pair (wrong taps, wrong template, damaged weights) writes the same text as before, only slower. The drafter's
config promises tokens per step for classes of prompts (`expected_tau`, measured on full greedy chains). The canary
compares the answers of a running server with that promise. Tokens that only the text itself had drafted do not count.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from slipstream.stats import RequestStats
from slipstream.types import BASE_VARIANT, Request

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

log = logging.getLogger("slipstream.server.canary")

# When the canary warns. Only drafted steps count, because plain steps say nothing about a drafter.
#
# A shortfall is noticed in two ways. First, the moving average of acceptance must stay above a floor once there are
# enough steps. Second, mode auto soon stops drafting with a drafter that is entirely broken, so that there may never be
# enough steps. Evidence is therefore also added up token by token: how much likelier the outcomes are with a broken
# drafter than with the promised one. One request adds a limited amount, so that one unusual text raises no alarm.
_FLOOR = 0.7  # share of the promised acceptance below which the canary warns
_RECOVERED = 0.8  # share that ends a warning; it is above the floor, so that warnings do not flicker
_LEAST_STEPS = 200  # drafted steps before the moving average can cause a warning
_HALF_LIFE_STEPS = 300  # steps after which an observation counts half in the moving average
_COLLAPSED_SHARE = 1 / 3  # share of the promised chance that a token of a broken drafter is assumed to have
_EVIDENCE = 6.0  # log of the likelihood ratio at which the canary warns: a factor of e^6
_REQUEST_EVIDENCE = 1.5  # the most that one request adds; a warning by evidence takes at least four requests
_SAMPLED_SHARE = 0.75  # share of the promised chance, which was measured greedily, that is left at temperatures up to 1

CanaryState = Literal["no promise", "learning", "ok", "warning"]


@dataclass(frozen=True, slots=True)
class Promise:
    """What a drafter's config promises: tokens per step by class of prompts, for blocks of `proposals` tokens."""

    taus: Mapping[str, float]
    proposals: int

    def survival(self, prompt_class: str | None) -> float:
        """Returns the constant chance per drafted token with which full chains would reach the promised tau.

        A request of no class, or of a class without a promise, is compared with the lowest promise, so that unknown
        traffic raises no false alarm.
        """
        tau = self.taus.get(prompt_class or "", min(self.taus.values(), default=1.0))
        return _survival(tau, max(1, self.proposals))


def promise_of(llm: LLM) -> Promise | None:
    """The promise of the drafter in use; None if there is no drafter."""
    return Promise(llm.expected_tau, llm.proposals) if llm.has_draft else None


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The canary's verdict on a model; both taus count drafted steps only, with the depths that were drafted."""

    state: CanaryState
    ratio: float | None = None  # accepted tokens divided by the tokens that are due
    live_tau: float | None = None
    due_tau: float | None = None
    drafted_steps: int = 0
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(self).items()}


class Canary:
    """Watches one pair: a moving average of the accepted tokens, divided by the tokens that are due.

    The tokens that are due are those that would be accepted if the drafter kept its promise. Their number depends on
    the depth of each draft: of a chain of three, no more than three tokens can be accepted, and mode auto drafts few
    tokens where it expects few to be accepted. More tokens of a tree are accepted than of a chain, so trees only raise
    the ratio.
    """

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self._total = 0
        self._steps = self._accepted = self._due = 0.0
        self._evidence = 0.0
        self._warning = ""

    def observe(self, stats: RequestStats, prompt_class: str | None = None, sampled: bool = False) -> None:
        """Takes in a finished request."""
        # Drafts with NaN or Inf were never verified; each counts as one rejected token.
        verified, kept_at = stats.drafter_verified_at, stats.drafter_accepted_at
        steps = sum(verified[:1]) + stats.bad_drafts
        chance = self.promise.survival(prompt_class) * (_SAMPLED_SHARE if sampled else 1.0)
        if not steps or not 0 < chance < 1:
            return
        accepted = sum(kept_at)
        due = stats.bad_drafts * chance
        due += sum(count * chance ** (slot + 1) for slot, count in enumerate(verified))
        kept = 0.5 ** (steps / _HALF_LIFE_STEPS)
        # The past fades within a request too, so that a very long request does not outweigh all later ones.
        weight = (1 - kept) * _HALF_LIFE_STEPS / math.log(2) / steps
        self._total += steps
        self._steps = self._steps * kept + steps * weight
        self._accepted = self._accepted * kept + accepted * weight
        self._due = self._due * kept + due * weight
        self._weigh(chance, accepted, _lost(stats))
        self._judge()

    def _weigh(self, chance: float, kept: int, lost: int) -> None:
        collapsed = chance * _COLLAPSED_SHARE
        found = kept * math.log(collapsed / chance) + lost * math.log((1 - collapsed) / (1 - chance))
        added = self._evidence + min(found, _REQUEST_EVIDENCE)
        self._evidence = min(max(0.0, added), _EVIDENCE)

    def _judge(self) -> None:
        ratio, enough = self._ratio, self._total >= _LEAST_STEPS
        if self._evidence >= _EVIDENCE:
            self._warning = f"its drafts are hardly ever accepted ({ratio:.0%} of what it promises)"
        elif enough and ratio < _FLOOR:
            self._warning = f"acceptance stays at {ratio:.0%} of what it promises"
        elif self._evidence <= _EVIDENCE / 2 and (ratio >= _RECOVERED or not enough):
            self._warning = ""

    @property
    def _ratio(self) -> float:
        return self._accepted / self._due if self._due else 1.0

    def report(self) -> CanaryReport:
        if not self.promise.taus:
            return CanaryReport("no promise", reason="the drafter's config has no expected_tau")
        if not self._steps:
            return CanaryReport("learning")
        state: CanaryState = "warning" if self._warning else "ok"
        if not self._warning and self._total < _LEAST_STEPS:
            state = "learning"
        return CanaryReport(
            state,
            self._ratio,
            1 + self._accepted / self._steps,
            1 + self._due / self._steps,
            self._total,
            self._warning,
        )


class CanaryBoard:
    """The canaries of all models of a server; it writes to the log when a canary begins or ceases to warn.

    Only the event loop's thread may use it.
    """

    def __init__(self) -> None:
        self.warnings: Counter[str] = Counter()  # how many times the canary of each model began to warn
        self._canaries: dict[str, Canary] = {}

    def observe(
        self, model: str, promise: Promise, request: Request, stats: RequestStats, prompt_class: str | None = None
    ) -> None:
        """Takes in a finished request of a model; a new promise under the same name starts a new canary."""
        if not is_telling(request):
            return
        canary = self._canaries.get(model)
        if canary is None or canary.promise != promise:
            canary = self._canaries[model] = Canary(promise)
        before = canary.report()
        canary.observe(stats, prompt_class, sampled=not request.sampling.greedy)
        after = canary.report()
        fields = {"event": "canary", "model": model, **after.to_json()}
        if after.state == "warning" and before.state != "warning":
            self.warnings[model] += 1
            log.warning(
                "the drafter of %s does not keep its promise: %s (was it made for this target and this chat template, "
                "and is its file whole?)",
                model,
                after.reason,
                extra={"fields": fields},
            )
        elif before.state == "warning" and after.state != "warning":
            log.info("the drafter of %s keeps its promise again", model, extra={"fields": fields})

    def reports(self) -> dict[str, CanaryReport]:
        return {name: canary.report() for name, canary in self._canaries.items()}


def is_telling(request: Request) -> bool:
    """Whether a request's acceptance says anything about the drafter.

    Biases, penalties, grammars and forced tokens change the target's choice in ways that the drafter cannot know. Above
    temperature 1 no drafter predicts well, and without shared noise a sampled token is predicted only by luck. An
    adapted variant is another drafter, which has no promise.
    """
    steered = (
        request.sampling.penalised
        or bool(request.sampling.logit_bias)
        or request.constraint is not None
        or (request.thinking is not None and request.thinking.budget is not None)
    )
    sampling = request.sampling
    guessable = sampling.temperature <= 1 and (sampling.greedy or request.share_noise)
    return guessable and not steered and request.draft_lora == BASE_VARIANT


def _lost(stats: RequestStats) -> int:
    """How many tokens of the drafter were rejected: at most one per step, the first after the accepted ones.

    A draft with NaN or Inf counts as one.
    """
    verified, accepted = stats.drafter_verified_at, stats.drafter_accepted_at
    reached = [*verified[:1], *map(min, verified[1:], accepted)]
    return sum(reached) - sum(accepted) + stats.bad_drafts


def _survival(tau: float, proposals: int) -> float:
    """The constant chance per token at which chains of `proposals` tokens give `tau` tokens a step, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        kept = sum(middle**depth for depth in range(1, proposals + 1))
        low, high = (middle, high) if kept < tau - 1 else (low, middle)
    return (low + high) / 2
