"""What this machine can do: usable cores, instruction sets that crash, memory bandwidth, the fastest weight format."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.config import WeightFormat
from slipstream.kernels.cpu.linear import DENSE_DTYPES, INT4_GROUP, DenseMatrix, Int4Matrix, Int8Matrix, Matrix
from slipstream.kernels.cpu.native_library import library
from slipstream.kernels.cpu.native_library import threads as native_threads
from slipstream.paths import user_cache

# Some cloud machines advertise AMX and then kill a process that uses it. This instruction set is the next best one;
# torch's matrix library is limited to it on such machines.
_SAFE_ISA = "AVX512_CORE_FP16"
_PROBE = """
import torch
x = torch.randn(32, 128)
w = torch.randn(64, 128)
torch.nn.functional.linear(x.bfloat16(), w.bfloat16())
torch.nn.functional.linear(x.half(), w.half())
torch._int_mm(x.to(torch.int8), w.to(torch.int8).t())
"""
_MEASURED_ROWS = (1, 16)  # rows of a plain decoding step and of a typical verify step
_ROUNDS = 6  # repetitions of a measurement, of which the fastest counts
_PEAK_ROUNDS = 500_000  # loop length of the int8 measurement
_READ_ROUNDS = 24  # repetitions of the bandwidth measurement, each of which takes milliseconds


def usable_cores() -> int:
    """Returns how many cores this process may use, by its affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text().partition(" ")
        if limit.isdecimal() and period.strip().isdecimal():
            cores = min(cores, max(1, math.ceil(int(limit) / int(period))))
    return cores


def prepare_torch(threads: int) -> int:
    """Makes torch safe and sets its number of threads, which is returned; call it before the first torch operation."""
    if advertises_amx() and "ONEDNN_MAX_CPU_ISA" not in os.environ and not amx_survives():
        os.environ["ONEDNN_MAX_CPU_ISA"] = _SAFE_ISA
    count = threads or usable_cores()
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count


def _cpu_info() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.is_file() else ""


def advertises_amx() -> bool:
    return "amx_tile" in _cpu_info()


def cpu_name() -> str:
    for line in _cpu_info().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def amx_survives() -> bool:
    """Whether torch's low-precision matmuls do not crash on this machine."""
    return _remembered(f"torch {torch.__version__}", _PROBE)


def amx_works(handle: ctypes.CDLL) -> bool:
    """Whether AMX int8 tiles may be used and compute correctly; they are tried in a child process, which may crash."""
    if not handle.slip_request_amx():
        return False
    probe = f"""
import ctypes, sys
library = ctypes.CDLL({handle._name!r})
sys.exit(0 if library.slip_request_amx() and library.slip_probe_amx() else 1)
"""
    works = _remembered(f"tiles of {Path(handle._name).stat().st_mtime_ns}", probe)
    handle.slip_use_amx(int(works))
    return works


def _remembered(what: str, probe: str) -> bool:
    """Whether a script succeeds in a child process; its answer is stored per machine and `what`, so it runs once."""
    path = user_cache() / "machine.json"
    key = f"{cpu_name()} | {platform.node()} | {what}"
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        stored = None
    known: dict[str, bool] = stored if isinstance(stored, dict) else {}
    if key not in known:
        try:
            done = subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=120, check=False)
            known[key] = done.returncode == 0
        except subprocess.TimeoutExpired:
            known[key] = False
        with contextlib.suppress(OSError):  # where nothing can be stored, the next process tries again
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(known))
            scratch.replace(path)
    return bool(known[key])


@functools.cache
def read_bandwidth(size: int = 96 << 20) -> float:
    """Measures how many bytes per second all threads together read from a buffer of `size` bytes, read repeatedly.

    If `size` is that of the weights, the result gives a lower bound for the time of a step. Caches speed up the reading
    of a buffer that fits into them, as they do for weights.
    """
    data = torch.ones(max(size, 1 << 20) // torch.float32.itemsize)
    compiled = library()
    read: Callable[[], object] = data.sum
    if compiled is not None:
        kernel = compiled.function("slip_read", "pli", "l")
        read = functools.partial(kernel, data.data_ptr(), data.numel(), native_threads())
    read()
    # the fastest round counts, because a disturbance only ever makes a round slower
    best = min(_timed(read) for _ in range(_READ_ROUNDS))
    return data.nbytes / best


@functools.cache
def int8_peak() -> float | None:
    """Measures how many int8 products per second all threads compute from registers; None without compiled kernels."""
    compiled = library()
    if compiled is None:
        return None
    kernel = compiled.function("slip_products", "ii", "l")
    kernel(_PEAK_ROUNDS, native_threads())
    rates = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        made = kernel(_PEAK_ROUNDS, native_threads())
        rates.append(made / (time.perf_counter() - began))
    return max(rates)


def measure_formats(
    candidates: list[WeightFormat], outputs: int, inputs: int
) -> dict[WeightFormat, tuple[float, float]]:
    """Returns the milliseconds of 1 row and of 16 rows through a matrix of this shape, per format that works here.

    The formats take turns, so that a busy moment of the machine does not count against a single one.
    """
    copies = max(2, min(16, (64 << 20) // (outputs * inputs * 4)))
    passes: dict[WeightFormat, list[Callable[[], None]]] = {}
    for candidate in candidates:
        try:
            matrices = [random_matrix(candidate, outputs, inputs) for _ in range(copies)]
            ready = [_row_pass(matrices, rows) for rows in _MEASURED_ROWS]
            for once in ready:
                once()
        except (RuntimeError, NotImplementedError):
            continue  # torch has no kernel for this format on this CPU
        passes[candidate] = ready
    best = {name: [math.inf] * len(_MEASURED_ROWS) for name in passes}
    for _ in range(_ROUNDS):
        for name, ready in passes.items():
            best[name] = [min(known, _timed(once)) for known, once in zip(best[name], ready, strict=True)]
    return {name: (one / copies * 1e3, many / copies * 1e3) for name, (one, many) in best.items()}


def pick_format(measured: dict[WeightFormat, tuple[float, float]]) -> WeightFormat:
    """Returns the format with the fastest single row; of those within 10 % of it, the one with the fastest 16 rows."""
    best = min(one for one, _ in measured.values())
    close = [name for name, (one, _) in measured.items() if one <= 1.1 * best]
    return min(close, key=lambda name: measured[name][1])


def random_matrix(weight_format: WeightFormat, outputs: int, inputs: int) -> Matrix:
    if weight_format in DENSE_DTYPES:
        return DenseMatrix(torch.randn(outputs, inputs), DENSE_DTYPES[weight_format])
    if weight_format == "int8":
        return Int8Matrix(torch.randn(outputs, inputs))
    groups = torch.rand(outputs, inputs // INT4_GROUP)
    return Int4Matrix(torch.randint(0, 16, (outputs, inputs)), groups, groups)


def _row_pass(matrices: list[Matrix], rows: int) -> Callable[[], None]:
    x = torch.randn(rows, matrices[0].in_features)

    def once() -> None:
        for matrix in matrices:
            matrix(x)

    return once


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
