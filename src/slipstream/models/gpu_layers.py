"""The parts of layers as a GPU runs them: each reads rows that a norm has prepared, and says what to add to the stream.

Which parts a layer has is read off its class; what a family's file loads and computes on a CPU is what runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.gpu.delta_net_launch import DeviceStates
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.expert_mixture import Mixture
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.layer_extras import Gating
from slipstream.kernels.gpu.paged_attention import AttentionScratch
from slipstream.models.delta_net import DeltaNetLayer
from slipstream.models.dflash import GatedLayer
from slipstream.models.gemma4 import Gemma4Layer
from slipstream.models.gpu_delta import GpuDeltaNet
from slipstream.models.gpu_moe import GpuExperts, GpuMoe
from slipstream.models.laguna import LagunaLayer
from slipstream.models.layers import BlockConvolution, TransformerLayer
from slipstream.models.moe import MoeLayer
from slipstream.models.qwen3_5 import GatedAttentionLayer

_PLAIN = (TransformerLayer, MoeLayer, LagunaLayer, GatedLayer, GatedAttentionLayer)  # and no classes below these


@dataclass(frozen=True, slots=True)
class RotaryPair:
    """cos, and sin with its first half negated, by position, on the device."""

    cos: Tensor
    sin: Tensor


class DevicePools(Protocol):
    """Keys and values on the device, and where rows that do not count may store theirs."""

    @property
    def target(self) -> Sequence[tuple[Tensor, Tensor]]: ...
    @property
    def scratch_place(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DevicePass:
    """What the parts of a stack need to know of the rows on their way through it."""

    rows: DeviceRows
    pools: DevicePools
    scratch: AttentionScratch
    states: DeviceStates | None = None
    sides: Tensor | None = None  # what a family gives its layers beside the stream: bf16 [rows, layers, width]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is added to the stream: experts' answers, or rows in bf16 and their bias, normed first if there is a norm.

    With a norm there may be other rows beside them, each of both normed by itself before, and a scale of the whole
    stream; without one, the rows may be a product in parts.
    """

    rows: Tensor | Mixture
    bias: Tensor | None = None
    norm: Tensor | None = None
    beside: Tensor | None = None
    beside_norms: Tensor | None = None
    scale: float = 1.0


class Part(Protocol):
    """`norms` is what the rows it reads are normed with: one line, several for several kinds of rows, or no norm."""

    norms: Tensor | None

    def __call__(self, normed: Tensor, step: DevicePass) -> Delta: ...


def layer_parts(
    kernels: GpuKernels, layer: TransformerLayer, index: int, pool: int, rotary: RotaryPair, device: torch.device
) -> list[Part]:
    """The parts of a model's layer, in their order; `pool` is the layer whose keys and values it reads."""
    if isinstance(layer, Gemma4Layer):
        side = [GemmaSide(kernels, layer, index)] if layer.side_gate is not None else []
        return [Attention(kernels, layer, pool, rotary), GemmaFeeder(kernels, layer), *side]
    if isinstance(layer, DeltaNetLayer):
        return [Recurrence(kernels, layer, device), Feeder(kernels, layer)]
    if type(layer) not in _PLAIN:
        raise ConfigError("this model has layers that do not run on a GPU yet", "use --device cpu")
    if layer.attention_conv is None or layer.mlp_conv is None:
        return [Attention(kernels, layer, pool, rotary), Feeder(kernels, layer)]
    mixer, feeder = Attention(kernels, layer, pool, rotary, in_parts=False), Feeder(kernels, layer, in_parts=False)
    return [Convolved(kernels, mixer, layer.attention_conv, device), Convolved(kernels, feeder, layer.mlp_conv, device)]


@dataclass(frozen=True, slots=True)
class _Gate:
    """What weighs an attention's result before its output matrix: so many columns, which stand behind qkv."""

    kind: Gating
    columns: int
    bias: Tensor | None = None


def _gate_of(layer: TransformerLayer) -> _Gate | None:
    if isinstance(layer, GatedAttentionLayer):
        return _Gate("sigmoid", layer.shape.heads * layer.shape.head_dim, layer.gate_bias)
    if layer.head_gate is not None:
        return _Gate("softplus", layer.head_gate.width)
    return None


class Attention:
    """Attention over pages, perhaps gated; Gemma's are normed behind it and not scaled within."""

    def __init__(
        self, kernels: GpuKernels, layer: TransformerLayer, pool: int, rotary: RotaryPair, in_parts: bool = True
    ) -> None:
        """`in_parts`: who reads the result can add up the parts of a product; Gemma's norms cannot."""
        self.norms: Tensor | None = layer.input_norm
        self._kernels = kernels
        self._layer = layer
        self._pool = pool
        self._rotary = rotary
        self._gate = _gate_of(layer)
        self._is_gemma = isinstance(layer, Gemma4Layer)
        self._scale = 1.0 if self._is_gemma else layer.shape.head_dim**-0.5
        self._last_product = kernels.multiply_in_parts if in_parts and not self._is_gemma else kernels.multiply

    def __call__(self, normed: Tensor, step: DevicePass) -> Delta:
        layer, shape, kernels, rows = self._layer, self._layer.shape, self._kernels, step.rows
        keys, values = step.pools.target[self._pool]
        product, gate = kernels.multiply(layer.qkv, normed), self._gate
        qkv = product if gate is None else product[:, : product.shape[1] - gate.columns]
        queries = qkv.new_empty(qkv.shape[0], shape.heads, shape.head_dim)
        kernels.rotary_write(
            qkv,
            layer.qkv_bias,
            layer.q_norm,
            layer.k_norm,
            shape.rms_eps,
            self._rotary.cos,
            self._rotary.sin,
            rows.positions,
            rows.places,
            queries,
            keys,
            values,
            self._is_gemma,
        )
        if rows.kind == "block" and layer.pattern.causal:
            rows = replace(rows, kind="chain")  # a block whose rows see nothing behind them
        mixed = qkv.new_empty(qkv.shape[0], shape.heads * shape.head_dim)
        kernels.paged_attention(queries, keys, values, rows, self._scale, layer.pattern.window, mixed, step.scratch)
        if gate is not None:
            found, mixed = mixed, torch.empty_like(mixed)
            kernels.gate_mul(found, product[:, -gate.columns :], gate.bias, mixed, gate.kind)
        norm = layer.post_norm if self._is_gemma else None
        return Delta(self._last_product(layer.output, mixed), layer.output_bias, norm)


