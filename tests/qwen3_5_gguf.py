"""Tiny Qwen3.5 targets as GGUF files, with the changes llama.cpp's converter makes to their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.family_gguf import write

# what the `gguf` package spells otherwise than transformers does, or only with `.weight` behind it
_OWN = {
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.experts.gate_up_proj": "ffn_gate_exps.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
}


def write_qwen3_5(model: PreTrainedModel, path: Path, kind: str = "F32", own_drafter: bool = False) -> Path:
    """The whole model; with a drafter of its own there is one block more, which nobody but llama.cpp can use."""
    config = model.config
    arch = "qwen35moe" if "moe" in config.model_type else "qwen35"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    tensors: dict[str, Tensor] = {}
    for name, stored in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _, _, layer, rest = ["", "", "", *name.split(".", 3)][-4:] if name.startswith("model.layers.") else ("",) * 4
        found = f"blk.{layer}.{_OWN[rest]}" if rest in _OWN else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        tensor = _converted(stored, rest or name, config)
        if rest == "mlp.experts.gate_up_proj":
            tensors[found], tensors[found.replace("gate", "up")] = tensor.chunk(2, dim=1)
        else:
            tensors[found] = tensor
    keys = _keys(config)
    if own_drafter:
        tensors[f"blk.{config.num_hidden_layers}.nextn.enorm.weight"] = torch.ones(config.hidden_size)
        keys |= {"block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1}
    return write(path, arch, keys, tensors, kind)


def _converted(tensor: Tensor, name: str, config: Any) -> Tensor:
    """Norms hold what they multiply by, rates are ready for use, and value heads come in rounds over the key heads."""
    if not name.startswith("linear_attn."):
        return tensor + 1.0 if name.endswith("norm.weight") else tensor
    keys, dim = 2 * config.linear_num_key_heads * config.linear_key_head_dim, config.linear_value_head_dim

    def in_rounds(values: Tensor, along: int, width: int) -> Tensor:
        heads = values.unflatten(along, (config.linear_num_key_heads, -1, width))
        return heads.transpose(along, along + 1).flatten(along, along + 2)

    match name.removeprefix("linear_attn."):
        case "A_log":
            return in_rounds(-tensor.exp(), 0, 1)
        case "dt_bias" | "in_proj_a.weight" | "in_proj_b.weight":
            return in_rounds(tensor, 0, 1)
        case "in_proj_z.weight":
            return in_rounds(tensor, 0, dim)
        case "in_proj_qkv.weight" | "conv1d.weight":
            flat = tensor.flatten(1) if name.startswith("linear_attn.conv1d") else tensor
            return torch.cat((flat[:keys], in_rounds(flat[keys:], 0, dim)))
        case "out_proj.weight":
            return in_rounds(tensor, 1, dim)
    return tensor


def _keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    turning = int(config.head_dim * rope["partial_rotary_factor"])
    keys = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "full_attention_interval": 4,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": turning, "rope.dimension_sections": [*rope["mrope_section"], 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    if "moe" not in config.model_type:
        return keys | {"feed_forward_length": config.intermediate_size}
    return keys | {
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }
