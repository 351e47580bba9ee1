"""What layers consist of, said once for all devices: parts with their matrices and numbers, and how they are loaded.

A layer is a list of sublayers. A sublayer norms the stream, runs one part on the normed rows, and adds what the part
finds to the stream. Nothing in this file computes: `models/cpu/part_runs.py` and `models/gpu/device_parts.py` each have
one table from the type of a part to the code that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from slipstream.formats.weight_files import WeightTensor
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.rope import RopeConfig, partial_rows
from slipstream.models.weights import Embedding, Weights

Activation = Literal["silu", "gelu"]
MlpSources = tuple[list[WeightTensor], list[WeightTensor]]  # of a gated MLP: the tensors of gate and up, and of down
_GATE_UP = ("gate_proj", "up_proj")
RotaryRows = Callable[[int, int], Tensor]  # (heads, head_dim) -> the row order that undoes a file's interleaving


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The numbers of a layer, and the fields that the configs of targets and drafters have in common."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeConfig
    qk_norm: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False

    def layer(self, index: int) -> Self:
        """Returns the numbers of one layer: those of the config itself, unless a family's layers differ."""
        return self

    def pattern(self, index: int) -> AttentionPattern:
        """Returns which keys a layer's rows see."""
        return AttentionPattern()

    def pool(self, index: int) -> int:
        """Returns the index of the stored keys and values that a layer reads."""
        return index


class LayerPart(Protocol):
    """What stands inside a sublayer; its type decides which code runs it on a device."""

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that multiply rows; of many experts it has one, which is enough to check how they sum."""
        ...


@dataclass(slots=True, eq=False)
class HeadGate:
    """Weighs the result of attention before its output matrix, by a function of the rows that attention read."""

    kind: Literal["softplus", "sigmoid"]
    columns: int  # one number per head, or one per dimension of every head
    matrix: Matrix | None  # None: the gate's rows stand after those of queries, keys and values
    bias: Tensor | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Attention:
    """Attention over pages, with the query, key and value matrices fused into one."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    pattern: AttentionPattern
    pool: int  # which of the stored keys and values this layer reads, and writes if it has keys of its own
    scale: float  # what queries are multiplied by before their products with keys
    qkv: Matrix
    qkv_bias: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    gate: HeadGate | None = None
    owns_keys: bool = True  # False: `qkv` has queries only, and an earlier layer stored the keys and values
    owns_values: bool = True  # False: the keys, before their norm and rotation, are the values
    norms_values: bool = False  # values are normed without weights before they are stored

    @property
    def matrices(self) -> list[Matrix]:
        gate = [] if self.gate is None or self.gate.matrix is None else [self.gate.matrix]
        return [self.qkv, self.output, *gate]


@dataclass(slots=True, eq=False)
class Mlp:
    """A gated MLP: `down(activation(gate) * up)`, with the gate and up matrices fused into one."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = "silu"

    @property
    def matrices(self) -> list[Matrix]:
        return [self.gate_up, self.down]


@dataclass(slots=True, eq=False)
class SideInput:
    """Adds what a layer makes of its own embedding of the row's token: `up(gelu(gate(stream)) * embedding)`."""

    index: int  # the layer's place in the side embeddings
    gate: Matrix
    up: Matrix

    @property
    def matrices(self) -> list[Matrix]:
        return [self.gate, self.up]


@dataclass(slots=True, eq=False)
class SideEmbeddings:
    """Gives every layer an embedding of every row: one of the row's token, and one computed from the first stream."""

    embed: Embedding
    projection: Matrix
    norm: Tensor
    layers: int
    size: int


@dataclass(slots=True, eq=False)
class BlockConvolution:
    """A short causal convolution over the rows of a draft block, around a part: one kernel before it, one after it.

    Each kernel is a learnt base plus a part computed from the sublayer's rows, the same for a group of channels.
    """

    base: Tensor  # [2, kernel size, groups, channels of a group]
    projection: Matrix
    block_size: int


@dataclass(slots=True, eq=False)
class Sublayer:
    """`stream + post_norm(part(norm(stream)))`; a norm that is None is left out."""

    part: LayerPart
    norm: Tensor | None
    post_norm: Tensor | None = None
    convolution: BlockConvolution | None = None  # stands around the part, inside the norms


