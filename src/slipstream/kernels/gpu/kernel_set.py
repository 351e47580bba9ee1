"""One place that chooses what the device runs: the Triton kernels, or their torch counterparts if the user asks for
them.

The choice is made once and by name; there is no automatic fallback from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from slipstream.config import Kernels
from slipstream.kernels.gpu import (
    block_layout,
    commit,
    delta_net_launch,
    delta_reference,
    elementwise,
    expert_mixture,
    head_tables,
    layer_extras,
    paged_attention,
    text_match,
    token_choice,
    tree_growth,
    tree_growth_reference,
)
from slipstream.kernels.gpu.matrices import GpuMatrix, matmul_reference

Launch = Callable[..., None]
Product = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class GpuKernels:
    """The launchers, by what they do; the module of each describes its arguments."""

    multiply: Product
    multiply_in_parts: Product
    embed: Product
    add_norm: Launch
    rotary_write: Launch
    silu_mul: Launch
    context_write: Launch
    block_rows: Launch
    paged_attention: Launch
    choose: Launch
    top_candidates: Launch
    score_heads: Launch
    match_text: Launch
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
    delta: delta_net_launch.DeltaKernels


# The module of each launcher. A launcher has the name of its field; its torch counterpart has that name and
# `_reference`.
_MODULES: dict[str, ModuleType] = {
    **dict.fromkeys(("add_norm", "rotary_write", "silu_mul", "context_write"), elementwise),
    **dict.fromkeys(("accept", "compact", "hold"), commit),
    **dict.fromkeys(("choose", "top_candidates"), token_choice),
    **dict.fromkeys(("join_norm", "norm_parts", "gate_mul", "convolve", "bend"), layer_extras),
    **dict.fromkeys(
        ("score", "route", "expert_gate_up", "expert_down", "combine", "combine_norm"), expert_mixture
    ),
    "block_rows": block_layout,
    "paged_attention": paged_attention,
    "score_heads": head_tables,
    "match_text": text_match,
    "grow": tree_growth,
}


def gpu_kernels(choice: Kernels) -> GpuKernels:
    if choice == "reference":
        modules = {**_MODULES, "grow": tree_growth_reference}
        launchers = {name: getattr(module, f"{name}_reference") for name, module in modules.items()}
        return GpuKernels(
            multiply=matmul_reference, multiply_in_parts=matmul_reference, embed=_embed_reference,
            delta=delta_reference.REFERENCE, **launchers,
        )
    launchers = {name: getattr(module, name) for name, module in _MODULES.items()}
    return GpuKernels(
        multiply=_multiply, multiply_in_parts=_multiply_in_parts, embed=_embed,
        delta=delta_net_launch.TRITON, **launchers,
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
