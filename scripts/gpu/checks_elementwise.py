"""Checks the kernels between the matmuls on a GPU against torch and for independent rows, and times them.

python scripts/gpu/checks_elementwise.py          # on the GPU
python scripts/gpu/checks_elementwise.py --tiny   # on a CPU under Triton's interpreter: finds typos, times nothing
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from slipstream.kernels.gpu import elementwise as kernels
from slipstream.kernels.gpu import layer_extras as blending

EPS, PAGE = 1e-6, 64
COPY_GB_S = 4300.0  # gigabytes per second that an H200 copies; times are compared with it


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    draft_layers: int


SHAPES = (Shape("qwen3-8b", 4096, 32, 8, 128, 12288, 5), Shape("smollm2", 576, 9, 3, 64, 1536, 3))
WIDE_SHAPES = (Shape("gemma4", 5376, 32, 4, 512, 21504, 5),)
TINY_SHAPES = (Shape("tiny", 48, 3, 1, 16, 80, 2),)


def random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def poisoned(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def median_us(launches: Sequence[Callable[[], None]], replays: int = 30) -> float:
    """Microseconds per launch, captured in one graph; launches rotate memory, so that the L2 cache does not hold it."""
    for launch in launches[:2]:
        launch()
    if not torch.cuda.is_available():
        return float("nan")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(launches))
    return statistics.median(times)


@dataclass
class Case:
    """One kernel with its inputs; `run` passes fresh poisoned outputs to a kernel and returns them."""

    name: str
    run: Callable[[Callable[..., None], int], tuple[Tensor, ...]]  # takes the kernel and the number of rows
    kernel: Callable[..., None]
    reference: Callable[..., None]
    launch: Callable[[], None]
    bytes: int


def cases(shape: Shape, rows: int, device: torch.device) -> list[Case]:
    hidden, dim = shape.hidden, shape.dim
    fp32 = torch.float32
    table = max(2048, rows + 1)
    angles = torch.rand(table, dim, device=device) * 6.28
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randperm(table, device=device)[:rows].int()
    pages = -(-2 * rows // PAGE) + 1
    places = torch.randperm(pages * PAGE, device=device)[:rows].int()
    weight, head_norm = random(device, hidden, dtype=fp32), random(device, 2, dim, dtype=fp32)
    residual, delta = random(device, rows, hidden, dtype=fp32), random(device, rows, hidden)
    qkv = random(device, rows, (shape.heads + 2 * shape.kv_heads) * dim)
    projected = random(device, rows, shape.draft_layers * 2 * shape.kv_heads * dim)
    k_norms = random(device, shape.draft_layers, dim, dtype=fp32)
    gate_up = random(device, rows, 2 * shape.inner)

    def add_norm(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
        changed, out = residual[:count].clone(), poisoned(device, count, hidden)
        taps = poisoned(device, count, 2 * hidden)
        kernel(changed, delta[:count], weight, EPS, out, taps[:, hidden:])
        return changed, out, taps

    def rotary_write(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
        pools = [poisoned(device, pages, shape.kv_heads, PAGE, dim) for _ in range(2)]
        queries = poisoned(device, count, shape.heads, dim)
        turn = EPS, cos, sin, positions[:count], places[:count]
        kernel(qkv[:count], None, head_norm[0], head_norm[1], *turn, queries, *pools)
        written = [_rows_of(pool, places[:count]) for pool in pools]
        return queries, *written, *(pools if count == rows else ())  # whole pools show values written by mistake

    def context_write(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
        pools = [poisoned(device, shape.draft_layers, pages, shape.kv_heads, PAGE, dim) for _ in range(2)]
        kernel(projected[:count], None, k_norms, EPS, cos, sin, positions[:count], places[:count], *pools)
        return tuple(_rows_of(layer, places[:count]) for pool in pools for layer in pool)

    def silu_mul(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
        out = poisoned(device, count, shape.inner)
        kernel(gate_up[:count], None, out)
        return (out,)

    normed, tap = poisoned(device, rows, hidden), poisoned(device, rows, 5 * hidden)[:, hidden : 2 * hidden]
    pool, queries = poisoned(device, 2, pages, shape.kv_heads, PAGE, dim), poisoned(device, rows, shape.heads, dim)
    drafts = poisoned(device, 2, shape.draft_layers, pages, shape.kv_heads, PAGE, dim)
    gated = poisoned(device, rows, shape.inner)
    zero = torch.zeros_like(delta)
    k = kernels
    return [
        Case(
            "add_norm",
            add_norm,
            k.add_norm,
            k.add_norm_reference,
            lambda: k.add_norm(residual, zero, weight, EPS, normed, None),
            rows * hidden * 12,
        ),
        Case(
            "add_norm+tap",
            add_norm,
            k.add_norm,
            k.add_norm_reference,
            lambda: k.add_norm(residual, zero, weight, EPS, normed, tap),
            rows * hidden * 14,
        ),
        Case(
            "rotary_write",
            rotary_write,
            k.rotary_write,
            k.rotary_write_reference,
            lambda: k.rotary_write(
                qkv, None, head_norm[0], head_norm[1], EPS, cos, sin, positions, places, queries, pool[0], pool[1]
            ),
            4 * qkv.numel(),
        ),
        Case(
            "context_write",
            context_write,
            k.context_write,
            k.context_write_reference,
            lambda: k.context_write(projected, None, k_norms, EPS, cos, sin, positions, places, drafts[0], drafts[1]),
            4 * projected.numel(),
        ),
        Case(
            "silu_mul",
            silu_mul,
            k.silu_mul,
            k.silu_mul_reference,
            lambda: k.silu_mul(gate_up, None, gated),
            6 * gated.numel(),
        ),
    ]


def family_cases(shape: Shape, rows: int, device: torch.device) -> list[Case]:
    """The kernels that only some families and drafters use."""
    hidden, width, fp32, k = shape.hidden, shape.heads * shape.dim, torch.float32, blending
    residual, delta, beside = random(device, rows, hidden, dtype=fp32), *random(device, 2, rows, hidden)
    norm, pair, three = random(device, hidden, dtype=fp32), *(random(device, n, hidden, dtype=fp32) for n in (2, 3))
    mixed, head_gate = random(device, rows, width), random(device, rows, shape.heads)
    gate_up, taps = random(device, rows, 2 * shape.inner), random(device, rows, 3, hidden)
    dynamic, base = random(device, rows, 2 * 4 * (hidden // 16)), random(device, 2, 4, hidden, dtype=fp32)
    logits = 20 * random(device, rows, 64 * hidden, dtype=fp32)
    block = min(rows, 16)

    def join_norm(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
        changed, outs = residual[:count].clone(), poisoned(device, 3, count, hidden)
        own = delta[:count], None, norm, beside[:count], pair, 0.9
        kernel(changed, *own, three, EPS, outs)
        return changed, *outs

    def gate_mul(values: Tensor, gate: Tensor, kind: str) -> Callable[..., tuple[Tensor, ...]]:
        def run(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
            out = poisoned(device, count, values.shape[1])
            kernel(values[:count], gate[:count], None, out, kind)
            return (out,)

        return run

    def norm_parts(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
        out = poisoned(device, count, 3, hidden)
        kernel(taps[:count], three, EPS, out)
        return (out,)

    def convolve(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
        out = poisoned(device, count, hidden)
        kernel(delta[:count], None, dynamic[:count], base, True, block, out)
        return (out,)

    def bend(kernel: Callable[..., None], count: int) -> tuple[Tensor, ...]:
        bent = logits[:count].clone()
        kernel(bent, 0.9, 30.0)
        return (bent,)

    outs, gated, inner = poisoned(device, 3, rows, hidden), torch.empty_like(mixed), poisoned(device, rows, shape.inner)
    gate, up = gate_up.chunk(2, dim=-1)
    normed = torch.empty_like(taps)
    calm, still = residual.clone(), torch.zeros_like(delta)
    return [
        Case(
            "join_norm",
            join_norm,
            k.join_norm,
            k.join_norm_reference,
            lambda: k.join_norm(calm, still, None, norm, None, None, 1.0, norm, EPS, outs[0]),
            rows * hidden * 12,
        ),
        Case(
            "gate_mul head",
            gate_mul(mixed, head_gate, "softplus"),
            k.gate_mul,
            k.gate_mul_reference,
            lambda: k.gate_mul(mixed, head_gate, None, gated, "softplus"),
            4 * mixed.numel(),
        ),
        Case(
            "gate_mul gelu",
            gate_mul(up, gate, "gelu"),
            k.gate_mul,
            k.gate_mul_reference,
            lambda: k.gate_mul(up, gate, None, inner, "gelu"),
            3 * gate_up.numel(),
        ),
        Case(
            "norm_parts",
            norm_parts,
            k.norm_parts,
            k.norm_parts_reference,
            lambda: k.norm_parts(taps, three, EPS, normed),
            4 * taps.numel(),
        ),
        Case(
            "convolve",
            convolve,
            k.convolve,
            k.convolve_reference,
            lambda: k.convolve(delta, None, dynamic, base, False, block, outs[1]),
            4 * delta.numel(),
        ),
        Case("bend", bend, k.bend, k.bend_reference, lambda: k.bend(logits, 1.0, 30.0), 8 * logits.numel()),
    ]


def _rows_of(pool: Tensor, places: Tensor) -> Tensor:
    return pool[places.long() // PAGE, :, places.long() % PAGE]


def check(device: torch.device, shapes: Sequence[Shape], counts: Sequence[int]) -> list[str]:
    """Describes each fault in a sentence: values that differ from torch, or bits that depend on the number of rows."""
    wrong = []
    for shape in shapes:
        for case in [*cases(shape, max(counts), device), *family_cases(shape, max(counts), device)]:
            among = case.run(case.kernel, max(counts))
            for found, expected in zip(among, case.run(case.reference, max(counts)), strict=True):
                same_holes = torch.equal(found.isnan(), expected.isnan())
                apart = (found - expected).float().nan_to_num().abs()
                error = (apart / (expected.float().nan_to_num().abs() + 1e-3)).max()
                if not same_holes or error > 2**-6:
                    wrong.append(f"{shape.name} {case.name}: off by {error:.4f} (relative), holes alike: {same_holes}")
            for count in counts:
                few = case.run(case.kernel, count)
                for found, more in zip(few, among, strict=False):
                    if found.shape[1:] == more.shape[1:] and not _same_bits(found, more[: found.shape[0]]):
                        wrong.append(f"{shape.name} {case.name}: bits of {count} rows change among {max(counts)}")
    return wrong


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=77.0), other.nan_to_num(nan=77.0))


def time_table(device: torch.device, shapes: Sequence[Shape], counts: Sequence[int]) -> list[str]:
    lines = [f"{'shape':<10} {'kernel':<14} {'rows':>5} {'us':>7} {'GB/s':>7} {'floor us':>9}"]
    for shape in shapes:
        for rows in counts:
            for case in [*cases(shape, rows, device), *family_cases(shape, rows, device)]:
                us = median_us([case.launch] * 50)
                rate, floor = case.bytes / us / 1e3, case.bytes / COPY_GB_S / 1e3
                lines.append(f"{shape.name:<10} {case.name:<14} {rows:>5} {us:>7.2f} {rate:>7.0f} {floor:>9.2f}")
    return lines


@dataclass(frozen=True, slots=True)
class Asked:
    """What a script shall do: tiny shapes under the interpreter or real ones on a GPU; checks, times or both."""

    tiny: bool
    device: torch.device
    checks: bool
    times: bool

    @classmethod
    def read(cls, description: str | None) -> Asked:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU under Triton's interpreter")
        parser.add_argument("--only", choices=("checks", "times"))
        options = parser.parse_args()
        torch.manual_seed(0)
        device = torch.device("cpu" if options.tiny else "cuda")
        return cls(options.tiny, device, options.only != "times", options.only != "checks")


def main() -> None:
    asked = Asked.read(__doc__)
    tiny, device = asked.tiny, asked.device
    shapes = TINY_SHAPES if tiny else (*SHAPES, *WIDE_SHAPES)
    wrong = []
    if asked.checks:
        wrong = check(device, shapes, (2, 3) if tiny else (1, 16, 32, 64, 512))
        print("\n".join(wrong) or "elementwise: all right, and every row for itself")
    if asked.times:
        print("\n".join(time_table(device, shapes, (2,) if tiny else (16, 64, 512))))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
