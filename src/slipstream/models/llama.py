"""Llama targets (SmolLM2 among them), from Hugging Face and GGUF checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.config_reading import FULL, ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.rope import RopeConfig, read_gguf_rope, read_rope
from slipstream.models.weights import Weights

MODEL = Decoder
GGUF_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str, own: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the GGUF name of a tensor from its Hugging Face name.

    `own` has the names of a family; in it, the names of a layer's tensors are without `model.layers.N.`.
    """
    found = own.get(name) or GGUF_GLOBAL.get(name)
    if found is not None:
        return found
    _, _, index, rest = name.split(".", 3)
    if rest in own:
        return f"blk.{index}.{own[rest]}"
    module, _, kind = rest.rpartition(".")
    return f"blk.{index}.{GGUF_LAYER[module]}.{kind}" if module in GGUF_LAYER else name


def stored_rotary_rows(heads: int, head_dim: int) -> Tensor:
    """Returns the row order that undoes the interleaving of each rotary head's two halves in GGUF llama files."""
    return torch.arange(heads * head_dim).view(heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)


def hf_names(
    tied: bool, multimodal: bool = False, other_parts: tuple[str, ...] = (), norm_shift: float = 0.0
) -> FamilyNames:
    """Returns how a Hugging Face checkpoint spells tensors.

    A multimodal checkpoint also has image and audio parts, which are ignored: the tensors whose names begin with one of
    `other_parts` or, if `other_parts` is empty, all tensors outside the text part.
    """
    text = "model.language_model."

    def file_name(name: str) -> str:
        return name.replace("model.", text, 1) if multimodal and name.startswith("model.") else name

    def ignored(name: str) -> bool:
        if name == "lm_head.weight":
            return tied
        foreign = multimodal and not other_parts and not name.startswith(text)
        return foreign or name.startswith(other_parts) or name.endswith("rotary_emb.inv_freq")

    return FamilyNames(file_name, ignored, norm_shift=norm_shift)


def hf_common(config: ConfigReader, even_heads: bool = False, **own: Any) -> dict[str, Any]:
    """Reads the fields of `DecoderConfig` that Hugging Face spells alike for all families, except those in `own`."""
    shared = {
        "max_positions": config.integer("max_position_embeddings"),
        "tied_head": config.boolean("tie_word_embeddings", False),
        "attention_bias": config.boolean("attention_bias", False),
    }
    return config.common(even_heads=even_heads, **shared | own)


def gguf_common(
    config: ConfigReader, arch: str, weights: Weights, even_heads: bool = False, **own: Any
) -> dict[str, Any]:
    """Reads the fields of `hf_common` from GGUF metadata, and those that have no key there from the tensors."""
    file = weights.file
    shared = {
        "max_positions": config.integer(f"{arch}.context_length"),
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "tied_head": "output.weight" not in file,
        "attention_bias": "blk.0.attn_q.bias" in file,
    }
    return config.common(arch, even_heads, **shared | own)


def hf_config(config: ConfigReader, **own: Any) -> DecoderConfig:
    """Reads the config of a Llama-like model in a Hugging Face folder; `own` has the fields of its family."""
    common = hf_common(config, even_heads=True, mlp_bias=config.boolean("mlp_bias", False), **own)
    config.require("hidden_act", ("silu", "swish"), "this activation")
    config.require("pretraining_tp", (1,), "tensor-parallel pretraining")
    config.require("use_sliding_window", (False,), "a sliding window in this family")
    kinds = config.values.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {FULL}:
        raise ConfigError(f"{config.label}: sliding or other special layers are not supported for this family")
    return DecoderConfig(rope=read_rope(config, common["head_dim"]), **common)


def gguf_config(config: ConfigReader, arch: str, weights: Weights, **own: Any) -> DecoderConfig:
    """Reads the config of a Llama-like model in a GGUF file."""
    mlp_bias = "blk.0.ffn_gate.bias" in weights.file
    common = gguf_common(config, arch, weights, even_heads=True, mlp_bias=mlp_bias, **own)
    head_dim = common["head_dim"]
    if head_dim % 2:
        raise ConfigError(f"{config.label}: heads of {head_dim} dimensions cannot turn in pairs", "convert it again")
    if config.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{config.label}: partial rotary embeddings are not supported for this family")
    rope = read_gguf_rope(config, arch, head_dim, scalings=("none", "linear"))
    if "rope_freqs.weight" in weights.file:
        rope = with_stored_factors(rope, weights)
    return DecoderConfig(rope=rope, **common)


def with_stored_factors(rope: RopeConfig, weights: Weights) -> RopeConfig:
    """Returns a rotation with the factors of its frequencies, which a GGUF file has as a tensor."""
    factors = weights.source("rope_freqs.weight", (rope.dim // 2,)).dense()
    return replace(rope, factors=tuple(factors.tolist()))


def read_hf(config: ConfigReader) -> tuple[DecoderConfig, FamilyNames]:
    read = hf_config(config, family="llama", qk_norm=False)
    return read, hf_names(read.tied_head)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[DecoderConfig, FamilyNames]:
    names = FamilyNames(gguf_name, lambda name: name == "rope_freqs.weight", stored_rotary_rows)
    return gguf_config(config, "llama", weights, family="llama", qk_norm=False), names
