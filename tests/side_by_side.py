"""Runs lint and the two halves of the test suite at the same time: whole programs, and all the others.

    python -m tests.side_by_side [pytest options]

Most of it keeps one core busy, so two cores are done in little more than half the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO

PYTEST = [sys.executable, "-m", "pytest", "--durations=20", *sys.argv[1:]]
WHOLE_PROGRAMS = [[*PYTEST, "tests/e2e", "tests/hostile"]]
OTHERS = [
    [sys.executable, "-m", "ruff", "check", "."], [sys.executable, "-m", "mypy"],
    [*PYTEST, "-p", "no:cacheprovider", "tests/unit", "tests/kernels", "tests/models"],
]  # fmt: skip
# Threads of OpenMP spin while they wait, which takes the core away from the other half.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
NOTHING_TO_RUN = 5  # pytest's exit code where a selection leaves a half without tests
interrupted = threading.Event()


def run(commands: list[list[str]], words: IO[str] | None) -> int:
    """All of them, whatever the others say; the first exit code that is a failure."""
    failures = 0
    for command in commands:
        if interrupted.is_set():
            return 1
        code = subprocess.run(
            command, stdout=words, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, check=False
        ).returncode
        failures = failures or (code if code != NOTHING_TO_RUN else 0)
    return failures


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as held, ThreadPoolExecutor(1) as beside:
        # the second half's words come behind the first's: mixed, nobody could read them
        others = beside.submit(run, OTHERS, held)
        try:
            failed = run(WHOLE_PROGRAMS, None)
        except KeyboardInterrupt:
            interrupted.set()
            raise
        failed = others.result() or failed
        held.seek(0)
        print(held.read(), flush=True)
    print(f"lint and both halves in {time.monotonic() - began:.0f} s: {'failed' if failed else 'passed'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
