"""Mixtures of experts as parts of a layer: a router that picks a few experts for every row, and the experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.linear import Matrix
from slipstream.models.config_reading import ConfigReader
from slipstream.models.layers import Activation, Layer, Mlp, MlpSources, mlp_sources
from slipstream.models.weights import Weights

# The GGUF names of a layer's experts, without the prefix `blk.N.` of the layer.
GGUF_MOE = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_proj": "ffn_gate_exps.weight",
    "mlp.experts.up_proj": "ffn_up_exps.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}


# The keys of a mixture's numbers: that of config.json files, and that of GGUF files without the architecture and the
# dot before it.
_KEYS = {
    "hidden_size": ("hidden_size", "embedding_length"),
    "experts": ("num_experts", "expert_count"),
    "active": ("num_experts_per_tok", "expert_used_count"),
    "intermediate_size": ("moe_intermediate_size", "expert_feed_forward_length"),
}


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The numbers of a mixture and the rule of its router."""

    hidden_size: int
    experts: int
    active: int  # how many experts each row goes through
    intermediate_size: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # the shares of a row's experts are scaled to add up to one
    scale: float = 1.0  # multiplies the sum of the experts' answers
    router_softcap: float = 0.0
    selection_bias: bool = False  # a bias that counts in the choice of experts and not in their shares
    shared_size: int = 0  # inner width of the shared expert, which every row goes through; 0: there is none
    shared_gate: bool = False  # a sigmoid of the row weighs the shared expert

    def __post_init__(self) -> None:
        if self.active > self.experts:
            raise ConfigError(f"{self.active} of {self.experts} experts cannot be active at once")

    @classmethod
    def read(cls, config: ConfigReader, arch: str = "", **own: Any) -> MoeShape:
        """Reads the numbers that families spell alike; `own` has those that a family spells in a way of its own."""
        return cls(**config.numbers(_KEYS, arch, **own))


@dataclass(slots=True, eq=False)
class RoutedExperts:
    """A router and the experts of one layer, each a gated MLP."""

    shape: MoeShape
    router: Matrix
    router_bias: Tensor | None
    gate_up: Sequence[Matrix]
    down: Sequence[Matrix]
    activation: Activation
    has_shared: bool  # the shared expert stands after the others in `gate_up` and `down`

    @property
    def matrices(self) -> list[Matrix]:
        """The router and one expert of many."""
        return [self.router, self.gate_up[0], self.down[0]]


@dataclass(slots=True, eq=False)
class ExpertBlock:
    """Routed experts in the place of an MLP, and perhaps a shared expert that every row goes through."""

    routed: RoutedExperts
    shared: Mlp | None  # None: there is none, or it stands among the routed experts
    shared_gate: Matrix | None

    @property
    def matrices(self) -> list[Matrix]:
        shared = self.shared.matrices if self.shared is not None else []
        return [*self.routed.matrices, *shared, *([] if self.shared_gate is None else [self.shared_gate])]


@dataclass(slots=True, eq=False)
class MlpBesideExperts:
    """An MLP and routed experts that read the same stream, each with norms of its own; their answers are added.

    This part reads the stream as it is, because the MLP, the router and the experts norm it in three different ways.
    """

    mlp: Mlp
    mlp_norm: Tensor
    mlp_post_norm: Tensor
    routed: RoutedExperts
    router_norm: Tensor
    expert_norm: Tensor
    expert_post_norm: Tensor
    expert_scale: Tensor  # one number per expert, which multiplies that expert's share

    @property
    def matrices(self) -> list[Matrix]:
        return [*self.mlp.matrices, *self.routed.matrices]


def routed_experts(layers: Sequence[Layer]) -> list[RoutedExperts]:
    """Returns the experts of all layers that have some."""
    parts = [part for layer in layers for part in layer.parts]
    return [part.routed for part in parts if isinstance(part, ExpertBlock | MlpBesideExperts)]


def load_experts(
    weights: Weights,
    router_name: str,
    prefix: str,
    shape: MoeShape,
    activation: Activation = "silu",
    router_bias: Tensor | None = None,
    shared: MlpSources | None = None,
) -> RoutedExperts:
    """Loads the experts of one layer; the shared one joins them where a device keeps all of them in one stack."""
    router = weights.linear(router_name, shape.experts, shape.hidden_size)
    bytes_before, products_before = weights.step_bytes, weights.row_products
    own = _expert_sources(weights, prefix, shape)
    each = list(zip(*own, strict=True))  # gate and up of every expert, and down of every expert
    has_shared = (
        shared is not None
        and shape.shared_size == shape.intermediate_size
        and all(weights.takes_among(*given) for given in zip(each, shared, strict=True))
    )
    if shared is not None and has_shared:
        own.append(shared)
    gate_up, down = (weights.experts(sources) for sources in zip(*own, strict=True))
    # A row reads only the experts that it chose, so only that share of the bytes and products counts.
    active, count = shape.active + has_shared, len(own)
    weights.step_bytes = bytes_before + (weights.step_bytes - bytes_before) * active // count
    weights.row_products = products_before + (weights.row_products - products_before) * active // count
    return RoutedExperts(shape, router, router_bias, gate_up, down, activation, has_shared)


def _expert_sources(weights: Weights, prefix: str, shape: MoeShape) -> list[MlpSources]:
    """Takes each expert's tensors, from one tensor of all, from one per projection, or from one per expert."""
    count, inner, hidden = shape.experts, shape.intermediate_size, shape.hidden_size
    if not weights.has(prefix + "down_proj"):
        return [mlp_sources(weights, f"{prefix}{expert}.", inner, hidden) for expert in range(count)]
    if weights.has(prefix + "gate_up_proj"):
        joined = [weights.source(prefix + "gate_up_proj", (count, 2 * inner, hidden))]
    else:
        joined = [weights.source(prefix + name, (count, inner, hidden)) for name in ("gate_proj", "up_proj")]
    down = weights.source(prefix + "down_proj", (count, hidden, inner))
    return [([tensor.part(expert) for tensor in joined], [down.part(expert)]) for expert in range(count)]


def load_expert_block(weights: Weights, prefix: str, shape: MoeShape) -> ExpertBlock:
    """Loads experts in the place of an MLP; `prefix` begins the names of their tensors."""
    name = prefix + "experts.e_score_correction_bias"
    bias = weights.vector(name, shape.experts) if shape.selection_bias else None
    shared = None
    if shape.shared_size:
        shared = mlp_sources(weights, prefix + "shared_expert.", shape.shared_size, shape.hidden_size)
    routed = load_experts(weights, prefix + "gate.weight", prefix + "experts.", shape, router_bias=bias, shared=shared)
    block = ExpertBlock(routed, None, None)
    if shared is not None and not routed.has_shared:
        gate_up, down = map(weights.matrix, shared)
        block.shared = Mlp(gate_up, down)
    if shape.shared_gate:
        block.shared_gate = weights.linear(prefix + "shared_expert_gate.weight", 1, shape.hidden_size)
    return block
