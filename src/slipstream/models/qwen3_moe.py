"""Qwen3 mixture-of-experts targets: Qwen3's attention, and routed experts in the place of the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from slipstream.errors import ConfigError
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames, extended
from slipstream.models.layers import LayerPart
from slipstream.models.llama import gguf_config, gguf_name, hf_config, hf_names
from slipstream.models.moe import GGUF_MOE, MoeShape, load_expert_block
from slipstream.models.weights import Weights

FAMILY, ARCH = "qwen3_moe", "qwen3moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Qwen3's numbers, those of the experts, and which layers have experts."""

    moe: MoeShape
    sparse: tuple[bool, ...]


class Qwen3Moe(Decoder):
    """Qwen3 with experts in most or all layers."""

    config: Qwen3MoeConfig

    def make_feeder(self, weights: Weights, index: int, prefix: str) -> LayerPart:
        if not self.config.sparse[index]:
            return super().make_feeder(weights, index, prefix)
        return load_expert_block(weights, prefix, self.config.moe)


MODEL = Qwen3Moe


def read_hf(config: ConfigReader) -> tuple[Qwen3MoeConfig, FamilyNames]:
    base = hf_config(config, FAMILY, qk_norm=True)
    # Older configs call it num_experts.
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
    """llama.cpp's files have experts in every layer, and the shares of a row's experts always add up to one."""
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
