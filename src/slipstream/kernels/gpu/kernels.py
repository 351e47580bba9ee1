"""One dispatch for everything the device runs: the Triton kernels, or their torch twins where somebody asked for them.

The choice is made once and by name; nothing falls back from one to the other on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.config import Kernels
from slipstream.kernels.gpu import (
    attention,
    blending,
    commit,
    delta,
    delta_reference,
    elementwise,
    experts,
    growth,
    growth_reference,
    heads,
    layout,
    sampling,
)
from slipstream.kernels.gpu.matmul import GpuMatrix, matmul_reference

Launch = Callable[..., None]
Product = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class GpuKernels:
    """Launchers by what they do; see the module of each for its arguments."""

    choice: Kernels
    multiply: Product
    multiply_in_parts: Product
    embed: Product
    add_norm: Launch
    rotary_write: Launch
    silu_mul: Launch
    context_write: Launch
    block_rows: Launch
    attention: Launch
    choose: Launch
    top_candidates: Launch
    score_heads: Launch
    grow: Launch
    accept: Launch
    compact: Launch
    hold: Launch
    join_norm: Launch
    norm_parts: Launch
    gate_mul: Launch
    convolve: Launch
    bend: Launch
    score: Launch
    route: Launch
    expert_gate_up: Launch
    expert_down: Launch
    combine: Launch
    combine_norm: Launch
    delta: delta.DeltaKernels


def gpu_kernels(choice: Kernels) -> GpuKernels:
    if choice == "reference":
        return GpuKernels(
            choice, matmul_reference, matmul_reference, _embed_reference, elementwise.add_norm_reference,
            elementwise.rotary_write_reference,
            elementwise.silu_mul_reference, elementwise.context_write_reference, layout.block_rows_reference,
            attention.paged_attention_reference, sampling.choose_reference, sampling.top_candidates_reference,
            heads.score_heads_reference,
            growth_reference.grow_reference, commit.accept_reference, commit.compact_reference, commit.hold_reference,
            blending.join_norm_reference, blending.norm_parts_reference, blending.gate_mul_reference,
            blending.convolve_reference, blending.bend_reference,
            experts.score_reference, experts.route_reference, experts.expert_gate_up_reference,
            experts.expert_down_reference, experts.combine_reference, experts.combine_norm_reference,
            delta_reference.REFERENCE,
        )
    return GpuKernels(
        choice, _multiply, _multiply_in_parts, _embed, elementwise.add_norm, elementwise.rotary_write,
        elementwise.silu_mul, elementwise.context_write,
        layout.block_rows, attention.paged_attention, sampling.choose, sampling.top_candidates,
        heads.score_heads, growth.grow,
        commit.accept, commit.compact, commit.hold,
        blending.join_norm, blending.norm_parts, blending.gate_mul, blending.convolve, blending.bend,
        experts.score, experts.route, experts.expert_gate_up, experts.expert_down, experts.combine,
        experts.combine_norm,
        delta.TRITON,
    )


def _multiply(matrix: GpuMatrix, rows: Tensor, out: Tensor | None = None) -> Tensor:
    return matrix(rows, out)


def _multiply_in_parts(matrix: GpuMatrix, rows: Tensor) -> Tensor:
    return matrix.in_parts(rows)


def _embed(table: GpuMatrix, tokens: Tensor) -> Tensor:
    residual = torch.empty(tokens.shape[0], table.in_features, dtype=torch.float32, device=tokens.device)
    table.embed_rows(tokens, residual)
    return residual


def _embed_reference(table: GpuMatrix, tokens: Tensor) -> Tensor:
    return table.dense()[tokens.long()]
