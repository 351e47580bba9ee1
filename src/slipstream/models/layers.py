"""The transformer layer that targets and drafters share: attention over pages, then a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.reference import rms_norm, rotate, row_attention, write_rows
from slipstream.kernels.rows import AttentionPattern, RowBatch
from slipstream.models.weights import Weights

RotaryRows = Callable[[int, int], Tensor]  # (heads, head_dim) -> the row order that undoes a file's interleaving


class LayerShape(Protocol):
    """What a layer needs to know of its model's config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def rms_eps(self) -> float: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...


class TransformerLayer:
    """One layer with its query, key and value (and gate and up) matrices fused."""

    def __init__(
        self, weights: Weights, shape: LayerShape, prefix: str, pattern: AttentionPattern,
        rotary_rows: RotaryRows | None = None,
    ) -> None:
        self.shape = shape
        self.pattern = pattern
        hidden, dim = shape.hidden_size, shape.head_dim
        self._load_qkv(weights, prefix + "self_attn.", rotary_rows)
        self.output = weights.matrix([weights.source(prefix + "self_attn.o_proj.weight", (hidden, shape.heads * dim))])
        self.output_bias = weights.vector(prefix + "self_attn.o_proj.bias", hidden) if shape.attention_bias else None
        self.q_norm = weights.vector(prefix + "self_attn.q_norm.weight", dim) if shape.qk_norm else None
        self.k_norm = weights.vector(prefix + "self_attn.k_norm.weight", dim) if shape.qk_norm else None
        self.input_norm = weights.vector(prefix + "input_layernorm.weight", hidden)
        self.post_norm = weights.vector(prefix + "post_attention_layernorm.weight", hidden)
        self._load_mlp(weights, prefix + "mlp.")

    def _load_qkv(self, weights: Weights, prefix: str, rotary_rows: RotaryRows | None) -> None:
        shape = self.shape
        self.projections, self.biases = {}, {}
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            order = rotary_rows(heads, shape.head_dim) if rotary_rows is not None and name != "v" else None
            source = weights.source(f"{prefix}{name}_proj.weight", (heads * shape.head_dim, shape.hidden_size))
            self.projections[name] = source if order is None else source.rows(order)
            if shape.attention_bias:
                bias = weights.vector(f"{prefix}{name}_proj.bias", heads * shape.head_dim)
                self.biases[name] = bias if order is None else bias[order]
        self.qkv = weights.matrix(list(self.projections.values()))
        self.qkv_bias = torch.cat(list(self.biases.values())) if self.biases else None

    def _load_mlp(self, weights: Weights, prefix: str) -> None:
        hidden, inner = self.shape.hidden_size, self.shape.intermediate_size
        self.gate_up = weights.matrix(
            [weights.source(f"{prefix}{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
        )
        self.down = weights.matrix([weights.source(prefix + "down_proj.weight", (hidden, inner))])
        self.gate_up_bias = self.down_bias = None
        if self.shape.mlp_bias:
            self.gate_up_bias = torch.cat(
                [weights.vector(f"{prefix}{name}.bias", inner) for name in ("gate_proj", "up_proj")]
            )
            self.down_bias = weights.vector(prefix + "down_proj.bias", hidden)

    def __call__(
        self, x: Tensor, batch: RowBatch, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> Tensor:
        """Rows [n, hidden] through the layer; their keys and values are stored in the pools on the way."""
        shape = self.shape
        heads, turning = shape.heads, shape.heads + shape.kv_heads
        qkv = biased(self.qkv(rms_norm(x, self.input_norm, shape.rms_eps)), self.qkv_bias)
        qkv = qkv.view(x.shape[0], turning + shape.kv_heads, shape.head_dim)
        turned = qkv[:, :turning]
        if self.q_norm is not None and self.k_norm is not None:
            turned = torch.cat(
                (
                    rms_norm(qkv[:, :heads], self.q_norm, shape.rms_eps),
                    rms_norm(qkv[:, heads:turning], self.k_norm, shape.rms_eps),
                ),
                dim=1,
            )
        turned = rotate(turned, *rotary)
        write_rows(keys, batch.pages, batch.offsets, turned[:, heads:])
        write_rows(values, batch.pages, batch.offsets, qkv[:, turning:])
        mixed = row_attention(turned[:, :heads], keys, values, batch.groups[self.pattern], shape.head_dim**-0.5)
        x = x + biased(self.output(mixed), self.output_bias)
        gate, up = biased(self.gate_up(rms_norm(x, self.post_norm, shape.rms_eps)), self.gate_up_bias).chunk(2, dim=-1)
        return x + biased(self.down(F.silu(gate) * up), self.down_bias)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
