"""Checks the matrix kernels on a GPU against plain torch, then times them in every weight format.

python scripts/gpu/checks_matmul.py            everything, on a GPU
python scripts/gpu/checks_matmul.py --tiny     the same code at tiny sizes under Triton's interpreter
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.gpu.matmul_plans import Launch, ShapePlan, dense_launch, quant_launch, quant_plan
from slipstream.kernels.gpu.matrices import GpuDense, GpuMatrix, GpuQuantised, Scratch, library_product, rows_agree
from slipstream.kernels.gpu.packing import KINDS, TILE_ROWS, BlockKind, QuantPlanes, dequantised, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

Shapes = dict[str, tuple[int, int]]
QWEN3_8B: Shapes = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
QWEN3_8B_LAYERS = 36
SMOLLM2: Shapes = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
TINY: Shapes = {"o": (128, 512), "head": (192, 256)}
DEVICE = torch.device("cpu" if "--tiny" in sys.argv else "cuda")
COPY_RATE = 4.3e12  # bytes per second that an H200 copies; times are compared with it
L2_BYTES = 50 << 20
BF16_ERROR = 8e-3 if "--tiny" in sys.argv else 4e-3  # the interpreter truncates where a GPU rounds
SUM_ERROR = BF16_ERROR if "--tiny" in sys.argv else 3e-4
LAUNCHES: dict[int, tuple[Launch, ...]] = {
    16: (Launch(64, 4, 3), Launch(64, 4, 4), Launch(128, 4, 3)),
    32: (Launch(64, 4, 3), Launch(128, 4, 3), Launch(128, 8, 2), Launch(128, 8, 3)),
    64: (Launch(64, 4, 2), Launch(64, 4, 3), Launch(128, 4, 2), Launch(128, 8, 2), Launch(128, 8, 3),
         Launch(256, 16, 3), Launch(128, 8, 2, registers=128)),
}  # fmt: skip
DENSE_LAUNCHES: dict[int, tuple[Launch, ...]] = {
    16: (Launch(64, 4, 4), Launch(64, 4, 6), Launch(128, 4, 4), Launch(128, 4, 6), Launch(128, 8, 5)),
    32: (Launch(64, 4, 4), Launch(64, 4, 5), Launch(128, 4, 4), Launch(128, 8, 5)),
    64: (
        Launch(64, 4, 4),
        Launch(64, 4, 5),
        Launch(64, 4, 6),
        Launch(128, 4, 3),
        Launch(128, 4, 4),
        Launch(128, 8, 3),
        Launch(128, 8, 4),
    ),
}
SPLITS = (1, 2, 4, 8)
MOST_SPLITS = 16


# ---- matrices of random bits, made on the device that uses them


def random_planes(kind: BlockKind, outputs: int, inputs: int, device: torch.device) -> QuantPlanes:
    tiles, steps = -(-outputs // TILE_ROWS), -(-inputs // kind.step)

    def bits(count: int) -> Tensor:
        shape = (tiles, count, TILE_ROWS, kind.group)
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)

    wide = torch.int64 if kind.planes == 4 else torch.int32

    def numbers_of_groups(size: float) -> Tensor:
        numbers = (torch.rand(tiles, steps, TILE_ROWS, kind.planes, device=device) + 0.5) * size
        past = torch.arange(steps * kind.step, device=device).view(steps, kind.planes, kind.group)[..., 0] >= inputs
        return numbers.masked_fill(past[None, :, None], 0.0).to(torch.bfloat16).view(wide).squeeze(-1)

    high = bits(steps // 2) if kind.high else None
    offsets = numbers_of_groups(2.0**-9) if kind.minima else None
    return QuantPlanes(kind, outputs, inputs, bits(steps), high, numbers_of_groups(2.0**124), offsets, 2.0**-4)


def make(name: str, outputs: int, inputs: int, scratch: Scratch, dtype: torch.dtype) -> GpuMatrix:
    if name in KINDS:
        return GpuQuantised(random_planes(KINDS[name], outputs, inputs, scratch.device), scratch, dtype)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=scratch.device).mul_(0.02)
    return GpuDense(weight, scratch, dtype, fixed_order=name == "in order")


# ---- correct values


def error(result: Tensor, expected: Tensor) -> float:
    return float(((result.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


def check_matrix(name: str, outputs: int, inputs: int, scratch: Scratch) -> Iterator[str]:
    """Yields the faults of one matrix: values, rows that depend on others, runs that differ."""
    label = f"{name} {outputs}x{inputs}"
    matrix = make(name, outputs, inputs, scratch, torch.float32)
    rows = torch.randn(64, inputs, device=scratch.device).to(torch.bfloat16)
    expected = rows.double() @ matrix.dense().double().t()
    results = {}
    for count in (16, 32, 64):
        others = rows[:count].clone()
        others[16:] *= 1000.0
        for run in range(3):
            out = torch.full((count, outputs), torch.nan, device=scratch.device)
            matrix(rows[:count] if run < 2 else others, out)
            results[count, run] = out
        if not torch.equal(results[count, 0], results[count, 1]):
            yield f"{label}: two runs of {count} rows differ"
        for run in (0, 2):
            if not torch.equal(results[count, run][:16], results[16, 0]):
                yield f"{label}: rows change among {count}" + (" large ones" if run else "")
        found = error(results[count, 0], expected[:count])
        if not found < SUM_ERROR:
            yield f"{label}: error {found:.1e} at {count} rows"
    parts = matrix.in_parts(rows)
    if parts.dim() == 3 and not torch.equal(reduce(torch.add, parts), results[64, 0]):
        yield f"{label}: the product in parts is another one"
    with_nan = rows.clone()
    with_nan[16:] = torch.nan
    if not torch.equal(matrix(with_nan)[:16], results[16, 0]):
        yield f"{label}: rows that are not numbers reach others"
    many = rows.repeat(2, 1)[:100]
    out = torch.full((100, outputs), torch.nan, device=scratch.device)
    found = error(matrix(many, out), expected.repeat(2, 1)[:100])
    print(f"  {label}: error {error(results[16, 0], expected[:16]):.1e}, 100 rows {found:.1e}", end="")
    if not found < BF16_ERROR:
        yield f"{label}: error {found:.1e} at 100 rows"
    print()
    ids = torch.randint(0, outputs, (7,), dtype=torch.int32, device=scratch.device)
    table = torch.full((7, inputs), torch.nan, device=scratch.device)
    matrix.embed_rows(ids, table)
    if not error(table, matrix.dense()[ids.long()].double()) < SUM_ERROR:
        yield f"{label}: rows of the table are wrong"


def check_packing(name: str, device: torch.device) -> Iterator[str]:
    """Checks that random blocks packed on the device and on the CPU are equal and decode to the blocks' values."""
    kind = KINDS[name]
    outputs, inputs = 192, 512
    raw = np.random.default_rng(5).integers(0, 256, (outputs, inputs // kind.block * kind.block_bytes), np.uint8)
    blocks = raw.reshape(outputs, -1, kind.block_bytes)
    halves = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}.get(name, (0, 2))
    for at in halves:
        blocks[..., at : at + 2] = (
            np.random.default_rng(6).uniform(1e-3, 1e-2, blocks.shape[:2] + (1,)).astype(np.float16).view(np.uint8)
        )
    there, here = (pack([raw], kind, inputs, where) for where in (device, torch.device("cpu")))
    for part in ("words", "high", "scales", "offsets"):
        one, other = getattr(there, part), getattr(here, part)
        if one is not None and not torch.equal(one.cpu(), other):
            yield f"{name}: {part} packed on the device differ"
    weights = GpuQuantised(there, Scratch(device)).dense().cpu()
    found = error(weights, dequantised(torch.from_numpy(raw), kind).double())
    if not found < BF16_ERROR:
        yield f"{name}: packed weights are off by {found:.1e}"


def check(device: torch.device, tiny: bool, names: Sequence[str]) -> list[str]:
    faults = [fault for name in names if name in KINDS for fault in check_packing(name, device)]
    shapes = [(72, 320), (128, 512)]
    if not tiny:
        shapes = [(4096, 4096), (4096, 12288), (576, 576), (1000, 1536), (49152, 512), (49152, 576)]
    scratch = Scratch(device)
    for name in names:
        for outputs, inputs in shapes if not tiny or name in ("Q4_K", "in order") else shapes[1:]:
            if name in KINDS and inputs % KINDS[name].block:
                continue  # no file has a tensor of this type and shape
            faults += check_matrix(name, outputs, inputs, scratch)
    return faults


# ---- times


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to multiply: a launch and, unless it is the plan's own, a split; cuBLAS has neither."""

    rows: int
    launch: Launch | None
    split: int | None = None

    def __str__(self) -> str:
        if self.launch is None:
            return "cuBLAS"
        name = f"{self.launch.tile}/{self.launch.warps}w/{self.launch.stages}s"
        name += f"/r{self.launch.registers}" if self.launch.registers else ""
        return name + (f"/k{self.split}" if self.split else "")


def variants(name: str, shape: str, rows: int) -> list[Variant]:
    if name == "cuBLAS":
        return [Variant(rows, None)]
    found = [Variant(rows, launch) for launch in (DENSE_LAUNCHES if name == "in order" else LAUNCHES)[rows]]
    if shape in ("o", "down"):
        found += [replace(variant, split=split) for split in SPLITS for variant in tuple(found)]
    return found


def run_variant(matrix: GpuMatrix, variant: Variant, rows: Tensor, out: Tensor) -> None:
    if isinstance(matrix, GpuQuantised):
        assert variant.launch is not None
        matrix.multiply_blocks(rows, out, variant.launch)
    elif isinstance(matrix, GpuDense) and variant.launch is not None:
        matrix.multiply_in_order(rows, out, variant.launch)
    else:
        assert isinstance(matrix, GpuDense)
        library_product(rows, matrix.weight, out)


def with_split(matrix: GpuMatrix, variant: Variant, usual: ShapePlan) -> None:
    """Sets how many programs share a tile, which belongs to the plan that the matrix keeps."""
    if isinstance(matrix, GpuQuantised | GpuDense):
        matrix.plan = replace(usual, split=variant.split or usual.split)


def milliseconds(call: Callable[[int], None], copies: int, device: torch.device) -> float:
    """The median time of one call over replays of a graph that goes through all copies."""
    calls = max(copies, 20)
    if device.type != "cuda":
        start = time.perf_counter()
        call(0)
        return (time.perf_counter() - start) * 1e3
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index % copies)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)) / calls


