"""Computes every part of a layer on a GPU, by launches that a graph can hold, from rows in bf16 to rows in bf16.

A part reads rows that a norm has prepared and returns what is to be added to the stream. The stack adds it in the
launch that norms the stream for the next part, so that the stream is read and written once per sublayer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.gpu.delta_net_launch import DeviceStates
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.expert_mixture import Mixture
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.paged_attention import AttentionScratch
from slipstream.models.delta_net import DeltaNet
from slipstream.models.gpu.device_experts import DeviceExpertBlock, DeviceExperts
from slipstream.models.layers import Attention, BlockConvolution, Layer, LayerPart, Mlp, SideInput, Sublayer
from slipstream.models.moe import ExpertBlock, MlpBesideExperts
from slipstream.models.rope import RopeConfig

Product = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class RotaryPair:
    """cos, and sin with its first half negated, by position, on the device."""

    cos: Tensor
    sin: Tensor


class DevicePools(Protocol):
    """Keys and values on the device, and the place for those of rows that do not count."""

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
    sides: Tensor | None = None  # embeddings of the layers' own: bf16 [rows, layers, size]


@dataclass(frozen=True, slots=True)
class DeviceSetting:
    """What the parts of one stack share."""

    kernels: GpuKernels
    rotaries: Mapping[RopeConfig, RotaryPair]
    eps: float  # of all norms of the model
    device: torch.device


@dataclass(frozen=True, slots=True)
class PartResult:
    """What a part adds to the stream: the answers of experts, or rows in bf16 and their bias.

    If the sublayer norms its result, there may be a second result `beside`; `rows` and `beside` are then normed, each
    with its line of `beside_norms`, and their sum is normed again. If it does not, the rows may be a product in parts,
    which the next launch adds up.
    """

    rows: Tensor | Mixture
    bias: Tensor | None = None
    beside: Tensor | None = None
    beside_norms: Tensor | None = None


class DevicePart(Protocol):
    """A part on a device; `norms` has the norms that the part itself declares, or None for the sublayer's."""

    norms: Tensor | None

    def __call__(self, normed: Tensor, step: DevicePass) -> PartResult: ...


@dataclass(frozen=True, slots=True)
class DeviceSublayer:
    """A part, the norms of the rows that it reads, and how its result joins the stream."""

    part: DevicePart
    norms: Tensor | None  # one line, several lines for several kinds of rows, or None for the stream itself
    post_norm: Tensor | None
    scale: float  # multiplies the stream after this sublayer


def device_layer(setting: DeviceSetting, layer: Layer) -> list[DeviceSublayer]:
    """Makes the sublayers of a layer as a GPU runs them."""
    last = len(layer.sublayers) - 1
    return [
        _device_sublayer(setting, sublayer, layer.scalar if index == last else 1.0)
        for index, sublayer in enumerate(layer.sublayers)
    ]


def _device_sublayer(setting: DeviceSetting, sublayer: Sublayer, scale: float) -> DeviceSublayer:
    """Makes one sublayer, and refuses one that the launches cannot compute.

    The launch that norms a result cannot add up a product in parts, and it is the only one that scales the stream.
    """
    kernels, plain = setting.kernels, sublayer.convolution is None and sublayer.post_norm is None
    make = _PARTS.get(type(sublayer.part))
    if make is None or (scale != 1.0 and sublayer.post_norm is None):
        raise not_on_a_gpu("layers")
    if isinstance(sublayer.part, ExpertBlock) and not plain:
        raise not_on_a_gpu("layers")
    part = make(setting, sublayer.part, kernels.multiply_in_parts if plain else kernels.multiply)
    if sublayer.convolution is not None:
        part = Convolved(setting, part, sublayer.convolution)
    norms = part.norms if part.norms is not None else sublayer.norm
    return DeviceSublayer(part, norms, sublayer.post_norm, scale)


