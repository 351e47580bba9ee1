"""Converts targets of every family between a Hugging Face folder and llama.cpp's GGUF conventions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.formats.file_bytes import MemoryBytes, TensorEntry
from slipstream.formats.gguf import ValueKind
from slipstream.formats.gguf_write import TensorPlan, as_read, entries
from slipstream.formats.weight_files import WeightFile, open_weights
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import DecoderConfig, FamilyNames
from slipstream.models.gemma4_config import Gemma4Config
from slipstream.models.loading import FAMILIES, read_target_config
from slipstream.models.rope import RopeConfig, inverse_frequencies
from slipstream.models.weights import Weights
from slipstream.tools.convert_plans import (
    Conversion,
    general_keys,
    gguf_type,
    hf_dtype,
    rounded,
    safetensors_type,
    tensor_plan,
    widened_keys,
    widened_types,
)
from slipstream.tools.convert_vocab import END_KEY, NO_END, folder_entries
from slipstream.tools.family_configs import FAMILY_NAMES, gguf_keys, hf_config
from slipstream.tools.family_tensors import folder_tensors, gguf_tensors
from slipstream.tools.model_file import decoder_tensors, take_tensors
from slipstream.types import Progress

_FACTORS = "rope_freqs.weight"
_STANDS_STILL = 1e30  # the divisor that llama.cpp stores for a frequency whose dimensions do not rotate
_LLAMA3 = "slipstream.rope."  # + a setting of llama3 scaling; the GGUF tensor holds only the resulting factors
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
# Fields that files express in different ways with the same meaning; what layers derive from them is compared instead.
_SPELLING = {
    "as_gguf",
    "family",
    "full_rope",
    "head_dim",
    "heads",
    "intermediate_size",
    "keys_are_values",
    "kv_heads",
    "layer_dims",
    "layer_heads",
    "layer_inner",
    "layer_kv_heads",
    "rope",
    "sliding",
    "sliding_rope",
    "window",
}
_WORDS = {
    "attention_bias": "attention biases",
    "mlp_bias": "biases",
    "moe": "how its experts are chosen or weighed",
    "sparse": "which of its layers have experts",
    "rope": "how its positions turn",
    "window": "the windows of its layers",
    "heads": "the heads of its layers",
    "kv_shapes": "which layers share keys",
}


def read_target(path: Path) -> tuple[DecoderConfig, FamilyNames, WeightFile]:
    """The configuration of the target at `path`, the names that its file uses, and the open file."""
    file = open_weights(path)
    return *read_target_config(path, file), file


def to_gguf(path: Path, asked: str | None, progress: Progress | None = None) -> Conversion:
    """The contents of a GGUF file for a Hugging Face target folder."""
    config, names, file = read_target(path)
    tensors = take_tensors(file, decoder_tensors(config, names, file), names.file_name, names.ignored)
    sources = gguf_tensors(config, tensors)
    written = [tensor_plan(name, tensor, gguf_type(tensor, asked)) for name, tensor in sources.items()]
    described = entries(gguf_keys(config))
    if config.rope.kind == "llama3":
        scaling = {_LLAMA3 + key: getattr(config.rope, key) for key in _LLAMA3_KEYS}
        described |= entries(scaling, ValueKind.FLOAT64)
    factors = _factors(config)
    if factors is not None:
        written.insert(0, _factor_tensor(factors))
    back = FAMILIES[config.family].read_gguf(
        ConfigReader(as_read(described), path.name), Weights(_as_written(written, factors), "fp32")
    )[0]
    _refuse_what_is_lost(config, back, path.name, "GGUF")
    folder = path if path.is_dir() else path.parent
    metadata = entries(general_keys(FAMILY_NAMES[config.family][0], path.resolve().name, written)) | described
    metadata |= entries(widened_keys(sources)) | folder_entries(folder, config.vocab_size, progress)
    return Conversion(written, metadata, notes=[] if END_KEY in metadata else [NO_END])


def to_folder(path: Path, asked: str | None) -> Conversion:
    """The safetensors of a GGUF target, and the config.json that belongs to them."""
    config, names, file = read_target(path)
    if not isinstance(config, Gemma4Config):
        config = replace(config, rope=_original_rope(config.rope, file))
    tensors = take_tensors(file, decoder_tensors(config, names, file), names.file_name, names.ignored)
    widened = widened_types(file.metadata)
    plans = [
        tensor_plan(name, tensor, safetensors_type(tensor, asked, widened))
        for name, tensor in folder_tensors(config, tensors).items()
    ]
    ids = {key: file.metadata.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
    found = {"dtype": hf_dtype(plans)} | {key: value for key, value in ids.items() if isinstance(value, int)}
    described = {key: value for key, value in hf_config(config, found).items() if value is not None}
    back = FAMILIES[config.family].read_hf(ConfigReader(described, path.name))[0]
    _refuse_what_is_lost(config, back, path.name, "config.json")
    return Conversion(plans, config=described)


# ---- what a format cannot express


def _refuse_what_is_lost(config: DecoderConfig, back: DecoderConfig, label: str, into: str) -> None:
    """Compares what a reader of the new file will understand with the original, and refuses a difference."""
    meant, understood = _traits(config), _traits(back)
    lost = [name for name, value in meant.items() if understood.get(name) != value]
    ropes = [(config.layer(index).rope, back.layer(index).rope) for index in range(config.layers if not lost else 0)]
    lost += ["rope"] if not all(_turn_alike(*pair) for pair in ropes) else []
    if lost:
        what = _WORDS.get(lost[0], f"its '{lost[0]}' ({getattr(config, lost[0])!r})")
        raise ConfigError(f"{label}: {into} cannot express {what} in this family", "use it in the format it has")


def _traits(config: DecoderConfig) -> dict[str, object]:
    """What the model will compute, independent of the file's notation; numbers have the precision of 32-bit floats."""
    layers = [config.layer(index) for index in range(config.layers)]
    traits: dict[str, object] = {
        item.name: rounded(getattr(config, item.name)) for item in fields(config) if item.name not in _SPELLING
    }
    return traits | {
        "heads": [(one.heads, one.kv_heads, one.head_dim) for one in layers],
        "kv_shapes": config.kv_shapes,
        "intermediate_size": [one.intermediate_size for one in layers],
        "window": [config.pattern(index) for index in range(config.layers)],
    }


