"""Output that cannot be written and memory that runs out: one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_pair

MAIN = f"{sys.executable} -m slipstream.cli.main"
SHORT_OF_MEMORY = """
import resource, sys
from slipstream.cli.main import run
from slipstream.engine.llm import LLM

pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
run()
"""


def shell(command: str) -> tuple[int, str, str]:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--help", "inspect smollm2 --json"])
def test_output_that_cannot_be_written(arguments: str) -> None:
    closed = "slipstream: standard output is closed (send it to a file, or to /dev/null)\n"
    full = "slipstream: No space left on device (check the disk, and where the output goes)\n"
    assert shell(f"{MAIN} {arguments} >&-") == (2, "", closed)
    assert shell(f"{MAIN} {arguments} > /dev/full") == (2, "", full)


@pytest.mark.slow
def test_errors_that_cannot_be_written() -> None:
    for target in ("&-", "/dev/full"):
        assert shell(f"{MAIN} genrate 2>{target}") == (2, "", "")
        assert shell(f"{MAIN} --version 2>{target}")[0] == 0
    assert shell(f"{MAIN} --version >&- 2>&-") == (2, "", "")


@pytest.mark.slow
def test_memory_that_runs_out(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SHORT_OF_MEMORY,
            "generate",
            "--prompt",
            "x",
            "--target",
            str(target),
            "--draft",
            str(draft),
            "--max-context",
            "1000000",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    said = "there is not enough memory (choose a smaller model or --max-context, or raise the limit on memory)"
    assert done.stderr.splitlines()[-1] == f"slipstream: {said}"
    assert "Traceback" not in done.stderr
