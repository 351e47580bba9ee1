"""Writes adapter files for the tests in the layouts of PEFT and llama.cpp, and the drafters that they belong to."""

# mypy: disable-error-code="unused-ignore, var-annotated"

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.formats.adapters import PEFT_CONFIG, PEFT_WEIGHTS
from slipstream.formats.weight_files import WeightFile, open_weights
from slipstream.models.dflash_names import canonical_name, gguf_spellings, names_in
from tests.tiny import HIDDEN, MASK, VOCAB, write_pair

RANK = 4
HEAD_RANK = 6
GROUPS = 4
LAYER_MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
ADAPTABLE = ("fc", *(f"layers.{index}.{module}" for index in range(8) for module in LAYER_MODULES))
# For each kind of drafter: the modules that it has beyond the plain backbone.
EXTRA: dict[str, tuple[str, ...]] = {
    "plain": (),
    "tables": ("embed_tokens", "lm_head"),
    "dspark": ("markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"),
    "gated": ("markov_head.markov_w1", "markov_head.markov_w2", "markov_head.gate_proj"),
    "rnn": ("markov_head.markov_w1", "markov_head.markov_w2", "markov_head.joint_proj"),
    "dflash2": (
        "layers.0.attention_conv.kernel_projection",
        "layers.1.mlp_conv.kernel_projection",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection",
    ),
}
_SHAPES = {
    "embed_tokens": (VOCAB, HIDDEN),
    "lm_head": (VOCAB, HIDDEN),
    "markov_head.markov_w1": (VOCAB, HEAD_RANK),
    "markov_head.markov_w2": (VOCAB, HEAD_RANK),
    "confidence_head.proj": (1, HIDDEN + HEAD_RANK),
    "markov_head.gate_proj": (HEAD_RANK, HIDDEN + HEAD_RANK),
    "markov_head.joint_proj": (3 * HEAD_RANK, HIDDEN + 2 * HEAD_RANK),
    "candidate_selector.predecessor_codebook": (VOCAB, HEAD_RANK),
    "candidate_selector.successor_codebook": (VOCAB, HEAD_RANK),
    "candidate_selector.hidden_projection": (HEAD_RANK, HIDDEN),
}
EMBEDDINGS = (
    "embed_tokens",
    "markov_head.markov_w1",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)


def noise(*shape: int, seed: int = 0, size: float = 0.3) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write_drafter(folder: Path, kind: str = "plain") -> Path:
    """Writes a tiny drafter with the parts of its kind; returns its folder."""
    draft = write_pair(folder)[1]
    tensors = load_file(draft / "model.safetensors")
    for number, module in enumerate(EXTRA[kind]):
        if module in _SHAPES:
            tensors[f"{module}.weight"] = noise(*_SHAPES[module], seed=number)
    if kind == "dflash2":
        config = json.loads((draft / "config.json").read_text())
        config["dflash_config"] |= {
            "target_layer_ids": [0, 1],
            "mask_token_id": MASK,
            "conv_kernel_size": 2,
            "conv_group_size": HIDDEN // GROUPS,
            "selector_rank": HEAD_RANK,
            "selector_top_k": 5,
        }
        (draft / "config.json").write_text(json.dumps(config))
        for name in (f"layers.{index}.{part}_conv." for index in range(2) for part in ("attention", "mlp")):
            tensors[f"{name}base_kernel"] = 1 + noise(2, 2, HIDDEN, seed=len(tensors), size=0.1)
            tensors[f"{name}kernel_projection.weight"] = noise(4 * GROUPS, HIDDEN, seed=len(tensors), size=0.05)
    save_file(tensors, draft / "model.safetensors")
    return draft


