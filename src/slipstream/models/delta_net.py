"""A gated delta net as a part of a layer: a head keeps a matrix, which each row fades, changes and then reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.cpu.delta_rule import DeltaRule, DeltaShape
from slipstream.kernels.cpu.linear import Matrix
from slipstream.models.weights import Weights


@dataclass(slots=True, eq=False)
class DeltaNet:
    """Mixes rows through a recurrent state, which comes with the batch, instead of attention over stored keys."""

    shape: DeltaShape
    state: int  # the layer's place among the recurrent layers
    inputs: Matrix  # computes what the convolution reads, and the output's gate
    gates: Matrix | None  # computes how much is written and how much stays; None: its rows stand last in `inputs`
    output: Matrix
    head_norm: Tensor
    rule: DeltaRule

    @property
    def value_width(self) -> int:
        return self.shape.value_heads * self.shape.value_dim

    @property
    def matrices(self) -> list[Matrix]:
        return [self.inputs, *([] if self.gates is None else [self.gates]), self.output]


def load_delta_net(
    weights: Weights, delta: DeltaShape, prefix: str, hidden_size: int, state: int, as_gguf: bool
) -> DeltaNet:
    """Loads a delta net; `as_gguf` says that llama.cpp's converter has changed the tensors of the recurrence."""
    width = delta.value_heads * delta.value_dim
    inputs = [
        weights.source(prefix + "in_proj_qkv.weight", (delta.channels, hidden_size)),
        weights.source(prefix + "in_proj_z.weight", (width, hidden_size)),
    ]
    names = (prefix + "in_proj_b.weight", prefix + "in_proj_a.weight")
    gates = [weights.source(name, (delta.value_heads, hidden_size)) for name in names]
    return DeltaNet(
        delta,
        state,
        inputs=weights.matrix([*inputs, *gates] if weights.joins_gates else inputs),
        gates=None if weights.joins_gates else weights.matrix(gates),
        output=weights.linear(prefix + "out_proj.weight", hidden_size, width),
        head_norm=weights.vector(prefix + "norm.weight", delta.value_dim),
        rule=_load_rule(weights, delta, prefix, as_gguf),
    )


def _load_rule(weights: Weights, delta: DeltaShape, prefix: str, as_gguf: bool) -> DeltaRule:
    rates, shift = (weights.vector(prefix + name, delta.value_heads) for name in ("A_log", "dt_bias"))
    if as_gguf:
        # llama.cpp's files have the rates themselves instead of their logarithms, and a flat kernel.
        kernel = weights.source(prefix + "conv1d.weight", (delta.channels, delta.kernel)).dense()
        return DeltaRule(delta, kernel, rates, shift)
    kernel = weights.source(prefix + "conv1d.weight", (delta.channels, 1, delta.kernel)).dense()
    return DeltaRule(delta, kernel[:, 0], -rates.exp(), shift)
