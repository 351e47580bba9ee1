"""The compiled module as a whole: built where it can be, and chosen by what the machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from slipstream.kernels.cpu.linear import NativeMatrix
from slipstream.kernels.cpu.native_library import CAP_VARIABLE, availability
from tests.conftest import SHARE_VARIABLE
from tests.native import every_library, stored

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/slipstream/kernels/cpu/native"
COMPILER = shutil.which("g++")
REPORT = "from slipstream.kernels.cpu.native_library import availability; print(availability().reason)"


def explained(cap: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", REPORT], env=os.environ | {CAP_VARIABLE: cap}, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def test_a_machine_with_a_compiler_has_compiled_kernels() -> None:
    assert availability().library is not None or COMPILER is None, availability().reason


@pytest.mark.skipif(availability().library is None, reason="no compiled kernels")
def test_the_environment_caps_the_instruction_set() -> None:
    assert explained("avx2") == "compiled kernels, AVX2"
    assert explained("none") == f"torch's kernels, as {CAP_VARIABLE} asks"


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        explained("sse")
    assert f"{CAP_VARIABLE} is 'sse' (use one of none, avx2, avx512, amx, or leave it out)" in failed.value.stderr


@pytest.mark.slow
@pytest.mark.skipif(availability().library is None, reason="no compiled kernels")
def test_kernels_pass_their_tests_on_an_avx2_machine() -> None:
    tests = [f"tests/unit/test_native_{name}.py" for name in ("matmul", "attention", "sampling", "growth")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        env=os.environ | {CAP_VARIABLE: "avx2", SHARE_VARIABLE: "5"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:]


@every_library()
def test_engines_in_several_threads_take_turns(library: object) -> None:
    linear, rows = NativeMatrix(library, [stored("Q4_1", 256, 256)]), torch.randn(4, 256)  # type: ignore[arg-type]
    expected = linear.multiply(rows, 2)
    wrong: list[int] = []

    def work() -> None:
        for turn in range(200):
            if not torch.equal(linear.multiply(rows, 1 + turn % 3), expected):
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_library()
def test_nobody_spins_while_there_is_nothing_to_do(library: object) -> None:
    linear = NativeMatrix(library, [stored("Q4_1", 256, 256)])  # type: ignore[arg-type]
    linear.multiply(torch.randn(4, 256), 2)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


@pytest.mark.skipif(availability().library is None, reason="no compiled kernels")
def test_the_machines_peaks_are_measured() -> None:
    from slipstream.kernels.machine import int8_peak, read_bandwidth

    peak, bandwidth = int8_peak(), read_bandwidth(8 << 20)
    assert peak is not None and 1e9 < peak < 1e15
    assert 1e8 < bandwidth < 1e13
