"""The steps between the matmuls of a layer: residual and norm, rotation and key/value writes, and the MLP's gate.

Every kernel has a launcher and a counterpart in torch with the same signature (`..._reference`). Sums within a row run
in an order that depends on the row's width only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.cpu.torch_kernels import rms_norm, rotate, write_rows
from slipstream.kernels.gpu.matrices import EARLY

_GATE_BLOCK = 1024  # numbers of a row that a program gates
_MOST_TOGETHER = 4  # heads per program: with one head each, starting the programs takes longer than their work


@triton.jit
def store_normed(  # type: ignore[no-untyped-def]
    x, row, column, inside, weight, out, tap, tap_stride, eps, WIDTH: tl.constexpr, HAS_TAP: tl.constexpr
):
    """Stores the normed stream for the next part, and the stream itself if it is tapped."""
    if HAS_TAP:
        tl.store(tap + row * tap_stride + column, x.to(tl.bfloat16), mask=inside)
    mean = tl.sum(x * x, 0) / WIDTH
    tl.store(out + row * WIDTH + column, (x * tl.rsqrt(mean + eps) * weight).to(tl.bfloat16), mask=inside)


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    residual, delta, bias, weight, out, tap, tap_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAP: tl.constexpr, EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()  # the weights were loaded before the wait, since no earlier kernel writes them
        gdc_launch_dependents()
    x = tl.load(residual + row * WIDTH + column, mask=inside, other=0.0)
    if PARTS > 0:
        change = tl.load(delta + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            other = part * tl.num_programs(0) + row
            change += tl.load(delta + other * WIDTH + column, mask=inside, other=0.0)
        if PARTS > 1:
            change = change.to(tl.bfloat16).to(tl.float32)  # rounds as if the product had been summed where it was made
        if HAS_BIAS:
            change += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        x += change
        tl.store(residual + row * WIDTH + column, x, mask=inside)
    store_normed(x, row, column, inside, scale, out, tap, tap_stride, eps, WIDTH, HAS_TAP)


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, tap: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Computes residual += delta (+ bias) and out = rms_norm(residual) * weight; the new residual also goes to `tap`.

    residual is fp32 [rows, width], delta and out are bf16, weight is fp32; tap is a bf16 view whose rows need not be
    contiguous. delta may also be a product in parts, fp32 [parts, rows, width].
    """
    rows, width = residual.shape
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        residual, or_any(delta, out), or_any(bias, weight), weight, out, or_any(tap, out),
        0 if tap is None else tap.stride(0), eps, WIDTH=width, BLOCK=block, PARTS=_parts(delta),
        HAS_BIAS=bias is not None, HAS_TAP=tap is not None, EARLY=EARLY, num_warps=warps_for(block), launch_pdl=EARLY,
    )