def not_on_a_gpu(what: str) -> ConfigError:
    return ConfigError(f"this model has {what} that do not run on a GPU yet", "use --device cpu")


class DeviceAttention:
    """Attention over pages, perhaps with a gate on its result."""

    norms: Tensor | None = None

    def __init__(self, setting: DeviceSetting, part: Attention, last_product: Product) -> None:
        self._kernels = setting.kernels
        self._eps = setting.eps
        self._part = part
        self._rotary = setting.rotaries[part.rope]
        self._last_product = last_product

    def __call__(self, normed: Tensor, step: DevicePass) -> PartResult:
        part, kernels, rows, gate = self._part, self._kernels, step.rows, self._part.gate
        keys, values = step.pools.target[part.pool]
        product = kernels.multiply(part.qkv, normed)
        qkv = product if gate is None else product[:, : product.shape[1] - gate.columns]
        queries = qkv.new_empty(qkv.shape[0], part.heads, part.head_dim)
        kernels.rotary_write(
            qkv,
            part.qkv_bias,
            part.q_norm,
            part.k_norm,
            self._eps,
            self._rotary.cos,
            self._rotary.sin,
            rows.positions,
            rows.places,
            queries,
            keys,
            values,
            part.norms_values,
        )
        if rows.kind == "block" and part.pattern.causal:
            rows = replace(rows, kind="chain")  # the rows of this block see nothing after them
        mixed = qkv.new_empty(qkv.shape[0], part.heads * part.head_dim)
        kernels.paged_attention(queries, keys, values, rows, part.scale, part.pattern.window, mixed, step.scratch)
        if gate is not None:
            found, mixed = mixed, torch.empty_like(mixed)
            kernels.gate_mul(found, product[:, -gate.columns :], gate.bias, mixed, gate.kind)
        return PartResult(self._last_product(part.output, mixed), part.output_bias)


class DeviceDeltaNet:
    """A gated delta net: two products, and three launches between them."""

    norms: Tensor | None = None

    def __init__(self, setting: DeviceSetting, part: DeltaNet, last_product: Product) -> None:
        self._kernels = setting.kernels
        self._eps = setting.eps
        self._part = part
        self._rule = part.rule.to(setting.device)
        self._last_product = last_product

    def __call__(self, normed: Tensor, step: DevicePass) -> PartResult:
        """Computes the part's result; padding rows reach the output matrix as zeros."""
        kernels, part, delta, rows, states = self._kernels, self._part, self._part.shape, step.rows, step.states
        assert states is not None, "the rows of a recurrent target come with their states"
        if part.state == 0:
            kernels.delta.plan(rows, states)  # the first recurrent layer plans the walk for all of them
        sizes = [delta.channels, part.value_width, 2 * delta.value_heads]
        inputs, gate, gates = kernels.multiply(part.inputs, normed).split(sizes, dim=-1)
        kernels.delta.mix(inputs, gates, rows, self._rule, states, part.state)
        kernels.delta.recur(rows, states, part.state)
        weighed = normed.new_empty(gate.shape)
        kernels.delta.gate(gate, part.head_norm, self._eps, rows, states, weighed)
        return PartResult(self._last_product(part.output, weighed))


class DeviceMlp:
    """A gated MLP."""

    norms: Tensor | None = None

    def __init__(self, setting: DeviceSetting, part: Mlp, last_product: Product) -> None:
        if part.activation == "gelu" and part.gate_up_bias is not None:
            raise not_on_a_gpu("biases before a GELU")
        self._kernels = setting.kernels
        self._part = part
        self._last_product = last_product

    def __call__(self, normed: Tensor, step: DevicePass) -> PartResult:
        return PartResult(self.feed(normed), self._part.down_bias)

    def feed(self, normed: Tensor) -> Tensor:
        part, kernels = self._part, self._kernels
        gate_up = kernels.multiply(part.gate_up, normed)
        inner = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        if part.activation == "silu":
            kernels.silu_mul(gate_up, part.gate_up_bias, inner)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            kernels.gate_mul(up, gate, None, inner, "gelu")
        return self._last_product(part.down, inner)


