"""Writes a DFlash drafter folder as one GGUF file (llama.cpp's conventions), matrices in Q8_0 or as stored.

    python scripts/pack_drafter.py path/to/drafter src/slipstream/data/smollm2-135m-dflash.Q8_0.gguf --type q8_0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.formats.weights import open_weights
from slipstream.models.dflash import read_drafter_config
from slipstream.models.dflash_config import GGUF_EXPECTED_TAU, DFlashConfig
from slipstream.models.dflash_names import canonical_name, gguf_spellings
from slipstream.models.dflash_parts import DraftParts
from slipstream.models.rope import RopeConfig

Type = gguf.GGMLQuantizationType
TYPES = {"q8_0": Type.Q8_0, "bf16": Type.BF16}
Q8_BLOCK = 32


def write_metadata(writer: gguf.GGUFWriter, config: DFlashConfig) -> None:
    writer.add_name(config.label)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_uint32("dflash.block_size", config.block_size)
    # llama.cpp records layer inputs, hence one more than the layer whose output is meant
    writer.add_array("dflash.target_layers", [layer + 1 for layer in config.target_layer_ids])
    writer.add_bool("dflash.sample_from_anchor", config.sample_from_anchor)
    writer.add_uint32("tokenizer.ggml.mask_token_id", config.mask_token_id)
    writer.add_uint32("slipstream.trained_length", config.trained_length)
    if config.num_target_layers is not None:
        writer.add_uint32("slipstream.num_target_layers", config.num_target_layers)
    if config.input_embedding_scale is not None:
        writer.add_float32("dflash.embedding_scale", config.input_embedding_scale)
    if config.output_multiplier != 1.0:
        writer.add_logit_scale(config.output_multiplier)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for prompts, tau in config.expected_tau.items():
        writer.add_float64(f"{GGUF_EXPECTED_TAU}{prompts}", tau)
    write_parts(writer, config.parts)


def write_parts(writer: gguf.GGUFWriter, parts: DraftParts) -> None:
    if parts.markov_rank:
        writer.add_uint32("dflash.markov_rank", parts.markov_rank)
        writer.add_string("dflash.markov_head_type", parts.markov_head_type)
    if parts.enable_confidence_head:
        writer.add_bool("dflash.enable_confidence_head", True)
        writer.add_bool("dflash.confidence_head_with_markov", parts.confidence_head_with_markov)
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if value := getattr(parts, key):
            writer.add_uint32(f"dflash.{key}", value)


def stored_type(name: str, values: np.ndarray, matrix_type: Type) -> Type:
    """Vectors, kernels and the confidence head's one row stay exact: there is nothing to save."""
    if values.ndim != 2 or values.shape[0] == 1 or name.startswith("confidence_head."):
        return Type.F32
    return Type.BF16 if values.shape[1] % Q8_BLOCK else matrix_type


def pack(folder: Path, out: Path, matrix_type: Type) -> None:
    """Writes the drafter in `folder` to the GGUF file `out`."""
    source = open_weights(folder)
    config = read_drafter_config(folder, source)
    if any(pattern.window or pattern.causal for pattern in config.patterns):
        raise ConfigError(f"{config.label} has sliding or causal layers", "only full, non-causal ones can be packed")
    if config.attention_bias or config.rope != RopeConfig(config.rope.theta, config.head_dim):
        raise ConfigError(f"{config.label} has attention biases or scaled positions", "these cannot be packed")
    writer = gguf.GGUFWriter(str(out), "dflash")
    write_metadata(writer, config)
    for file_name in source.names():
        values, name = source.tensor(file_name).dense().numpy(), canonical_name(file_name)
        kind = stored_type(name, values, matrix_type)
        packed = values if kind is Type.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(gguf_spellings(name)[0], packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=tuple(TYPES), default="q8_0")
    options = parser.parse_args()
    try:
        pack(options.folder, options.out, TYPES[options.type])
    except SlipstreamError as error:
        sys.exit(f"pack_drafter: {error}")


if __name__ == "__main__":
    main()
