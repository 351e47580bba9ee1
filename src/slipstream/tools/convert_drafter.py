"""Converts DFlash, DSpark and DFlash 2 drafters between a folder and GGUF, in llama.cpp's or lucebox's naming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from slipstream.errors import ConfigError, PairError
from slipstream.formats.gguf import ValueKind
from slipstream.formats.gguf_write import Metadata, TensorPlan, Value, as_read, entries
from slipstream.formats.weight_files import WeightFile, WeightTensor, open_weights, read_config
from slipstream.models import dflash_config
from slipstream.models.config_reading import ConfigReader
from slipstream.models.dflash import LUCEBOX_ARCH, read_drafter_config
from slipstream.models.dflash_config import GGUF_EXPECTED_TAU, DFlashConfig
from slipstream.models.dflash_names import gguf_spellings, names_in, shapes_in
from slipstream.tools.convert_plans import (
    Conversion,
    general_keys,
    gguf_type,
    hf_dtype,
    rounded,
    safetensors_type,
    shortest,
    tensor_plan,
    widened_keys,
    widened_types,
)
from slipstream.tools.convert_target import read_target
from slipstream.tools.convert_vocab import MASK_KEY, target_entries
from slipstream.tools.family_configs import rope_section, stack_keys, stack_shape
from slipstream.tools.model_file import drafter_tensors, take_tensors
from slipstream.types import Progress

NAMINGS = {"llama.cpp": "dflash", "lucebox": LUCEBOX_ARCH}  # naming of keys and tensors -> architecture
# The factors and the cap of a drafter: names in a config.json -> names in GGUF
_SCALES = {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Fields of the configuration that GGUF cannot express, each with the words for the error message.
_WORDLESS = {
    "patterns": "the windows and causality of its layers",
    "rope": "scaled positions",
    "mlp_bias": "biases",
    "qk_norm": "layers without query and key norms",
}
_KNOWN, _KNOWN_BACKWARDS = "d2t", "t2d"  # both hold the same map between draft and target ids, in opposite directions
_FUSED = "qkv_proj.weight"
# Parts that a reader learns from the tensors. A config.json does not state them under these names.
_SHOWN_BY_TENSORS = ("tap_norms", "context_norm", "gate_width")
_NO_TOKENIZER = "without --target the file has no tokenizer: slipstream accepts it, but llama.cpp would refuse it"


def to_gguf(
    path: Path, asked: str | None, naming: str, target: Path | None, progress: Progress | None = None
) -> Conversion:
    """The contents of a GGUF file for a Hugging Face drafter folder."""
    file = open_weights(path)
    config = read_drafter_config(path, file)
    names = names_in(file)
    tensors = take_tensors(file, drafter_tensors(config, file), names, lambda name: name == _KNOWN_BACKWARDS)
    known = tensors.pop(_KNOWN, None)
    sources = {gguf_tensor_name(name, naming): tensor for name, tensor in _apart(config, tensors).items()}
    written = [tensor_plan(name, tensor, gguf_type(tensor, asked)) for name, tensor in sources.items()]
    written += [] if known is None else [_known_tokens(known, as_offsets=False)]
    context = ConfigReader(read_config(path) or {}, path.name).integer("max_position_embeddings")
    tap_width = tensors["fc.weight"].shape[1]
    metadata = entries(general_keys(NAMINGS[naming], path.resolve().name, written))
    metadata |= _drafter_entries(config, naming, context, tap_width) | entries(widened_keys(sources))
    _refuse_what_is_lost(config, metadata, naming, file)
    if target is None:
        return Conversion(written, metadata, notes=[_NO_TOKENIZER] if naming == "llama.cpp" else [])
    _check_target(config, tap_width, target)
    return Conversion(written, metadata | target_entries(target, config.vocab_size, progress))


def to_folder(path: Path, asked: str | None, target: Path | None) -> Conversion:
    """The safetensors of a GGUF drafter, and the config.json that belongs to them."""
    file = open_weights(path)
    config = read_drafter_config(path, file)
    tensors = take_tensors(file, drafter_tensors(config, file), names_in(file))
    known = tensors.pop(_KNOWN, None)
    if target is not None:
        _check_target(config, tensors["fc.weight"].shape[1], target)
    widened = widened_types(file.metadata)
    plans = [
        tensor_plan(name, tensor, safetensors_type(tensor, asked, widened)) for name, tensor in tensors.items()
    ] + ([] if known is None else [_known_tokens(known, as_offsets=True)])
    return Conversion(plans, config=_hf_config(config, _context(config, file, target), plans))


def _apart(config: DFlashConfig, tensors: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
    """Splits fused query, key and value tensors, which some folders have, because GGUF stores them separately."""
    found: dict[str, WeightTensor] = {}
    counts = [heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
    for name, tensor in tensors.items():
        if name.endswith(_FUSED):
            for part, rows in zip("qkv", torch.arange(sum(counts)).split(counts), strict=True):
                found[f"{name.removesuffix(_FUSED)}{part}_proj.weight"] = tensor.rows(rows)
        else:
            found[name] = tensor
    return found


def _known_tokens(stored: WeightTensor, *, as_offsets: bool) -> TensorPlan:
    """The target's ids of the tokens that a drafter knows; folders store each id minus its index in the tensor."""
    places = torch.arange(stored.shape[0])
    values = stored.dense().long() + (-places if as_offsets else places)
    return TensorPlan(_KNOWN, "I64", stored.shape, lambda: [np.asarray(values, "<i8").tobytes()])


