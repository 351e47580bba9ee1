"""Llama targets (SmolLM2 among them), from Hugging Face and GGUF checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.rope import RopeConfig, read_rope
from slipstream.models.weights import Weights, keep_name

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
    """A Hugging Face tensor name as GGUF files spell it.

    `own` has the names of a family; those of a layer's tensors stand there without `model.layers.N.`.
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
    """The row order that undoes an interleaving: GGUF llama files interleave the two halves of each rotary head."""
    return torch.arange(heads * head_dim).view(heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)


def hf_names(tied: bool) -> FamilyNames:
    def ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")

    return FamilyNames(keep_name, ignored)


def multimodal_names(tied: bool) -> FamilyNames:
    """Names in a checkpoint that also has image and audio parts, which are ignored."""
    text = "model.language_model."

    def ignored(name: str) -> bool:
        return not name.startswith(text) and (tied or name != "lm_head.weight")

    return FamilyNames(lambda name: name.replace("model.", text, 1) if name.startswith("model.") else name, ignored)


def gguf_names() -> FamilyNames:
    return FamilyNames(gguf_name, lambda name: name == "rope_freqs.weight", stored_rotary_rows)


def hf_config(config: ConfigReader, family: str, qk_norm: bool) -> DecoderConfig:
    """The fields that every Llama-like Hugging Face config has."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden // heads)
    max_positions = config.integer("max_position_embeddings")
    config.require("hidden_act", ("silu", "swish"), "this activation")
    config.require("pretraining_tp", (1,), "tensor-parallel pretraining")
    config.require("use_sliding_window", (False,), "a sliding window in this family")
    kinds = config.values.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
        raise ConfigError(f"{config.label}: sliding or other special layers are not supported for this family")
    return DecoderConfig(
        family=family,
        hidden_size=hidden,
        layers=config.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        rms_eps=config.number("rms_norm_eps"),
        rope=read_rope(config, head_dim, max_positions),
        max_positions=max_positions,
        tied_head=config.boolean("tie_word_embeddings", False),
        qk_norm=qk_norm,
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
    )


def gguf_config(config: ConfigReader, arch: str, weights: Weights, qk_norm: bool) -> DecoderConfig:
    """The same fields from GGUF metadata; the shapes of tensors give the numbers that have no key."""
    hidden, heads = config.integer(f"{arch}.embedding_length"), config.integer(f"{arch}.attention.head_count")
    head_dim = config.integer(f"{arch}.attention.key_length", hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{config.label}: heads of {head_dim} dimensions cannot turn in pairs", "convert it again")
    if config.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{config.label}: partial rotary embeddings are not supported for this family")
    if not config.has(f"{arch}.rope.freq_base"):
        raise ConfigError(f"{config.label}: no '{arch}.rope.freq_base'", "convert the model again with a newer tool")
    scaling = config.text(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ConfigError(f"{config.label}: rope scaling '{scaling}' in a GGUF target is not supported")
    factors: tuple[float, ...] = ()
    if "rope_freqs.weight" in weights.file:
        factors = tuple(weights.source("rope_freqs.weight", (head_dim // 2,)).dense().tolist())
    rope = RopeConfig(
        config.number(f"{arch}.rope.freq_base"),
        head_dim,
        "linear" if scaling == "linear" else "default",
        factor=config.number(f"{arch}.rope.scaling.factor", 1.0),
        factors=factors,
    )
    return DecoderConfig(
        family=arch,
        hidden_size=hidden,
        layers=config.layers(f"{arch}.block_count"),
        heads=heads,
        kv_heads=config.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=config.integer(f"{arch}.feed_forward_length"),
        vocab_size=weights.file.tensor("token_embd.weight").shape[0],
        rms_eps=config.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        max_positions=config.integer(f"{arch}.context_length"),
        tied_head="output.weight" not in weights.file,
        qk_norm=qk_norm,
        attention_bias="blk.0.attn_q.bias" in weights.file,
        mlp_bias="blk.0.ffn_gate.bias" in weights.file,
    )


def read_hf(config: ConfigReader) -> tuple[DecoderConfig, FamilyNames]:
    read = hf_config(config, "llama", qk_norm=False)
    return read, hf_names(read.tied_head)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[DecoderConfig, FamilyNames]:
    return gguf_config(config, "llama", weights, qk_norm=False), gguf_names()
