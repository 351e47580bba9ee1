"""A layer whose rows mix through a gated delta net: a matrix per head that fades, learns and answers."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cpu.delta_rule import DeltaRule, DeltaShape
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.torch_kernels import rms_norm
from slipstream.kernels.rows import AttentionPattern, RowBatch
from slipstream.models.layers import LayerShape, RotaryRows
from slipstream.models.moe import MoeLayer, MoeShape
from slipstream.models.weights import Weights


class DeltaNetLayer(MoeLayer):
    """Norm, delta net, norm, MLP or experts; the recurrent state comes with the batch."""

    def __init__(
        self,
        weights: Weights,
        shape: LayerShape,
        prefix: str,
        moe: MoeShape | None,
        delta: DeltaShape,
        state: int,
        as_gguf: bool,
    ) -> None:
        """`state` is the layer's place among the recurrent ones; `as_gguf` says how the file has its tensors."""
        self.delta, self.state, self._as_gguf = delta, state, as_gguf
        super().__init__(weights, shape, prefix, AttentionPattern(), moe)

    @property
    def matrices(self) -> list[Matrix]:
        feeding = self.moe.matrices if self.moe is not None else [self.gate_up, self.down]
        return [self.inputs, *([] if self.gates is None else [self.gates]), self.output, *feeding]

    def _load_mixer(self, weights: Weights, prefix: str, rotary_rows: RotaryRows | None) -> None:
        delta, hidden, prefix = self.delta, self.shape.hidden_size, prefix + "linear_attn."
        self._value_width = delta.value_heads * delta.value_dim
        # what the convolution reads and the output's gate; how much is written and how much forgotten
        inputs = [
            weights.source(prefix + "in_proj_qkv.weight", (delta.channels, hidden)),
            weights.source(prefix + "in_proj_z.weight", (self._value_width, hidden)),
        ]
        gates = [weights.source(f"{prefix}in_proj_{name}.weight", (delta.value_heads, hidden)) for name in ("b", "a")]
        self.inputs = weights.matrix([*inputs, *gates] if weights.joins_gates else inputs)
        self.gates = None if weights.joins_gates else weights.matrix(gates)
        self.output = weights.matrix([weights.source(prefix + "out_proj.weight", (hidden, self._value_width))])
        self.head_norm = weights.vector(prefix + "norm.weight", delta.value_dim)
        self.rule = self._load_rule(weights, prefix)

    def _load_rule(self, weights: Weights, prefix: str) -> DeltaRule:
        delta = self.delta
        rates, shift = (weights.vector(prefix + name, delta.value_heads) for name in ("A_log", "dt_bias"))
        if self._as_gguf:
            # these files have the rates themselves and a flat kernel
            kernel = weights.source(prefix + "conv1d.weight", (delta.channels, delta.kernel)).dense()
            return DeltaRule(delta, kernel, rates, shift)
        kernel = weights.source(prefix + "conv1d.weight", (delta.channels, 1, delta.kernel)).dense()
        return DeltaRule(delta, kernel[:, 0], -rates.exp(), shift)

    def recur(self, x: Tensor, batch: RowBatch) -> Tensor:
        """Rows [n, hidden] through the layer."""
        return self._mlp(x + self._recall(rms_norm(x, self.input_norm, self.shape.rms_eps), batch))

    def _recall(self, y: Tensor, batch: RowBatch) -> Tensor:
        assert batch.recurrent is not None, "the rows of a recurrent target come with their states"
        assert self.gates is not None, "a CPU keeps gates for themselves"
        inputs, gate = self.inputs(y).split([self.delta.channels, self._value_width], dim=-1)
        write, left = self.rule.gates(*self.gates(y).chunk(2, dim=-1))
        read = batch.recurrent.run(self.state, self.rule, inputs, write, left)
        read = rms_norm(read, self.head_norm, self.shape.rms_eps).view(y.shape[0], self._value_width)
        return self.output(read * F.silu(gate))
