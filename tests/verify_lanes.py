"""The sections of the verification that run what `make test` only samples: whole products of cases, and sanitizers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import WHOLE_VARIABLE
from tests.verify_report import Report

ROOT = Path(__file__).parent.parent
Section = Callable[[Report], None]


def _summary(said: str) -> str:
    """pytest's last line with counts, such as "12 passed in 3.4 s"."""
    found = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|error).*?)(?: =+)?$", said, re.MULTILINE)
    return found[-1] if found else said[-200:].replace("\n", " ").strip()


def sampled_tests(report: Report) -> None:
    """All cases of the tests that are marked `sampled`, among them every kernel compiled for an H200.

    Kernels have a process of their own, because Triton's interpreter is chosen before anything imports Triton.
    """
    environment = {**os.environ, WHOLE_VARIABLE: "1"}
    for folders in (("tests/kernels",), ("tests/e2e", "tests/unit")):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "sampled", *folders]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        promise = f"every case of the tests of which `make test` runs a sample, {' and '.join(folders)}"
        report.add(promise, _summary(done.stdout), not done.returncode)


def sanitizers(report: Report) -> None:
    """The compiled kernels' tests with checks of memory, threads and undefined behaviour."""
    for kind in ("memory", "thread", "undefined"):
        command = [sys.executable, str(ROOT / "scripts" / "sanitize.py"), kind]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        report.add(f"the compiled kernels under the {kind} sanitizer", _summary(done.stdout), not done.returncode)


# They keep both cores busy by themselves, so they run alone.
TIMED: tuple[Section, ...] = (sampled_tests, sanitizers)
