"""Builds a `transformers` target and the authors' drafter from our files, to run the same weights in their code."""

# mypy: disable-error-code="arg-type, call-arg, unused-ignore"

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.formats.weight_files import open_weights
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.llama import gguf_name, stored_rotary_rows
from slipstream.models.loading import read_target_config
from slipstream.tools.authors_drafter import build_authors_drafter
from slipstream.tools.model_file import open_model


def build_target(path: Path, device: torch.device) -> Any:
    """A Llama from a GGUF file in bf16, as `transformers` runs it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with open_weights(path) as file:
        shape, _ = read_target_config(path, file)
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.rms_eps,
            max_position_embeddings=shape.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
            tie_word_embeddings=shape.tied_head,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        state = {}
        for name in model.state_dict():
            if name == "lm_head.weight" and shape.tied_head:
                continue
            tensor = file.tensor(gguf_name(name))
            for part, heads in (("q_proj", shape.heads), ("k_proj", shape.kv_heads)):
                if part in name:
                    tensor = tensor.rows(stored_rotary_rows(heads, shape.head_dim))
            state[name] = tensor.dense().to(torch.bfloat16)
        model.load_state_dict(state, strict=False)
        model.tie_weights()
    return model.to(device).eval()


def build_drafter(path: Path, device: torch.device) -> Any:
    with open_model(path) as model:
        assert isinstance(model.config, DFlashConfig), model.problem
        return build_authors_drafter(model, model.config).to(torch.bfloat16).to(device)


def build_random_pair(shape: DecoderConfig, draft: DFlashConfig, device: torch.device) -> tuple[Any, Any]:
    """A Qwen3 of this shape and the authors' drafter for it, both with random weights in bf16."""
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    common = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_eps,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope.theta},
        "tie_word_embeddings": False,
    }
    speculation = {"target_layer_ids": list(draft.target_layer_ids), "mask_token_id": draft.mask_token_id}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            target = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=shape.layers, **common)).eval()
            drafter = DFlashDraftModel(
                Qwen3Config(
                    num_hidden_layers=draft.layers,
                    block_size=draft.block_size,
                    num_target_layers=shape.layers,
                    dflash_config=speculation,
                    **common,
                )
            ).eval()
    finally:
        torch.set_default_dtype(before)
    return target, drafter
