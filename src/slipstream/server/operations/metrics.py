"""A server's numbers for Prometheus: requests, tokens, times, what speculation did, and waiting requests.

Counters and histograms grow when an answer is over; gauges are read from the router and its engines when Prometheus
asks. Every app has a registry of its own, so that several apps can live in one process.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from slipstream.server.operations.canary import CanaryBoard
from slipstream.server.operations.gauges import Gauges
from slipstream.server.serving.jobs import Answer
from slipstream.stats import RequestStats

if TYPE_CHECKING:
    from slipstream.server.serving.router import ModelRouter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Bounds of histogram buckets in seconds: _SHORT for steps and tokens, _LONG for first tokens and whole requests.
_SHORT = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


# What each counter counts, and the labels of its series.
_COUNTERS: dict[str, tuple[str, ...]] = {
    "requests": ("Generations that ended, by how", "model", "api", "outcome"),
    "refused": ("Requests answered with an error instead of a generation", "reason"),
    "prompt_tokens": ("Tokens of prompts, cached ones included", "model"),
    "prefix_cache_tokens": ("Tokens of prompts found in the prefix cache", "model"),
    "prefix_cache_hits": ("Requests that found part of their prompt in the cache", "model"),
    "generated_tokens": ("Tokens generated", "model"),
    "steps": ("Decoding steps of all requests", "model"),
    "drafted_steps": ("Decoding steps that verified a draft", "model", "draft_lora"),
    "drafted_tokens": ("Tokens drafted and verified", "model", "draft_lora"),
    "accepted_tokens": ("Drafted tokens that were accepted", "model", "draft_lora"),
    "accepted_tokens_by_source": ("Accepted tokens by what had drafted them: drafter or text", "model", "source"),
    "verified_at_position": ("Steps that drafted this deep", "model", "position"),
    "accepted_at_position": ("Steps that accepted this deep", "model", "position"),
    "bad_drafts": ("Drafts thrown away because they were not finite", "model"),
    "policy_choices": (
        "What steps verified: plain, or a shape with its rows rounded up to a power of two",
        "model",
        "choice",
    ),
    "engine_failures": ("Engines that died", "model"),
}
# What each histogram measures, the bounds of its buckets, and the labels of its series.
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], tuple[str, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token", _LONG, ("model",)),
    "time_per_token_seconds": ("Decoding time per token after the first, a request's average", _SHORT, ("model",)),
    "step_seconds": ("Decoding time per step, a request's average", _SHORT, ("model",)),
    "request_seconds": ("From arrival to the last token", _LONG, ("model", "api")),
}


class Metrics:
    """Takes in finished answers and refusals; `render` returns the text that Prometheus reads."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.canaries = CanaryBoard()
        self._counters = {
            name: Counter(f"slipstream_{name}", about, labels, registry=registry)
            for name, (about, *labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"slipstream_{name}", about, labels, registry=registry, buckets=buckets)
            for name, (about, buckets, labels) in _HISTOGRAMS.items()
        }
        self._gauges = Gauges(self.canaries)
        registry.register(self._gauges)
        ProcessCollector(registry=registry)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(*labels).inc(amount)

    def watch(self, router: ModelRouter) -> None:
        """Makes the gauges show this router's models and engines, and counts its engines that fail."""
        self._gauges.router = router
        router.on_engine_failed = lambda model: self._count("engine_failures", 1, model)

    def answered(self, answer: Answer, api: str = "") -> None:
        """Counts a generation that is over, however it ended."""
        stats, model = answer.stats, answer.model
        self._count("requests", 1, model, api, answer.finish_reason or "unfinished")
        self._count("prompt_tokens", stats.prompt_tokens, model)
        self._count("prefix_cache_tokens", stats.cached_tokens, model)
        self._count("prefix_cache_hits", stats.cached_tokens > 0, model)
        self._count("generated_tokens", stats.completion_tokens, model)
        self._count("steps", stats.steps, model)
        self._count("bad_drafts", stats.bad_drafts, model)
        self._count_speculation(stats, model)

        def observe(name: str, milliseconds: float, *labels: str) -> None:
            self._histograms[name].labels(*labels).observe(milliseconds / 1e3)

        if stats.ttft_ms:
            observe("time_to_first_token_seconds", stats.ttft_ms, model)
            observe("request_seconds", stats.ttft_ms + stats.decode_ms, model, api)
        if stats.committed:
            observe("time_per_token_seconds", stats.decode_ms / stats.committed, model)
        if stats.steps:
            observe("step_seconds", stats.decode_ms / stats.steps, model)

    def _count_speculation(self, stats: RequestStats, model: str) -> None:
        if stats.draft_lora is not None or stats.drafted:
            variant = stats.draft_lora or ""  # text alone has no variants
            self._count("drafted_steps", stats.verified_at[0] if stats.verified_at else 0, model, variant)
            self._count("drafted_tokens", stats.drafted, model, variant)
            self._count("accepted_tokens", stats.accepted, model, variant)
            for source, count in stats.accepted_by_source.items():
                self._count("accepted_tokens_by_source", count, model, source)
        for slot, (verified, accepted) in enumerate(zip(stats.verified_at, stats.accepted_at, strict=True), start=1):
            self._count("verified_at_position", verified, model, str(slot))
            self._count("accepted_at_position", accepted, model, str(slot))
        for choice, count in stats.policy.choices.items():
            self._count("policy_choices", count, model, rounded_choice(choice))

    def forget_variant(self, model: str, name: str) -> None:
        """Removes the series of a draft variant that was removed, because such series would otherwise pile up."""
        for counter in ("drafted_steps", "drafted_tokens", "accepted_tokens"):
            with suppress(KeyError):
                self._counters[counter].remove(model, name)

    def refused(self, reason: str) -> None:
        """Counts a request that got an error; the reason is an error code of this server, never a client's text."""
        self._count("refused", 1, reason)

    def render(self) -> bytes:
        return generate_latest(self.registry)


def rounded_choice(choice: str) -> str:
    """Rounds `tree:19` up to `tree:32`, because otherwise every number of rows would be a series of its own."""
    kind, _, rows = choice.partition(":")
    if not rows.isdecimal() or kind != "tree":
        return choice
    return f"{kind}:{1 << max(0, int(rows) - 1).bit_length()}"
