"""Laguna targets: full and sliding layers with head counts of their own, gated heads, experts routed by sigmoids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from slipstream.errors import ConfigError
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.layers import LayerPart, load_attention, load_gate, load_projections
from slipstream.models.llama import gguf_name, hf_names
from slipstream.models.moe import GGUF_MOE, MoeShape, load_expert_block
from slipstream.models.rope import RopeConfig, read_gguf_rope, read_rope
from slipstream.models.weights import Weights

ARCH = "laguna"
SLIDING, FULL = "sliding_attention", "full_attention"
_GGUF_PERIOD = 4  # layers from one full layer to the next (three slide between), for a file that does not say
_GGUF_SIGMOID = 2  # llama.cpp's number of the rule that routes by sigmoids
GGUF_OWN = GGUF_MOE | {"self_attn.g_proj.weight": "attn_gate.weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LagunaConfig(DecoderConfig):
    """The numbers that all layers share, and those in which layers differ; `rope` is that of the full layers."""

    layer_heads: tuple[int, ...]
    sliding: tuple[bool, ...]
    window: int
    sliding_rope: RopeConfig
    sparse: tuple[bool, ...]
    moe: MoeShape
    gate_per_head: bool

    def layer(self, index: int) -> Self:
        rope = self.sliding_rope if self.sliding[index] else self.rope
        return replace(self, heads=self.layer_heads[index], rope=rope)

    def pattern(self, index: int) -> AttentionPattern:
        return AttentionPattern(self.window if self.sliding[index] else 0)


class Laguna(Decoder):
    """A softplus of the row weighs every head's result; all layers but the first few have experts."""

    config: LagunaConfig

    def make_mixer(self, weights: Weights, names: FamilyNames, index: int, prefix: str) -> LayerPart:
        config, prefix = self.config, prefix + "self_attn."
        shape = config.layer(index)
        projections = load_projections(weights, shape, prefix)
        width = shape.heads if shape.gate_per_head else shape.heads * shape.head_dim
        source = weights.source(prefix + "g_proj.weight", (width, shape.hidden_size))
        gate = load_gate(weights, "softplus", source, projections)
        return load_attention(weights, shape, prefix, config.pattern(index), config.pool(index), projections, gate)

    def make_feeder(self, weights: Weights, index: int, prefix: str) -> LayerPart:
        if not self.config.sparse[index]:
            return super().make_feeder(weights, index, prefix)
        return load_expert_block(weights, prefix, self.config.moe)


MODEL = Laguna


