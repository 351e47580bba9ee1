"""Measures the milliseconds of all matrices of one decoding step, per weight format and row count, on this machine.

python scripts/cpu_formats.py            shapes of SmolLM2-135M
"""

from __future__ import annotations

import argparse
import time

import torch

from slipstream.kernels.cpu.linear import DENSE_DTYPES, DenseMatrix, Int4Matrix, Int8Matrix, Matrix
from slipstream.kernels.machine import prepare_torch

LAYERS, HIDDEN, INNER, QKV, VOCAB = 30, 576, 1536, 960, 49152
SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
ROWS = (1, 2, 4, 8, 16, 64)


def random_matrix(name: str, outputs: int, inputs: int) -> Matrix:
    if name in DENSE_DTYPES:
        return DenseMatrix(torch.randn(outputs, inputs), DENSE_DTYPES[name])
    if name == "int8":
        return Int8Matrix(torch.randn(outputs, inputs))
    groups = torch.rand(outputs, inputs // 32)
    return Int4Matrix(torch.randint(0, 16, (outputs, inputs)), groups, groups)


def step_ms(name: str, rows: int) -> float:
    matrices = [random_matrix(name, *shape) for _ in range(LAYERS) for shape in SHAPES]
    matrices.append(random_matrix("int8" if name == "int4" else name, VOCAB, HIDDEN))
    inputs = {size: torch.randn(rows, size) for size in (HIDDEN, INNER)}
    times = []
    for _ in range(8):
        began = time.perf_counter()
        for matrix in matrices:
            matrix(inputs[matrix.in_features])
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0)
    print(f"{prepare_torch(parser.parse_args().threads)} threads; rows: {', '.join(map(str, ROWS))}")
    with torch.inference_mode():
        for name in ("fp32", "fp16", "bf16", "int8", "int4"):
            print(f"{name:>5}: " + "  ".join(f"{step_ms(name, rows):7.1f}" for rows in ROWS), flush=True)


if __name__ == "__main__":
    main()
