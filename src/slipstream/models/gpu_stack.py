"""A stack of layers on a GPU: the same rows as everywhere, through kernels that a graph can hold.

Everything here allocates its intermediates as it goes: inside a captured graph they become the graph's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.gpu.attention import AttentionScratch
from slipstream.kernels.gpu.kernels import GpuKernels
from slipstream.kernels.gpu.rows import DeviceRows
from slipstream.kernels.matmul import Matrix
from slipstream.models.layers import LayerShape, TransformerLayer


@dataclass(frozen=True, slots=True)
class RotaryPair:
    """cos, and sin with its first half negated, by position, on the device."""

    cos: Tensor
    sin: Tensor


class GpuStack:
    """The layers of a target or a drafter with their final norm."""

    def __init__(
        self, kernels: GpuKernels, shape: LayerShape, layers: Sequence[TransformerLayer], norm: Tensor,
        rotary: RotaryPair,
    ) -> None:
        for layer in layers:
            if type(layer) is not TransformerLayer or layer.attention_conv is not None or layer.mlp_conv is not None:
                raise ConfigError("this model has layers that do not run on a GPU yet", "use --device cpu")
        self._kernels = kernels
        self._shape = shape
        self._layers = layers
        self._norm = norm
        self._rotary = rotary

    def run(
        self, residual: Tensor, rows: DeviceRows, keys: Tensor, values: Tensor, tap_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Normed hidden rows in bf16 and the tapped residuals side by side; `residual` is used up.

        Pools are [layers, pages, kv heads, page tokens, dim].
        """
        shape, kernels = self._shape, self._kernels
        count, hidden = residual.shape
        taps = residual.new_empty(count, len(tap_layers) * hidden, dtype=torch.bfloat16) if tap_layers else None
        places = {layer: slice(i * hidden, (i + 1) * hidden) for i, layer in enumerate(tap_layers)}
        normed = residual.new_empty(count, hidden, dtype=torch.bfloat16)
        scratch = AttentionScratch.empty(count, shape.heads, shape.kv_heads, shape.head_dim, residual.device)
        delta: Tensor | None = None
        bias: Tensor | None = None
        for index, layer in enumerate(self._layers):
            # what a layer leaves behind is complete when the next one's norm has added it up
            tap = taps[:, places[index - 1]] if taps is not None and index - 1 in places else None
            kernels.add_norm(residual, delta, layer.input_norm, shape.rms_eps, normed, tap, bias)
            delta = self._attend(layer, normed, rows, keys[index], values[index], scratch)
            bias = layer.output_bias
            kernels.add_norm(residual, delta, layer.post_norm, shape.rms_eps, normed, None, bias)
            delta, bias = self._mlp(layer, normed), layer.down_bias
        last = len(self._layers) - 1
        tap = taps[:, places[last]] if taps is not None and last in places else None
        kernels.add_norm(residual, delta, self._norm, shape.rms_eps, normed, tap, bias)
        return normed, taps

    def _attend(
        self, layer: TransformerLayer, normed: Tensor, rows: DeviceRows, keys: Tensor, values: Tensor,
        scratch: AttentionScratch,
    ) -> Tensor:
        shape, kernels = self._shape, self._kernels
        qkv = kernels.multiply(layer.qkv, normed)
        queries = qkv.new_empty(qkv.shape[0], shape.heads, shape.head_dim)
        kernels.rotary_write(
            qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, shape.rms_eps, self._rotary.cos, self._rotary.sin,
            rows.positions, rows.places, queries, keys, values,
        )
        mixed = qkv.new_empty(qkv.shape[0], shape.heads * shape.head_dim)
        kernels.attention(queries, keys, values, rows, shape.head_dim**-0.5, layer.pattern.window, mixed, scratch)
        return kernels.multiply(layer.output, mixed)

    def _mlp(self, layer: TransformerLayer, normed: Tensor) -> Tensor:
        gate_up = self._kernels.multiply(layer.gate_up, normed)
        inner = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up, layer.gate_up_bias, inner)
        return self._kernels.multiply(layer.down, inner)


class GpuContext:
    """Taps of committed rows into the draft layers' keys and values."""

    def __init__(
        self, kernels: GpuKernels, fc: Matrix, projection: Matrix, bias: Tensor | None, norm: Tensor,
        k_norms: Tensor, eps: float, rotary: RotaryPair,
    ) -> None:
        self._kernels = kernels
        self._fc = fc
        self._projection = projection
        self._bias = bias
        self._norm = norm
        self._k_norms = k_norms
        self._eps = eps
        self._rotary = rotary

    def write(self, taps: Tensor, positions: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Pools are [layers, pages, heads, page tokens, dim]; rows that do not count have a scratch place."""
        projected = self._kernels.multiply(self._fc, taps)
        context = torch.empty_like(projected)
        self._kernels.add_norm(projected.float(), None, self._norm, self._eps, context, None, None)
        self._kernels.context_write(
            self._kernels.multiply(self._projection, context), self._bias, self._k_norms, self._eps,
            self._rotary.cos, self._rotary.sin,
            positions, places, keys, values,
        )
