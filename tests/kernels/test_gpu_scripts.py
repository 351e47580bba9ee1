"""What is timed on a GPU runs at tiny sizes here, and its numbers can be judged: minutes on a GPU are dear."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.formats.sources import resolve
from tests import verify_gpu
from tests.verify_report import Report

pytest.importorskip("triton")

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
ON_CPU = ["--device", "cpu", "--limit", "1", "--tokens", "4", "--batches", "1,2", "--parts", "batches"]


def judged(script: list[str], name: str, section: Callable[[Report], None], folder: Path) -> list[str]:
    """The promises that a section finds in what a script has written."""
    command = [sys.executable, str(SCRIPTS / script[0]), *script[1:], "--out", str(folder / f"{name}.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_gpu, "NUMBERS", folder)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        report = Report(tokens=4)
        section(report)
    return [outcome.promise.split(":")[0] for outcome in report.outcomes]


def test_steps_of_the_dense_shape(tmp_path: Path) -> None:
    assert judged(["step_times.py", "--tiny"], "steps_bf16", verify_gpu.gpu_steps, tmp_path) == [
        "bf16, 1K context, plain",
        "bf16, 1K context, draft + verify 16",
        "bf16",
    ]


def test_steps_of_other_families(tmp_path: Path) -> None:
    script = ["family_steps.py", "--tiny", "--shapes", "Laguna-XS.2", "--formats", "bf16"]
    assert judged(script, "families", verify_gpu.gpu_families, tmp_path) == [
        f"Laguna-XS.2, bf16, 1024 tokens of context, {step}" for step in ("plain", "verify chain 16", "verify tree 64")
    ]


def test_batches_of_the_real_pair(tmp_path: Path) -> None:
    pair = [str(resolve(name).path) for name in ("smollm2", "smollm2-dflash")]
    assert judged(["real_pair.py", *pair, *ON_CPU], "real_pair", verify_gpu.gpu_pair, tmp_path) == [
        f"throughput of {batch} sequences at once" for batch in (1, 2)
    ]
