"""The transformer layer that targets and drafters share: attention over pages, then a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.formats.weight_files import WeightTensor
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.native_attention import attention
from slipstream.kernels.cpu.torch_kernels import rms_norm, rotate, row_by_row, write_rows
from slipstream.kernels.rows import AttentionPattern, RowBatch
from slipstream.models.rope import RopeConfig, partial_rows
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
    def rope(self) -> RopeConfig: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...


class TransformerLayer:
    """One layer with its query, key and value (and gate and up) matrices fused.

    Families override what is different in theirs: `_load_mixer` and `_mix`, of which `_gated` stands between attention
    and its output matrix, or `_load_mlp` and `_feed`. Compiled passes take layers of this very class only.
    """

    def __init__(
        self,
        weights: Weights,
        shape: LayerShape,
        prefix: str,
        pattern: AttentionPattern,
        rotary_rows: RotaryRows | None = None,
    ) -> None:
        self.shape = shape
        self.pattern = pattern
        self.head_gate: HeadGate | None = None
        self._load_mixer(weights, prefix, rotary_rows)
        self.input_norm = weights.norm(prefix + "input_layernorm.weight", shape.hidden_size)
        self.post_norm = weights.norm(prefix + "post_attention_layernorm.weight", shape.hidden_size)
        self._load_mlp(weights, prefix + "mlp.")
        self.attention_conv: BlockConvolution | None = None
        self.mlp_conv: BlockConvolution | None = None

    @property
    def matrices(self) -> list[Matrix]:
        """All that multiply rows."""
        return [*self.mixing, self.gate_up, self.down]

    @property
    def mixing(self) -> list[Matrix]:
        """Those of them around attention."""
        gate = self.head_gate.matrix if self.head_gate is not None else None
        return [self.qkv, self.output, *([] if gate is None else [gate])]

    def _load_mixer(self, weights: Weights, prefix: str, rotary_rows: RotaryRows | None) -> None:
        shape, prefix = self.shape, prefix + "self_attn."
        hidden, width = shape.hidden_size, shape.heads * shape.head_dim
        self._load_qkv(weights, prefix, rotary_rows)
        self.output = weights.matrix([weights.source(prefix + "o_proj.weight", (hidden, width))])
        self.output_bias = weights.vector(prefix + "o_proj.bias", hidden) if shape.attention_bias else None
        self.q_norm = self._head_norm(weights, prefix + "q_norm.weight") if shape.qk_norm else None
        self.k_norm = self._head_norm(weights, prefix + "k_norm.weight") if shape.qk_norm else None

    def _head_norm(self, weights: Weights, name: str) -> Tensor:
        shape = self.shape
        norm = weights.norm(name, shape.head_dim)
        return norm[partial_rows(1, shape.head_dim, shape.rope.dim)] if shape.rope.partial else norm

    def _load_qkv(self, weights: Weights, prefix: str, rotary_rows: RotaryRows | None) -> None:
        shape = self.shape
        if shape.rope.partial:
            rotary_rows = partial(partial_rows, dim=shape.rope.dim)
        self.projections, self.biases = {}, {}
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            order = rotary_rows(heads, shape.head_dim) if rotary_rows is not None and name != "v" else None
            source = self._projection(weights, prefix, name, heads)
            self.projections[name] = source if order is None else source.rows(order)
            if shape.attention_bias:
                bias = weights.vector(f"{prefix}{name}_proj.bias", heads * shape.head_dim)
                self.biases[name] = bias if order is None else bias[order]
        self.head_gate = self._load_gate(weights, prefix)
        joined = [self.head_gate.source] if self.head_gate is not None and self.head_gate.matrix is None else []
        self.qkv = weights.matrix([*self.projections.values(), *joined])
        self.qkv_bias = torch.cat(list(self.biases.values())) if self.biases else None

    def _load_gate(self, weights: Weights, prefix: str) -> HeadGate | None:
        """What weighs the heads, where a family or a drafter has it."""
        return None

    def _projection(self, weights: Weights, prefix: str, name: str, heads: int) -> WeightTensor:
        """One of the three projections; some drafters keep them in one tensor."""
        shape, fused = self.shape, prefix + "qkv_proj.weight"
        if not weights.has(fused):
            return weights.source(f"{prefix}{name}_proj.weight", (heads * shape.head_dim, shape.hidden_size))
        counts = torch.tensor([shape.heads, shape.kv_heads, shape.kv_heads]) * shape.head_dim
        whole = weights.source(fused, (int(counts.sum()), shape.hidden_size))
        return whole.rows(torch.arange(int(counts.sum())).split(counts.tolist())["qkv".index(name)])

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
        return self._mlp(x + self._mix(x, batch, rotary, keys, values))

    def _mix(self, x: Tensor, batch: RowBatch, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> Tensor:
        """What a row takes from the rows before it."""
        y = rms_norm(x, self.input_norm, self.shape.rms_eps)
        if self.attention_conv is not None:
            y, closing = self.attention_conv.enter(y)
        mixed = self._gated(self._attend(y, batch, rotary, keys, values), y)
        y = biased(self.output(mixed), self.output_bias)
        return self.attention_conv.leave(y, closing) if self.attention_conv is not None else y

    def _mlp(self, x: Tensor) -> Tensor:
        y = rms_norm(x, self.post_norm, self.shape.rms_eps)
        if self.mlp_conv is not None:
            y, closing = self.mlp_conv.enter(y)
        y = self._feed(y)
        return x + (self.mlp_conv.leave(y, closing) if self.mlp_conv is not None else y)

    def _attend(
        self, y: Tensor, batch: RowBatch, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> Tensor:
        shape = self.shape
        heads, turning = shape.heads, shape.heads + shape.kv_heads
        qkv = biased(self.qkv(y), self.qkv_bias)
        qkv = qkv.view(y.shape[0], turning + shape.kv_heads, shape.head_dim)
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
        return attention(turned[:, :heads], keys, values, batch.groups[self.pattern], shape.head_dim**-0.5)

    def _gated(self, mixed: Tensor, y: Tensor) -> Tensor:
        """What attention found, before its output matrix; `y` is what attention read."""
        return mixed if self.head_gate is None else self.head_gate(mixed, y)

    def _feed(self, y: Tensor) -> Tensor:
        gate, up = biased(self.gate_up(y), self.gate_up_bias).chunk(2, dim=-1)
        return biased(self.down(F.silu(gate) * up), self.down_bias)


class HeadGate:
    """Weighs what attention found, head by head or number by number, with a softplus of what it read.

    Its own matrix is None where its rows stand behind those of queries, keys and values.
    """

    def __init__(self, weights: Weights, name: str, width: int, hidden_size: int) -> None:
        self.source = weights.source(name, (width, hidden_size))
        self.width = width
        self.matrix = None if weights.joins_gates else weights.matrix([self.source])

    def __call__(self, mixed: Tensor, y: Tensor) -> Tensor:
        assert self.matrix is not None, "a CPU keeps gates for themselves"
        gate = row_by_row(F.softplus, self.matrix(y))
        return (mixed.view(*gate.shape, -1) * gate[..., None]).view_as(mixed)


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
        self.base = base.view(2, kernel_size, self._groups, group_size)
        name = prefix + "kernel_projection.weight"
        self.projection = weights.matrix([weights.source(name, (2 * kernel_size * self._groups, hidden_size))])

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input, and the kernel that `leave` will need."""
        dynamic = self.projection(x).view(x.shape[0], 2, -1, self._groups, 1)
        kernels = self.base + dynamic
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
