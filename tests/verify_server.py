"""The sections of the verification about the server: many clients at once, and for a long time."""

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
        report.add("different requests at once, each against itself alone", seen.row(), seen.ok)
        ratio = promises.batch_speedup(server)
        report.add(
            "eight requests together against one after the other",
            f"{ratio:.2f} times as fast (the middle of 3 rounds)",
            ratio >= LEAST_BATCH_SPEEDUP,
        )


def server_load(report: Report) -> None:
    with promises.small_server(queue=128) as server:
        seen = promises.load(server, LOAD_CLIENTS, LOAD_TOKENS, LOAD_SECONDS, WARM_UP_SECONDS)
        report.add("a server under load", seen.row(), seen.ok)


TIMED: tuple[Section, ...] = (server_crowd, server_load)