class Recurrence:
    """A gated delta net."""

    def __init__(self, kernels: GpuKernels, layer: DeltaNetLayer, device: torch.device) -> None:
        self.norms: Tensor | None = layer.input_norm
        self._net = GpuDeltaNet(kernels, layer, device)

    def __call__(self, normed: Tensor, step: DevicePass) -> Delta:
        assert step.states is not None, "the rows of a recurrent target come with their states"
        return Delta(self._net(normed, step.rows, step.states))


class Feeder:
    """The MLP of a layer, or the experts in its place."""

    def __init__(self, kernels: GpuKernels, layer: TransformerLayer, in_parts: bool = True) -> None:
        self.norms: Tensor | None = layer.post_norm
        self._kernels = kernels
        self._last_product = kernels.multiply_in_parts if in_parts else kernels.multiply
        self._layer = layer
        moe = layer.moe if isinstance(layer, MoeLayer) else None
        self._moe = GpuMoe(kernels, moe) if moe is not None else None

    def __call__(self, normed: Tensor, step: DevicePass) -> Delta:
        if self._moe is not None:
            return Delta(self._moe(normed, step.rows, step.pools.scratch_place))
        layer, kernels = self._layer, self._kernels
        gate_up = kernels.multiply(layer.gate_up, normed)
        inner = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        kernels.silu_mul(gate_up, layer.gate_up_bias, inner)
        return Delta(self._last_product(layer.down, inner), layer.down_bias)


class GemmaFeeder:
    """Gemma's MLP, and the experts that may stand beside it; of both, the last part of a layer scales the stream."""

    def __init__(self, kernels: GpuKernels, layer: Gemma4Layer) -> None:
        self.norms: Tensor | None = layer.pre_mlp_norm
        self._kernels = kernels
        self._layer = layer
        self._scale = layer.scalar if layer.side_gate is None else 1.0
        self._experts: GpuExperts | None = None
        self._beside_norms: Tensor | None = None
        if layer.experts is not None:
            own = layer.experts
            self._experts = GpuExperts(kernels, own.router, own.experts)
            self.norms = torch.stack((layer.pre_mlp_norm, own.router_scale, own.pre_norm))
            self._beside_norms = torch.stack((own.mlp_norm, own.post_norm))

    def __call__(self, normed: Tensor, step: DevicePass) -> Delta:
        layer = self._layer
        if layer.experts is None or self._experts is None:
            return Delta(self._feed(normed), norm=layer.post_mlp_norm, scale=self._scale)
        found = self._experts(normed[1], normed[2], step.rows, step.pools.scratch_place, layer.experts.expert_scale)
        mixed = torch.empty_like(normed[2])
        self._kernels.combine(found, mixed)
        return Delta(
            self._feed(normed[0]),
            norm=layer.post_mlp_norm,
            beside=mixed,
            beside_norms=self._beside_norms,
            scale=self._scale,
        )

    def _feed(self, normed: Tensor) -> Tensor:
        kernels = self._kernels
        gate_up = kernels.multiply(self._layer.gate_up, normed)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = gate_up.new_empty(up.shape)
        kernels.gate_mul(up, gate, None, inner, "gelu")
        return kernels.multiply(self._layer.down, inner)


class GemmaSide:
    """What a layer makes of its own embedding of the row's token; it reads the stream as it is."""

    def __init__(self, kernels: GpuKernels, layer: Gemma4Layer, index: int) -> None:
        self.norms: Tensor | None = None
        self._kernels = kernels
        self._layer = layer
        self._index = index

    def __call__(self, normed: Tensor, step: DevicePass) -> Delta:
        layer, kernels = self._layer, self._kernels
        assert step.sides is not None and layer.side_gate is not None and layer.side_up is not None
        side = step.sides[:, self._index]
        gated = normed.new_empty(side.shape)
        kernels.gate_mul(side, kernels.multiply(layer.side_gate, normed), None, gated, "gelu")
        return Delta(kernels.multiply(layer.side_up, gated), norm=layer.side_norm, scale=layer.scalar)


class Convolved:
    """A part of a draft layer between two convolutions over the rows of a block."""

    def __init__(self, kernels: GpuKernels, part: Part, convolution: BlockConvolution, device: torch.device) -> None:
        self.norms = part.norms
        self._kernels = kernels
        self._part = part
        self._projection = convolution.projection
        self._base = convolution.base.flatten(2).to(device)

    def __call__(self, normed: Tensor, step: DevicePass) -> Delta:
        kernels, each = self._kernels, step.rows.each
        dynamic = kernels.multiply(self._projection, normed)
        entered, left = torch.empty_like(normed), torch.empty_like(normed)
        kernels.convolve(normed, None, dynamic, self._base, False, each, entered)
        found = self._part(entered, step)
        assert isinstance(found.rows, Tensor), "drafters have no experts"
        kernels.convolve(found.rows, found.bias, dynamic, self._base, True, each, left)
        return Delta(left)
