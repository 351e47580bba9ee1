"""Tiny family targets as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

Renamed = Mapping[str, Tensor]


def write(path: Path, arch: str, keys: Mapping[str, Any], tensors: Renamed, kind: str = "F32") -> Path:
    """One file with a vocabulary; matrices are stored as `kind`, and the tensors are left with the values it has."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        name = f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    _add_vocabulary(writer, tensors["token_embd.weight"].shape[0])
    for name, tensor in tensors.items():
        values = tensor.detach().float().contiguous().numpy()
        matrix = values.ndim > 1 and values.shape[-1] % 32 == 0 and "ffn_gate_inp" not in name
        stored = gguf.GGMLQuantizationType[kind if matrix else "F32"]
        raw = gguf.quants.quantize(values, stored)
        if stored.name != "F32":
            tensor.detach().copy_(torch.from_numpy(gguf.quants.dequantize(raw, stored).reshape(values.shape)))
        writer.add_tensor(name, raw, raw_dtype=None if stored.name == "F32" else stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Tokens that spell their own ids, so that a text tells which they were."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"[{token}]" for token in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _common(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def _renamed(model: PreTrainedModel, arch: gguf.MODEL_ARCH, own: Callable[[str], str | None]) -> dict[str, Tensor]:
    """The model's tensors under their GGUF names: the family's own, and the `gguf` package's for the others."""
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        found = own(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if name.endswith("experts.gate_up_proj") and "gate_up" not in found:
            gate, up = tensor.chunk(2, dim=1)
            tensors[found] = gate
            tensors[found.replace("gate_exps", "up_exps")] = up
        else:
            tensors[found] = tensor
    return tensors


def _layer_name(table: Mapping[str, str]) -> Callable[[str], str | None]:
    def find(name: str) -> str | None:
        parts = name.split(".", 3)
        return f"blk.{parts[2]}.{table[parts[3]]}" if len(parts) == 4 and parts[3] in table else None

    return find


def write_qwen3_moe(model: PreTrainedModel, path: Path, kind: str = "F32") -> Path:
    config = model.config
    keys = _common(config) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim, "rope.freq_base": config.rope_parameters["rope_theta"],
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    own = _layer_name({
        "mlp.experts.gate_up_proj": "ffn_gate_exps.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
    })
    return write(path, "qwen3moe", keys, _renamed(model, gguf.MODEL_ARCH.QWEN3MOE, own), kind)


def write_laguna(model: PreTrainedModel, path: Path, kind: str = "F32") -> Path:
    """The `gguf` package does not know this family yet; its names are Qwen3's but for a few."""
    config = model.config
    full, sliding = (config.rope_parameters[f"{name}_attention"] for name in ("full", "sliding"))
    keys = _common(config) | {
        "attention.head_count": list(config.num_attention_heads_per_layer),
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window, "vocab_size": config.vocab_size,
        "attention.sliding_window_pattern": config.layer_types[1:].index("full_attention") + 1,
        "rope.dimension_count": int(config.head_dim * full.get("partial_rotary_factor", 1.0)),
        "rope.dimension_count_swa": int(config.head_dim * sliding.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": full["rope_theta"], "rope.freq_base_swa": sliding["rope_theta"],
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": True, "expert_weights_scale": config.moe_routed_scaling_factor,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }
    if full["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": full["factor"],
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }
    own = _layer_name({
        "self_attn.g_proj.weight": "attn_gate.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.experts.gate_up_proj": "ffn_gate_exps.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
        "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
        "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
    })
    return write(path, "laguna", keys, _renamed(model, gguf.MODEL_ARCH.QWEN3, own), kind)


def write_gemma4(model: PreTrainedModel, path: Path, kind: str = "F32") -> Path:
    config = model.config
    sliding = [name == "sliding_attention" for name in config.layer_types]
    layers = [config.per_layer_config[index] for index in range(config.num_hidden_layers)]
    full, narrow = layers[sliding.index(False)], layers[sliding.index(True)]
    own_keys = config.num_hidden_layers - config.num_kv_shared_layers
    wide = config.use_double_wide_mlp
    keys = _common(config) | {
        "attention.head_count_kv": [one.num_key_value_heads for one in layers],
        "attention.key_length": full.head_dim, "attention.value_length": full.head_dim,
        "attention.key_length_swa": narrow.head_dim, "attention.value_length_swa": narrow.head_dim,
        "attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "feed_forward_length": [
            config.intermediate_size * (2 if wide and index >= own_keys else 1) for index in range(len(layers))
        ],
        "rope.dimension_count": full.head_dim, "rope.dimension_count_swa": narrow.head_dim,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }
    if config.final_logit_softcapping:
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    if config.enable_moe_block:
        keys |= {
            "expert_count": config.num_experts, "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    own = _layer_name({
        "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
        "layer_scalar": "layer_output_scale.weight",
    })
    tensors = _renamed(model, gguf.MODEL_ARCH.GEMMA4, own)
    turning = int(full.head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = torch.tensor([1.0] * turning + [1e30] * (full.head_dim // 2 - turning))
    return write(path, "gemma4", keys, tensors | {"rope_freqs.weight": factors}, kind)