def gguf_tensor_name(name: str, naming: str) -> str:
    """A tensor's name in a GGUF file; lucebox adds a prefix to tensors that a plain decoder does not have."""
    spellings = gguf_spellings(name)
    marked = [spelling for spelling in spellings if spelling.startswith("dflash.")]
    return marked[0] if marked and naming == "lucebox" else spellings[0]


def _drafter_entries(config: DFlashConfig, naming: str, context: int, tap_width: int) -> Metadata:
    """All settings of a drafter's configuration as GGUF metadata."""
    arch = NAMINGS[naming]
    keys = stack_keys(config, context) | _window_keys(config)
    keys |= {_SCALES[name]: value for name, value in _scales(config).items()}
    own: dict[str, Value] = {"slipstream.trained_length": config.trained_length}
    if config.num_target_layers is not None:
        own["slipstream.num_target_layers"] = config.num_target_layers
    if config.target_family is not None:
        own["slipstream.target_model_type"] = config.target_family
    lucebox = naming == "lucebox"
    prefix = f"{arch}.dflash." if lucebox else "dflash."
    written = {f"{arch}.{key}": value for key, value in keys.items()} | own
    written |= {f"{prefix}{key}": value for key, value in _speculation_keys(config, lucebox, tap_width).items()}
    if not lucebox:
        written[MASK_KEY] = config.mask_token_id
    taus = {prefix + GGUF_EXPECTED_TAU.removeprefix("dflash.") + name: tau for name, tau in config.expected_tau.items()}
    return entries(written) | entries(taus, ValueKind.FLOAT64)


def _scales(config: DFlashConfig) -> dict[str, float]:
    """The factors and the cap that the drafter has, by their names in a config.json."""
    own = [item for item in fields(config) if item.name in _SCALES]
    return {item.name: value for item in own if (value := getattr(config, item.name)) != item.default}


def _window_keys(config: DFlashConfig) -> dict[str, Value]:
    windows = [pattern.window for pattern in config.patterns]
    flags, causal = [window > 0 for window in windows], [pattern.causal for pattern in config.patterns]
    keys: dict[str, Value] = {} if causal == flags else {"attention.causal": max(causal)}
    if any(windows):
        keys |= {"attention.sliding_window": max(windows), "attention.sliding_window_pattern": flags}
    return keys


def _speculation_keys(config: DFlashConfig, lucebox: bool, tap_width: int) -> dict[str, Value]:
    """The keys for blocks, taps, heads and convolutions; lucebox keeps DSpark's heads in a section of their own."""
    parts, heads = config.parts, "dspark." if lucebox else ""
    keys: dict[str, Value] = {"block_size": config.block_size, "sample_from_anchor": config.sample_from_anchor}
    if lucebox:
        keys |= {
            "target_layer_ids": config.target_layer_ids,
            "mask_token_id": config.mask_token_id,
            "n_target_layers": len(config.target_layer_ids),
            "n_target_features": tap_width,
        }
    else:
        # llama.cpp records the inputs of layers, so the number is one more than the layer whose output is meant.
        keys["target_layers"] = [layer + 1 for layer in config.target_layer_ids]
    if parts.markov_rank:
        keys |= {f"{heads}markov_rank": parts.markov_rank, f"{heads}markov_head_type": parts.markov_head_type}
    if parts.dspark and lucebox:
        width = config.hidden_size + (parts.markov_rank if parts.confidence_head_with_markov else 0)
        keys |= {
            f"{heads}enabled": True,
            f"{heads}vocab_size": config.vocab_size,
            f"{heads}confidence_dim": width if parts.enable_confidence_head else 0,
        }
    elif parts.dspark:
        keys["has_confidence_head"] = parts.enable_confidence_head
    if parts.enable_confidence_head:
        keys[f"{heads}enable_confidence_head"] = True
        keys[f"{heads}confidence_head_with_markov"] = parts.confidence_head_with_markov
    if parts.context_norm:
        keys["context_kv_layer_norm"] = True
    sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return keys | {name: size for name in sizes if (size := getattr(parts, name))}