def add_norm_reference(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, tap: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    if delta is not None:
        residual += bias_added(delta if delta.dim() == 2 else delta.sum(0).to(torch.bfloat16), bias)
    if tap is not None:
        tap.copy_(residual)
    out.copy_(rms_norm(residual, weight.to(residual.dtype), eps))


def _parts(delta: Tensor | None) -> int:
    return 0 if delta is None else 1 if delta.dim() == 2 else delta.shape[0]


@triton.jit
def _heads(  # type: ignore[no-untyped-def]
    vectors, biases, norm, eps, cos, sin, position, DIM: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, VALUE_NORM: tl.constexpr = False,
):
    """Loads the vectors of some heads with their biases. Queries and keys (ROTATED) are normed and rotated.

    The norm of values has no weights.
    """
    d = tl.arange(0, BLOCK)
    inside = (d < DIM)[None, :]
    x = tl.load(vectors[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(biases[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        # the other half is loaded a second time, which is cheaper than exchanging it between threads
        other = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
        y = tl.load(vectors[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(biases[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            shrink = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            x = x * shrink * tl.load(norm + d, mask=d < DIM, other=0.0)[None, :]
            y = y * shrink * tl.load(norm + other, mask=d < DIM, other=0.0)[None, :]
        at = position.to(tl.int64) * DIM + d
        x = x * tl.load(cos + at, mask=d < DIM, other=0.0)[None, :]
        x += y * tl.load(sin + at, mask=d < DIM, other=0.0)[None, :]
    elif VALUE_NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    return x.to(tl.bfloat16)


@triton.jit
def _places(place, heads, HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the addresses of heads' vectors in a pool [pages, heads, page tokens, dim]."""
    vector = ((place // PAGE).to(tl.int64) * HEADS + heads) * PAGE + place % PAGE
    return vector[:, None] * DIM + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _rotary_write_kernel(  # type: ignore[no-untyped-def]
    qkv, bias, q_norm, k_norm, eps, cos, sin, positions, places, queries, keys, values,
    ROW: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr, EARLY: tl.constexpr,
):
    """Each program handles a few heads of one row, which are all queries, all keys or all values."""
    first, row = tl.program_id(0) * TOGETHER, tl.program_id(1)
    heads, inside = first + tl.arange(0, TOGETHER), (tl.arange(0, BLOCK) < DIM)[None, :]
    # if qkv contains no values, the keys before norm and rotation are the values
    parts = tl.where(first < PARTS, heads, heads - KV_HEADS)
    vectors, biases = qkv + row.to(tl.int64) * ROW + parts * DIM, bias + parts * DIM
    position, place = tl.load(positions + row), tl.load(places + row)
    if EARLY:
        gdc_wait()  # the kernel that may still run writes none of what was loaded above
        gdc_launch_dependents()
    if first < HEADS:
        x = _heads(vectors, biases, q_norm, eps, cos, sin, position, DIM, BLOCK, True, HAS_BIAS, HAS_NORM)
        at = (row * HEADS + heads)[:, None] * DIM + tl.arange(0, BLOCK)[None, :]
        tl.store(queries + at, x, mask=inside)
    elif first < HEADS + KV_HEADS:
        x = _heads(vectors, biases, k_norm, eps, cos, sin, position, DIM, BLOCK, True, HAS_BIAS, HAS_NORM)
        tl.store(keys + _places(place, heads - HEADS, KV_HEADS, PAGE, DIM, BLOCK), x, mask=inside)
    else:
        x = _heads(vectors, biases, k_norm, eps, cos, sin, position, DIM, BLOCK, False, HAS_BIAS, HAS_NORM, VALUE_NORM)
        tl.store(values + _places(place, heads - HEADS - KV_HEADS, KV_HEADS, PAGE, DIM, BLOCK), x, mask=inside)


def rotary_write(
    qkv: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor,
    signed_sin: Tensor, positions: Tensor, places: Tensor, queries: Tensor, keys: Tensor, values: Tensor,
    norm_values: bool = False,
) -> None:
    """Norms and rotates the heads of qkv bf16 [rows, (heads + 2 kv heads) * dim]; stores keys and values at their
    places.

    queries are bf16 [rows, heads, dim]; keys and values are one layer's pools [pages, kv heads, page tokens, dim].
    Either both norms are given or none. If qkv has no values, the keys before their norm are the values; if it has
    queries only, nothing is stored. `norm_values` norms the values too, without weights. Rows of qkv need not be
    contiguous.
    """
    rows, heads, dim = queries.shape
    kv_heads, page, parts = keys.shape[1], keys.shape[2], qkv.shape[1] // dim
    stored = 2 * kv_heads if parts > heads else 0
    together = _together(heads, kv_heads)
    _rotary_write_kernel[((heads + stored) // together, rows)](
        qkv, or_any(bias, cos), or_any(q_norm, cos), or_any(k_norm, cos), eps, cos, signed_sin, positions, places,
        queries, keys, values, ROW=qkv.stride(0), HEADS=heads, KV_HEADS=kv_heads, PARTS=parts, TOGETHER=together,
        DIM=dim, BLOCK=triton.next_power_of_2(dim), PAGE=page, HAS_BIAS=bias is not None, HAS_NORM=q_norm is not None,
        VALUE_NORM=norm_values, EARLY=EARLY, num_warps=1, launch_pdl=EARLY,
    )


def rotary_write_reference(
    qkv: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor,
    signed_sin: Tensor, positions: Tensor, places: Tensor, queries: Tensor, keys: Tensor, values: Tensor,
    norm_values: bool = False,
) -> None:
    rows, heads, dim = queries.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    parts = bias_added(qkv, bias).reshape(rows, -1, dim)
    turn = cos[positions][:, None], signed_sin[positions][:, None]
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, -kv_heads:]
    queries.copy_(rotate(rms_norm(q, q_norm, eps) if q_norm is not None else q, *turn))
    if parts.shape[1] == heads:
        return
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if norm_values:
        v = rms_norm(v, torch.ones_like(cos[0]), eps)
    write_rows(keys, places // page, places % page, rotate(k, *turn).to(keys.dtype))
    write_rows(values, places // page, places % page, v.to(values.dtype))


@triton.jit
def _context_write_kernel(  # type: ignore[no-untyped-def]
    projected, bias, k_norms, eps, cos, sin, positions, places, keys, values, layer_stride,
    KV_HEADS: tl.constexpr, TOGETHER: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):
    first, row = tl.program_id(0) * TOGETHER, tl.program_id(1)
    parts, inside = first + tl.arange(0, TOGETHER), (tl.arange(0, BLOCK) < DIM)[None, :]
    layer = first // (2 * KV_HEADS)
    vectors = projected + (row * (tl.num_programs(0) * TOGETHER) + parts).to(tl.int64) * DIM
    biases = bias + parts * DIM
    position, place = tl.load(positions + row), tl.load(places + row)
    at = layer.to(tl.int64) * layer_stride + _places(place, parts % KV_HEADS, KV_HEADS, PAGE, DIM, BLOCK)
    if first % (2 * KV_HEADS) < KV_HEADS:
        norm = k_norms + layer * DIM
        x = _heads(vectors, biases, norm, eps, cos, sin, position, DIM, BLOCK, True, HAS_BIAS, HAS_NORM)
        tl.store(keys + at, x, mask=inside)
    else:
        x = _heads(vectors, biases, k_norms, eps, cos, sin, position, DIM, BLOCK, False, HAS_BIAS, HAS_NORM)
        tl.store(values + at, x, mask=inside)


def context_write(
    projected: Tensor, bias: Tensor | None, k_norms: Tensor | None, eps: float, cos: Tensor, signed_sin: Tensor,
    positions: Tensor, places: Tensor, keys: Tensor, values: Tensor,
) -> None:
    """Stores the draft context of all layers.

    projected is bf16 [rows, layers * 2 * kv heads * dim], k_norms are fp32 [layers, dim]; keys and values are the draft
    pools [layers, pages, kv heads, page tokens, dim].
    """
    layers, _, kv_heads, page, dim = keys.shape
    together = _together(kv_heads)
    _context_write_kernel[(layers * 2 * kv_heads // together, projected.shape[0])](
        projected, or_any(bias, cos), or_any(k_norms, cos), eps, cos, signed_sin, positions, places, keys, values,
        keys.stride(0), KV_HEADS=kv_heads, TOGETHER=together, DIM=dim, BLOCK=triton.next_power_of_2(dim), PAGE=page,
        HAS_BIAS=bias is not None, HAS_NORM=k_norms is not None, num_warps=1,
    )


def context_write_reference(
    projected: Tensor, bias: Tensor | None, k_norms: Tensor | None, eps: float, cos: Tensor, signed_sin: Tensor,
    positions: Tensor, places: Tensor, keys: Tensor, values: Tensor,
) -> None:
    layers, _, kv_heads, page, dim = keys.shape
    parts = bias_added(projected, bias).view(-1, layers, 2, kv_heads, dim)
    turn = cos[positions][:, None], signed_sin[positions][:, None]
    for layer in range(layers):
        k, v = parts[:, layer].unbind(1)
        if k_norms is not None:
            k = rms_norm(k, k_norms[layer], eps)
        write_rows(keys[layer], places // page, places % page, rotate(k, *turn).to(keys.dtype))
        write_rows(values[layer], places // page, places % page, v.to(values.dtype))


@triton.jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up, bias, out, INNER: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(gate_up + row * 2 * INNER + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + INNER + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + column, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=inside)


def silu_mul(gate_up: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Computes out = silu(gate) * up for gate_up bf16 [rows, 2 * inner] (gates first), out bf16 [rows, inner]."""
    rows, inner = out.shape
    _silu_mul_kernel[(triton.cdiv(inner, _GATE_BLOCK), rows)](
        gate_up, or_any(bias, gate_up), out, INNER=inner, BLOCK=_GATE_BLOCK, HAS_BIAS=bias is not None, EARLY=EARLY,
        num_warps=4, launch_pdl=EARLY,
    )


def silu_mul_reference(gate_up: Tensor, bias: Tensor | None, out: Tensor) -> None:
    gate, up = bias_added(gate_up, bias).chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def _together(*heads: int) -> int:
    """Returns how many heads a program handles: a power of two that divides all numbers of heads."""
    common = math.gcd(*heads)
    return min(common & -common, _MOST_TOGETHER)


def bias_added(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.float() if bias is None else x.float() + bias.float()


def or_any(tensor: Tensor | None, stand_in: Tensor) -> Any:
    """Returns a stand-in for a missing tensor, because a kernel argument that is never read still needs an address."""
    return stand_in if tensor is None else tensor


def warps_for(block: int) -> int:
    return 8 if block >= 2048 else 4