def read_hf(config: ConfigReader) -> tuple[LagunaConfig, FamilyNames]:
    config.require("hidden_act", ("silu", "swish"), "this activation")
    config.require("moe_apply_router_weight_on_input", (False,), "router weights on the experts' input")
    config.require("gating", (True, "per-head", "per-element"), "this gate")
    layers, head_dim = config.layers("num_hidden_layers"), config.integer("head_dim")
    heads, max_positions = config.integer("num_attention_heads"), config.integer("max_position_embeddings")
    hidden = config.integer("hidden_size")
    kinds = (FULL,) * layers
    if config.has("layer_types"):
        kinds = config.layer_kinds("layer_types", layers, (FULL, SLIDING))
    mlps = ("dense", *["sparse"] * (layers - 1))
    if config.has("mlp_layer_types"):
        mlps = config.layer_kinds("mlp_layer_types", layers, ("dense", "sparse"))
    ropes = {kind: read_rope(config, head_dim, max_positions, kind, allows_partial=True) for kind in sorted(set(kinds))}
    read = LagunaConfig(
        family=ARCH,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        rms_eps=config.number("rms_norm_eps"),
        rope=ropes.get(FULL, ropes[kinds[0]]),
        max_positions=max_positions,
        tied_head=config.boolean("tie_word_embeddings", False),
        qk_norm=True,
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=False,
        layer_heads=config.each_layer("num_attention_heads_per_layer", layers, heads),
        sliding=tuple(kind == SLIDING for kind in kinds),
        window=config.integer("sliding_window") if SLIDING in kinds else 0,
        sliding_rope=ropes.get(SLIDING, ropes[kinds[0]]),
        sparse=tuple(kind == "sparse" for kind in mlps),
        moe=MoeShape(
            hidden,
            config.integer("num_experts"),
            config.integer("num_experts_per_tok"),
            config.integer("moe_intermediate_size"),
            "sigmoid",
            scale=config.number("moe_routed_scaling_factor", 1.0),
            router_softcap=config.number("moe_router_logit_softcapping", 0.0),
            selection_bias=True,
            shared_size=config.integer("shared_expert_intermediate_size"),
        ),
        gate_per_head=config.values.get("gating") != "per-element",
    )
    return read, hf_names(read.tied_head)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[LagunaConfig, FamilyNames]:
    hidden, layers = config.integer(f"{ARCH}.embedding_length"), config.layers(f"{ARCH}.block_count")
    head_dim, file = config.integer(f"{ARCH}.attention.key_length"), weights.file
    layer_heads = config.each_layer(f"{ARCH}.attention.head_count", layers)
    sliding = _gguf_sliding(config, layers)
    rope = read_gguf_rope(config, ARCH, head_dim)
    dense = config.integer(f"{ARCH}.leading_dense_block_count", least=0)
    gate = file.tensor("blk.0.attn_gate.weight").shape[0]
    read = LagunaConfig(
        family=ARCH,
        hidden_size=hidden,
        layers=layers,
        heads=layer_heads[0],
        kv_heads=config.integer(f"{ARCH}.attention.head_count_kv"),
        head_dim=head_dim,
        intermediate_size=config.integer(f"{ARCH}.feed_forward_length"),
        vocab_size=file.tensor("token_embd.weight").shape[0],
        rms_eps=config.number(f"{ARCH}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        max_positions=config.integer(f"{ARCH}.context_length"),
        tied_head="output.weight" not in file,
        qk_norm=True,
        attention_bias="blk.0.attn_q.bias" in file,
        mlp_bias=False,
        layer_heads=layer_heads,
        sliding=sliding,
        window=config.integer(f"{ARCH}.attention.sliding_window") if any(sliding) else 0,
        sliding_rope=read_gguf_rope(config, ARCH, head_dim, sliding=True) if any(sliding) else rope,
        sparse=tuple(index >= dense for index in range(layers)),
        moe=_gguf_moe(config, hidden),
        gate_per_head=gate == layer_heads[0],
    )
    return read, FamilyNames(partial(gguf_name, own=GGUF_OWN), lambda name: False)


def _gguf_sliding(config: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Which layers slide: all but the first of every few; without a window no layer slides."""
    if not config.integer(f"{ARCH}.attention.sliding_window", 0, least=0):
        return (False,) * layers
    key = f"{ARCH}.attention.sliding_window_pattern"
    flags = config.values.get(key)
    if isinstance(flags, list):
        if len(flags) != layers:
            raise ConfigError(f"{config.label}: '{key}' must have {layers} entries")
        return tuple(map(bool, flags))
    period = config.integer(key, _GGUF_PERIOD)
    return tuple(index % period != 0 for index in range(layers))


def _gguf_moe(config: ConfigReader, hidden: int) -> MoeShape:
    config.require(f"{ARCH}.expert_gating_func", (_GGUF_SIGMOID,), "this routing rule")
    config.require(f"{ARCH}.expert_shared_count", (0, 1), "more than one shared expert")
    return MoeShape(
        hidden,
        config.integer(f"{ARCH}.expert_count"),
        config.integer(f"{ARCH}.expert_used_count"),
        config.integer(f"{ARCH}.expert_feed_forward_length"),
        "sigmoid",
        renormalise=config.boolean(f"{ARCH}.expert_weights_norm"),
        scale=config.number(f"{ARCH}.expert_weights_scale", 1.0),
        selection_bias=True,
        shared_size=config.integer(f"{ARCH}.expert_shared_feed_forward_length"),
    )
