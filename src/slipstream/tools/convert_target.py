"""Llama and Qwen3 targets between a Hugging Face folder and llama.cpp's GGUF conventions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.formats.gguf_write import MetadataEntry, Progress, TensorPlan, ValueKind, number_entry, text_entry
from slipstream.formats.weights import WeightFile, open_weights, read_config
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import DecoderConfig, FamilyNames
from slipstream.models.llama import gguf_name, gguf_names
from slipstream.models.loading import FAMILIES
from slipstream.models.rope import RopeConfig, inverse_frequencies
from slipstream.models.weights import Weights
from slipstream.tools.convert_plans import (
    Conversion,
    general_entries,
    gguf_type,
    hf_dtype,
    safetensors_type,
    shortest,
    tensor_plan,
    widened_entries,
    widened_types,
)
from slipstream.tools.convert_vocab import NO_END, folder_entries, names_an_end
from slipstream.tools.tensor_lists import decoder_tensors, take_tensors

_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FACTORS = "rope_freqs.weight"
_LLAMA3 = "slipstream.rope."  # what llama3 scaling was made of; the GGUF tensor only has its outcome
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_context")


def read_target(path: Path) -> tuple[DecoderConfig, FamilyNames, WeightFile]:
    """The configuration of the target at `path`, how its file spells things, and the file itself."""
    file, config = open_weights(path), read_config(path)
    family = str(file.metadata.get("general.architecture") if config is None else config.get("model_type"))
    if family not in FAMILIES:
        raise ConfigError(
            f"{path.name}: '{family}' is not a supported target", f"supported: {', '.join(sorted(FAMILIES))}"
        )
    if config is not None:
        return *FAMILIES[family].read_hf(ConfigReader(config, path.name)), file
    reader = ConfigReader(file.metadata, file.path.name)
    return *FAMILIES[family].read_gguf(reader, Weights(file, "fp32")), file


def to_gguf(path: Path, asked: str | None, progress: Progress | None = None) -> Conversion:
    """A Hugging Face target folder as the contents of a GGUF file."""
    config, names, file = read_target(path)
    tensors = take_tensors(file, decoder_tensors(config), names.file_name, names.ignored)
    plans = {}
    for name, tensor in tensors.items():
        order = rotary_order(name, config, to_file=True)
        taken = tensor if order is None else tensor.rows(order)
        plans[name] = tensor_plan(gguf_name(name), taken, gguf_type(tensor, asked)), tensor
    written = [plan for plan, _ in plans.values()]
    folder = path if path.is_dir() else path.parent
    metadata = [
        *general_entries(config.family, path.resolve().name, written), *_shape_entries(config),
        *_rope_entries(config), *widened_entries(plans), *folder_entries(folder, config.vocab_size, progress),
    ]
    if config.rope.kind == "llama3":
        written.insert(0, _factor_tensor(config.rope))
    return Conversion("target", metadata, written, [] if names_an_end(metadata) else [NO_END])


def to_folder(path: Path, asked: str | None) -> tuple[Conversion, dict[str, object]]:
    """A GGUF target as safetensors and the config.json that belongs to them."""
    config, names, file = read_target(path)
    config = replace(config, rope=_original_rope(config.rope, file))
    tensors = take_tensors(file, decoder_tensors(config), names.file_name, names.ignored)
    widened = widened_types(file.metadata)
    plans = []
    for name, tensor in tensors.items():
        order = rotary_order(name, config, to_file=False)
        taken = tensor if order is None else tensor.rows(order)
        plans.append(tensor_plan(name, taken, safetensors_type(tensor, asked, widened)))
    return Conversion("target", [], plans), _hf_config(config, file, plans)


def rotary_order(name: str, config: DecoderConfig, *, to_file: bool) -> Tensor | None:
    """How the rows of a llama's query and key projections are reordered on the way into a GGUF file or out of it."""
    rows = gguf_names().rotary_rows
    if config.family != "llama" or rows is None or ".self_attn." not in name:
        return None
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    order = rows(heads, config.head_dim)
    return order.argsort() if to_file else order


