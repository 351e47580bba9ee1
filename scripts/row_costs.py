"""Measures a step of 1 to 64 rows on this machine's native kernels, with random weights shaped like SmolLM2-135M.

    python scripts/row_costs.py [--threads 2] [--context 200]

Prints milliseconds per instruction set, the floors beside them, and whether all sets give the same bits.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from slipstream.kernels.cpu.linear import NativeMatrix
from slipstream.kernels.cpu.native_library import Library, availability, set_threads
from slipstream.kernels.rows import AttentionPattern, RowBatch, make_group
from slipstream.models.cpu.native_pass import NativeStack
from slipstream.models.layers import Attention, Layer, LayerShape, Mlp, Sublayer
from slipstream.models.rope import RopeConfig

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
PAGE = 64
ROWS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 15


class RandomTensor:
    """A tensor of random codes with plausible scales, in the bytes of a file."""

    def __init__(self, type_name: str, outputs: int, inputs: int) -> None:
        self.type_name, self.shape = type_name, (outputs, inputs)
        size, header = {"Q4_1": (20, 4), "Q8_0": (34, 2)}[type_name]
        blocks = np.random.default_rng(inputs).integers(0, 256, (outputs, inputs // 32, size), dtype=np.uint8)
        blocks[:, :, :header] = np.full(header // 2, 0.01, np.float16).view(np.uint8)
        self._bytes = blocks.reshape(outputs, -1)

    def raw(self) -> np.ndarray:
        return self._bytes

    def dense(self) -> torch.Tensor:
        raise NotImplementedError("random codes exist only as the bytes of a file")


class Model:
    def __init__(self, library: Library) -> None:
        def linear(*outputs: int, inputs: int = HIDDEN, kind: str = "Q4_1") -> NativeMatrix:
            return NativeMatrix(library, [RandomTensor(kind, count, inputs) for count in outputs])

        norm, rope = torch.full((HIDDEN,), 0.05), RopeConfig(1e4, DIM)

        def layer() -> Layer:
            attention = Attention(
                heads=HEADS,
                kv_heads=KV_HEADS,
                head_dim=DIM,
                rope=rope,
                pattern=AttentionPattern(),
                pool=0,
                scale=DIM**-0.5,
                qkv=linear(HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM),
                qkv_bias=None,
                output=linear(HIDDEN, inputs=HEADS * DIM),
                output_bias=None,
                q_norm=None,
                k_norm=None,
            )
            mlp = Mlp(linear(INNER, INNER), linear(HIDDEN, inputs=INNER))
            return Layer([Sublayer(attention, norm), Sublayer(mlp, norm)])

        layers = [layer() for _ in range(LAYERS)]
        shape = LayerShape(
            hidden_size=HIDDEN,
            layers=LAYERS,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            intermediate_size=INNER,
            vocab_size=VOCAB,
            rms_eps=1e-5,
            rope=rope,
        )
        self.stack = NativeStack(library, shape, layers, norm)
        self.head = linear(VOCAB, kind="Q8_0")
        self.bytes = self.head.nbytes + sum(matrix.nbytes for each in layers for matrix in each.matrices)
        pool = (16, KV_HEADS, PAGE, DIM)
        tensors = [torch.randn(pool, generator=torch.Generator().manual_seed(i)) for i in range(2 * LAYERS)]
        self._pools = list(zip(tensors[::2], tensors[1::2], strict=True))
        angles = torch.rand(1024, DIM, generator=torch.Generator().manual_seed(7))
        self._rotary = angles.cos(), angles.sin()

    def step(self, rows: int, context: int) -> torch.Tensor | None:
        span = range(context, context + rows)
        group = make_group(0, span, range(16), PAGE, AttentionPattern())
        places = [divmod(position, PAGE) for position in span]
        batch = RowBatch(
            [0] * rows,
            span,
            [p for p, _ in places],
            [o for _, o in places],
            context + rows,
            {AttentionPattern(): [group]},
        )
        x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(3))
        return self.stack.run(x, batch, self._pools, self._rotary, self.head, range(rows), ())[2]


def bandwidth(threads: int) -> float:
    """Bytes per second at which torch reads a buffer as large as the weights."""
    torch.set_num_threads(threads)
    data = torch.ones(24 * 1024 * 1024)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - began)
    return data.nbytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=200)
    asked = parser.parse_args()
    set_threads(asked.threads)
    found = availability()
    print(found.reason)
    if found.library is None:
        raise SystemExit(1)
    handle = found.library.handle
    sets = [("avx2", False)]
    if found.library.isa == "avx512":
        sets += [("avx512", tiles) for tiles in (False, True)[: 1 + found.library.amx]]
    results: list[torch.Tensor] = []
    print(f"threads {asked.threads}, context {asked.context}; milliseconds")
    print(f"{'rows':>10} " + " ".join(f"{rows:>7}" for rows in ROWS) + "   16 rows in rows")
    model = None
    for isa, tiles in sets:
        handle.slip_use_amx(int(tiles))
        model = Model(Library(handle, isa, tiles))
        costs = []
        for rows in ROWS:
            times = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                done = model.step(rows, asked.context)
                times.append(time.perf_counter() - began)
            costs.append(sorted(times)[ROUNDS // 4] * 1e3)
            if rows == ROWS[-1] and done is not None:
                results.append(done)
        name = "amx" if tiles else isa
        print(f"{name:>10} " + " ".join(f"{ms:7.2f}" for ms in costs) + f"   {costs[4] / costs[0]:.2f}")
    assert model is not None
    print(f"same bits: {all(torch.equal(each, results[0]) for each in results)}")
    speed = bandwidth(asked.threads)
    print(f"floor: {model.bytes / 1e6:.1f} MB at {speed / 1e9:.1f} GB/s = {model.bytes / speed * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
