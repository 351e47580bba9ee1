"""A stack of layers on a GPU: the same rows as everywhere, through kernels that a graph can hold.

Everything here allocates its intermediates as it goes: inside a captured graph they become the graph's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.gpu.delta_net_launch import DeviceStates
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.expert_mixture import Mixture
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.paged_attention import AttentionScratch, padded_heads
from slipstream.models.delta_net import DeltaNetLayer
from slipstream.models.gpu_layers import Delta, DevicePass, DevicePools, RotaryPair, layer_parts
from slipstream.models.layers import TransformerLayer
from slipstream.models.rope import RopeConfig


class GpuStack:
    """The layers of a target or a drafter with their final norm; `pool_of` says whose keys and values a layer reads."""

    def __init__(
        self,
        kernels: GpuKernels,
        layers: Sequence[TransformerLayer],
        norm: Tensor,
        rotaries: Mapping[RopeConfig, RotaryPair],
        pool_of: Callable[[int], int],
    ) -> None:
        self._kernels = kernels
        self._norm = norm
        self._eps = layers[0].shape.rms_eps
        self._layers = [
            layer_parts(kernels, layer, index, pool_of(index), rotaries[layer.shape.rope], norm.device)
            for index, layer in enumerate(layers)
        ]
        read = [part.norms for parts in self._layers for part in parts if part.norms is not None]
        self._most_lines = max(norms.numel() // norm.numel() for norms in read)
        attending = [layer.shape for layer in layers if not isinstance(layer, DeltaNetLayer)]
        heads = [padded_heads(shape.heads, shape.kv_heads) for shape in attending]
        self._most_heads = max(heads, default=0)
        widths = (count * shape.head_dim for count, shape in zip(heads, attending, strict=True))
        self._widest = max(widths, default=0)

    def run(
        self,
        residual: Tensor,
        rows: DeviceRows,
        pools: DevicePools,
        tap_layers: Sequence[int] = (),
        states: DeviceStates | None = None,
        sides: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Normed hidden rows in bf16 and the tapped residuals side by side; `residual` is used up."""
        count, hidden = residual.shape
        taps = residual.new_empty(count, len(tap_layers) * hidden, dtype=torch.bfloat16) if tap_layers else None
        places = {layer: slice(i * hidden, (i + 1) * hidden) for i, layer in enumerate(tap_layers)}
        normed = residual.new_empty(self._most_lines, count, hidden, dtype=torch.bfloat16)
        page_tokens = pools.target[0][0].shape[2]
        scratch = AttentionScratch.sized(rows, page_tokens, self._most_heads, self._widest, residual.device)
        step = DevicePass(rows, pools, scratch, states, sides)
        delta: Delta | None = None
        for index, parts in enumerate(self._layers):
            # what a layer leaves behind is complete when the next one's norm has added it up
            tap = taps[:, places[index - 1]] if taps is not None and index - 1 in places else None
            for part in parts:
                read = normed[: len(part.norms)] if part.norms is not None and part.norms.dim() > 1 else normed[0]
                self._join(residual, delta, part.norms, read, tap)
                delta, tap = part(read, step), None
        last = len(self._layers) - 1
        tap = taps[:, places[last]] if taps is not None and last in places else None
        self._join(residual, delta, self._norm, normed[0], tap)
        return normed[0], taps

    def _join(
        self, residual: Tensor, delta: Delta | None, norms: Tensor | None, out: Tensor, tap: Tensor | None
    ) -> None:
        """Adds what a part has said to the stream, and norms the stream for the next one."""
        if delta is not None and isinstance(delta.rows, Mixture):
            self._kernels.combine_norm(residual, delta.rows, norms, self._eps, out, tap)
            return
        if delta is None or delta.norm is None:
            rows, bias = (None, None) if delta is None else (delta.rows, delta.bias)
            self._kernels.add_norm(residual, rows, norms, self._eps, out, tap, bias)
            return
        self._kernels.join_norm(
            residual,
            delta.rows,
            delta.bias,
            delta.norm,
            delta.beside,
            delta.beside_norms,
            delta.scale,
            norms,
            self._eps,
            out,
            tap,
        )


class GpuContext:
    """Taps of committed rows into the draft layers' keys and values."""

    def __init__(
        self,
        kernels: GpuKernels,
        fc: Matrix,
        projection: Matrix,
        bias: Tensor | None,
        norm: Tensor,
        k_norms: Tensor,
        eps: float,
        rotary: RotaryPair,
        tap_norms: Tensor | None = None,
        layer_norms: Tensor | None = None,
        projections: Sequence[Matrix] = (),
    ) -> None:
        """`tap_norms` [taps, width] norm every tap for itself. With `layer_norms` [layers, hidden] every layer norms
        the context once more, and has a projection of its own.
        """
        self._kernels = kernels
        self._fc = fc
        self._projection = projection
        self._bias = bias
        self._norm = norm
        self._k_norms = k_norms
        self._eps = eps
        self._rotary = rotary
        self._tap_norms = tap_norms
        self._layer_norms = layer_norms
        self._projections = projections
        self.width = fc.in_features  # of the taps of a row

    def write(self, taps: Tensor, positions: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Pools are [layers, pages, heads, page tokens, dim]; rows that do not count have a scratch place."""
        if self._tap_norms is not None:
            parts = taps.view(taps.shape[0], *self._tap_norms.shape)
            each = torch.empty_like(parts)
            self._kernels.norm_parts(parts, self._tap_norms, self._eps, each)
            taps = each.view_as(taps)
        projected = self._kernels.multiply(self._fc, taps)
        context = torch.empty_like(projected)
        self._kernels.add_norm(projected.float(), None, self._norm, self._eps, context, None, None)
        self._kernels.context_write(
            self._project(context),
            self._bias,
            self._k_norms,
            self._eps,
            self._rotary.cos,
            self._rotary.sin,
            positions,
            places,
            keys,
            values,
        )

    def _project(self, context: Tensor) -> Tensor:
        """Keys and values of all layers side by side."""
        if self._layer_norms is None:
            return self._kernels.multiply(self._projection, context)
        layers, (rows, hidden) = len(self._layer_norms), context.shape
        normed = context.new_empty(layers, rows, hidden)
        shared = context[:, None].expand(-1, layers, -1)
        self._kernels.norm_parts(shared, self._layer_norms, self._eps, normed.transpose(0, 1))
        projected = context.new_empty(rows, layers, self._projections[0].out_features)
        for index, matrix in enumerate(self._projections):
            self._kernels.multiply(matrix, normed[index], projected[:, index])
        return projected.view(rows, -1)
