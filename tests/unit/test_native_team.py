"""The cores to which the threads of a team are pinned, and the number of torch's own threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.kernels.cpu.native_library import library
from tests.tiny import keep_threads, tiny_llm

WAIT_S = 30  # on a busy machine a thread may get its core only after a long time
PROBE = f"""
import ctypes, os, sys, time
from slipstream.kernels.cpu.native_library import library

products = library().function("slip_products", "ii", "l")
before = set(os.listdir("/proc/self/task"))
whole = os.sched_getaffinity(0)
for threads in map(int, sys.argv[1:]):
    own = [{{core}} if threads == len(whole) else whole for core in sorted(whole)] + [whole]
    cores, deadline = [], time.monotonic() + {WAIT_S}
    while cores != own[1:threads] and time.monotonic() < deadline:
        products(1000, threads)
        workers = sorted(set(os.listdir("/proc/self/task")) - before, key=int)
        cores = [os.sched_getaffinity(int(worker)) for worker in workers[: threads - 1]]
    assert cores == own[1:threads], (threads, cores)
    assert os.sched_getaffinity(0) == whole, "the caller stays pinned"
"""


@pytest.mark.skipif(library() is None, reason="no compiled kernels")
def test_only_a_team_that_fills_its_cores_is_pinned() -> None:
    cores = len(os.sched_getaffinity(0))
    teams = [str(size) for size in (cores, cores + 1, cores, max(1, cores - 1))]
    done = subprocess.run([sys.executable, "-c", PROBE, *teams], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_every_model_of_a_process_has_its_own_number_of_torch_threads(tmp_path: Path) -> None:
    """Torch's threads would otherwise spin on the cores that the threads of a compiled model need."""
    with keep_threads():
        few, many = (tiny_llm(tmp_path, threads=count) for count in (1, 2))
        for llm, count in ((few, 1), (many, 2), (few, 1)):
            torch.set_num_threads(3)
            llm.generate("a", max_tokens=2)
            assert torch.get_num_threads() == count