def _refuse_what_is_lost(config: DFlashConfig, metadata: Metadata, naming: str, file: WeightFile) -> None:
    """Reads the new metadata as a reader of the file will, and refuses to write a drafter that would differ."""
    found: Mapping[str, object] = as_read(metadata)
    if naming == "lucebox":
        found = dflash_config.llama_cpp_keys(found, NAMINGS[naming])
    back = dflash_config.read_gguf(found, config.label, shapes_in(file))
    for item in fields(config):
        one, other = rounded(getattr(config, item.name)), rounded(getattr(back, item.name))
        if one != other:
            what = _WORDLESS.get(item.name, f"its '{item.name}' ({getattr(config, item.name)!r})")
            raise ConfigError(
                f"{config.label}: GGUF cannot express {what}", "use the drafter from its folder of safetensors"
            )


def _check_target(config: DFlashConfig, tap_width: int, target: Path) -> None:
    """Refuses a target for which the drafter was not trained."""
    other, _, _ = read_target(target)
    hint, taps = "name the target that the drafter was trained for", len(config.target_layer_ids)
    if config.vocab_size != other.vocab_size:
        raise PairError(
            f"the drafter's vocabulary has {config.vocab_size} tokens, that of {target.name} has {other.vocab_size}",
            hint,
        )
    if tap_width != taps * other.hidden_size:
        raise PairError(
            f"the drafter reads {taps} taps {tap_width // taps} wide, but those of {target.name} are "
            f"{other.hidden_size} wide",
            hint,
        )
    if config.num_target_layers not in (None, other.layers) or max(config.target_layer_ids) >= other.layers:
        raise PairError(
            f"the drafter was made for another target than {target.name}, which has {other.layers} layers", hint
        )


def _context(config: DFlashConfig, file: WeightFile, target: Path | None) -> int:
    reader = ConfigReader(file.metadata, file.path.name)
    key = f"{file.metadata['general.architecture']}.context_length"
    if reader.has(key):
        return reader.integer(key)
    if target is not None:
        return read_target(target)[0].max_positions
    if config.trained_length:
        return config.trained_length
    raise ConfigError(f"{file.path.name} does not state '{key}'", "name the target with --target")


def _hf_config(config: DFlashConfig, context: int, plans: list[TensorPlan]) -> dict[str, object]:
    parts = config.parts
    speculation: dict[str, object] = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
    }
    speculation |= {name: shortest(value) for name, value in _scales(config).items()}
    for item in fields(parts):
        if item.name not in _SHOWN_BY_TENSORS and (value := getattr(parts, item.name)) != item.default:
            speculation[item.name] = value
    if parts.context_norm:
        speculation["context_kv_layer_norm"] = True
    second = parts.selector_rank or parts.conv_kernel_size
    found: dict[str, object] = {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        **stack_shape(config),
        "max_position_embeddings": context,
        "rope_theta": shortest(config.rope.theta),
        "rope_parameters": rope_section(config.rope),
        "attention_bias": config.attention_bias,
        "block_size": config.block_size,
        "dflash_config": speculation,
        "dtype": hf_dtype(plans),
    }
    optional = {
        "num_target_layers": config.num_target_layers,
        "draft_vocab_size": config.draft_vocab_size or None,
        "target_model_type": config.target_family,
        "trained_length": config.trained_length or None,
        "expected_tau": dict(config.expected_tau) or None,
    }
    return found | {key: value for key, value in optional.items() if value is not None} | _hf_windows(config)


def _hf_windows(config: DFlashConfig) -> dict[str, object]:
    windows = [pattern.window for pattern in config.patterns]
    found: dict[str, object] = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows]
    }
    if any(pattern.causal != bool(pattern.window) for pattern in config.patterns):
        found["is_causal"] = config.patterns[0].causal
    return found | ({"sliding_window": max(windows), "use_sliding_window": True} if any(windows) else {})
