"""Reads a DFlash drafter's configuration from Hugging Face JSON or GGUF metadata, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.config_reading import ConfigReader
from slipstream.models.rope import RopeConfig, read_rope


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Every number and silent convention of a drafter."""

    label: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeConfig
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    patterns: tuple[AttentionPattern, ...]  # one per layer
    trained_length: int  # 0: not recorded
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    qk_norm: bool = True
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.label}: {self.heads} heads cannot share {self.kv_heads} key heads evenly")
        if not self.target_layer_ids:
            raise ConfigError(f"{self.label}: target_layer_ids is empty", "the drafter must say which layers it reads")
        if self.block_size < 2:
            raise ConfigError(f"{self.label}: block_size is {self.block_size}, it must be at least 2")


def read_hf(config: Mapping[str, object], label: str) -> DFlashConfig:
    """From config.json; speculation fields may stand in `dflash_config` or at top level."""
    reader = ConfigReader(config, label)
    nested = reader.section("dflash_config")
    _refuse_other_drafters(reader, nested)

    def holder(key: str) -> ConfigReader:
        return nested if nested.has(key) else reader

    heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    head_dim = reader.integer("head_dim", hidden // heads)
    layers = reader.integer("num_hidden_layers")
    if not holder("target_layer_ids").has("target_layer_ids"):
        raise ConfigError(
            f"{label}: no target_layer_ids", "add the ids the drafter was trained with; they cannot be guessed safely"
        )
    block_key = "block_size" if holder("block_size").has("block_size") else "draft_block_size"
    reader.require("hidden_act", ("silu", "swish"), "this activation")
    for key in ("rope_is_neox_style", "is_neox_style"):
        reader.require(key, (True,), "interleaved rotary embeddings")
    scale_key, cap_key = "input_embedding_scale", "final_logit_softcapping"
    return DFlashConfig(
        label=label,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        rms_eps=reader.number("rms_norm_eps"),
        rope=read_rope(reader, head_dim, reader.integer("max_position_embeddings")),
        attention_bias=reader.boolean("attention_bias", False),
        block_size=holder(block_key).integer(block_key),
        mask_token_id=holder("mask_token_id").integer("mask_token_id", least=0),
        target_layer_ids=tuple(holder("target_layer_ids").integers("target_layer_ids")),
        num_target_layers=_optional_integer(holder("num_target_layers"), "num_target_layers"),
        patterns=_layer_patterns(reader, nested, layers),
        trained_length=holder("trained_length").integer("trained_length", 0, least=0),
        input_embedding_scale=holder(scale_key).number(scale_key) if holder(scale_key).has(scale_key) else None,
        output_multiplier=holder("output_multiplier").number("output_multiplier", 1.0),
        final_logit_softcapping=holder(cap_key).number(cap_key, 0.0),
    )


def _refuse_other_drafters(reader: ConfigReader, nested: ConfigReader) -> None:
    """Drafters with parts we do not compute would run and lose their acceptance."""
    for section in (reader, nested):
        for key in ("markov_rank", "selector_rank", "conv_kernel_size", "draft_vocab_size", "transformer_layer_config"):
            if section.has(key) and section.values[key] != 0:
                message = f"{reader.label}: drafters with '{key}' are not supported"
                raise ConfigError(message, "use a plain DFlash drafter")
        section.require("sample_from_anchor", (False,), "a block that samples from the anchor")


def _optional_integer(reader: ConfigReader, key: str) -> int | None:
    return reader.integer(key) if reader.has(key) else None


def _layer_patterns(reader: ConfigReader, nested: ConfigReader, layers: int) -> tuple[AttentionPattern, ...]:
    """Window and causality of each layer: explicit flags first, then what the layer type implies."""
    forced: bool | None = None
    if reader.has("is_causal"):
        forced = reader.boolean("is_causal")
    elif nested.has("causal"):
        forced = nested.boolean("causal")
    if not reader.has("layer_types"):
        if nested.has("use_swa") and nested.boolean("use_swa"):
            window = nested.integer("swa_window_size")
            return (AttentionPattern(window, bool(forced)),) * layers
        return (AttentionPattern(0, bool(forced)),) * layers
    kinds = reader.values["layer_types"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ConfigError(f"{reader.label}: layer_types must name {layers} layers, each one of {', '.join(known)}")
    patterns = []
    for kind in kinds:
        sliding = kind == "sliding_attention"
        window = reader.integer("sliding_window") if sliding else 0
        patterns.append(AttentionPattern(window, sliding if forced is None else forced))
    return tuple(patterns)


def read_gguf(metadata: Mapping[str, object], label: str, vocab_size: int | None) -> DFlashConfig:
    """From a GGUF written to llama.cpp's conventions, whose `target_layers` are layer ids plus one."""
    reader = ConfigReader(metadata, label)
    hidden, heads = reader.integer("dflash.embedding_length"), reader.integer("dflash.attention.head_count")
    head_dim = reader.integer("dflash.attention.key_length", hidden // heads)
    layers = reader.integer("dflash.block_count")
    reader.require("dflash.sample_from_anchor", (False,), "a block that samples from the anchor")
    if not reader.has("dflash.target_layers"):
        raise ConfigError(f"{label}: no dflash.target_layers", "convert the drafter again; a guess costs acceptance")
    if not reader.has("dflash.rope.freq_base"):
        raise ConfigError(f"{label}: no dflash.rope.freq_base", "convert the drafter again; a guess costs acceptance")
    return DFlashConfig(
        label=label,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=reader.integer("dflash.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=reader.integer("dflash.feed_forward_length"),
        vocab_size=reader.integer("dflash.vocab_size", vocab_size),
        rms_eps=reader.number("dflash.attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(reader.number("dflash.rope.freq_base"), head_dim),
        attention_bias=False,
        block_size=reader.integer("dflash.block_size"),
        mask_token_id=reader.integer("tokenizer.ggml.mask_token_id", least=0),
        target_layer_ids=tuple(layer - 1 for layer in reader.integers("dflash.target_layers")),
        num_target_layers=_optional_integer(reader, "slipstream.num_target_layers"),
        patterns=_gguf_patterns(reader, layers),
        trained_length=reader.integer("slipstream.trained_length", 0, least=0),
    )


def _gguf_patterns(reader: ConfigReader, layers: int) -> tuple[AttentionPattern, ...]:
    if not reader.has("dflash.attention.sliding_window"):
        return (AttentionPattern(0, causal=False),) * layers
    window = reader.integer("dflash.attention.sliding_window", least=0)
    flags = reader.values.get("dflash.attention.sliding_window_pattern", [window > 0] * layers)
    if not isinstance(flags, list) or len(flags) != layers:
        raise ConfigError(f"{reader.label}: dflash.attention.sliding_window_pattern must have {layers} entries")
    return tuple(AttentionPattern(window if flag else 0, causal=bool(flag)) for flag in flags)
