"""Steps between the matmuls that only some families and drafters have: normed deltas, gates, norms of several parts,
convolutions within a draft block, and bent logits.

Every kernel has a launcher and a counterpart in torch with the same signature (`..._reference`). A row's result does
not depend on other rows.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cpu.torch_kernels import rms_norm, softcapped
from slipstream.kernels.gpu.elementwise import bias_added, or_any, warps_for

Gating = Literal["sigmoid", "softplus", "gelu"]
_SIGMOID, _SOFTPLUS, _GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_GATINGS: dict[Gating, int] = {"sigmoid": 0, "softplus": 1, "gelu": 2}
_BLOCK = 1024  # numbers of a row per program
_LOGIT_BLOCK = 4096  # logits of a row per program


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


@triton.jit
def _join_norm_kernel(  # type: ignore[no-untyped-def]
    residual, delta, bias, norm, beside, beside_norms, scale, weights, out, out_stride, tap, tap_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OUTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BESIDE: tl.constexpr,
    HAS_TAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    change = tl.load(delta + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        change += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BESIDE:
        other = tl.load(beside + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        change = _normed(change, tl.load(beside_norms + column, mask=inside, other=0.0), eps, WIDTH)
        change += _normed(other, tl.load(beside_norms + WIDTH + column, mask=inside, other=0.0), eps, WIDTH)
    change = _normed(change, tl.load(norm + column, mask=inside, other=0.0), eps, WIDTH)
    x = (tl.load(residual + row * WIDTH + column, mask=inside, other=0.0) + change) * scale
    tl.store(residual + row * WIDTH + column, x, mask=inside)
    if HAS_TAP:
        tl.store(tap + row * tap_stride + column, x.to(tl.bfloat16), mask=inside)
    if OUTS == 0:
        tl.store(out + row * WIDTH + column, x.to(tl.bfloat16), mask=inside)
    else:
        shrunk = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        for each in tl.static_range(OUTS):
            weight = tl.load(weights + each * WIDTH + column, mask=inside, other=0.0)
            place = out + each * out_stride + row * WIDTH + column
            tl.store(place, (shrunk * weight).to(tl.bfloat16), mask=inside)


def join_norm(
    residual: Tensor, delta: Tensor, bias: Tensor | None, norm: Tensor, beside: Tensor | None,
    beside_norms: Tensor | None, scale: float, weights: Tensor | None, eps: float, out: Tensor,
    tap: Tensor | None = None,
) -> None:
    """Computes residual = (residual + rms_norm(delta + bias) * norm) * scale and out = rms_norm(residual) * weights.

    residual is fp32 [rows, width]; delta, beside and out are bf16, norms are fp32. If there is a second delta `beside`,
    both are first normed with their line of `beside_norms` [2, width] and added. Several lines of `weights`
    [outs, width] give several outs [outs, rows, width]; without weights, out is the residual itself. The new residual
    also goes to `tap`.
    """
    rows, width = residual.shape
    block = triton.next_power_of_2(width)
    outs = 0 if weights is None else weights.numel() // width
    _join_norm_kernel[(rows,)](
        residual, delta, or_any(bias, norm), norm, or_any(beside, delta), or_any(beside_norms, norm), scale,
        or_any(weights, norm), out, out.stride(0), or_any(tap, out), 0 if tap is None else tap.stride(0), eps,
        WIDTH=width, BLOCK=block, OUTS=outs, HAS_BIAS=bias is not None, HAS_BESIDE=beside is not None,
        HAS_TAP=tap is not None, num_warps=warps_for(block),
    )


def join_norm_reference(
    residual: Tensor, delta: Tensor, bias: Tensor | None, norm: Tensor, beside: Tensor | None,
    beside_norms: Tensor | None, scale: float, weights: Tensor | None, eps: float, out: Tensor,
    tap: Tensor | None = None,
) -> None:
    change = bias_added(delta, bias)
    if beside is not None and beside_norms is not None:
        change = rms_norm(change, beside_norms[0], eps) + rms_norm(beside.float(), beside_norms[1], eps)
    residual += rms_norm(change, norm, eps)
    residual *= scale
    if tap is not None:
        tap.copy_(residual)
    if weights is None:
        out.copy_(residual)
        return
    for place, weight in zip(out.view(-1, *residual.shape), weights.view(-1, residual.shape[1]), strict=True):
        place.copy_(rms_norm(residual, weight, eps))


@triton.jit
def _norm_parts_kernel(  # type: ignore[no-untyped-def]
    x, x_row, x_part, weights, out, out_row, out_part, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    numbers = tl.load(x + row * x_row + part * x_part + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + part * WIDTH + column, mask=inside, other=0.0)
    normed = _normed(numbers, weight, eps, WIDTH).to(tl.bfloat16)
    tl.store(out + row * out_row + part * out_part + column, normed, mask=inside)


def norm_parts(x: Tensor, weights: Tensor, eps: float, out: Tensor) -> None:
    """Computes out = rms_norm of every part of x [rows, parts, width], each with its line of `weights` fp32 [parts,
    width].

    x is fp32 or bf16, out is bf16 of the same shape; rows and parts of both may have any stride.
    """
    rows, parts, width = x.shape
    block = triton.next_power_of_2(width)
    _norm_parts_kernel[(parts, rows)](
        x, x.stride(0), x.stride(1), weights, out, out.stride(0), out.stride(1), eps, WIDTH=width, BLOCK=block,
        num_warps=warps_for(block),
    )


def norm_parts_reference(x: Tensor, weights: Tensor, eps: float, out: Tensor) -> None:
    out.copy_(rms_norm(x.float(), torch.ones_like(weights[0]), eps) * weights)


@triton.jit
def _gate_mul_kernel(  # type: ignore[no-untyped-def]
    values, value_row, gate, gate_row, bias, out, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(values + row * value_row + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_row + column // GROUP, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + column // GROUP, mask=inside, other=0.0).to(tl.float32)
    if KIND == _SIGMOID:
        weight = tl.sigmoid(x)
    elif KIND == _SOFTPLUS:
        small = tl.exp(-tl.abs(x))  # below 1e-4 the sum with 1 would lose its digits
        weight = tl.maximum(x, 0.0) + tl.where(small < 1e-4, small, tl.log(1.0 + small))
    else:
        # 0.5 * (1 + tanh(u)) is the sigmoid of 2 u
        weight = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tl.store(out + row * WIDTH + column, (value * weight).to(tl.bfloat16), mask=inside)


def gate_mul(values: Tensor, gate: Tensor, bias: Tensor | None, out: Tensor, kind: Gating) -> None:
    """Computes out = values * f(gate + bias); f is a sigmoid, a softplus or the GELU with a tanh.

    values [rows, width] and gate [rows, gates] are bf16 or fp32 with any row stride; each gate weighs the next
    width / gates values. out is bf16 [rows, width].
    """
    rows, width = values.shape
    _gate_mul_kernel[(triton.cdiv(width, _BLOCK), rows)](
        values, values.stride(0), gate, gate.stride(0), or_any(bias, gate), out, WIDTH=width,
        GROUP=width // gate.shape[1], BLOCK=_BLOCK, KIND=_GATINGS[kind], HAS_BIAS=bias is not None, num_warps=4,
    )


def gate_mul_reference(values: Tensor, gate: Tensor, bias: Tensor | None, out: Tensor, kind: Gating) -> None:
    x = bias_added(gate, bias)
    weight = F.gelu(x, approximate="tanh") if kind == "gelu" else F.softplus(x) if kind == "softplus" else x.sigmoid()
    out.copy_((values.float().reshape(*gate.shape, -1) * weight[..., None]).view(values.shape))


@triton.jit
def _convolve_kernel(  # type: ignore[no-untyped-def]
    x, bias, dynamic, base, out, each, WIDTH: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr,
    SIDE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row.to(tl.int64) * WIDTH + column
    kernels = dynamic + (row * 2 + SIDE) * (TAPS * (WIDTH // GROUP)) + column // GROUP
    total = tl.zeros([BLOCK], tl.float32)
    before = tl.where(inside, row % each, -1)  # blocks are neighbours in memory, and no tap may cross a block's start
    for back in tl.static_range(TAPS):
        there = before >= back
        weight = tl.load(base + (SIDE * TAPS + back) * WIDTH + column, mask=there, other=0.0)
        weight += tl.load(kernels + back * (WIDTH // GROUP), mask=there, other=0.0).to(tl.float32)
        number = tl.load(x + at - back * WIDTH, mask=there, other=0.0).to(tl.float32)
        if HAS_BIAS:
            number += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
        total += weight * number
    tl.store(out + at, total.to(tl.bfloat16), mask=inside)


def convolve(
    x: Tensor, bias: Tensor | None, dynamic: Tensor, base: Tensor, leaving: bool, each: int, out: Tensor
) -> None:
    """Convolves x + bias, bf16 [rows, width], causally within blocks of `each` rows; each row has its own kernel.

    A kernel is the sum of its part of base fp32 [2, taps, width] and of dynamic bf16 [rows, 2 * taps * groups], which
    the channels of a group share. The second half of both is for rows `leaving` a sublayer. out bf16 must not be x.
    """
    rows, width = x.shape
    taps = base.shape[1]
    groups = dynamic.shape[1] // (2 * taps)
    _convolve_kernel[(triton.cdiv(width, _BLOCK), rows)](
        x, or_any(bias, x), dynamic, base, out, each, WIDTH=width, GROUP=width // groups, TAPS=taps, SIDE=int(leaving),
        BLOCK=_BLOCK, HAS_BIAS=bias is not None, num_warps=4,
    )


def convolve_reference(
    x: Tensor, bias: Tensor | None, dynamic: Tensor, base: Tensor, leaving: bool, each: int, out: Tensor
) -> None:
    rows, width = x.shape
    taps = base.shape[1]
    shared = dynamic.float().view(rows, 2, taps, -1)[:, int(leaving)]
    kernels = base[int(leaving)] + shared.repeat_interleave(width // shared.shape[-1], dim=-1)
    numbers = bias_added(x, bias)
    within = torch.arange(rows, device=x.device)[:, None] % each
    total = kernels[:, 0] * numbers
    for back in range(1, taps):
        before = torch.where(within >= back, numbers.roll(back, 0), torch.zeros_like(numbers))
        total = total + kernels[:, back] * before
    out.copy_(total)


@triton.jit
def _bend_kernel(logits, width, multiplier, cap, BLOCK: tl.constexpr, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(logits + row * width + column, mask=inside, other=0.0) * multiplier
    if CAPPED:
        x = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
    tl.store(logits + row * width + column, x, mask=inside)


def bend(logits: Tensor, multiplier: float, cap: float) -> None:
    """Multiplies fp32 logits [rows, vocabulary] in place and bends them into plus or minus `cap`; 0 means no cap."""
    rows, width = logits.shape
    _bend_kernel[(triton.cdiv(width, _LOGIT_BLOCK), rows)](
        logits, width, multiplier, cap, BLOCK=_LOGIT_BLOCK, CAPPED=cap > 0, num_warps=8
    )


def bend_reference(logits: Tensor, multiplier: float, cap: float) -> None:
    logits.copy_(softcapped(logits * multiplier, cap))