class DeviceMixture:
    """Routed experts in the place of an MLP; the next norm's launch adds up their answers."""

    norms: Tensor | None = None

    def __init__(self, setting: DeviceSetting, part: ExpertBlock, last_product: Product) -> None:
        self._block = DeviceExpertBlock(setting.kernels, part)

    def __call__(self, normed: Tensor, step: DevicePass) -> PartResult:
        return PartResult(self._block(normed, step.rows, step.pools.scratch_place))


class DeviceMlpBesideExperts:
    """An MLP and experts that read the same stream, each through a norm of its own."""

    def __init__(self, setting: DeviceSetting, part: MlpBesideExperts, last_product: Product) -> None:
        self.norms: Tensor | None = torch.stack((part.mlp_norm, part.router_norm, part.expert_norm))
        self._kernels = setting.kernels
        self._mlp = DeviceMlp(setting, part.mlp, last_product)
        self._experts = DeviceExperts(setting.kernels, part.routed)
        self._expert_scale = part.expert_scale
        self._beside_norms = torch.stack((part.mlp_post_norm, part.expert_post_norm))

    def __call__(self, normed: Tensor, step: DevicePass) -> PartResult:
        scratch_place = step.pools.scratch_place
        found = self._experts(normed[1], normed[2], step.rows, scratch_place, self._expert_scale)
        mixed = torch.empty_like(normed[2])
        self._kernels.combine(found, mixed)
        return PartResult(self._mlp.feed(normed[0]), beside=mixed, beside_norms=self._beside_norms)


class DeviceSideInput:
    """What a layer makes of its own embedding of the row's token; it reads the stream itself."""

    norms: Tensor | None = None

    def __init__(self, setting: DeviceSetting, part: SideInput, last_product: Product) -> None:
        self._kernels = setting.kernels
        self._part = part
        self._last_product = last_product

    def __call__(self, normed: Tensor, step: DevicePass) -> PartResult:
        part, kernels = self._part, self._kernels
        assert step.sides is not None, "a model with side inputs has side embeddings"
        side = step.sides[:, part.index]
        gated = normed.new_empty(side.shape)
        kernels.gate_mul(side, kernels.multiply(part.gate, normed), None, gated, "gelu")
        return PartResult(self._last_product(part.up, gated))


class Convolved:
    """A part of a draft layer between two convolutions over the rows of a block."""

    def __init__(self, setting: DeviceSetting, part: DevicePart, convolution: BlockConvolution) -> None:
        self.norms = part.norms
        self._kernels = setting.kernels
        self._part = part
        self._projection = convolution.projection
        self._base = convolution.base.flatten(2).to(setting.device)

    def __call__(self, normed: Tensor, step: DevicePass) -> PartResult:
        kernels, each = self._kernels, step.rows.each
        dynamic = kernels.multiply(self._projection, normed)
        entered, left = torch.empty_like(normed), torch.empty_like(normed)
        kernels.convolve(normed, None, dynamic, self._base, False, each, entered)
        found = self._part(entered, step)
        assert isinstance(found.rows, Tensor), "no experts stand between convolutions"
        kernels.convolve(found.rows, found.bias, dynamic, self._base, True, each, left)
        return PartResult(left)


# Which class runs each type of part; a model with a part of another type is refused.
_PARTS: dict[type[LayerPart], Callable[[DeviceSetting, Any, Product], DevicePart]] = {
    Attention: DeviceAttention,
    DeltaNet: DeviceDeltaNet,
    Mlp: DeviceMlp,
    ExpertBlock: DeviceMixture,
    MlpBesideExperts: DeviceMlpBesideExperts,
    SideInput: DeviceSideInput,
}
