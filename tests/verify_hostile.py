"""The sections of the verification about hostile input: bodies, connections, neighbours, constraints, random texts."""

from __future__ import annotations

from collections.abc import Callable

from tests import differential
from tests.differential_worlds import WORLDS
from tests.e2e.serving import serve
from tests.hostile import company, fuzz_constraints, idle, neighbour
from tests.hostile.bodies import table
from tests.verify_report import Report

SIZE = 4 << 20  # bytes: a server's default limit for a request's body
CONNECTIONS, IDLE_SECONDS = 10_000, 30.0
CONSTRAINTS, TEXTS = 200_000, 20_000
Section = Callable[[Report], None]


def hostile_bodies(report: Report) -> None:
    """Reports one row for all bodies that keep the limits, and one row for each body that does not."""
    bodies = table(SIZE)
    for at_once in (1, 8):
        with serve() as server:
            seen = list(neighbour.measure(server, bodies, at_once))
        good = [found for found in seen if found.ok]
        silence_ms = max((found.silence_ms for found in good), default=0)
        growth = max((found.growth for found in good), default=0)
        report.add(
            f"the worst bodies of every endpoint at {SIZE >> 20} MiB, {at_once} at once, beside one stream",
            f"{len(good)} of {len(seen)} within {neighbour.SILENCE_LIMIT_MS:.0f} ms of silence and "
            f"{neighbour.GROWTH_LIMIT:.0f} times their size in memory; at most "
            f"{silence_ms:.0f} ms and {growth:.1f} times",
            len(good) == len(seen),
            within=len(good),
            bodies=len(seen),
            silence_ms=round(silence_ms),
            growth=round(growth, 1),
        )
        for found in seen:
            if not found.ok:
                text = " ".join(found.row().split())
                report.add(f"a hostile body, {at_once} at once", text, False, over_silence_ms=round(found.silence_ms))


def hostile_connections(report: Report) -> None:
    with serve() as server:
        seen = idle.beside_idle(server, CONNECTIONS, IDLE_SECONDS)
    report.add(
        "connections that ask for nothing, from several processes",
        seen.row(),
        seen.ok,
        connections=seen.connections,
        slowest_health_s=round(max(seen.health_s, default=0), 3),
        failed=seen.failed,
        silence_ms=round(seen.silence_ms),
    )


def hostile_company(report: Report) -> None:
    for seen in company.measure(company.hostile_bodies(), streams=2, tokens=200, rounds=3):
        report.add(
            "two streams beside one hostile client, against the same two alone",
            seen.row(),
            seen.ok,
            slowdown=round(seen.slowdown, 2),
            silence_ms=round(1e3 * seen.silence_s),
        )


def fuzzed_constraints(report: Report) -> None:
    found = fuzz_constraints.fuzz(CONSTRAINTS)
    said = ", ".join(f"{count} {name}" for name, count in found.most_common(6))
    report.add(
        "random and recursive constraints end no process",
        f"{found.total()} tried, no signal: {said}",
        not found["hung"],
        tried=found.total(),
        hung=found["hung"],
    )


def differential_texts(report: Report) -> None:
    for name, seen in differential.run(list(WORLDS), TEXTS, 0, "cpu", 2).items():
        promise = f"random requests in random company against each alone and plain ({name})"
        report.add(promise, seen.row(), seen.ok, texts=seen.texts, different=len(seen.different))


# Sections that keep both cores busy by themselves run alone, like those that measure time.
TIMED: tuple[Section, ...] = (
    hostile_bodies,
    hostile_connections,
    hostile_company,
    fuzzed_constraints,
    differential_texts,
)