def factors(shape: Sequence[int], rank: int = RANK, seed: int = 1, embedding: bool = False) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] for a weight; for an embedding PEFT stores A [rank, rows] and B [width, rank]."""
    outputs, inputs = shape
    if embedding:
        outputs, inputs = inputs, outputs
    return noise(rank, inputs, seed=seed), noise(outputs, rank, seed=seed + 1)


def peft_tensors(pairs: Mapping[str, tuple[Tensor, Tensor]], embeddings: Sequence[str] = ()) -> dict[str, Tensor]:
    """The (A, B) of modules under the names with which PEFT saves them."""
    tensors = {}
    for module, pair in pairs.items():
        for side, tensor in zip("AB", pair, strict=True):
            ending = f"lora_embedding_{side}" if module in embeddings else f"lora_{side}.weight"
            tensors[f"base_model.model.{module}.{ending}"] = tensor.contiguous().clone()  # tests change the copies
    return tensors


def write_peft(folder: Path, tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    """Writes a PEFT folder; a change of None removes a key of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": "draft",
        "task_type": None,
        "r": RANK,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors}),
        "inference_mode": True,
        "layer_replication": None,
        "trainable_token_indices": None,
    } | changes
    (folder / PEFT_CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(dict(tensors), folder / PEFT_WEIGHTS, metadata={"format": "pt"})
    return folder


def write_random_adapter(
    folder: Path, drafter: Path, modules: Sequence[str] = (), seed: int = 0, size: float = 0.3
) -> Path:
    """Writes a PEFT adapter for the drafter's matrices whose names contain one of `modules` (for all if none is given).

    It changes a matrix by about `size` times a matrix that keeps the length of its rows.
    """
    pairs = {}
    with open_weights(drafter) as file:
        names = names_in(file)
        for name in ADAPTABLE if not modules else [n for n in ADAPTABLE if any(part in n for part in modules)]:
            if names(f"{name}.weight") not in file:
                continue
            outputs, inputs = file.tensor(names(f"{name}.weight")).shape
            own = seed * 1000 + 2 * len(pairs)
            down = noise(RANK, inputs, seed=own, size=size / inputs**0.5)
            pairs[name] = down, noise(outputs, RANK, seed=own + 1, size=RANK**-0.5)
    return write_peft(folder, peft_tensors(pairs), lora_alpha=RANK)


def write_gguf_adapter(
    path: Path, tensors: Mapping[str, Tensor], alpha: float | None = 8.0, kind: str = "F32", **keys: str
) -> Path:
    """Writes a GGUF adapter like llama.cpp's converter; `tensors` have full names, and `__` in `keys` means a dot."""
    settings = {"general__architecture": "dflash", "general__type": "adapter", "adapter__type": "lora"} | keys
    writer = gguf.GGUFWriter(path, settings.pop("general__architecture"))
    for key, value in settings.items():
        writer.add_string(key.replace("__", "."), value)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    _write(writer, tensors, kind)
    return path


def gguf_tensors(pairs: Mapping[str, tuple[Tensor, Tensor]], spelling: int = 0) -> dict[str, Tensor]:
    """The (A, B) of modules under GGUF names; spelling 0 is llama.cpp's, -1 is the last of the other ones."""
    tensors = {}
    for module, (a, b) in pairs.items():
        name = gguf_spellings(f"{module}.weight")[spelling]
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    return tensors


def gguf_drafter(path: Path, folder: Path, kind: str = "F32", spelling: int = 0) -> WeightFile:
    """Writes the tensors of a drafter folder into a GGUF file; matrices are quantised if their rows allow it."""
    source = open_weights(folder)
    writer = gguf.GGUFWriter(path, "dflash")
    tensors = {gguf_spellings(canonical_name(name))[spelling]: source.tensor(name).dense() for name in source.names()}
    _write(writer, tensors, kind)
    return open_weights(path)


def _write(writer: gguf.GGUFWriter, tensors: Mapping[str, Tensor], kind: str) -> None:
    wanted = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor.float().numpy())
        if kind == "F32" or values.ndim != 2 or values.shape[1] % block:
            writer.add_tensor(name, values)
        else:
            stored = gguf.quants.quantize(values, wanted)
            writer.add_tensor(name, stored, raw_dtype=None if kind == "F16" else wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
