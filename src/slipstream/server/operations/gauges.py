"""The metrics that are computed when Prometheus asks: open requests, pages, states of models, and the canaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.server.operations.canary import CanaryBoard
from slipstream.server.serving.model_entries import State
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.server.serving.router import ModelRouter


class Gauges(Collector):
    """Reads the router, its engines and the canaries when Prometheus asks; only the event loop's thread may call it."""

    def __init__(self, canaries: CanaryBoard) -> None:
        self._canaries = canaries
        self.router: ModelRouter | None = None  # without a router there are no models and engines to show

    def collect(self) -> Iterator[Metric]:
        yield _family("build_info", "Always 1; the version is the label", ["version"], [([__version__], 1)])
        yield from self._canary_metrics()
        if self.router is not None:
            yield from _engine_metrics(self.router)
            yield from _model_metrics(self.router)

    def _canary_metrics(self) -> Iterator[Metric]:
        reports = self._canaries.reports()
        yield _family(
            "canary_ratio",
            "Accepted tokens over those the drafter's expected_tau makes due, of late",
            ["model"],
            (([name], report.ratio) for name, report in reports.items() if report.ratio is not None),
        )
        yield _family(
            "canary_warning",
            "1 while acceptance stays below what the drafter promises",
            ["model"],
            (([name], report.state == "warning") for name, report in reports.items()),
        )
        yield _family(
            "canary_warnings",
            "How often a model began to stay below its promise",
            ["model"],
            (([name], count) for name, count in self._canaries.warnings.items()),
            CounterMetricFamily,
        )


def _engine_metrics(router: ModelRouter) -> Iterator[Metric]:
    about = {
        "requests_running": "Requests in a slot of their engine",
        "requests_waiting": "Requests in line for a slot",
        "requests_paused": "Requests that wait to be resumed",
        "pages_used": "Pages of the cache in use, remembered prefixes included",
        "pages_total": "Pages the cache has",
    }
    totals: dict[str, Counter[str]] = {name: Counter() for name in about}
    for resident in router.residents():
        seen = resident.worker.snapshot()
        paused = sum(slot.paused for slot in seen.slots)
        yielded = sum(slot.phase == "yielded" for slot in seen.slots)
        running = len(seen.slots) - paused - yielded
        values = running, seen.waiting + yielded, paused, seen.pages_used, seen.pages_total
        # While a model is being replaced, two residents have its name, so their values are added up.
        for total, value in zip(totals.values(), values, strict=True):
            total[resident.name] += value
    for name, text in about.items():
        yield _family(name, text, ["model"], (([model], value) for model, value in totals[name].items()))


def _model_metrics(router: ModelRouter) -> Iterator[Metric]:
    models = router.describe()
    yield _family(
        "models",
        "Models by state",
        ["state"],
        (([state], sum(model.state == state for model in models)) for state in get_args(State)),
    )
    yield _family(
        "model_state",
        "1 for the state a model is in",
        ["model", "state"],
        (([model.name, state], model.state == state) for model in models for state in get_args(State)),
    )
    yield _family(
        "model_memory_bytes", "Weights and cache of a model", ["model"], (([m.name], m.memory_bytes) for m in models)
    )
    yield _family(
        "model_last_used_seconds",
        "When a model was used last, in seconds since 1970; 0: never",
        ["model"],
        (([model.name], model.last_used_ms / 1000) for model in models),
    )


def _family(
    name: str,
    about: str,
    labels: list[str],
    samples: Iterable[tuple[list[str], float]],
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    family = kind(f"slipstream_{name}", about, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family
