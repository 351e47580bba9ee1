"""Qwen3 mixture-of-experts targets: Qwen3's attention, and routed experts in the place of the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from slipstream.errors import ConfigError
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames, extended
from slipstream.models.llama import gguf_config, gguf_name, hf_config, hf_names
from slipstream.models.moe import GGUF_MOE, MoeLayer, MoeShape
from slipstream.models.weights import Weights

FAMILY, ARCH = "qwen3_moe", "qwen3moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Qwen3's numbers, the experts', and which layers have them."""

    moe: MoeShape
    sparse: tuple[bool, ...]


class Qwen3Moe(Decoder):
    """Qwen3 with experts in most or all layers."""

    config: Qwen3MoeConfig

    def make_layer(self, weights: Weights, names: FamilyNames, index: int) -> MoeLayer:
        config = self.config
        moe = config.moe if config.sparse[index] else None
        return MoeLayer(weights, config, f"model.layers.{index}.", config.pattern(index), moe)


MODEL = Qwen3Moe


def read_hf(config: ConfigReader) -> tuple[Qwen3MoeConfig, FamilyNames]:
    base = hf_config(config, FAMILY, qk_norm=True)
    # older configs say num_experts
    count = config.integer("num_local_experts" if config.has("num_local_experts") else "num_experts")
    moe = MoeShape(
        base.hidden_size,
        count,
        config.integer("num_experts_per_tok"),
        config.integer("moe_intermediate_size"),
        renormalise=config.boolean("norm_topk_prob"),
    )
    every, dense = config.integer("decoder_sparse_step", 1), set(config.integers("mlp_only_layers", []))
    sparse = tuple((index + 1) % every == 0 and index not in dense for index in range(base.layers))
    return extended(base, Qwen3MoeConfig, moe=moe, sparse=sparse), hf_names(base.tied_head)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[Qwen3MoeConfig, FamilyNames]:
    """llama.cpp's files have experts in every layer, and their shares always add up to one."""
    base = gguf_config(config, ARCH, weights, qk_norm=True)
    if config.number(f"{ARCH}.expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise ConfigError(f"{config.label}: a scale of the experts' sum is not supported for this family")
    moe = MoeShape(
        base.hidden_size,
        config.integer(f"{ARCH}.expert_count"),
        config.integer(f"{ARCH}.expert_used_count"),
        config.integer(f"{ARCH}.expert_feed_forward_length"),
    )
    read = extended(base, Qwen3MoeConfig, family=FAMILY, moe=moe, sparse=(True,) * base.layers)
    return read, FamilyNames(partial(gguf_name, own=GGUF_MOE), lambda name: False)
