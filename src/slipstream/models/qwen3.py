"""Qwen3 targets, dense and with experts: Llama's stack with RMS norms on queries and keys."""

from __future__ import annotations

from functools import partial

from slipstream.errors import ConfigError
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.llama import gguf_config, gguf_name, hf_config, hf_names
from slipstream.models.moe import GGUF_MOE, MoeShape
from slipstream.models.weights import Weights

MODEL = Decoder
FAMILY, MOE_FAMILY = "qwen3", "qwen3_moe"
ARCH, MOE_ARCH = "qwen3", "qwen3moe"


def read_hf(config: ConfigReader) -> tuple[DecoderConfig, FamilyNames]:
    if config.text("model_type") != MOE_FAMILY:
        read = hf_config(config, family=FAMILY)
        return read, hf_names(read.tied_head)
    # Older configs have the number of experts under the key num_experts.
    count = config.integer("num_local_experts" if config.has("num_local_experts") else "num_experts")
    moe = MoeShape.read(config, experts=count, renormalise=config.boolean("norm_topk_prob"))
    every, dense = config.integer("decoder_sparse_step", 1), set(config.integers("mlp_only_layers", []))
    layers = range(config.layers("num_hidden_layers"))
    sparse = tuple((index + 1) % every == 0 and index not in dense for index in layers)
    read = hf_config(config, family=MOE_FAMILY, moe=moe, sparse=sparse)
    return read, hf_names(read.tied_head)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[DecoderConfig, FamilyNames]:
    """Reads llama.cpp's keys; its files have experts in every layer, and a row's shares always add up to one."""
    if not config.is_of(MOE_ARCH):
        return gguf_config(config, ARCH, weights, family=FAMILY), FamilyNames(gguf_name)
    if config.number(f"{MOE_ARCH}.expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise ConfigError(f"{config.label}: a scale of the experts' sum is not supported for this family")
    moe, sparse = MoeShape.read(config, MOE_ARCH), (True,) * config.layers(f"{MOE_ARCH}.block_count")
    read = gguf_config(config, MOE_ARCH, weights, family=MOE_FAMILY, moe=moe, sparse=sparse)
    return read, FamilyNames(partial(gguf_name, own=GGUF_MOE))
