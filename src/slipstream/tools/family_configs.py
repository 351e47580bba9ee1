"""Writes the settings of a target's configuration as llama.cpp's GGUF keys and as a config.json, for each family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.errors import ConfigError
from slipstream.formats.gguf_write import Value
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.gemma4_config import FULL, SLIDING, Gemma4Config
from slipstream.models.laguna import LagunaConfig
from slipstream.models.moe import MoeShape
from slipstream.models.qwen3_5 import LINEAR, Qwen35Config
from slipstream.models.rope import RopeConfig
from slipstream.tools.convert_plans import shortest

# For each family: llama.cpp's architecture, Hugging Face's model type, and Hugging Face's class.
FAMILY_NAMES = {
    "gemma4": ("gemma4", "gemma4_text", "Gemma4ForCausalLM"),
    "laguna": ("laguna", "laguna", "LagunaForCausalLM"),
    "llama": ("llama", "llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "qwen3", "Qwen3ForCausalLM"),
    "qwen3_5": ("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3_moe": ("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM"),
}
_SIGMOID = 2  # llama.cpp's number for routing by sigmoid
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # the defaults, which files do not state
_STILL = 1e20  # dimensions whose frequency is divided by this or more do not rotate


# ---- GGUF keys


def gguf_keys(config: DecoderConfig) -> dict[str, Value]:
    """All keys that llama.cpp requires in a file of this family."""
    keys = stack_keys(config, config.max_positions) | (_moe_keys(config.moe) if config.moe is not None else {})
    if own := _OWN_KEYS.get(config.family):
        keys |= own(config)
    return {f"{FAMILY_NAMES[config.family][0]}.{key}": value for key, value in keys.items()}


def stack_keys(config: DecoderConfig | DFlashConfig, context: int) -> dict[str, Value]:
    """The keys that targets and drafters share."""
    return {
        "vocab_size": config.vocab_size,
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        **rope_keys(config.rope),
    }


def rope_keys(rope: RopeConfig, suffix: str = "") -> dict[str, Value]:
    """The keys for rotary embeddings; llama3 scaling has none, because a tensor holds its result."""
    keys: dict[str, Value] = {f"rope.freq_base{suffix}": rope.theta, f"rope.dimension_count{suffix}": rope.dim}
    if rope.kind in ("default", "llama3"):
        return keys
    if rope.kind not in ("linear", "yarn") or suffix:
        raise ConfigError(
            f"rope scaling '{rope.kind}' cannot be stored in a GGUF target", "default, linear, llama3 and yarn can"
        )
    keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.original_context
        keys |= {f"rope.scaling.yarn_{name}": value for name, value in _yarn_extras(rope).items()}
    return keys


def _yarn_extras(rope: RopeConfig) -> dict[str, float]:
    """The settings of a YaRN scaling that differ from their defaults."""
    usual = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    found = {} if math.isclose(rope.attention_factor, usual, rel_tol=1e-6) else {"attn_factor": rope.attention_factor}
    return found | {name: getattr(rope, name) for name, value in _YARN_BETAS.items() if getattr(rope, name) != value}


def _moe_keys(moe: MoeShape) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "expert_count": moe.experts,
        "expert_used_count": moe.active,
        "expert_feed_forward_length": moe.intermediate_size,
    }
    return keys | ({"expert_shared_feed_forward_length": moe.shared_size} if moe.shared_size else {})


def _laguna_keys(config: LagunaConfig) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "attention.head_count": config.layer_heads,
        "leading_dense_block_count": (*config.sparse, True).index(True),
        "expert_weights_norm": config.moe.renormalise,
        "expert_weights_scale": config.moe.scale,
        "expert_gating_func": _SIGMOID,
        "attention.sliding_window": config.window,
    }
    if not config.window:
        return keys
    period = (*config.sliding[1:], False).index(False) + 1
    regular = config.sliding == tuple(index % period != 0 for index in range(config.layers))
    pattern: Value = period if regular else config.sliding
    return keys | rope_keys(config.sliding_rope, "_swa") | {"attention.sliding_window_pattern": pattern}


def _gemma4_keys(config: Gemma4Config) -> dict[str, Value]:
    full = config.layer_dims[-1]
    keys: dict[str, Value] = {
        "attention.head_count_kv": config.layer_kv_heads,
        "feed_forward_length": config.layer_inner,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.sliding_window": config.window,
        "attention.sliding_window_pattern": config.sliding,
        "attention.shared_kv_layers": config.sharing,
        "embedding_length_per_layer_input": config.side_size,
        **rope_keys(config.full_rope),
        **rope_keys(config.rope, "_swa"),
    }
    if config.final_softcap:
        keys["final_logit_softcapping"] = config.final_softcap
    return keys


def _qwen35_keys(config: Qwen35Config) -> dict[str, Value]:
    delta, period = config.delta, (*config.recurrent, False).index(False) + 1
    keys: dict[str, Value] = {
        "rope.dimension_sections": (*rotary_sections(config.rope.dim // 2), 0),
        "ssm.conv_kernel": delta.kernel,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.value_heads * delta.value_dim,
        "full_attention_interval": period,
    }
    if config.recurrent != tuple((index + 1) % period != 0 for index in range(config.layers)):
        keys["attention.recurrent_layers"] = config.recurrent
    return keys


def rotary_sections(pairs: int) -> tuple[int, int, int]:
    """How time, height and width share the rotating pairs; in text all three equal the position."""
    first = -(-pairs // 3)
    second = -(-(pairs - first) // 2)
    return first, second, pairs - first - second


# ---- config.json


def stack_shape(config: DecoderConfig | DFlashConfig) -> dict[str, object]:
    """The keys of a config.json that targets and drafters share."""
    return {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": shortest(config.rms_eps),
    }


def hf_config(config: DecoderConfig, context: Mapping[str, object]) -> dict[str, object]:
    """The config.json of a target; `context` holds what the configuration does not know, such as token ids."""
    _, model_type, architecture = FAMILY_NAMES[config.family]
    found: dict[str, object] = {
        "architectures": [architecture],
        "model_type": model_type,
        **stack_shape(config),
        "max_position_embeddings": config.max_positions,
        "rope_theta": shortest(config.rope.theta),
        "rope_parameters": rope_section(config.rope),
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    if own := _OWN_CONFIG.get(config.family):
        found |= own(config)
    return found | _moe_config(config) | dict(context)


def _moe_config(config: DecoderConfig) -> dict[str, object]:
    moe = config.moe
    if moe is None:
        return {}
    found: dict[str, object] = {
        "num_experts": moe.experts,
        "top_k_experts" if isinstance(config, Gemma4Config) else "num_experts_per_tok": moe.active,
        "moe_intermediate_size": moe.intermediate_size,
    }
    shares = isinstance(config, LagunaConfig | Qwen35Config)
    return found | ({"shared_expert_intermediate_size": moe.shared_size} if shares else {})


def rope_section(rope: RopeConfig) -> dict[str, object]:
    """One rotation as `rope_parameters` states it; Gemma's full layers rotate only their first frequencies."""
    found: dict[str, object] = {"rope_type": rope.kind, "rope_theta": shortest(rope.theta)}
    if rope.partial:
        found["partial_rotary_factor"] = rope.dim / rope.width
    if rope.factors:
        turning = [factor for factor in rope.factors if factor < _STILL]
        found |= {"rope_type": "proportional", "partial_rotary_factor": len(turning) / len(rope.factors)}
        return found | ({"factor": shortest(turning[0])} if turning and turning[0] != 1.0 else {})
    if rope.kind != "default":
        found["factor"] = shortest(rope.factor)
    if rope.kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        extras = _yarn_extras(rope)
        found |= {name.replace("attn_", "attention_"): shortest(value) for name, value in extras.items()}
    return found