def _turn_alike(one: RopeConfig, other: RopeConfig) -> bool:
    if (one.dim, one.width) != (other.dim, other.width):
        return False
    first, second = (
        torch.cat((inverse_frequencies(rope), torch.tensor([rope.attention_factor]))) for rope in (one, other)
    )
    return torch.allclose(first, second, rtol=1e-5, atol=1e-12)


def _as_written(plans: Sequence[TensorPlan], factors: Tensor | None) -> WeightFile:
    """The new file as a reader of its configuration sees it: names, shapes, and the one tensor that is read."""
    data = b"" if factors is None else factors.numpy().astype("<f4").tobytes()
    stored = MemoryBytes(np.frombuffer(data, np.uint8))
    entries = [
        TensorEntry(plan.name, plan.type_name, plan.shape, 0, len(data) if plan.name == _FACTORS else 0)
        for plan in plans
    ]
    return WeightFile(Path(_FACTORS), {entry.name: (entry, stored) for entry in entries}, {})


# ---- scaled positions


def _factors(config: DecoderConfig) -> Tensor | None:
    """The divisor of each plain frequency if GGUF stores it as a tensor: for llama3 scaling and Gemma's full layers."""
    rope = config.full_rope if isinstance(config, Gemma4Config) else config.rope
    if rope.kind != "llama3" and not rope.factors:
        return None
    divisors = inverse_frequencies(RopeConfig(rope.theta, rope.dim)) / inverse_frequencies(rope)
    return divisors.clamp(max=_STANDS_STILL)


def _factor_tensor(factors: Tensor) -> TensorPlan:
    return TensorPlan(_FACTORS, "F32", (factors.numel(),), lambda: [np.asarray(factors, "<f4").tobytes()])


def _original_rope(rope: RopeConfig, file: WeightFile) -> RopeConfig:
    """The scaling from which a file's stored factors were computed; a config.json cannot hold the factors."""
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