def time_shape(
    name: str, shape: str, size: tuple[int, int], rows_counts: Sequence[int], scratch: Scratch
) -> Iterator[dict[str, object]]:
    outputs, inputs = size
    dtype = torch.float32 if shape == "head" else torch.bfloat16
    first = make(name, outputs, inputs, scratch, dtype)
    scratch.reserve(partials=MOST_SPLITS * (outputs + 4 * TILE_ROWS) * 64 if outputs < 30000 else 0)
    copies = max(1, -(-4 * L2_BYTES // first.nbytes)) if scratch.device.type == "cuda" else 1
    matrices = [first, *(make(name, outputs, inputs, scratch, dtype) for _ in range(copies - 1))]
    assert isinstance(first, GpuQuantised | GpuDense)
    usual = first.plan
    for count in rows_counts:
        rows = torch.randn(count, inputs, device=scratch.device).to(torch.bfloat16)
        out = torch.empty(count, outputs, dtype=dtype, device=scratch.device)
        for variant in variants(name, shape, count):
            if variant.launch is not None and -(-outputs // TILE_ROWS) % (variant.launch.tile // TILE_ROWS):
                continue

            def call(index: int, variant: Variant = variant, rows: Tensor = rows, out: Tensor = out) -> None:
                with_split(matrices[index], variant, usual)
                run_variant(matrices[index], variant, rows, out)

            try:
                ms = milliseconds(call, copies, scratch.device)
            except Exception as problem:  # a launch may need more memory than a multiprocessor has
                print(f"  {name} {shape} {count} {variant}: {str(problem)[:100]}")
                continue
            yield {
                "format": name, "shape": shape, "rows": count, "variant": str(variant), "us": ms * 1e3,
                "rate": first.nbytes / ms * 1e3, "usual": variant.launch == _usual(first, count)
                and variant.split is None,
            }  # fmt: skip


def _usual(matrix: GpuMatrix, rows: int) -> Launch | None:
    if isinstance(matrix, GpuQuantised):
        planes = matrix.planes
        split = quant_plan(planes.kind, planes.tiles, planes.steps).split
        return quant_launch(planes.kind, planes.tiles, split, rows)
    if isinstance(matrix, GpuDense) and matrix.fixed_order:
        return dense_launch(matrix.out_features, matrix.plan.split, rows)
    return None


# ---- compiling in advance, in as many processes as there are cores


def compile_one(job: tuple[str, str, tuple[int, int], Variant]) -> None:
    name, shape, size, variant = job
    torch.set_num_threads(1)
    scratch = Scratch(DEVICE)
    dtype = torch.float32 if shape == "head" else torch.bfloat16
    usual = make(name, *size, scratch, dtype)
    small = make(name, 4 * TILE_ROWS, size[1], scratch, dtype)
    assert isinstance(usual, GpuQuantised | GpuDense)
    scratch.reserve(partials=MOST_SPLITS * 8 * TILE_ROWS * 64)
    with_split(small, variant, usual.plan)
    rows = torch.zeros(variant.rows, size[1], dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(variant.rows, 4 * TILE_ROWS, dtype=dtype, device=DEVICE)
    try:
        run_variant(small, variant, rows, out)
    except Exception as problem:  # the timing reports it
        print(f"  {name} {variant}: {str(problem)[:100]}")


def compile_ahead(shapes: Shapes, names: Sequence[str], rows_counts: Sequence[int], processes: int) -> None:
    jobs: dict[object, tuple[str, str, tuple[int, int], Variant]] = {}
    scratch = Scratch(DEVICE)
    for name in names:
        if name == "cuBLAS":
            continue
        for shape, size in shapes.items():
            probe = make(name, *size, scratch, torch.bfloat16)
            assert isinstance(probe, GpuQuantised | GpuDense)
            for count in rows_counts:
                for variant in variants(name, shape, count):
                    plan = replace(probe.plan, split=variant.split or probe.plan.split)
                    key = (name, replace(variant, split=None), plan, shape == "head")
                    jobs.setdefault(key, (name, shape, (min(size[0], 24576), size[1]), variant))
    start = time.perf_counter()
    with get_context("spawn").Pool(processes) as pool:
        pool.map(compile_one, jobs.values(), chunksize=1)
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


# ---- tables


def print_times(times: list[dict[str, object]]) -> None:
    groups: dict[tuple[object, object, object], list[dict[str, object]]] = {}
    for entry in times:
        groups.setdefault((entry["format"], entry["rows"], entry["shape"]), []).append(entry)
    for (name, count, shape), entries in groups.items():
        entries.sort(key=lambda entry: float(str(entry["us"])))
        best = "  ".join(f"{entry['variant']} {entry['us']:.1f}" for entry in entries[:6])
        print(f"{name!s:9} {count!s:>2} {shape!s:8} {float(str(entries[0]['rate'])) / 1e12:4.2f} TB/s  {best}")


def print_totals(times: list[dict[str, object]], layers: int) -> None:
    print(f"\nall matmuls of a step ({layers} layers and head), ms: best | as the code has it | floor | best / floor")
    for name in dict.fromkeys(entry["format"] for entry in times):
        for count in dict.fromkeys(entry["rows"] for entry in times):
            best = usual = floor = 0.0
            for shape in dict.fromkeys(entry["shape"] for entry in times):
                own = [e for e in times if (e["format"], e["rows"], e["shape"]) == (name, count, shape)]
                if not own:
                    continue
                often = 1 if shape == "head" else layers
                fastest = min(own, key=lambda entry: float(str(entry["us"])))
                us, rate = float(str(fastest["us"])), float(str(fastest["rate"]))
                best += often * us / 1e3
                usual += often * min((float(str(e["us"])) for e in own if e["usual"]), default=float("nan")) / 1e3
                floor += often * us * rate / COPY_RATE / 1e3
            print(f"{name!s:9} {count!s:>2} rows  {best:6.3f} | {usual:6.3f} | {floor:6.3f} | {best / floor:4.2f}")


def agreement(device: torch.device) -> None:
    for model, shapes in (("Qwen3-8B", QWEN3_8B), ("SmolLM2", SMOLLM2)):
        for shape, (outputs, inputs) in shapes.items():
            weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device).mul_(0.02)
            agree = rows_agree(weight, torch.float32 if shape == "head" else torch.bfloat16)
            print(f"cuBLAS {model} {shape}: {'rows agree' if agree else 'rows differ between 16, 32 and 64'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=("checks", "times"))
    parser.add_argument("--out", type=Path, help="also write the times as JSON")
    parser.add_argument("--formats", default=",".join(("cuBLAS", "in order", *KINDS)))
    parser.add_argument("--rows", default="16,32,64")
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    names, rows_counts = options.formats.split(","), [int(count) for count in options.rows.split(",")]
    if options.tiny:
        rows_counts, options.processes = rows_counts[:1], 1
    start = time.perf_counter()
    faults: list[str] = []
    if options.only != "times":
        faults = check(DEVICE, options.tiny, [name for name in names if name != "cuBLAS"])
        print(f"checks took {time.perf_counter() - start:.0f} s; faults: {faults or 'none'}", flush=True)
        if "cuBLAS" in names and not options.tiny:
            agreement(DEVICE)
    if options.only != "checks":
        shapes = TINY if options.tiny else QWEN3_8B
        compile_ahead(shapes, names[-1:] if options.tiny else names, rows_counts, options.processes)
        times: list[dict[str, object]] = []
        for name in names:
            for shape, size in shapes.items():
                times += time_shape(name, shape, size, rows_counts, Scratch(DEVICE))
        if options.out is not None:
            options.out.write_text(json.dumps(times, indent=1))
        print_times(times)
        print_totals(times, QWEN3_8B_LAYERS)
    print(f"{options.formats}: {time.perf_counter() - start:.0f} s in all; {len(faults)} faults {faults}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
