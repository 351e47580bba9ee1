"""The kernels that only some families and drafters use, under the interpreter: right against torch, row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gpu import layer_extras as kernels
from slipstream.kernels.gpu.layer_extras import Gating
from tests.kernels.test_elementwise import EPS, assert_alike, poisoned, random

FP32 = torch.float32


@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("parts", ["", "bias tap", "beside", "beside bias", "beside three outs", "no norm"])
def test_join_norm(width: int, parts: str) -> None:
    rows, outs = 3, 3 if "three outs" in parts else 1
    delta, beside = random(rows, width, seed=1), random(rows, width, seed=2) if "beside" in parts else None
    bias = random(width, seed=3, dtype=FP32) if "bias" in parts else None
    beside_norms = random(2, width, seed=4, dtype=FP32) if "beside" in parts else None
    weights = None if "no norm" in parts else random(outs, width, seed=5, dtype=FP32)
    norm = random(width, seed=6, dtype=FP32)

    def run(join_norm: Callable[..., None]) -> tuple[Tensor, Tensor, Tensor]:
        residual, taps = random(rows, width, dtype=FP32), poisoned(rows, 2 * width)
        out = poisoned(outs, rows, width)
        tap = taps[:, width:] if "tap" in parts else None
        lines = weights[0] if weights is not None and outs == 1 else weights
        place = out if outs > 1 else out[0]
        join_norm(residual, delta, bias, norm, beside, beside_norms, 0.75, lines, EPS, place, tap)
        return residual, out, taps

    for found, expected in zip(run(kernels.join_norm), run(kernels.join_norm_reference), strict=True):
        assert_alike(found, expected)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
def test_norm_parts_of_rows_that_lie_apart(dtype: torch.dtype) -> None:
    rows, parts, width = 3, 4, 50
    weights = random(parts, width, seed=1, dtype=FP32)
    x = random(rows, parts + 1, width, seed=2, dtype=dtype)[:, 1:]
    for source in (x, x[:, :1].expand(-1, parts, -1)):
        found, expected = poisoned(parts, rows, width), poisoned(parts, rows, width)
        kernels.norm_parts(source, weights, EPS, found.transpose(0, 1))
        kernels.norm_parts_reference(source, weights, EPS, expected.transpose(0, 1))
        assert_alike(found, expected)


@pytest.mark.parametrize("kind", ["sigmoid", "softplus", "gelu"])
@pytest.mark.parametrize(("width", "gates", "with_bias"), [(96, 96, False), (1100, 11, True)])
def test_gate_mul(kind: Gating, width: int, gates: int, with_bias: bool) -> None:
    rows = 3
    both = random(rows, width + gates, seed=1)
    both[0, :9] = torch.tensor(
        [-90.0, -20.0, -7.0, -1e-3, 0.0, 1e-3, 7.0, 20.0, 90.0]
    )  # gates at which the functions saturate
    gate, values = both[:, :gates], both[:, gates:]
    bias = random(gates, seed=2, dtype=FP32) if with_bias else None
    out, expected = poisoned(rows, width), poisoned(rows, width)
    kernels.gate_mul(values, gate, bias, out, kind)
    kernels.gate_mul_reference(values, gate, bias, expected, kind)
    assert_alike(out, expected)


@pytest.mark.parametrize(("taps", "groups", "each"), [(3, 8, 4), (1, 1, 4), (5, 48, 2)])
@pytest.mark.parametrize("leaving", [False, True])
def test_convolutions_stay_within_their_block(taps: int, groups: int, each: int, leaving: bool) -> None:
    rows, width = 8, 48
    x, dynamic = random(rows, width, seed=1), random(rows, 2 * taps * groups, seed=2)
    base = random(2, taps, width, seed=3, dtype=FP32)
    bias = random(width, seed=4, dtype=FP32) if leaving else None
    out, expected = poisoned(rows, width), poisoned(rows, width)
    kernels.convolve(x, bias, dynamic, base, leaving, each, out)
    kernels.convolve_reference(x, bias, dynamic, base, leaving, each, expected)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2**-6, atol=2e-2)
    changed = poisoned(rows, width)
    kernels.convolve(x.index_fill(0, torch.arange(each), 9.0), bias, dynamic, base, leaving, each, changed)
    assert torch.equal(changed[each:], out[each:]) and not torch.equal(changed[:each], out[:each])


@pytest.mark.parametrize(("multiplier", "cap"), [(1.0, 30.0), (0.7, 0.0), (0.7, 3.0)])
def test_bend(multiplier: float, cap: float) -> None:
    logits = 40 * random(2, 5000, dtype=FP32)
    logits[0, :4] = torch.tensor([1e4, -1e4, 0.0, 1e-3])
    found, expected = logits.clone(), logits.clone()
    kernels.bend(found, multiplier, cap)
    kernels.bend_reference(expected, multiplier, cap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
