"""Computes every part of a layer on a CPU, in torch calls around the matrices' own kernels.

A row's numbers must depend on that row alone, because speculative text has to equal plain text. The kernels of matrices
and attention are made for that; activations of narrow tensors go through `row_by_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cpu.expert_products import mix_experts
from slipstream.kernels.cpu.native_attention import attention
from slipstream.kernels.cpu.torch_kernels import rms_norm, rotate, row_by_row, softcapped, write_rows
from slipstream.kernels.rows import RowBatch
from slipstream.models.cpu.native_pass import KvLayers
from slipstream.models.delta_net import DeltaNet
from slipstream.models.layers import (
    Attention,
    BlockConvolution,
    HeadGate,
    Layer,
    LayerPart,
    Mlp,
    SideEmbeddings,
    SideInput,
    Sublayer,
)
from slipstream.models.moe import ExpertBlock, MlpBesideExperts, RoutedExperts
from slipstream.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class CpuPass:
    """What the parts of a stack need to know of the rows on their way through it."""

    batch: RowBatch
    rotary: Mapping[RopeConfig, tuple[Tensor, Tensor]]
    kv: KvLayers
    eps: float  # of all norms of the model
    sides: Tensor | None = None  # embeddings of the layers' own: [rows, layers, size]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}


def run_layer(layer: Layer, x: Tensor, step: CpuPass) -> Tensor:
    """Runs rows [n, hidden] through a layer; attention stores their keys and values in the pools on the way."""
    for sublayer in layer.sublayers:
        x = x + _run_sublayer(sublayer, x, step)
    return x if layer.scalar == 1.0 else x * layer.scalar


def _run_sublayer(sublayer: Sublayer, x: Tensor, step: CpuPass) -> Tensor:
    y = x if sublayer.norm is None else rms_norm(x, sublayer.norm, step.eps)
    run = _RUNS[type(sublayer.part)]
    if sublayer.convolution is None:
        y = run(sublayer.part, y, step)
    else:
        y, closing = enter_convolution(sublayer.convolution, y)
        y = _convolve(run(sublayer.part, y, step), closing, sublayer.convolution.block_size)
    return y if sublayer.post_norm is None else rms_norm(y, sublayer.post_norm, step.eps)


def _attend(part: Attention, y: Tensor, step: CpuPass) -> Tensor:
    batch, heads = step.batch, part.heads
    product = biased(part.qkv(y), part.qkv_bias).view(y.shape[0], -1, part.head_dim)
    turning = heads + part.kv_heads if part.owns_keys else heads
    turned = rotate(_head_normed(part, product, turning, step.eps), *step.rotary[part.rope])
    keys, values = step.kv[part.pool]
    if part.owns_keys:
        own = product[:, turning:] if part.owns_values else product[:, heads:turning]
        write_rows(keys, batch.pages, batch.offsets, turned[:, heads:])
        write_rows(values, batch.pages, batch.offsets, unweighted_norm(own, step.eps) if part.norms_values else own)
    mixed = attention(turned[:, :heads], keys, values, batch.groups[part.pattern], part.scale)
    if part.gate is not None:
        mixed = _gated(part.gate, mixed, y)
    return biased(part.output(mixed), part.output_bias)


def _head_normed(part: Attention, product: Tensor, turning: int, eps: float) -> Tensor:
    """Returns the heads that a rotation turns: queries and, where the layer has them, keys, normed if it has norms."""
    if part.q_norm is None:
        return product[:, :turning]
    queries = rms_norm(product[:, : part.heads], part.q_norm, eps)
    if part.k_norm is None:
        return queries
    return torch.cat((queries, rms_norm(product[:, part.heads : turning], part.k_norm, eps)), dim=1)


def unweighted_norm(x: Tensor, eps: float) -> Tensor:
    return rms_norm(x, torch.ones(x.shape[-1]), eps)


def _gated(gate: HeadGate, mixed: Tensor, y: Tensor) -> Tensor:
    """Multiplies attention's result, per head or per number, by a function of the rows that attention read."""
    assert gate.matrix is not None, "on a CPU a gate has a matrix of its own"
    function = torch.sigmoid if gate.kind == "sigmoid" else F.softplus
    weight = row_by_row(function, biased(gate.matrix(y), gate.bias))
    return (mixed.view(*weight.shape, -1) * weight[..., None]).view_as(mixed)


def _recall(part: DeltaNet, y: Tensor, step: CpuPass) -> Tensor:
    states = step.batch.recurrent
    assert states is not None, "the rows of a recurrent target come with their states"
    assert part.gates is not None, "on a CPU the gates have a matrix of their own"
    inputs, gate = part.inputs(y).split([part.shape.channels, part.value_width], dim=-1)
    write, left = part.rule.gates(*part.gates(y).chunk(2, dim=-1))
    read = states.run(part.state, part.rule, inputs, write, left)
    read = rms_norm(read, part.head_norm, step.eps).view(y.shape[0], part.value_width)
    return part.output(read * F.silu(gate))