def _shape_entries(config: DecoderConfig) -> list[MetadataEntry]:
    arch = config.family
    numbers = {
        "vocab_size": config.vocab_size, "context_length": config.max_positions,
        "embedding_length": config.hidden_size, "block_count": config.layers,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim,
    }
    entries = [number_entry(f"{arch}.{key}", value, ValueKind.UINT32) for key, value in numbers.items()]
    epsilon = number_entry(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_eps, ValueKind.FLOAT32)
    return [*entries, epsilon]


def _rope_entries(config: DecoderConfig) -> list[MetadataEntry]:
    rope, arch = config.rope, config.family
    entries = [number_entry(f"{arch}.rope.freq_base", rope.theta, ValueKind.FLOAT32)]
    if rope.kind == "linear":
        entries.append(text_entry(f"{arch}.rope.scaling.type", "linear"))
        entries.append(number_entry(f"{arch}.rope.scaling.factor", rope.factor, ValueKind.FLOAT32))
    elif rope.kind == "llama3":
        entries += [number_entry(_LLAMA3 + key, getattr(rope, key), ValueKind.FLOAT64) for key in _LLAMA3_KEYS]
    elif rope.kind != "default":
        raise ConfigError(
            f"rope scaling '{rope.kind}' cannot be stored in a GGUF target", "default, linear and llama3 scaling can"
        )
    return entries


def _factor_tensor(rope: RopeConfig) -> TensorPlan:
    """llama3 scaling as GGUF has it: what each plain frequency is divided by."""
    divisors = inverse_frequencies(RopeConfig(rope.theta, rope.dim)) / inverse_frequencies(rope)
    return TensorPlan(_FACTORS, "F32", (divisors.numel(),), lambda: [np.asarray(divisors, "<f4").tobytes()])


def _original_rope(rope: RopeConfig, file: WeightFile) -> RopeConfig:
    """The scaling whose outcome a file stores; a config.json cannot hold that outcome itself."""
    if not rope.factors:
        return rope
    reader = ConfigReader(file.metadata, file.path.name)
    if all(reader.has(_LLAMA3 + key) for key in _LLAMA3_KEYS):
        factor, low, high, original = (reader.number(_LLAMA3 + key) for key in _LLAMA3_KEYS)
        scaled = RopeConfig(rope.theta, rope.dim, "llama3", factor, int(original), low, high)
        if torch.allclose(inverse_frequencies(scaled), inverse_frequencies(rope), rtol=1e-5):
            return scaled
    raise ConfigError(
        f"{file.path.name} scales positions by the tensor {_FACTORS}, which a config.json cannot hold",
        "convert from the original folder",
    )


def _hf_config(config: DecoderConfig, file: WeightFile, plans: list[TensorPlan]) -> dict[str, object]:
    theta = shortest(config.rope.theta)
    rope: dict[str, object] = {"rope_type": config.rope.kind, "rope_theta": theta}
    if config.rope.kind != "default":
        rope["factor"] = shortest(config.rope.factor)
    if config.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": config.rope.low_freq_factor, "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_context,
        }
    found: dict[str, object] = {
        "architectures": [_CLASSES[config.family]], "model_type": config.family, "hidden_act": "silu",
        "hidden_size": config.hidden_size, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "rms_norm_eps": shortest(config.rms_eps), "max_position_embeddings": config.max_positions,
        "rope_theta": theta, "rope_parameters": rope, "tie_word_embeddings": config.tied_head,
        "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias, "dtype": hf_dtype(plans),
    }
    for key in ("bos_token_id", "eos_token_id"):
        if isinstance(index := file.metadata.get(f"tokenizer.ggml.{key}"), int):
            found[key] = index
    return found
