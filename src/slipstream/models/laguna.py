"""Laguna targets: full and sliding layers with head counts of their own, gated heads, experts routed by sigmoids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from slipstream.models.config_reading import FULL, SLIDING, ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.layers import LayerPart, load_attention, load_gate, load_projections
from slipstream.models.llama import gguf_common, gguf_name, hf_common, hf_names
from slipstream.models.moe import GGUF_MOE, MoeShape
from slipstream.models.rope import RopeConfig, read_gguf_rope, read_rope
from slipstream.models.weights import Weights

ARCH = "laguna"
_GGUF_PERIOD = 4  # layers from one full layer to the next (three slide between), for a file that does not say
_GGUF_SIGMOID = 2  # llama.cpp's number of the rule that routes by sigmoids
GGUF_OWN = GGUF_MOE | {"self_attn.g_proj.weight": "attn_gate.weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LagunaConfig(DecoderConfig):
    """The numbers that all layers share, and those in which layers differ; `rope` is that of the full layers."""

    layer_heads: tuple[int, ...]
    sliding_rope: RopeConfig
    moe: MoeShape
    gate_per_head: bool

    def layer(self, index: int) -> Self:
        rope = self.sliding_rope if self.sliding[index] else self.rope
        return replace(self, heads=self.layer_heads[index], rope=rope)


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
        return load_attention(weights, config, index, prefix, projections, gate)


MODEL = Laguna


def read_hf(config: ConfigReader) -> tuple[LagunaConfig, FamilyNames]:
    config.require("hidden_act", ("silu", "swish"), "this activation")
    config.require("moe_apply_router_weight_on_input", (False,), "router weights on the experts' input")
    config.require("gating", (True, "per-head", "per-element"), "this gate")
    common = hf_common(config)
    layers = common["layers"]
    kinds = (FULL,) * layers
    if config.has("layer_types"):
        kinds = config.layer_kinds("layer_types", layers, (FULL, SLIDING))
    mlps = ("dense", *["sparse"] * (layers - 1))
    if config.has("mlp_layer_types"):
        mlps = config.layer_kinds("mlp_layer_types", layers, ("dense", "sparse"))
    ropes = {kind: read_rope(config, common["head_dim"], kind, allows_partial=True) for kind in sorted(set(kinds))}
    moe = MoeShape.read(
        config,
        scores="sigmoid",
        scale=config.number("moe_routed_scaling_factor", 1.0),
        router_softcap=config.number("moe_router_logit_softcapping", 0.0),
        selection_bias=True,
        shared_size=config.integer("shared_expert_intermediate_size"),
    )
    read = LagunaConfig(
        family=ARCH,
        rope=ropes.get(FULL, ropes[kinds[0]]),
        layer_heads=config.each_layer("num_attention_heads_per_layer", layers, common["heads"]),
        sliding=tuple(kind == SLIDING for kind in kinds),
        window=config.integer("sliding_window") if SLIDING in kinds else 0,
        sliding_rope=ropes.get(SLIDING, ropes[kinds[0]]),
        sparse=tuple(kind == "sparse" for kind in mlps),
        moe=moe,
        gate_per_head=config.values.get("gating") != "per-element",
        **common,
    )
    return read, hf_names(read.tied_head)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[LagunaConfig, FamilyNames]:
    layers = config.layers(f"{ARCH}.block_count")
    layer_heads = config.each_layer(f"{ARCH}.attention.head_count", layers)
    common = gguf_common(config, ARCH, weights, heads=layer_heads[0])
    sliding, head_dim = _gguf_sliding(config, layers), common["head_dim"]
    rope = read_gguf_rope(config, ARCH, head_dim)
    dense = config.integer(f"{ARCH}.leading_dense_block_count", least=0)
    config.require(f"{ARCH}.expert_gating_func", (_GGUF_SIGMOID,), "this routing rule")
    config.require(f"{ARCH}.expert_shared_count", (0, 1), "more than one shared expert")
    moe = MoeShape.read(
        config,
        ARCH,
        scores="sigmoid",
        renormalise=config.boolean(f"{ARCH}.expert_weights_norm"),
        scale=config.number(f"{ARCH}.expert_weights_scale", 1.0),
        selection_bias=True,
        shared_size=config.integer(f"{ARCH}.expert_shared_feed_forward_length"),
    )
    read = LagunaConfig(
        family=ARCH,
        rope=rope,
        layer_heads=layer_heads,
        sliding=sliding,
        window=config.integer(f"{ARCH}.attention.sliding_window") if any(sliding) else 0,
        sliding_rope=read_gguf_rope(config, ARCH, head_dim, sliding=True) if any(sliding) else rope,
        sparse=tuple(index >= dense for index in range(layers)),
        moe=moe,
        gate_per_head=weights.file.tensor("blk.0.attn_gate.weight").shape[0] == layer_heads[0],
        **common,
    )
    return read, FamilyNames(partial(gguf_name, own=GGUF_OWN))


def _gguf_sliding(config: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Which layers slide: all but the first of every few; without a window no layer slides."""
    if not config.integer(f"{ARCH}.attention.sliding_window", 0, least=0):
        return (False,) * layers
    key = f"{ARCH}.attention.sliding_window_pattern"
    if isinstance(config.values.get(key), list):
        return config.flags(key, layers)
    period = config.integer(key, _GGUF_PERIOD)
    return tuple(index % period != 0 for index in range(layers))
