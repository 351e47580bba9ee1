"""Converts DFlash, DSpark and DFlash 2 drafters between a folder and GGUF, in llama.cpp's or lucebox's naming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from slipstream.errors import ConfigError, PairError
from slipstream.formats.gguf_write import (
    MetadataEntry,
    TensorPlan,
    ValueKind,
    array_entry,
    as_read,
    number_entry,
    text_entry,
)
from slipstream.formats.weight_files import WeightFile, WeightTensor, open_weights, read_config
from slipstream.models import dflash_config
from slipstream.models.config_reading import ConfigReader
from slipstream.models.dflash import LUCEBOX_ARCH, LUCEBOX_ARCHS, read_drafter_config
from slipstream.models.dflash_config import GGUF_EXPECTED_TAU, DFlashConfig
from slipstream.models.dflash_names import gguf_spellings, names_in, shapes_in
from slipstream.tools.convert_plans import (
    Conversion,
    general_entries,
    gguf_type,
    hf_dtype,
    rounded,
    safetensors_type,
    shortest,
    tensor_plan,
    widened_entries,
    widened_types,
)
from slipstream.tools.convert_target import read_target
from slipstream.tools.convert_vocab import MASK_KEY, target_entries
from slipstream.tools.family_configs import rope_entries, rope_section, stack_shape
from slipstream.tools.tensor_lists import drafter_tensors, take_tensors
from slipstream.types import Progress

Naming = Literal["llama.cpp", "lucebox"]
NAMINGS: tuple[Naming, ...] = get_args(Naming)
DRAFTER_ARCHITECTURES = ("dflash", *LUCEBOX_ARCHS)
_ARCH: dict[Naming, str] = {"llama.cpp": "dflash", "lucebox": LUCEBOX_ARCH}
# Fields of the configuration that GGUF cannot express, each with the words for the error message.
_WORDLESS = {
    "patterns": "the windows and causality of its layers",
    "rope": "scaled positions",
    "mlp_bias": "biases",
    "qk_norm": "layers without query and key norms",
}
_KNOWN, _KNOWN_BACKWARDS = "d2t", "t2d"  # both hold the same map between draft and target ids, in opposite directions
_FUSED = "qkv_proj.weight"
_SHOWN_BY_TENSORS = ("tap_norms", "context_norm", "gate_width")
_NO_TOKENIZER = "without --target the file has no tokenizer: slipstream accepts it, but llama.cpp would refuse it"


def is_drafter(path: Path) -> bool:
    """Whether `path` holds a drafter, judged by its config.json or its GGUF architecture."""
    config = read_config(path)
    if config is None:
        with open_weights(path) as file:
            return file.metadata.get("general.architecture") in DRAFTER_ARCHITECTURES
    named = config.get("architectures")
    names = [str(name).lower() for name in named] if isinstance(named, list) else []
    speculates = ("dflash_config", "target_layer_ids", "dspark_target_layer_ids")
    return any(key in config for key in speculates) or any("dflash" in name or "dspark" in name for name in names)


def to_gguf(
    path: Path, asked: str | None, naming: Naming, target: Path | None, progress: Progress | None = None
) -> Conversion:
    """The contents of a GGUF file for a Hugging Face drafter folder."""
    file = open_weights(path)
    config = read_drafter_config(path, file)
    names = names_in(file)
    tensors = take_tensors(file, drafter_tensors(config, file), names, lambda name: name == _KNOWN_BACKWARDS)
    known = tensors.pop(_KNOWN, None)
    plans = {
        name: (tensor_plan(gguf_tensor_name(name, naming), tensor, gguf_type(tensor, asked)), tensor)
        for name, tensor in _apart(config, tensors).items()
    }
    written = [plan for plan, _ in plans.values()] + ([] if known is None else [_known_tokens(known, as_offsets=False)])
    context = ConfigReader(read_config(path) or {}, path.name).integer("max_position_embeddings")
    metadata = [
        *general_entries(_ARCH[naming], path.resolve().name, written),
        *drafter_entries(config, naming, context, tensors["fc.weight"].shape[1]),
        *widened_entries(plans),
    ]
    _refuse_what_is_lost(config, metadata, naming, file)
    if target is None:
        return Conversion("drafter", metadata, written, [_NO_TOKENIZER] if naming == "llama.cpp" else [])
    check_target(config, tensors["fc.weight"].shape[1], target)
    vocabulary = target_entries(target, config.vocab_size, progress)
    return Conversion("drafter", [*metadata, *vocabulary], written)


def to_folder(path: Path, asked: str | None, target: Path | None) -> tuple[Conversion, dict[str, object]]:
    """The safetensors of a GGUF drafter, and the config.json that belongs to them."""
    file = open_weights(path)
    config = read_drafter_config(path, file)
    tensors = take_tensors(file, drafter_tensors(config, file), names_in(file))
    known = tensors.pop(_KNOWN, None)
    if target is not None:
        check_target(config, tensors["fc.weight"].shape[1], target)
    widened = widened_types(file.metadata)
    plans = [
        tensor_plan(name, tensor, safetensors_type(tensor, asked, widened)) for name, tensor in tensors.items()
    ] + ([] if known is None else [_known_tokens(known, as_offsets=True)])
    return Conversion("drafter", [], plans), _hf_config(config, _context(config, file, target), plans)


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
    """The target's ids of the tokens that a drafter knows; folders store each id's distance from its place instead."""
    places = torch.arange(stored.shape[0])
    values = stored.dense().long() + (-places if as_offsets else places)
    return TensorPlan(_KNOWN, "I64", stored.shape, lambda: [np.asarray(values, "<i8").tobytes()])


def gguf_tensor_name(name: str, naming: Naming) -> str:
    """A tensor's name in a GGUF file; lucebox adds a prefix to tensors that a plain decoder does not have."""
    spellings = gguf_spellings(name)
    marked = [spelling for spelling in spellings if spelling.startswith("dflash.")]
    return marked[0] if marked and naming == "lucebox" else spellings[0]


