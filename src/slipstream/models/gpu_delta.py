"""A gated delta net as a GPU runs it: two products, and what stands between them in three launches."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.gpu.delta_net_launch import DeviceStates
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.models.delta_net import DeltaNetLayer


class GpuDeltaNet:
    """The mixer of a recurrent layer; the first of a model also finds the way through the rows, for all of them."""

    def __init__(self, kernels: GpuKernels, layer: DeltaNetLayer, device: torch.device) -> None:
        self._kernels = kernels
        self._layer = layer
        self._rule = layer.rule.to(device)

    def __call__(self, normed: Tensor, rows: DeviceRows, states: DeviceStates) -> Tensor:
        """Rows bf16 [padded rows, hidden] through the recurrence; zeros come of those that do not count."""
        kernels, layer, delta = self._kernels, self._layer, self._layer.delta
        if layer.state == 0:
            kernels.delta.plan(rows, states)
        sizes = [delta.channels, delta.value_heads * delta.value_dim, 2 * delta.value_heads]
        inputs, gate, gates = kernels.multiply(layer.inputs, normed).split(sizes, dim=-1)
        kernels.delta.mix(inputs, gates, rows, self._rule, states, layer.state)
        kernels.delta.recur(rows, states, layer.state)
        weighed = normed.new_empty(gate.shape)
        kernels.delta.gate(gate, layer.head_norm, layer.shape.rms_eps, rows, states, weighed)
        return kernels.multiply_in_parts(layer.output, weighed)
