"""The sections of the verification about the server: many clients at once, and clients for a long time."""

from __future__ import annotations

from collections.abc import Callable

from tests import checks_server as promises
from tests.e2e.serving import serve
from tests.verify_report import Report

CROWD = 64
LOAD_CLIENTS, LOAD_TOKENS, LOAD_SECONDS, WARM_UP_SECONDS = 200, 32, 300.0, 60.0
LEAST_BATCH_SPEEDUP = 1.0
Section = Callable[[Report], None]


def server_crowd(report: Report) -> None:
    with serve() as server:
        seen = promises.crowd(server, CROWD)
        promise = "different requests at once, each against itself alone"
        values = {"requests": seen.requests, "other_texts": seen.other_texts, "other_counts": seen.other_counts}
        report.add(promise, seen.row(), seen.ok, **values)
        ratio = promises.batch_speedup(server)
        report.add(
            "eight requests together against one after the other",
            f"{ratio:.2f} times as fast (the middle of 3 rounds)",
            ratio >= LEAST_BATCH_SPEEDUP,
            ratio=round(ratio, 2),
        )


def server_load(report: Report) -> None:
    with promises.small_server(queue=128) as server:
        seen = promises.load(server, LOAD_CLIENTS, LOAD_TOKENS, LOAD_SECONDS, WARM_UP_SECONDS)
        report.add(
            "a server under load",
            seen.row(),
            seen.ok,
            clients=seen.clients,
            seconds=seen.seconds,
            complete=seen.complete,
            gone=seen.gone,
            refused=seen.refused,
            tokens=seen.tokens,
            growth_mb=round(seen.growth_bytes / 2**20, 1),
            pages_held=seen.pages_held,
        )


TIMED: tuple[Section, ...] = (server_crowd, server_load)
