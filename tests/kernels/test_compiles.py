"""Kernels compile for their GPU at real sizes, which the interpreter cannot show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu" / "compiles.py"
# Of every part of a step there is one: rows, products, attention, choice, commit.
DENSE = (
    "_add_norm_kernel",
    "quant_matmul_kernel",
    "shared_kernel",
    "last_groups_kernel",
    "combine_kernel",
    "prefill_kernel",
    "_search_kernel",
    "_match_kernel",
    "_grow_kernel",
    "_accept_kernel",
    "_compact_kernel",
    "_hold_kernel",
    "_context_write_kernel",
)
# Experts and recurrent layers have further ones, and so has bf16.
FURTHER = (
    "quant_experts_kernel",
    "recur_kernel",
    "commit_kernel",
    "dense_matmul_kernel",
    "gather_kernel",
    "dense_experts_kernel",
)


@pytest.mark.sampled(0)
def test_steps_of_real_shapes_compile_for_an_h200(tmp_path: Path) -> None:
    # from nothing: what an earlier run has compiled would not be compiled again
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), "--shapes", "Qwen3-8B,Qwen3.6-35B-A3B", "--formats", "bf16,Q4_K"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for kernel in (*DENSE, *FURTHER):
        assert f"| {kernel} |" in done.stdout
