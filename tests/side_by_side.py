"""Runs the two halves of the test suite at the same time: whole programs, and all the others.

    python -m tests.side_by_side [pytest options]

Most tests keep one core busy, so two cores are done in little more than half the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

HALVES = (["tests/e2e"], ["tests/unit", "tests/kernels", "tests/models"])
# Threads of OpenMP spin while they wait, which takes the core away from the other half.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
NOTHING_TO_RUN = 5  # pytest's exit code where a selection leaves a half without tests


def main() -> int:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "--durations=20", *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as held:
        # the second half's words come behind the first's: mixed, nobody could read them
        others = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", *HALVES[1]], stdout=held, stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
        )
        try:
            real = subprocess.run([*command, *HALVES[0]], env={**os.environ, **ENVIRONMENT}, check=False).returncode
            other = others.wait()
        finally:
            others.kill()
        held.seek(0)
        print(held.read(), flush=True)
    failed = [code for code in (real, other) if code not in (0, NOTHING_TO_RUN)]
    print(f"both halves in {time.monotonic() - began:.0f} s: {'failed' if failed else 'passed'}")
    return failed[0] if failed else 0


if __name__ == "__main__":
    sys.exit(main())
