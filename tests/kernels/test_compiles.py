"""Kernels compile for their GPU at real sizes, which the interpreter cannot show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu" / "compiles.py"
SHAPES = "Qwen3-8B,Qwen3.6-35B-A3B"
# one kernel of every part of a step: rows, products, attention, experts, recurrent layers, choice, commit
KERNELS = (
    "gather_kernel",
    "_add_norm_kernel",
    "dense_matmul_kernel",
    "quant_matmul_kernel",
    "shared_kernel",
    "last_groups_kernel",
    "combine_kernel",
    "prefill_kernel",
    "dense_experts_kernel",
    "quant_experts_kernel",
    "recur_kernel",
    "commit_kernel",
    "_search_kernel",
    "_grow_kernel",
    "_accept_kernel",
    "_compact_kernel",
    "_hold_kernel",
    "_context_write_kernel",
)


def test_steps_of_real_shapes_compile_for_an_h200(tmp_path: Path) -> None:
    # starts with an empty cache, because kernels of an earlier run would not be compiled again
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--shapes", SHAPES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for kernel in KERNELS:
        assert f"| {kernel} |" in done.stdout