def drafter_entries(config: DFlashConfig, naming: Naming, context: int, tap_width: int) -> list[MetadataEntry]:
    """All settings of a drafter's configuration as GGUF entries."""
    arch = _ARCH[naming]
    numbers: dict[str, int] = {
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.vocab_size": config.vocab_size,
        "slipstream.trained_length": config.trained_length,
    }
    if config.num_target_layers is not None:
        numbers["slipstream.num_target_layers"] = config.num_target_layers
    entries = [number_entry(key, value, ValueKind.UINT32) for key, value in numbers.items()]
    floats = {f"{arch}.attention.layer_norm_rms_epsilon": config.rms_eps}
    if config.input_embedding_scale is not None:
        floats[f"{arch}.embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        floats[f"{arch}.logit_scale"] = config.output_multiplier
    if config.final_logit_softcapping:
        floats[f"{arch}.final_logit_softcapping"] = config.final_logit_softcapping
    entries += [number_entry(key, value, ValueKind.FLOAT32) for key, value in floats.items()]
    if config.target_family is not None:
        entries.append(text_entry("slipstream.target_model_type", config.target_family))
    turning = rope_entries(config.rope, arch)
    return [*entries, *turning, *_window_entries(config, arch), *_speculation_entries(config, naming, tap_width)]


def _window_entries(config: DFlashConfig, arch: str) -> list[MetadataEntry]:
    windows = [pattern.window for pattern in config.patterns]
    flags = [window > 0 for window in windows]
    causal = {pattern.causal for pattern in config.patterns}
    forced = (
        []
        if [pattern.causal for pattern in config.patterns] == flags
        else [number_entry(f"{arch}.attention.causal", max(causal), ValueKind.BOOL)]
    )
    if not any(windows):
        return forced
    return [
        *forced,
        number_entry(f"{arch}.attention.sliding_window", max(windows), ValueKind.UINT32),
        array_entry(f"{arch}.attention.sliding_window_pattern", flags, ValueKind.BOOL),
    ]


def _speculation_entries(config: DFlashConfig, naming: Naming, tap_width: int) -> list[MetadataEntry]:
    own = naming == "lucebox"
    prefix = f"{_ARCH[naming]}.dflash." if own else "dflash."
    entries = [number_entry(f"{prefix}block_size", config.block_size, ValueKind.UINT32)]
    if own:
        ids = array_entry(f"{prefix}target_layer_ids", config.target_layer_ids, ValueKind.INT32)
        counts = {
            "mask_token_id": config.mask_token_id,
            "n_target_layers": len(config.target_layer_ids),
            "n_target_features": tap_width,
        }
        entries += [ids, *(number_entry(prefix + key, value, ValueKind.UINT32) for key, value in counts.items())]
    else:
        # llama.cpp records the inputs of layers, so the number is one more than the layer whose output is meant.
        layers = [layer + 1 for layer in config.target_layer_ids]
        entries.append(array_entry("dflash.target_layers", layers, ValueKind.INT32))
        entries.append(number_entry(MASK_KEY, config.mask_token_id, ValueKind.UINT32))
    entries.append(number_entry(f"{prefix}sample_from_anchor", config.sample_from_anchor, ValueKind.BOOL))
    for prompts, tau in config.expected_tau.items():
        key = prefix + GGUF_EXPECTED_TAU.removeprefix("dflash.") + prompts
        entries.append(number_entry(key, tau, ValueKind.FLOAT64))
    return entries + _part_entries(config, prefix, own)


def _part_entries(config: DFlashConfig, prefix: str, own: bool) -> list[MetadataEntry]:
    """The entries for heads and convolutions; lucebox keeps DSpark's heads in a section of their own."""
    parts, heads = config.parts, f"{prefix}dspark." if own else prefix
    entries: list[MetadataEntry] = []
    if parts.markov_rank:
        entries.append(number_entry(f"{heads}markov_rank", parts.markov_rank, ValueKind.UINT32))
        entries.append(text_entry(f"{heads}markov_head_type", parts.markov_head_type))
    if parts.dspark and own:
        width = config.hidden_size + (parts.markov_rank if parts.confidence_head_with_markov else 0)
        dims = {"vocab_size": config.vocab_size, "confidence_dim": width if parts.enable_confidence_head else 0}
        entries.append(number_entry(f"{heads}enabled", True, ValueKind.BOOL))
        entries += [number_entry(heads + key, value, ValueKind.UINT32) for key, value in dims.items()]
    elif parts.dspark:
        entries.append(number_entry("dflash.has_confidence_head", parts.enable_confidence_head, ValueKind.BOOL))
    if parts.enable_confidence_head:
        for key in ("enable_confidence_head", "confidence_head_with_markov"):
            entries.append(number_entry(heads + key, getattr(parts, key), ValueKind.BOOL))
    if parts.context_norm:
        entries.append(number_entry(f"{prefix}context_kv_layer_norm", True, ValueKind.BOOL))
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if value := getattr(parts, key):
            entries.append(number_entry(prefix + key, value, ValueKind.UINT32))
    return entries


def _refuse_what_is_lost(config: DFlashConfig, metadata: list[MetadataEntry], naming: Naming, file: WeightFile) -> None:
    """Reads the new metadata as a reader of the file will, and refuses to write a drafter that would differ."""
    found: Mapping[str, object] = as_read(metadata)
    if naming == "lucebox":
        found = dflash_config.llama_cpp_keys(found, _ARCH[naming])
    back = dflash_config.read_gguf(found, config.label, shapes_in(file))
    for item in fields(config):
        one, other = rounded(getattr(config, item.name)), rounded(getattr(back, item.name))
        if one != other:
            what = _WORDLESS.get(item.name, f"its '{item.name}' ({getattr(config, item.name)!r})")
            raise ConfigError(
                f"{config.label}: GGUF cannot express {what}", "use the drafter from its folder of safetensors"
            )


def check_target(config: DFlashConfig, tap_width: int, target: Path) -> None:
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
    parts, theta = config.parts, shortest(config.rope.theta)
    speculation: dict[str, object] = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
    }
    if config.input_embedding_scale is not None:
        speculation["input_embedding_scale"] = shortest(config.input_embedding_scale)
    if config.output_multiplier != 1.0:
        speculation["output_multiplier"] = shortest(config.output_multiplier)
    if config.final_logit_softcapping:
        speculation["final_logit_softcapping"] = shortest(config.final_logit_softcapping)
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
        "rope_theta": theta,
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
    }
    found |= {key: value for key, value in optional.items() if value is not None}
    if config.trained_length:
        found["trained_length"] = config.trained_length
    if config.expected_tau:
        found["expected_tau"] = dict(config.expected_tau)
    return found | _hf_windows(config)


def _hf_windows(config: DFlashConfig) -> dict[str, object]:
    windows = [pattern.window for pattern in config.patterns]
    found: dict[str, object] = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows]
    }
    if any(pattern.causal != bool(pattern.window) for pattern in config.patterns):
        found["is_causal"] = config.patterns[0].causal
    return found | ({"sliding_window": max(windows), "use_sliding_window": True} if any(windows) else {})
