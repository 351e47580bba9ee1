"""The decoder stack that llama and qwen3 share: one forward over rows for prefill, decoding and verify alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.kernels.reference import rms_norm, rotate, row_attention, write_rows
from slipstream.kernels.rows import AttentionPattern, RowBatch
from slipstream.models.rope import RopeConfig, RotaryTable
from slipstream.models.weights import Weights

KvLayers = Sequence[tuple[Tensor, Tensor]]  # per layer: keys and values [pages, kv heads, page tokens, dim]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Every number of a decoder stack, read from the checkpoint and never guessed."""

    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeConfig
    max_positions: int
    tied_head: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} attention heads cannot share {self.kv_heads} key heads evenly")


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """How one file format spells a family's tensors, and the order of its query and key rows."""

    file_name: Callable[[str], str]
    ignored: Callable[[str], bool]
    rotary_rows: Callable[[int, int], Tensor] | None = None  # (heads, head_dim) -> row order to undo


class DecoderLayer:
    """One transformer layer with its query, key and value (and gate and up) matrices fused."""

    def __init__(self, weights: Weights, config: DecoderConfig, names: FamilyNames, index: int) -> None:
        self.config = config
        prefix = f"model.layers.{index}."
        attention, hidden = prefix + "self_attn.", config.hidden_size
        sizes = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
        orders = {
            name: names.rotary_rows(count, config.head_dim) if names.rotary_rows and name != "v_proj" else None
            for name, count in sizes.items()
        }
        projections, biases = [], []
        for name, count in sizes.items():
            source = weights.source(f"{attention}{name}.weight", (count * config.head_dim, hidden))
            order = orders[name]
            projections.append(source if order is None else source.rows(order))
            if config.attention_bias:
                bias = weights.vector(f"{attention}{name}.bias", count * config.head_dim)
                biases.append(bias if order is None else bias[order])
        self.qkv = weights.matrix(projections)
        self.qkv_bias = torch.cat(biases) if biases else None
        self.output = weights.matrix(
            [weights.source(attention + "o_proj.weight", (hidden, config.heads * config.head_dim))]
        )
        self.output_bias = weights.vector(attention + "o_proj.bias", hidden) if config.attention_bias else None
        self.q_norm = weights.vector(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None
        self.k_norm = weights.vector(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None
        self.input_norm = weights.vector(prefix + "input_layernorm.weight", hidden)
        self.post_norm = weights.vector(prefix + "post_attention_layernorm.weight", hidden)
        self._load_mlp(weights, prefix + "mlp.")

    def _load_mlp(self, weights: Weights, prefix: str) -> None:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        self.gate_up = weights.matrix(
            [weights.source(f"{prefix}{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
        )
        self.down = weights.matrix([weights.source(prefix + "down_proj.weight", (hidden, inner))])
        self.gate_up_bias = self.down_bias = None
        if self.config.mlp_bias:
            self.gate_up_bias = torch.cat(
                [weights.vector(f"{prefix}{name}.bias", inner) for name in ("gate_proj", "up_proj")]
            )
            self.down_bias = weights.vector(prefix + "down_proj.bias", hidden)

    def __call__(
        self, x: Tensor, batch: RowBatch, rotary: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor]
    ) -> Tensor:
        config = self.config
        qkv = _biased(self.qkv(rms_norm(x, self.input_norm, config.rms_eps)), self.qkv_bias)
        qkv = qkv.view(x.shape[0], config.heads + 2 * config.kv_heads, config.head_dim)
        turning = config.heads + config.kv_heads
        if self.q_norm is not None and self.k_norm is not None:
            queries = rms_norm(qkv[:, : config.heads], self.q_norm, config.rms_eps)
            keys = rms_norm(qkv[:, config.heads : turning], self.k_norm, config.rms_eps)
            turned = rotate(torch.cat((queries, keys), dim=1), *rotary)
        else:
            turned = rotate(qkv[:, :turning], *rotary)
        write_rows(kv[0], batch.pages, batch.offsets, turned[:, config.heads :])
        write_rows(kv[1], batch.pages, batch.offsets, qkv[:, turning:])
        mixed = row_attention(
            turned[:, : config.heads], *kv, batch.groups[AttentionPattern()], config.head_dim**-0.5
        )
        x = x + _biased(self.output(mixed), self.output_bias)
        gate, up = _biased(
            self.gate_up(rms_norm(x, self.post_norm, config.rms_eps)), self.gate_up_bias
        ).chunk(2, dim=-1)
        return x + _biased(self.down(F.silu(gate) * up), self.down_bias)


class Decoder:
    """A target model: embeds rows, runs the layers, records taps, and turns hidden rows into logits."""

    patterns = (AttentionPattern(),)

    def __init__(self, config: DecoderConfig, weights: Weights, names: FamilyNames) -> None:
        self.config = config
        self.weight_format = weights.weight_format
        self.embed = weights.embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(weights, config, names, index) for index in range(config.layers)]
        self.norm = weights.vector("model.norm.weight", config.hidden_size)
        head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        # int4 products come out in bf16, too coarse to rank a vocabulary by
        self.head = weights.matrix(
            [weights.source(head, (config.vocab_size, config.hidden_size))],
            "int8" if weights.weight_format == "int4" else None,
        )
        self.step_bytes = weights.step_bytes
        self.rotary = RotaryTable(config.rope)
        weights.finish(names.ignored)

    def forward(self, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Hidden rows after the final norm, and the residual after each tapped layer side by side.

        Tap -1 is the embedding; tap i is the residual stream that layer i leaves, before any norm.
        """
        x = self.embed(batch.token_ids)
        rotary = self.rotary.rows(batch.positions, batch.end)
        recorded = {-1: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, rotary, kv[index])
            if index in tap_layers:
                recorded[index] = x
        taps = torch.cat([recorded[index] for index in tap_layers], dim=-1) if tap_layers else None
        return rms_norm(x, self.norm, self.config.rms_eps), taps

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