@dataclass(slots=True, eq=False)
class Layer:
    """Sublayers in the order in which they run, and a number that multiplies the stream after the last of them."""

    sublayers: Sequence[Sublayer]
    scalar: float = 1.0

    @property
    def parts(self) -> list[LayerPart]:
        return [sublayer.part for sublayer in self.sublayers]

    @property
    def kind(self) -> tuple[type[LayerPart], ...]:
        """Layers with parts of the same types in the same order are of one kind."""
        return tuple(map(type, self.parts))

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices that multiply rows of the stream."""
        return [matrix for part in self.parts for matrix in part.matrices]


@dataclass(slots=True)
class Projections:
    """The tensors of queries, keys and values by the letter of each, on their way into one matrix."""

    sources: dict[str, WeightTensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    joined: list[WeightTensor] = field(default_factory=list)  # rows of a gate that are multiplied with them


def load_projections(
    weights: Weights, shape: LayerShape, prefix: str, rotary_rows: RotaryRows | None = None, letters: str = "qkv"
) -> Projections:
    """Takes the projections that a layer has, with rows in the order that a rotation of whole heads needs."""
    if shape.rope.partial:
        rotary_rows = partial(partial_rows, dim=shape.rope.dim)
    found = Projections()
    for letter in letters:
        heads = shape.heads if letter == "q" else shape.kv_heads
        order = rotary_rows(heads, shape.head_dim) if rotary_rows is not None and letter != "v" else None
        source = _projection(weights, shape, prefix, letter, heads)
        found.sources[letter] = source if order is None else source.rows(order)
        if shape.attention_bias:
            bias = weights.vector(f"{prefix}{letter}_proj.bias", heads * shape.head_dim)
            found.biases[letter] = bias if order is None else bias[order]
    return found


def _projection(weights: Weights, shape: LayerShape, prefix: str, letter: str, heads: int) -> WeightTensor:
    """Takes one of the three projections; some drafters have all three in one tensor."""
    fused = prefix + "qkv_proj.weight"
    if not weights.has(fused):
        return weights.source(f"{prefix}{letter}_proj.weight", (heads * shape.head_dim, shape.hidden_size))
    counts = torch.tensor([shape.heads, shape.kv_heads, shape.kv_heads]) * shape.head_dim
    whole = weights.source(fused, (int(counts.sum()), shape.hidden_size))
    return whole.rows(torch.arange(int(counts.sum())).split(counts.tolist())["qkv".index(letter)])


def load_gate(
    weights: Weights,
    kind: Literal["softplus", "sigmoid"],
    source: WeightTensor,
    projections: Projections,
    bias: Tensor | None = None,
) -> HeadGate:
    """Loads a gate with its own matrix, or adds its rows to `projections` where a device multiplies both at once."""
    if weights.joins_gates:
        projections.joined.append(source)
        return HeadGate(kind, source.shape[0], None, bias)
    return HeadGate(kind, source.shape[0], weights.matrix([source]), bias)


def load_attention(
    weights: Weights,
    config: LayerShape,
    index: int,
    prefix: str,
    projections: Projections,
    gate: HeadGate | None = None,
) -> Attention:
    """Loads the attention of layer `index`; it has keys and values of its own if `projections` has them."""
    shape = config.layer(index)
    hidden, width, owns_keys = shape.hidden_size, shape.heads * shape.head_dim, "k" in projections.sources
    return Attention(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope=shape.rope,
        pattern=config.pattern(index),
        pool=config.pool(index),
        scale=shape.head_dim**-0.5,
        qkv=weights.matrix([*projections.sources.values(), *projections.joined]),
        qkv_bias=torch.cat(list(projections.biases.values())) if projections.biases else None,
        output=weights.linear(prefix + "o_proj.weight", hidden, width),
        output_bias=weights.vector(prefix + "o_proj.bias", hidden) if shape.attention_bias else None,
        q_norm=_head_norm(weights, shape, prefix + "q_norm.weight") if shape.qk_norm else None,
        k_norm=_head_norm(weights, shape, prefix + "k_norm.weight") if shape.qk_norm and owns_keys else None,
        gate=gate,
        owns_keys=owns_keys,
        owns_values="v" in projections.sources,
    )


def _head_norm(weights: Weights, shape: LayerShape, name: str) -> Tensor:
    norm = weights.norm(name, shape.head_dim)
    return norm[partial_rows(1, shape.head_dim, shape.rope.dim)] if shape.rope.partial else norm


def mlp_sources(weights: Weights, prefix: str, inner: int, hidden: int) -> MlpSources:
    gate_up = [weights.source(f"{prefix}{name}.weight", (inner, hidden)) for name in _GATE_UP]
    return gate_up, [weights.source(prefix + "down_proj.weight", (hidden, inner))]


def load_mlp(weights: Weights, shape: LayerShape, prefix: str, activation: Activation = "silu") -> Mlp:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    gate_up, down = map(weights.matrix, mlp_sources(weights, prefix, inner, hidden))
    if not shape.mlp_bias:
        return Mlp(gate_up, down, activation=activation)
    gate_up_bias = torch.cat([weights.vector(f"{prefix}{name}.bias", inner) for name in _GATE_UP])
    return Mlp(gate_up, down, gate_up_bias, weights.vector(prefix + "down_proj.bias", hidden), activation)


def load_norms(weights: Weights, shape: LayerShape, prefix: str) -> tuple[Tensor, Tensor]:
    """Loads the norms that most families have: one before the part that mixes rows, one before the MLP or experts."""
    first, second = (f"{prefix}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))
    return weights.norm(first, shape.hidden_size), weights.norm(second, shape.hidden_size)