def feed(part: Mlp, y: Tensor) -> Tensor:
    gate, up = biased(part.gate_up(y), part.gate_up_bias).chunk(2, dim=-1)
    return biased(part.down(ACTIVATIONS[part.activation](gate) * up), part.down_bias)


def choose_experts(routed: RoutedExperts, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's experts [rows, active], best first, and the share of each in the row's answer."""
    shape = routed.shape
    logits = softcapped(routed.router(rows), shape.router_softcap)
    sigmoid = shape.scores == "sigmoid"
    scores = row_by_row(torch.sigmoid, logits) if sigmoid else torch.softmax(logits, dim=-1)
    ranked = scores if routed.router_bias is None else scores + routed.router_bias
    chosen = torch.topk(ranked, shape.active, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if shape.renormalise:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares


def ask_experts(routed: RoutedExperts, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    return mix_experts(routed.gate_up, routed.down, rows, chosen, shares, ACTIVATIONS[routed.activation])


def run_expert_block(part: ExpertBlock, rows: Tensor) -> Tensor:
    mixed = ask_experts(part.routed, rows, *choose_experts(part.routed, rows))
    if part.routed.shape.scale != 1.0:
        mixed = mixed * part.routed.shape.scale
    if part.shared is None:
        return mixed
    shared = feed(part.shared, rows)
    if part.shared_gate is not None:
        shared = row_by_row(torch.sigmoid, part.shared_gate(rows)) * shared
    return mixed + shared


def _feed_beside_experts(part: MlpBesideExperts, x: Tensor, step: CpuPass) -> Tensor:
    answer = feed(part.mlp, rms_norm(x, part.mlp_norm, step.eps))
    chosen, shares = choose_experts(part.routed, rms_norm(x, part.router_norm, step.eps))
    shares = shares * part.expert_scale[chosen]
    mixed = ask_experts(part.routed, rms_norm(x, part.expert_norm, step.eps), chosen, shares)
    return rms_norm(answer, part.mlp_post_norm, step.eps) + rms_norm(mixed, part.expert_post_norm, step.eps)


def _add_side(part: SideInput, x: Tensor, step: CpuPass) -> Tensor:
    assert step.sides is not None, "a model with side inputs has side embeddings"
    return part.up(row_by_row(ACTIVATIONS["gelu"], part.gate(x)) * step.sides[:, part.index])


def side_rows(sides: SideEmbeddings, x: Tensor, token_ids: Tensor, eps: float) -> Tensor:
    """Computes each row's embedding for each layer [rows, layers, size]; `x` is the stream before the first layer."""
    shape = (x.shape[0], sides.layers, sides.size)
    projected = rms_norm((sides.projection(x) * x.shape[-1] ** -0.5).view(shape), sides.norm, eps)
    return (projected + sides.embed(token_ids).view(shape)) * 2.0**-0.5


def enter_convolution(convolution: BlockConvolution, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows after the convolution before a part, and the kernels of the convolution after it."""
    dynamic = convolution.projection(x).view(x.shape[0], 2, -1, convolution.base.shape[2], 1)
    kernels = convolution.base + dynamic
    return _convolve(x, kernels[:, 0], convolution.block_size), kernels[:, 1]


def _convolve(x: Tensor, kernel: Tensor, block_size: int) -> Tensor:
    """Convolves rows [blocks * block size, hidden], each with its line of `kernel` [rows, taps, groups, channels]."""
    blocks = x.view(-1, block_size, *kernel.shape[2:])
    kernel = kernel.view(blocks.shape[0], block_size, *kernel.shape[1:])
    mixed = kernel[:, :, 0] * blocks
    # Blocks stand side by side in the batch; a tap that would reach across a block's start contributes nothing.
    for back in range(1, min(kernel.shape[2], block_size)):
        mixed[:, back:].addcmul_(kernel[:, back:, back], blocks[:, :-back])
    return mixed.view_as(x)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


# How each type of part runs: `(part, rows after the sublayer's norm, pass) -> what the sublayer adds to the stream`.
_RUNS: dict[type[LayerPart], Callable[[Any, Tensor, CpuPass], Tensor]] = {
    Attention: _attend,
    DeltaNet: _recall,
    Mlp: lambda part, y, step: feed(part, y),
    ExpertBlock: lambda part, y, step: run_expert_block(part, y),
    MlpBesideExperts: _feed_beside_experts,
    SideInput: _add_side,
}
