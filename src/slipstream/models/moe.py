"""Mixtures of experts: a router that picks a few experts for every row, the experts, and those every row passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.formats.weight_files import WeightTensor
from slipstream.kernels.cpu.expert_products import Activation, mix_experts
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.torch_kernels import row_by_row, softcapped
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.layers import LayerShape, TransformerLayer
from slipstream.models.weights import Weights

# the GGUF names of a layer's experts, behind `blk.N.`
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


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The numbers of a mixture and the rule of its router."""

    hidden_size: int
    experts: int
    active: int  # experts per row
    intermediate_size: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # the shares of a row's experts add up to one
    scale: float = 1.0  # of the experts' sum
    router_softcap: float = 0.0
    selection_bias: bool = False  # counts in the choice of experts and not in their shares
    shared_size: int = 0  # of the expert every row passes; 0: there is none
    shared_gate: bool = False  # a sigmoid of the row weighs that expert

    def __post_init__(self) -> None:
        if self.active > self.experts:
            raise ConfigError(f"{self.active} of {self.experts} experts cannot be active at once")


class Router:
    """Chooses experts and their shares for every row."""

    def __init__(self, weights: Weights, name: str, shape: MoeShape, bias: Tensor | None = None) -> None:
        self.shape = shape
        self.matrix = weights.matrix([weights.source(name, (shape.experts, shape.hidden_size))])
        self.bias = bias

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [rows, active] from the best on, and what share of the answer each gives."""
        shape = self.shape
        logits = softcapped(self.matrix(rows), shape.router_softcap)
        sigmoid = shape.scores == "sigmoid"
        scores = row_by_row(torch.sigmoid, logits) if sigmoid else torch.softmax(logits, dim=-1)
        chosen = torch.topk(scores if self.bias is None else scores + self.bias, shape.active, dim=-1).indices
        shares = scores.gather(-1, chosen)
        if shape.renormalise:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return chosen, shares


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """The tensors of an expert or of several: gate and up of each, and down of each."""

    gate_up: list[list[WeightTensor]]
    down: list[list[WeightTensor]]


class Experts:
    """The experts of one layer, each a gated MLP."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        shape: MoeShape,
        activation: Activation = F.silu,
        shared: GatedMlp | None = None,
    ) -> None:
        """`shared` is what every row passes; where weights are kept so, it stands behind the others."""
        self.activation = activation
        bytes_before, products_before = weights.step_bytes, weights.row_products
        own = _expert_sources(weights, prefix, shape)
        self.has_shared = (
            shared is not None
            and shape.shared_size == shape.intermediate_size
            and weights.takes_among(own.gate_up, shared.gate_up[0])
            and weights.takes_among(own.down, shared.down[0])
        )
        if shared is not None and self.has_shared:
            own = GatedMlp(own.gate_up + shared.gate_up, own.down + shared.down)
        self.gate_up = weights.experts(own.gate_up)
        self.down = weights.experts(own.down)
        # a row reads the experts it chose and no others
        active, count = shape.active + self.has_shared, len(own.down)
        weights.step_bytes = bytes_before + (weights.step_bytes - bytes_before) * active // count
        weights.row_products = products_before + (weights.row_products - products_before) * active // count

    def __call__(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return mix_experts(self.gate_up, self.down, rows, chosen, shares, self.activation)


def _expert_sources(weights: Weights, prefix: str, shape: MoeShape) -> GatedMlp:
    """The tensors of every expert: all in one, in one per projection, or one by one."""
    count, inner, hidden = shape.experts, shape.intermediate_size, shape.hidden_size
    if not weights.has(prefix + "down_proj"):
        each = [_mlp_sources(weights, f"{prefix}{expert}.", inner, hidden) for expert in range(count)]
        return GatedMlp([one.gate_up[0] for one in each], [one.down[0] for one in each])
    if weights.has(prefix + "gate_up_proj"):
        joined = [weights.source(prefix + "gate_up_proj", (count, 2 * inner, hidden))]
    else:
        joined = [weights.source(prefix + name, (count, inner, hidden)) for name in ("gate_proj", "up_proj")]
    down = weights.source(prefix + "down_proj", (count, hidden, inner))
    return GatedMlp(
        [[tensor.part(expert) for tensor in joined] for expert in range(count)],
        [[down.part(expert)] for expert in range(count)],
    )


def _mlp_sources(weights: Weights, prefix: str, inner: int, hidden: int) -> GatedMlp:
    """The tensors of one expert that has its own."""
    gate_up = [weights.source(f"{prefix}{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
    return GatedMlp([gate_up], [[weights.source(prefix + "down_proj.weight", (hidden, inner))]])


class MoeBlock:
    """What stands in the place of an MLP: routed experts and perhaps one that every row passes."""

    def __init__(self, weights: Weights, prefix: str, shape: MoeShape) -> None:
        self.shape = shape
        name = prefix + "experts.e_score_correction_bias"
        bias = weights.vector(name, shape.experts) if shape.selection_bias else None
        self.router = Router(weights, prefix + "gate.weight", shape, bias)
        shared = None
        if shape.shared_size:
            shared = _mlp_sources(weights, prefix + "shared_expert.", shape.shared_size, shape.hidden_size)
        self.experts = Experts(weights, prefix + "experts.", shape, shared=shared)
        self.shared_gate_up: Matrix | None = None
        self.shared_down: Matrix | None = None
        self.shared_gate: Matrix | None = None
        if shared is not None and not self.experts.has_shared:
            self.shared_gate_up = weights.matrix(shared.gate_up[0])
            self.shared_down = weights.matrix(shared.down[0])
        if shape.shared_gate:
            name = prefix + "shared_expert_gate.weight"
            self.shared_gate = weights.matrix([weights.source(name, (1, shape.hidden_size))])

    @property
    def matrices(self) -> list[Matrix]:
        """All that every row passes, and one expert of many."""
        found = (self.shared_gate_up, self.shared_down, self.shared_gate)
        always = [matrix for matrix in found if matrix is not None]
        return [self.router.matrix, self.experts.gate_up[0], self.experts.down[0], *always]

    def __call__(self, rows: Tensor) -> Tensor:
        mixed = self.experts(rows, *self.router(rows))
        if self.shape.scale != 1.0:
            mixed = mixed * self.shape.scale
        if self.shared_gate_up is None or self.shared_down is None:
            return mixed
        gate, up = self.shared_gate_up(rows).chunk(2, dim=-1)
        shared = self.shared_down(F.silu(gate) * up)
        if self.shared_gate is not None:
            shared = row_by_row(torch.sigmoid, self.shared_gate(rows)) * shared
        return mixed + shared


class MoeLayer(TransformerLayer):
    """A transformer layer with a mixture of experts where `moe` says so, and its plain MLP elsewhere."""

    def __init__(
        self, weights: Weights, shape: LayerShape, prefix: str, pattern: AttentionPattern, moe: MoeShape | None
    ) -> None:
        self._moe_shape = moe
        self.moe: MoeBlock | None = None
        super().__init__(weights, shape, prefix, pattern)

    @property
    def matrices(self) -> list[Matrix]:
        return super().matrices if self.moe is None else [*self.mixing, *self.moe.matrices]

    def _load_mlp(self, weights: Weights, prefix: str) -> None:
        if self._moe_shape is None:
            super()._load_mlp(weights, prefix)
        else:
            self.moe = MoeBlock(weights, prefix, self._moe_shape)

    def _feed(self, y: Tensor) -> Tensor:
        return super()._feed(y) if self.moe is None else self.moe(y)
