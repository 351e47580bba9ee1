"""The transformer layer that targets and drafters share: attention over pages, then a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.attention import attention
from slipstream.kernels.reference import rms_norm, rotate, write_rows
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
        self.attention_conv: BlockConvolution | None = None
        self.mlp_conv: BlockConvolution | None = None

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
        y = rms_norm(x, self.input_norm, shape.rms_eps)
        if self.attention_conv is not None:
            y, closing = self.attention_conv.enter(y)
        qkv = biased(self.qkv(y), self.qkv_bias)
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
        mixed = attention(turned[:, :heads], keys, values, batch.groups[self.pattern], shape.head_dim**-0.5)
        y = biased(self.output(mixed), self.output_bias)
        if self.attention_conv is not None:
            y = self.attention_conv.leave(y, closing)
        return self._mlp(x + y)

    def _mlp(self, x: Tensor) -> Tensor:
        y = rms_norm(x, self.post_norm, self.shape.rms_eps)
        if self.mlp_conv is not None:
            y, closing = self.mlp_conv.enter(y)
        gate, up = biased(self.gate_up(y), self.gate_up_bias).chunk(2, dim=-1)
        y = biased(self.down(F.silu(gate) * up), self.down_bias)
        if self.mlp_conv is not None:
            y = self.mlp_conv.leave(y, closing)
        return x + y


class BlockConvolution:
    """A short causal convolution over the rows of a draft block, around a sublayer: one kernel before, one behind.

    Each kernel is a learnt base plus a part computed from the sublayer's input, the same for a group of channels.
    """

    def __init__(
        self, weights: Weights, prefix: str, hidden_size: int, kernel_size: int, group_size: int, block_size: int
    ) -> None:
        self._block_size = block_size
        self._groups = hidden_size // group_size
        base = weights.source(prefix + "base_kernel", (2, kernel_size, hidden_size)).dense()
        self._base = base.view(2, kernel_size, self._groups, group_size)
        name = prefix + "kernel_projection.weight"
        self._projection = weights.matrix([weights.source(name, (2 * kernel_size * self._groups, hidden_size))])

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input, and the kernel that `leave` will need."""
        dynamic = self._projection(x).view(x.shape[0], 2, -1, self._groups, 1)
        kernels = self._base + dynamic
        return self._convolve(x, kernels[:, 0]), kernels[:, 1]

    def leave(self, x: Tensor, kernel: Tensor) -> Tensor:
        return self._convolve(x, kernel)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Rows [blocks * block size, hidden] with a kernel [rows, taps, groups, channels] for each row."""
        blocks = x.view(-1, self._block_size, *kernel.shape[2:])
        kernel = kernel.view(blocks.shape[0], self._block_size, *kernel.shape[1:])
        mixed = kernel[:, :, 0] * blocks
        # blocks stand side by side in the batch; what would reach across a block's start is nothing
        for back in range(1, min(kernel.shape[2], self._block_size)):
            mixed[:, back:].addcmul_(kernel[:, back:, back], blocks[:, :-back])
        return mixed.view_as(x)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
