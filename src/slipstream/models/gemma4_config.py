"""Reads a Gemma 4 configuration: sliding layers by default, full ones with heads and rotation of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from slipstream.errors import ConfigError
from slipstream.models.config_reading import FULL, SLIDING, ConfigReader
from slipstream.models.decoder import DecoderConfig
from slipstream.models.llama import gguf_common, hf_common, with_stored_factors
from slipstream.models.moe import MoeShape
from slipstream.models.rope import RopeConfig, read_gguf_rope, read_rope
from slipstream.models.weights import Weights

ARCH = "gemma4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """`head_dim`, `kv_heads` and `rope` are those of sliding layers; the last `sharing` layers read earlier keys."""

    layer_dims: tuple[int, ...]
    layer_kv_heads: tuple[int, ...]
    layer_inner: tuple[int, ...]
    full_rope: RopeConfig
    keys_are_values: tuple[bool, ...]  # the layer's values are its keys before their norm and rotation
    sharing: int
    side_size: int  # width of the embeddings that each layer has; 0: the model has none
    side_vocab: int
    final_softcap: float

    def layer(self, index: int) -> Self:
        return replace(
            self,
            head_dim=self.layer_dims[index],
            kv_heads=self.layer_kv_heads[index],
            intermediate_size=self.layer_inner[index],
            rope=self.rope if self.sliding[index] else self.full_rope,
        )

    def owns_keys(self, index: int) -> bool:
        return index < self.layers - self.sharing

    def pool(self, index: int) -> int:
        """Which keys a layer reads: its own, or if it shares, those of the last layer of its kind that stores any."""
        if self.owns_keys(index):
            return index
        own = range(self.layers - self.sharing)
        return max(other for other in own if self.sliding[other] == self.sliding[index])

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        own = self.layers - self.sharing
        return tuple(zip(self.layer_kv_heads[:own], self.layer_dims[:own], strict=True))

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size)

    @property
    def softcap(self) -> float:
        return self.final_softcap


def _checked(config: Gemma4Config, label: str) -> Gemma4Config:
    own = config.layers - config.sharing
    missing = set(config.sliding[own:]) - set(config.sliding[:own])
    if own < 1 or missing:
        raise ConfigError(f"{label}: the last {config.sharing} layers share keys that no layer before them has")
    dims = {dim for dim, sliding in zip(config.layer_dims, config.sliding, strict=True) if not sliding}
    if len(dims) > 1:
        raise ConfigError(f"{label}: full layers with heads of different sizes are not supported")
    return config


def read_hf(config: ConfigReader) -> Gemma4Config:
    config.require("hidden_activation", ("gelu_pytorch_tanh",), "this activation")
    config.require("use_bidirectional_attention", ("vision",), "attention that sees ahead in text")
    tied, layers = config.boolean("tie_word_embeddings", True), config.layers("num_hidden_layers")
    common, sharing = hf_common(config, tied_head=tied), config.integer("num_kv_shared_layers", 0, least=0)
    kinds = config.layer_kinds("layer_types", layers, (SLIDING, FULL))
    sliding = tuple(kind == SLIDING for kind in kinds)
    if sliding[-1]:
        raise ConfigError(f"{config.label}: the last layer must be a full one")
    key_values, head_dim = config.boolean("attention_k_eq_v", False), common["head_dim"]
    dims, layer_kv_heads = _layer_heads(config, sliding, key_values)
    inner, wide = common["intermediate_size"], config.boolean("use_double_wide_mlp", False)
    side, mixed = config.integer("hidden_size_per_layer_input", 0, least=0), config.boolean("enable_moe_block", False)
    return _checked(
        Gemma4Config(
            family=ARCH,
            rope=read_rope(config, head_dim, SLIDING),
            sliding=sliding,
            window=config.integer("sliding_window"),
            layer_dims=dims,
            layer_kv_heads=layer_kv_heads,
            layer_inner=tuple(inner * (2 if wide and index >= layers - sharing else 1) for index in range(layers)),
            full_rope=read_rope(config, dims[-1], FULL, allows_partial=True),
            keys_are_values=tuple(key_values and not slides for slides in sliding),
            sharing=sharing,
            side_size=side,
            side_vocab=config.integer("vocab_size_per_layer_input") if side else 0,
            final_softcap=config.number("final_logit_softcapping", 0.0),
            moe=MoeShape.read(config, active=config.integer("top_k_experts")) if mixed else None,
            **common,
        ),
        config.label,
    )


def _layer_heads(
    config: ConfigReader, sliding: tuple[bool, ...], key_values: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns head size and key heads of each layer, from `per_layer_config` or the older keys about full layers."""
    head_dim, kv_heads = config.integer("head_dim"), config.integer("num_key_value_heads")
    full = ConfigReader(
        {
            "head_dim": config.values.get("global_head_dim"),
            "num_key_value_heads": config.values.get("num_global_key_value_heads") if key_values else None,
        },
        config.label,
    )
    each = config.section("per_layer_config")
    if not each.values and not full.has("head_dim"):
        raise ConfigError(f"{config.label}: neither 'per_layer_config' nor 'global_head_dim' says how full layers look")
    sections = [
        each.section(str(index)) if each.values else ConfigReader({} if slides else full.values, config.label)
        for index, slides in enumerate(sliding)
    ]
    return (
        tuple(section.integer("head_dim", head_dim) for section in sections),
        tuple(section.integer("num_key_value_heads", kv_heads) for section in sections),
    )


def read_gguf(config: ConfigReader, weights: Weights) -> Gemma4Config:
    key, file, layers = f"{ARCH}.attention.", weights.file, config.layers(f"{ARCH}.block_count")
    sharing = config.integer(f"{key}shared_kv_layers", 0, least=0)
    sliding = config.flags(f"{key}sliding_window_pattern", layers)
    full_dim, head_dim = config.integer(f"{key}key_length"), config.integer(f"{key}key_length_swa")
    inner = config.each_layer(f"{ARCH}.feed_forward_length", layers)
    kv_heads = config.each_layer(f"{key}head_count_kv", layers)
    own: dict[str, Any] = {"kv_heads": kv_heads[0], "head_dim": head_dim, "intermediate_size": inner[0]}
    common = gguf_common(config, ARCH, weights, attention_bias=False, **own)
    side = config.integer(f"{ARCH}.embedding_length_per_layer_input", 0, least=0)
    return _checked(
        Gemma4Config(
            family=ARCH,
            rope=read_gguf_rope(config, ARCH, head_dim, sliding=True),
            sliding=sliding,
            window=config.integer(f"{key}sliding_window"),
            layer_dims=tuple(head_dim if slides else full_dim for slides in sliding),
            layer_kv_heads=kv_heads,
            layer_inner=inner,
            # the factors of dimensions that must not turn are so large that they never do
            full_rope=with_stored_factors(read_gguf_rope(config, ARCH, full_dim), weights),
            keys_are_values=tuple(f"blk.{index}.attn_v.weight" not in file for index in range(layers)),
            sharing=sharing,
            side_size=side,
            side_vocab=file.tensor("per_layer_token_embd.weight").shape[0] if side else 0,
            final_softcap=config.number(f"{ARCH}.final_logit_softcapping", 0.0),
            moe=MoeShape.read(config, ARCH) if config.integer(f"{ARCH}.expert_count", 0, least=0) else None,
            **common,
        ),
        config.label,
    )
