"""Model files for the tests: the public SmolLM2 target, and small GGUF and safetensors files that are made here."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from slipstream.formats.sources import resolve

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def smollm2_path() -> Path:
    """The SmolLM2 target's GGUF file, which is fetched once per machine."""
    return resolve("smollm2").path


@cache
def smollm2_metadata() -> dict[str, object]:
    from slipstream.formats.gguf import read_gguf

    return read_gguf(smollm2_path()).metadata


def byte_alphabet() -> list[str]:
    """The 256 characters with which byte-level vocabularies write bytes, as the tokenizers library lists them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tiny_vocab() -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges of a byte-level vocabulary of 264 tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), *(m.replace(" ", "") for m in merges)]
    types = [3, 3, 3] + [1] * (len(tokens) - 3)
    return tokens, types, merges


def write_gguf(path: Path, *, vocab: bool = True, pre: str = "smollm", seed: int = 0) -> dict[str, np.ndarray]:
    """Writes a small GGUF file with plain and quantised tensors; returns each tensor's values as float32."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_array("llama.layers", [1, 2, 3])
    writer.add_float32("llama.eps", 1e-5)
    if vocab:
        tokens, types, merges = tiny_vocab()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHATML)
    expected: dict[str, np.ndarray] = {}
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.F32, kinds.F16, kinds.BF16, kinds.Q4_0, kinds.Q4_1, kinds.Q5_0, kinds.Q5_1, kinds.Q8_0):
        values = generator.standard_normal((6, 64)).astype(np.float32)
        stored = gguf.quants.quantize(values, kind)
        name = f"{kind.name.lower()}.weight"
        writer.add_tensor(name, stored, raw_dtype=None if kind in (kinds.F32, kinds.F16) else kind)
        expected[name] = np.asarray(gguf.quants.dequantize(stored, kind), np.float32).reshape(values.shape)
    writer.add_tensor("norm", np.arange(10, dtype=np.float32))
    expected["norm"] = np.arange(10, dtype=np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def safetensors_bytes(header: dict[str, Any] | bytes, data: bytes, *, length: int | None = None) -> bytes:
    """The bytes of a safetensors file with the given header, which may be as wrong as a test needs."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data
