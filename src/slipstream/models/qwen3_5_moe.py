"""Qwen3.5 and Qwen3.6 mixture-of-experts targets: the layers of `qwen3_5.py` with experts in the place of the MLP."""

from __future__ import annotations

from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import FamilyNames
from slipstream.models.moe import MoeShape
from slipstream.models.qwen3_5 import Qwen35, Qwen35Config, gguf_config, hf_config
from slipstream.models.weights import Weights

FAMILY, ARCH = "qwen3_5_moe", "qwen35moe"
MODEL = Qwen35


def read_hf(config: ConfigReader) -> tuple[Qwen35Config, FamilyNames]:
    return hf_config(config, FAMILY, _hf_moe)


def _hf_moe(text: ConfigReader) -> MoeShape:
    return MoeShape(
        text.integer("hidden_size"),
        text.integer("num_experts"),
        text.integer("num_experts_per_tok"),
        text.integer("moe_intermediate_size"),
        shared_size=text.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[Qwen35Config, FamilyNames]:
    inner = config.integer(f"{ARCH}.expert_feed_forward_length")
    moe = MoeShape(
        config.integer(f"{ARCH}.embedding_length"),
        config.integer(f"{ARCH}.expert_count"),
        config.integer(f"{ARCH}.expert_used_count"),
        inner,
        shared_size=config.integer(f"{ARCH}.expert_shared_feed_forward_length", inner),
        shared_gate=True,
    )
    return gguf_config(config, weights, FAMILY, ARCH, moe)
