"""Compiles the kernels of whole decoding steps for an H200, without having one, and reports what each kernel uses.

    python scripts/gpu/compiles.py                     every shape in bf16 and Q4_K
    python scripts/gpu/compiles.py --shapes Qwen3-8B --formats Q8_0,Q6_K

Steps are built on the CPU with a few layers of the real width; every launch is compiled and none runs. Registers and
shared memory decide how many programs a multiprocessor runs at a time; spilled registers are written and read again.
"""

# mypy: disable-error-code="assignment, unused-ignore"

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import family_steps
import step_times
import torch
from shapes import FAMILIES, QWEN3_8B, RandomMatrices, few_layers
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from slipstream.engine.gpu.gpu_executor import GpuExecutor
from slipstream.kernels.gpu import delta_net_launch as delta
from slipstream.kernels.gpu import matrices as matmul
from slipstream.kernels.gpu import paged_attention as attention
from slipstream.kernels.gpu.packing import KINDS
from slipstream.models.gpu.device_models import GpuDrafter

HOPPER = GPUTarget("cuda", 90, 32)
BATCHES = {1: (1, 16, 64), 4: (16,), 64: (1, 4)}  # sequences of a step -> rows of each
MOST_SHARED = 227 * 1024  # bytes of shared memory that a program may use on an H200
Usage = tuple[int, int, int]  # registers of a thread, bytes that it spills, bytes of shared memory of its program


class NoGpu:
    """The part of a GPU driver that compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel compiled for one set of constants."""

    name: str
    step: str
    kernel: Any

    def usage(self, folder: Path) -> Usage:
        path = folder / "kernel.cubin"
        path.write_bytes(self.kernel.asm["cubin"])
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
        registers, spilled = (re.findall(rf"{what}:(\d+)", told) for what in ("REG", "LOCAL"))
        return max(map(int, registers)), max(map(int, spilled)), self.kernel.metadata.shared


class Compiler:
    """Takes the place of launching kernels, and records what would have been launched."""

    def __init__(self) -> None:
        self.step = ""
        self.found: dict[int, Compiled] = {}
        self._run = JITFunction.run

    def install(self) -> None:
        driver.set_active(NoGpu())  # type: ignore[no-untyped-call]
        compiler, run = self, self._run

        def compile_only(kernel: JITFunction[Any], *given: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
            made = run(kernel, *given, grid=grid, warmup=True, **settings)
            compiler.found.setdefault(id(made), Compiled(kernel.__name__, compiler.step, made))
            return made

        JITFunction.run = compile_only  # type: ignore[method-assign, assignment]
        attention.can_overlap = delta.can_overlap = lambda device: True  # type: ignore[attr-defined]
        # Only a GPU can find out which products cuBLAS runs, so the kernels of all products are compiled.
        matmul.rows_agree = lambda weight, result_dtype: False
        matmul.library_product = lambda rows, weight, out: None
        RandomMatrices.dense_weights = _unwritten  # type: ignore[method-assign]


def _unwritten(matrices: RandomMatrices, outputs: int, inputs: int) -> Tensor:
    """Weights that are never read, and so take no memory."""
    return torch.empty(outputs, inputs, dtype=torch.bfloat16)


def dense_pair(kind: str) -> tuple[GpuExecutor, GpuDrafter]:
    shape = replace(QWEN3_8B, layers=2)
    options = Namespace(contexts=[1024], batches=list(BATCHES), tiny=False, no_graphs=True, format=kind)
    bench = step_times.Bench(options, shape, torch.device("cpu"))
    return bench.executor, bench.gpu_drafter


def family_pair(name: str, kind: str) -> tuple[GpuExecutor, GpuDrafter]:
    bench = family_steps.Bench(few_layers(name), kind, 1024, torch.device("cpu"), False)
    return bench.executor, bench.drafter


@torch.inference_mode()
def compile_steps(executor: GpuExecutor, drafter: GpuDrafter, compiler: Compiler, label: str, most: int) -> None:
    """Plain steps with draft context and without, drafting ones, and a chunk of a prompt."""
    for sequences, widths in BATCHES.items():
        for each in widths if sequences <= most else ():
            for used in (None, drafter) if each == 1 else (drafter,):
                compiler.step = f"{label}, {sequences} x {each} rows" + (", context kept" if each == 1 and used else "")
                step = executor.device_steps.make_step(sequences, each, used, each > 1)
                step.launch()
                if step.held is not None:
                    step.write_held()
    compiler.step = f"{label}, prompt"
    passes = executor.passes
    chunk, run = passes.chunk_pass(drafter)
    run()
    assert chunk.hidden is not None
    passes.target.logits(chunk.hidden[:16])


def report(found: list[Compiled]) -> None:
    """Prints one line per kernel with the largest usage of any of its versions."""
    by_name: dict[str, list[Usage]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for each in found:
            by_name.setdefault(each.name, []).append(each.usage(Path(folder)))
    print("| kernel | versions | registers | spilled bytes | shared KiB |\n|" + " --- |" * 5)
    for name, versions in sorted(by_name.items()):
        registers, spilled, shared = map(max, zip(*versions, strict=True))
        print(f"| {name} | {len(versions)} | {registers} | {spilled} | {shared / 1024:.0f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(("Qwen3-8B", *FAMILIES)))
    parser.add_argument("--formats", default="bf16,Q4_K")
    options = parser.parse_args()
    shapes, formats = options.shapes.split(","), options.formats.split(",")
    if unknown := {*shapes, *formats} - {"Qwen3-8B", *FAMILIES, "bf16", *KINDS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    began = time.perf_counter()
    compiler = Compiler()
    compiler.install()
    for shape in shapes:
        for kind in formats:
            dense = shape == "Qwen3-8B"
            executor, drafter = dense_pair(kind) if dense else family_pair(shape, kind)
            compile_steps(executor, drafter, compiler, f"{shape} {kind}", max(BATCHES) if dense else 1)
            took = time.perf_counter() - began
            print(f"{shape} {kind}: {len(compiler.found)} kernels after {took:.0f} s", flush=True)
    found = list(compiler.found.values())
    report(found)
    too_large = [f"{each.name} ({each.step})" for each in found if each.kernel.metadata.shared > MOST_SHARED]
    print(f"{len(found)} kernels compile; with more shared memory than there is: {', '.join(too_large) or 'none'}")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
