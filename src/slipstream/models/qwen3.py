"""Qwen3 dense targets: Llama's stack with RMS norms on queries and keys."""

from __future__ import annotations

from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.llama import gguf_config, gguf_name, hf_config, hf_names
from slipstream.models.weights import Weights

MODEL = Decoder


def read_hf(config: ConfigReader) -> tuple[DecoderConfig, FamilyNames]:
    read = hf_config(config, "qwen3", qk_norm=True)
    return read, hf_names(read.tied_head)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[DecoderConfig, FamilyNames]:
    return gguf_config(config, "qwen3", weights, qk_norm=True), FamilyNames(gguf_name, lambda name: False)