def _qwen3_moe_config(config: DecoderConfig) -> dict[str, object]:
    assert config.moe is not None
    return {"norm_topk_prob": config.moe.renormalise, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _laguna_config(config: LagunaConfig) -> dict[str, object]:
    ropes = {FULL: config.rope, SLIDING: config.sliding_rope}
    return {
        "num_attention_heads_per_layer": list(config.layer_heads),
        "sliding_window": config.window or None,
        "layer_types": [SLIDING if slides else FULL for slides in config.sliding],
        "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in config.sparse],
        "rope_theta": None,
        "rope_parameters": {name: rope_section(rope) for name, rope in ropes.items()},
        "gating": True if config.gate_per_head else "per-element",
        "moe_routed_scaling_factor": shortest(config.moe.scale),
    }


def _gemma4_config(config: Gemma4Config) -> dict[str, object]:
    own = range(config.layers - config.sharing)
    kinds = [SLIDING if slides else FULL for slides in config.sliding]
    ropes = {SLIDING: config.rope, FULL: config.full_rope}
    heads = {
        str(index): {"head_dim": config.layer_dims[index], "num_key_value_heads": config.layer_kv_heads[index]}
        for index in range(config.layers)
        if not config.sliding[index]
    }
    sliding_heads = [count for count, slides in zip(config.layer_kv_heads, config.sliding, strict=True) if slides]
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "rope_theta": None,
        "rope_parameters": {name: rope_section(rope) for name, rope in ropes.items()},
        "per_layer_config": heads,
        "num_key_value_heads": (sliding_heads or config.layer_kv_heads)[0],
        "sliding_window": config.window,
        "attention_k_eq_v": any(config.keys_are_values[index] for index in own),
        "num_kv_shared_layers": config.sharing,
        "use_double_wide_mlp": config.layer_inner[-1] > config.layer_inner[0],
        "hidden_size_per_layer_input": config.side_size,
        "vocab_size_per_layer_input": config.side_vocab or None,
        "final_logit_softcapping": shortest(config.final_softcap) if config.final_softcap else None,
        "enable_moe_block": config.moe is not None,
    }


def _qwen35_config(config: Qwen35Config) -> dict[str, object]:
    delta = config.delta
    sections = {"mrope_section": list(rotary_sections(config.rope.dim // 2))}
    return {
        "layer_types": [LINEAR if recurrent else FULL for recurrent in config.recurrent],
        "rope_theta": None,
        "rope_parameters": {"partial_rotary_factor": 1.0} | rope_section(config.rope) | sections,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.kernel,
    }


# What a family has beside the keys of all families and those of experts.
_OWN_KEYS: dict[str, Callable[[Any], dict[str, Value]]] = {
    "gemma4": _gemma4_keys,
    "laguna": _laguna_keys,
    "qwen3_5": _qwen35_keys,
    "qwen3_5_moe": _qwen35_keys,
}
_OWN_CONFIG: dict[str, Callable[[Any], dict[str, object]]] = {
    "gemma4": _gemma4_config,
    "laguna": _laguna_config,
    "qwen3_5": _qwen35_config,
    "qwen3_5_moe": _qwen35_config,
    "qwen3_moe": _qwen3_moe_config,
}
