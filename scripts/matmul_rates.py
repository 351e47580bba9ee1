"""Measures products per second of single matrices by rows, instruction set and threads.

python scripts/matmul_rates.py [--threads 2]
"""

from __future__ import annotations

import argparse
import time

import torch
from row_costs import RandomTensor

from slipstream.kernels.cpu.linear import NativeMatrix
from slipstream.kernels.cpu.native_library import Library, availability

MATRICES = (("Q4_1", 3072, 576, 30), ("Q4_1", 576, 1536, 30), ("Q8_0", 49152, 576, 1))
ROWS = (1, 4, 8, 16, 32, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    found = availability()
    print(found.reason)
    if found.library is None:
        raise SystemExit(1)
    handle = found.library.handle
    known = 1 + (found.library.isa == "avx512") + found.library.amx
    sets = [("avx2", False), ("avx512", False), ("avx512", True)][:known]
    for kind, outputs, inputs, copies in MATRICES:
        print(f"{kind} [{outputs} x {inputs}], {threads} threads; 10^9 products a second at {ROWS} rows")
        for isa, tiles in sets:
            handle.slip_use_amx(int(tiles))
            library = Library(handle, isa, tiles)
            matrices = [NativeMatrix(library, [RandomTensor(kind, outputs, inputs)]) for _ in range(copies)]
            rates = []
            for count in ROWS:
                rows, best = torch.randn(count, inputs), float("inf")
                for _ in range(6):
                    began = time.perf_counter()
                    for matrix in matrices:
                        matrix.multiply(rows, threads)
                    best = min(best, time.perf_counter() - began)
                rates.append(count * outputs * inputs * copies / best / 1e9)
            print(f"{'amx' if tiles else isa:>8} " + " ".join(f"{rate:7.0f}" for rate in rates))


if __name__ == "__main__":
    main()
