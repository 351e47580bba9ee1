"""The kernels between the matmuls under the interpreter agree with torch, and compute every row independently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gpu import elementwise as kernels

NAN = float("nan")
EPS = 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed * 1000 + sum(shape))).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """Asserts equality up to the last bf16 bit, which depends on the order of sums; NaN must be in the same places."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("parts", ["", "delta", "delta bias", "delta tap", "tap", "delta in parts"])
def test_add_norm(width: int, parts: str) -> None:
    rows = 3
    delta = random(rows, width, seed=1) if "delta" in parts else None
    if "in parts" in parts:
        delta = random(3, rows, width, seed=1, dtype=torch.float32).mul(4).round()  # sums that bf16 holds
    bias = random(width, seed=2, dtype=torch.float32) if "bias" in parts else None
    weight = random(width, seed=3, dtype=torch.float32)

    def run(add_norm: Callable[..., None]) -> tuple[Tensor, Tensor, Tensor]:
        residual, out, taps = random(rows, width, dtype=torch.float32), poisoned(rows, width), poisoned(rows, 3 * width)
        add_norm(residual, delta, weight, EPS, out, taps[:, width : 2 * width] if "tap" in parts else None, bias)
        return residual, out, taps

    for found, expected in zip(run(kernels.add_norm), run(kernels.add_norm_reference), strict=True):
        assert_alike(found, expected)


@pytest.mark.parametrize(("bias", "norm"), [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 32), (2, 2, 24)])
def test_rotary_write(heads: int, kv_heads: int, dim: int, bias: bool, norm: bool) -> None:
    rows, pages, page = 3, 3, 4
    width = (heads + 2 * kv_heads) * dim
    cos, sin = random(50, dim, seed=1, dtype=torch.float32), random(50, dim, seed=2, dtype=torch.float32)
    q_norm, k_norm = (random(dim, seed=seed, dtype=torch.float32) if norm else None for seed in (3, 4))
    positions, places = torch.tensor([7, 49, 0], dtype=torch.int32), torch.tensor([11, 4, 2], dtype=torch.int32)

    def run(rotary_write: Callable[..., None]) -> tuple[Tensor, ...]:
        out = poisoned(rows, heads, dim), poisoned(pages, kv_heads, page, dim), poisoned(pages, kv_heads, page, dim)
        own_bias = random(width, seed=5, dtype=torch.float32) if bias else None
        qkv = random(rows, width + 6)[:, :width]
        rotary_write(qkv, own_bias, q_norm, k_norm, EPS, cos, sin, positions, places, *out)
        return out

    for found, expected in zip(run(kernels.rotary_write), run(kernels.rotary_write_reference), strict=True):
        assert_alike(found, expected)


@pytest.mark.parametrize("stored", ["keys and values", "keys that are values", "nothing"])
def test_values_can_be_normed_or_be_the_keys_and_nothing_need_be_stored(stored: str) -> None:
    rows, heads, kv_heads, dim, pages, page = 3, 4, 2, 16, 3, 4
    width = (heads + {"keys and values": 2, "keys that are values": 1, "nothing": 0}[stored] * kv_heads) * dim
    cos, sin = random(50, dim, seed=1, dtype=torch.float32), random(50, dim, seed=2, dtype=torch.float32)
    q_norm, k_norm = random(dim, seed=3, dtype=torch.float32), random(dim, seed=4, dtype=torch.float32)
    bias = random(width, seed=5, dtype=torch.float32)
    positions, places = torch.tensor([7, 49, 0], dtype=torch.int32), torch.tensor([11, 4, 2], dtype=torch.int32)

    def run(rotary_write: Callable[..., None]) -> tuple[Tensor, ...]:
        out = poisoned(rows, heads, dim), poisoned(pages, kv_heads, page, dim), poisoned(pages, kv_heads, page, dim)
        own = k_norm if stored != "nothing" else None
        rotary_write(random(rows, width), bias, q_norm, own, EPS, cos, sin, positions, places, *out, True)
        return out

    found = run(kernels.rotary_write)
    for one, expected in zip(found, run(kernels.rotary_write_reference), strict=True):
        assert_alike(one, expected)
    assert bool(found[1].isnan().all()) == (stored == "nothing")
    if stored != "nothing":
        size = found[2].float()[~found[2].isnan()].view(-1, dim).pow(2).mean(-1)
        assert (size - 1.0).abs().max() < 0.02


@pytest.mark.parametrize(("bias", "norm"), [(False, True), (True, False)])
def test_context_write(bias: bool, norm: bool) -> None:
    rows, layers, pages, kv_heads, page, dim = 2, 3, 2, 2, 4, 16
    width = layers * 2 * kv_heads * dim
    cos, sin = random(9, dim, seed=1, dtype=torch.float32), random(9, dim, seed=2, dtype=torch.float32)
    norms = random(layers, dim, seed=3, dtype=torch.float32) if norm else None
    positions, places = torch.tensor([8, 3], dtype=torch.int32), torch.tensor([5, 0], dtype=torch.int32)

    def run(context_write: Callable[..., None]) -> tuple[Tensor, Tensor]:
        pools = poisoned(layers, pages, kv_heads, page, dim), poisoned(layers, pages, kv_heads, page, dim)
        own_bias = random(width, seed=5) if bias else None
        context_write(random(rows, width), own_bias, norms, EPS, cos, sin, positions, places, *pools)
        return pools

    for found, expected in zip(run(kernels.context_write), run(kernels.context_write_reference), strict=True):
        assert_alike(found, expected)


@pytest.mark.parametrize("inner", [96, 1500])
@pytest.mark.parametrize("with_bias", [False, True])
def test_silu_mul(inner: int, with_bias: bool) -> None:
    gate_up, out, expected = random(3, 2 * inner), poisoned(3, inner), poisoned(3, inner)
    bias = random(2 * inner, seed=1, dtype=torch.float32) if with_bias else None
    kernels.silu_mul(gate_up, bias, out)
    kernels.silu_mul_reference(gate_up, bias, expected)
    assert_alike(out, expected)


def test_neighbours_change_no_bit() -> None:
    weight = random(100, seed=3, dtype=torch.float32)
    alone, among = poisoned(1, 100), poisoned(4, 100)
    residual, delta = random(4, 100, dtype=torch.float32), random(4, 100, seed=1)
    kernels.add_norm(residual[2:3].clone(), delta[2:3], weight, EPS, alone)
    kernels.add_norm(residual, delta, weight, EPS, among)
    assert torch.equal(alone[0], among[2])
