"""Runs a lane of checks in pieces, as many at a time as there are cores (two at most).

    python -m tests.side_by_side check [pytest options]   lint, types and the quick tests
    python -m tests.side_by_side test [pytest options]    lint, types and all tests

Most pieces keep one core busy, so two cores are done in little more than half the time. Pieces are taken from one
queue, the longest first, so that both cores have work until the end. A piece's output comes when the piece has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
Command = tuple[str, ...]
# Threads of OpenMP spin while they wait, which takes the core away from the other pieces.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
NOTHING_TO_RUN = 5  # pytest's exit code where a selection leaves a piece without tests
MOST_WORKERS = 2  # several tests have two processes of their own at work; more pieces would only take turns
UNIT_PIECES = 3  # each is then shorter than the longest other piece, which ends last
SERVER_FILES = ("server_", "smoke", "stream_socket", "web_page", "router")  # in tests/e2e: how their names begin

interrupted = threading.Event()
printing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Piece:
    name: str
    commands: tuple[Command, ...]

    def run(self) -> int:
        """Runs all commands, whatever the others say; returns the first exit code that is a failure."""
        began, failure, said = time.monotonic(), 0, ""
        for command in self.commands:
            if interrupted.is_set():
                return 1
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, text=True
            )
            failure = failure or (done.returncode if done.returncode != NOTHING_TO_RUN else 0)
            said += done.stdout
        with printing:
            verdict = "failed" if failure else "passed"
            print(f"{said}---- {self.name}: {verdict} in {time.monotonic() - began:.0f} s\n", flush=True)
        return failure


def pytest_piece(name: str, files: Sequence[str], options: Sequence[str]) -> Piece:
    # The pieces would write one cache of results at the same time.
    pytest = (sys.executable, "-m", "pytest", "-q", "--durations=10", "-p", "no:cacheprovider")
    return Piece(name, ((*pytest, *options, *files),))


def unit_tests(options: Sequence[str]) -> list[Piece]:
    files = sorted(map(str, (ROOT / "tests" / "unit").glob("test_*.py")))
    return [
        pytest_piece(f"unit tests, part {part + 1}", files[part::UNIT_PIECES], options) for part in range(UNIT_PIECES)
    ]


def lint() -> Piece:
    programs = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
    return Piece("lint and types", tuple((sys.executable, "-m", *program) for program in programs))


def check_lane(options: Sequence[str]) -> list[Piece]:
    """For every commit: nothing that loads a real model or starts a server."""
    return [lint(), *unit_tests(("-m", "not slow and not e2e", *options))]


def newcomer_lane(options: Sequence[str]) -> list[Piece]:
    """Everything that a newcomer must see pass, the longest pieces first."""
    whole = sorted((ROOT / "tests" / "e2e").glob("test_*.py"))
    servers = [str(path) for path in whole if path.stem.removeprefix("test_").startswith(SERVER_FILES)]
    programs = [str(path) for path in whole if str(path) not in servers]
    return [
        pytest_piece("servers", servers, options),
        pytest_piece("whole programs", programs, options),
        pytest_piece("GPU kernels under the interpreter", ["tests/kernels"], options),
        pytest_piece("hostile input", ["tests/hostile"], options),
        *unit_tests(options),
        pytest_piece("models", ["tests/models"], options),
        lint(),
    ]


LANES = {"check": check_lane, "test": newcomer_lane}


def main() -> int:
    lane, options = sys.argv[1], sys.argv[2:]
    pieces, began = LANES[lane](options), time.monotonic()
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        try:
            failed = any(list(pool.map(Piece.run, pieces)))
        except KeyboardInterrupt:
            interrupted.set()
            raise
    print(f"{lane}: {len(pieces)} pieces in {time.monotonic() - began:.0f} s: {'failed' if failed else 'passed'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
