"""Runs a stack of layers on a GPU, through kernels that a graph can hold.

A pass allocates its intermediates as it goes; inside a captured graph they become the graph's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.gpu.delta_net_launch import DeviceStates
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.expert_mixture import Mixture
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.paged_attention import AttentionScratch, padded_heads
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.gpu.device_parts import (
    DevicePass,
    DevicePools,
    DeviceSetting,
    DeviceSublayer,
    PartResult,
    RotaryPair,
    device_layer,
)
from slipstream.models.layers import Attention, Layer


class GpuStack:
    """The layers of a target or a drafter with their final norm."""

    def __init__(self, setting: DeviceSetting, layers: Sequence[Layer], norm: Tensor) -> None:
        self._kernels = setting.kernels
        self._norm = norm
        self._eps = setting.eps
        self._layers = [device_layer(setting, layer) for layer in layers]
        read = [sublayer.norms for layer in self._layers for sublayer in layer if sublayer.norms is not None]
        self._most_lines = max(norms.numel() // norm.numel() for norms in read)
        attending = [part for layer in layers for part in layer.parts if isinstance(part, Attention)]
        heads = [padded_heads(part.heads, part.kv_heads) for part in attending]
        self._most_heads = max(heads, default=0)
        widths = (count * part.head_dim for count, part in zip(heads, attending, strict=True))
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
        """Returns normed hidden rows in bf16, and the tapped residuals side by side; the pass overwrites `residual`."""
        count, hidden = residual.shape
        taps = residual.new_empty(count, len(tap_layers) * hidden, dtype=torch.bfloat16) if tap_layers else None
        places = {layer: slice(i * hidden, (i + 1) * hidden) for i, layer in enumerate(tap_layers)}
        normed = residual.new_empty(self._most_lines, count, hidden, dtype=torch.bfloat16)
        page_tokens = pools.target[0][0].shape[2]
        scratch = AttentionScratch.sized(rows, page_tokens, self._most_heads, self._widest, residual.device)
        step = DevicePass(rows, pools, scratch, states, sides)
        found: PartResult | None = None
        before: DeviceSublayer | None = None  # the sublayer that `found` comes from
        for index, sublayers in enumerate(self._layers):
            # The stream that a layer leaves is complete when the next layer's first norm has added the last result.
            tap = taps[:, places[index - 1]] if taps is not None and index - 1 in places else None
            for sublayer in sublayers:
                norms = sublayer.norms
                read = normed[: len(norms)] if norms is not None and norms.dim() > 1 else normed[0]
                self._join(residual, found, before, norms, read, tap)
                found, before, tap = sublayer.part(read, step), sublayer, None
        last = len(self._layers) - 1
        tap = taps[:, places[last]] if taps is not None and last in places else None
        self._join(residual, found, before, self._norm, normed[0], tap)
        return normed[0], taps

    def _join(
        self,
        residual: Tensor,
        found: PartResult | None,
        before: DeviceSublayer | None,
        norms: Tensor | None,
        out: Tensor,
        tap: Tensor | None,
    ) -> None:
        """Adds what a part has found to the stream, and norms the stream for the next part."""
        kernels, eps = self._kernels, self._eps
        if found is None or before is None:
            kernels.add_norm(residual, None, norms, eps, out, tap, None)
        elif isinstance(found.rows, Mixture):
            kernels.combine_norm(residual, found.rows, norms, eps, out, tap)
        elif before.post_norm is None:
            kernels.add_norm(residual, found.rows, norms, eps, out, tap, found.bias)
        else:
            kernels.join_norm(
                residual,
                found.rows,
                found.bias,
                before.post_norm,
                found.beside,
                found.beside_norms,
                before.scale,
                norms,
                eps,
                out,
                tap,
            )


class GpuContext:
    """Projects the taps of committed rows into the draft layers' keys and values."""

    def __init__(self, kernels: GpuKernels, drafter: DFlashDrafter, rotary: RotaryPair) -> None:
        self._kernels = kernels
        self._drafter = drafter
        self._eps = drafter.config.rms_eps
        self._rotary = rotary
        self._k_norms = drafter.context_k_norm[:, 0].contiguous()
        # [layers, hidden], for a drafter whose layers norm the context once more, each by itself
        self._layer_norms = torch.stack(drafter.input_norms) if drafter.context_each else None
        self.width = drafter.tap_width  # of all taps of a row together

    def write(self, taps: Tensor, positions: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes rows into pools [layers, pages, heads, page tokens, dim]; padding rows have the scratch place."""
        kernels, drafter = self._kernels, self._drafter
        if drafter.tap_norms is not None:
            parts = taps.view(taps.shape[0], *drafter.tap_norms.shape)
            each = torch.empty_like(parts)
            kernels.norm_parts(parts, drafter.tap_norms, self._eps, each)
            taps = each.view_as(taps)
        projected = kernels.multiply(drafter.fc, taps)
        context = torch.empty_like(projected)
        kernels.add_norm(projected.float(), None, drafter.hidden_norm, self._eps, context, None, None)
        kernels.context_write(
            self._project(context),
            drafter.context_bias,
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
        """Returns keys and values of all layers side by side."""
        each = self._drafter.context_each
        if self._layer_norms is None or each is None:
            return self._kernels.multiply(self._drafter.context_kv, context)
        layers, (rows, hidden) = len(self._layer_norms), context.shape
        normed = context.new_empty(layers, rows, hidden)
        shared = context[:, None].expand(-1, layers, -1)
        self._kernels.norm_parts(shared, self._layer_norms, self._eps, normed.transpose(0, 1))
        projected = context.new_empty(rows, layers, each[0].out_features)
        for index, matrix in enumerate(each):
            self._kernels.multiply(matrix, normed[index], projected[:, index])
        return projected.view(rows, -1)
