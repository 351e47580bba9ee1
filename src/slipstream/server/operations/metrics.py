"""A server's numbers for Prometheus: requests, tokens, times, what speculation did, and waiting requests.

Counters and histograms grow when an answer is over; gauges are read from the router and its engines when Prometheus
asks. Every app has a registry of its own, so that several apps can live in one process.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from slipstream.server.operations.canary import CanaryBoard, CanaryRules
from slipstream.server.operations.gauges import Gauges
from slipstream.server.serving.jobs import Answer
from slipstream.stats import RequestStats

if TYPE_CHECKING:
    from slipstream.server.serving.router import ModelRouter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Bounds of histogram buckets in seconds: _SHORT for steps and tokens, _LONG for first tokens and whole requests.
_SHORT = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Takes in finished answers and refusals; `render` returns the text that Prometheus reads."""

    def __init__(self, canary_rules: CanaryRules | None = None) -> None:
        self.registry = CollectorRegistry()
        self.canaries = CanaryBoard(canary_rules)
        self._router: ModelRouter | None = None
        self._make_counters()
        self._make_histograms()
        self.registry.register(Gauges(self.canaries, lambda: self._router))
        ProcessCollector(registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"slipstream_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"slipstream_{name}", about, labels, registry=self.registry, buckets=buckets)

    def _make_counters(self) -> None:
        counter = self._counter
        self._requests = counter("requests", "Generations that ended, by how", "model", "api", "outcome")
        self._refused = counter("refused", "Requests answered with an error instead of a generation", "reason")
        self._prompt = counter("prompt_tokens", "Tokens of prompts, cached ones included", "model")
        self._cached = counter("prefix_cache_tokens", "Tokens of prompts found in the prefix cache", "model")
        self._hits = counter("prefix_cache_hits", "Requests that found part of their prompt in the cache", "model")
        self._generated = counter("generated_tokens", "Tokens generated", "model")
        self._steps = counter("steps", "Decoding steps of all requests", "model")
        variant = ("model", "draft_lora")
        self._drafted_steps = counter("drafted_steps", "Decoding steps that verified a draft", *variant)
        self._drafted = counter("drafted_tokens", "Tokens drafted and verified", *variant)
        self._accepted = counter("accepted_tokens", "Drafted tokens that were accepted", *variant)
        self._by_source = counter(
            "accepted_tokens_by_source", "Accepted tokens by what had drafted them: drafter or text", "model", "source"
        )
        self._verified_at = counter("verified_at_position", "Steps that drafted this deep", "model", "position")
        self._accepted_at = counter("accepted_at_position", "Steps that accepted this deep", "model", "position")
        self._bad_drafts = counter("bad_drafts", "Drafts thrown away because they were not finite", "model")
        self._choices = counter(
            "policy_choices",
            "What steps verified: plain, or a shape with its rows rounded up to a power of two",
            "model",
            "choice",
        )
        self._failures = counter("engine_failures", "Engines that died", "model")

    def _make_histograms(self) -> None:
        histogram = self._histogram
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", _LONG, "model")
        self._per_token = histogram(
            "time_per_token_seconds", "Decoding time per token after the first, a request's average", _SHORT, "model"
        )
        self._per_step = histogram("step_seconds", "Decoding time per step, a request's average", _SHORT, "model")
        self._duration = histogram("request_seconds", "From arrival to the last token", _LONG, "model", "api")

    def watch(self, router: ModelRouter) -> None:
        """Makes the gauges show this router's models and engines, and counts its engines that fail."""
        self._router = router
        router.on_engine_failed = lambda model: self._failures.labels(model).inc()

    def answered(self, answer: Answer, model: str, api: str = "") -> None:
        """Counts a generation that is over, however it ended."""
        stats = answer.stats
        self._requests.labels(model, api, answer.finish_reason or "unfinished").inc()
        self._count_tokens(stats, model)
        self._count_speculation(stats, model)
        if stats.ttft_ms:
            self._ttft.labels(model).observe(stats.ttft_ms / 1e3)
            self._duration.labels(model, api).observe((stats.ttft_ms + stats.decode_ms) / 1e3)
        if stats.committed:
            self._per_token.labels(model).observe(stats.decode_ms / 1e3 / stats.committed)
        if stats.steps:
            self._per_step.labels(model).observe(stats.decode_ms / 1e3 / stats.steps)

    def _count_tokens(self, stats: RequestStats, model: str) -> None:
        self._prompt.labels(model).inc(stats.prompt_tokens)
        self._cached.labels(model).inc(stats.cached_tokens)
        self._hits.labels(model).inc(stats.cached_tokens > 0)
        self._generated.labels(model).inc(stats.completion_tokens)

    def _count_speculation(self, stats: RequestStats, model: str) -> None:
        self._steps.labels(model).inc(stats.steps)
        if stats.draft_lora is not None or stats.drafted:
            variant = stats.draft_lora or ""  # text alone has no variants
            self._drafted_steps.labels(model, variant).inc(stats.verified_at[0] if stats.verified_at else 0)
            self._drafted.labels(model, variant).inc(stats.drafted)
            self._accepted.labels(model, variant).inc(stats.accepted)
            for source, count in stats.accepted_by_source.items():
                self._by_source.labels(model, source).inc(count)
        self._bad_drafts.labels(model).inc(stats.bad_drafts)
        for slot, (verified, accepted) in enumerate(zip(stats.verified_at, stats.accepted_at, strict=True), start=1):
            self._verified_at.labels(model, str(slot)).inc(verified)
            self._accepted_at.labels(model, str(slot)).inc(accepted)
        for choice, count in stats.policy.choices.items():
            self._choices.labels(model, rounded_choice(choice)).inc(count)

    def forget_variant(self, model: str, name: str) -> None:
        """Removes the series of a draft variant that was removed, because series without an end would pile up."""
        for counter in (self._drafted_steps, self._drafted, self._accepted):
            with suppress(KeyError):
                counter.remove(model, name)

    def refused(self, reason: str) -> None:
        """Counts a request that got an error; the reason is an error code of this server, never a client's text."""
        self._refused.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


def rounded_choice(choice: str) -> str:
    """Rounds `tree:19` up to `tree:32`, because otherwise every number of rows would be a series of its own."""
    kind, _, rows = choice.partition(":")
    if not rows.isdecimal() or kind != "tree":
        return choice
    return f"{kind}:{1 << max(0, int(rows) - 1).bit_length()}"
