"""Writes a DFlash drafter folder as one GGUF file (llama.cpp's conventions), matrices in Q8_0 or as stored.

    python scripts/pack_drafter.py path/to/drafter src/slipstream/data/smollm2-135m-dflash.Q8_0.gguf --type q8_0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from slipstream.formats.weights import open_weights, read_config
from slipstream.models import dflash_config
from slipstream.models.llama import GGUF_LAYER

GLOBAL = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight"}


def gguf_name(name: str) -> str:
    if name in GLOBAL:
        return GLOBAL[name]
    _, index, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"blk.{index}.{GGUF_LAYER[module]}.{kind}"


def write_metadata(writer: gguf.GGUFWriter, config: dflash_config.DFlashConfig) -> None:
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
    writer.add_bool("dflash.sample_from_anchor", False)
    writer.add_uint32("tokenizer.ggml.mask_token_id", config.mask_token_id)
    writer.add_uint32("slipstream.trained_length", config.trained_length)
    if config.num_target_layers is not None:
        writer.add_uint32("slipstream.num_target_layers", config.num_target_layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("q8_0", "bf16"), default="q8_0")
    options = parser.parse_args()
    raw = read_config(options.folder)
    if raw is None:
        parser.error(f"{options.folder} has no config.json")
    config = dflash_config.read_hf(raw, options.folder.name)
    if any(pattern.window or pattern.causal for pattern in config.patterns):
        parser.error("only drafters with full, non-causal layers can be packed")
    writer = gguf.GGUFWriter(str(options.out), "dflash")
    write_metadata(writer, config)
    source = open_weights(options.folder)
    matrix_type = gguf.GGMLQuantizationType.Q8_0 if options.type == "q8_0" else gguf.GGMLQuantizationType.BF16
    for name in source.names():
        values = source.tensor(name).dense().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values.astype(np.float32))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
