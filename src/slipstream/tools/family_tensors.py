"""Turns a target's tensors from the layout of Hugging Face folders into that of llama.cpp's GGUF files, and back.

llama.cpp stacks the experts of a layer and reorders the rotary rows of Llama. Of Qwen3.5 it stores numbers as they are
used: a norm's weight is the factor itself (folders store the factor minus 1), and a decay rate is not a logarithm. It
also orders Qwen3.5's value heads differently: the first value head of every key head, then the second of every key
head, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from slipstream.formats.weight_files import WeightTensor
from slipstream.models import gemma4, laguna, qwen3_5
from slipstream.models.decoder import DecoderConfig
from slipstream.models.llama import gguf_name, stored_rotary_rows
from slipstream.models.moe import GGUF_MOE
from slipstream.models.qwen3_5 import Qwen35Config
from slipstream.tools.convert_plans import DerivedTensor, Source

_OWN_NAMES: dict[str, Mapping[str, str]] = {
    "gemma4": gemma4.GGUF_OWN,
    "laguna": laguna.GGUF_OWN,
    "qwen3_moe": GGUF_MOE,
    "qwen3_5": qwen3_5.GGUF_OWN,
    "qwen3_5_moe": qwen3_5.GGUF_OWN,
}
_ONE_EXPERT = re.compile(r"^(.*\.experts\.)(\d+)\.((?:gate|up|down)_proj)\.weight$")
_ALL_EXPERTS = re.compile(r"^(.*\.experts\.)(gate_up_proj|gate_proj|up_proj|down_proj)$")
_DELTA = ".linear_attn."


def gguf_tensors(config: DecoderConfig, tensors: Mapping[str, WeightTensor]) -> dict[str, Source]:
    """Takes a folder's tensors by their Hugging Face names and returns a GGUF file's tensors by llama.cpp's names."""
    spell = partial(gguf_name, own=_OWN_NAMES.get(config.family, {}))
    found: dict[str, Source] = {}
    experts: dict[str, list[WeightTensor]] = {}
    for name, tensor in tensors.items():
        if one := _ONE_EXPERT.match(name):
            experts.setdefault(one[1] + one[3], []).append(tensor)
        elif name.endswith("experts.gate_up_proj") and config.family != "gemma4":
            gate, up = _halves(tensor)
            prefix = name.removesuffix("gate_up_proj")
            experts |= {prefix + "gate_proj": gate, prefix + "up_proj": up}
        else:
            found[spell(name)] = _laid_out(name, tensor, config, to_gguf=True)
    for name, each in experts.items():
        found[spell(name)] = DerivedTensor(spell(name), tuple(each), (len(each), *each[0].shape))
    return found


def folder_tensors(config: DecoderConfig, tensors: Mapping[str, WeightTensor]) -> dict[str, Source]:
    """Takes a GGUF file's tensors by their Hugging Face names and returns them in the layout of its folders."""
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        experts = _ALL_EXPERTS.match(name)
        if experts is None:
            found[name] = _laid_out(name, tensor, config, to_gguf=False)
        elif config.family == "gemma4":
            found |= _joined_experts(experts[1], experts[2], tensors)
        elif experts[2] == "gate_up_proj":
            for kind, each in zip(("gate_proj", "up_proj"), _halves(tensor), strict=True):
                found |= {f"{experts[1]}{index}.{kind}.weight": one for index, one in enumerate(each)}
        else:
            each = [tensor.part(index) for index in range(tensor.shape[0])]
            found |= {f"{experts[1]}{index}.{experts[2]}.weight": one for index, one in enumerate(each)}
    return found


def _halves(tensor: WeightTensor) -> tuple[list[WeightTensor], list[WeightTensor]]:
    """The first half of every expert's rows (gate), and the second half (up)."""
    half = tensor.shape[1] // 2
    parts = [tensor.part(index) for index in range(tensor.shape[0])]
    return [one.rows(torch.arange(half)) for one in parts], [one.rows(torch.arange(half, 2 * half)) for one in parts]


def _joined_experts(prefix: str, kind: str, tensors: Mapping[str, WeightTensor]) -> dict[str, Source]:
    """Joins gate and up of all experts, which Gemma's folders have in one tensor and its GGUF files in one or two."""
    tensor = tensors[prefix + kind]
    if kind in ("gate_up_proj", "down_proj"):
        return {prefix + kind: tensor}
    if kind == "up_proj":
        return {}  # it was joined with the gate
    up, name = tensors[prefix + "up_proj"], prefix + "gate_up_proj"
    pairs = tuple(one.part(index) for index in range(tensor.shape[0]) for one in (tensor, up))
    return {name: DerivedTensor(name, pairs, (tensor.shape[0], 2 * tensor.shape[1], tensor.shape[2]))}


def _laid_out(name: str, tensor: WeightTensor, config: DecoderConfig, *, to_gguf: bool) -> Source:
    """A tensor that is not of an expert in the layout of GGUF files or of folders."""
    if isinstance(config, Qwen35Config):
        return _qwen35(name, tensor, config, to_gguf=to_gguf)
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get((name.split(".") + [""] * 5)[4])
    if config.family != "llama" or heads is None:
        return tensor
    order = stored_rotary_rows(heads, config.head_dim)  # for each row of a folder's tensor, its row in the GGUF file
    return tensor.rows(order.argsort() if to_gguf else order)


def _qwen35(name: str, tensor: WeightTensor, config: Qwen35Config, *, to_gguf: bool) -> Source:
    if name.endswith("shared_expert_gate.weight"):  # it has one row, which llama.cpp stores as a vector
        width = tensor.shape[-1]
        return DerivedTensor(tensor.name, (tensor,), (width,) if to_gguf else (1, width))
    if _DELTA not in name:
        shift = 1.0 if to_gguf else -1.0
        return _changed(tensor, lambda rows: rows + shift) if name.endswith("norm.weight") else tensor
    kind = name.partition(_DELTA)[2].removesuffix(".weight")
    order = _value_order(kind, config)
    order = order if order is None or to_gguf else order.argsort()
    if kind == "out_proj" and order is not None:
        columns = order
        return _changed(tensor, lambda rows: rows[:, columns])
    taken = tensor if order is None else tensor.rows(order)
    if kind == "A_log":
        return _changed(taken, (lambda rows: -rows.exp()) if to_gguf else (lambda rows: (-rows).log()))
    if kind == "conv1d":
        kernel = (config.delta.kernel,) if to_gguf else (1, config.delta.kernel)
        return DerivedTensor(tensor.name, (taken,), (config.delta.channels, *kernel))
    return taken


def _changed(tensor: WeightTensor, change: Callable[[Tensor], Tensor]) -> DerivedTensor:
    return DerivedTensor(tensor.name, (tensor,), tensor.shape, change)


def _value_order(kind: str, config: Qwen35Config) -> Tensor | None:
    """For each row of a GGUF file's tensor (for out_proj: each column), its place in a folder's tensor.

    Folders keep the value heads of a key head together. None means that the order is the same.
    """
    delta = config.delta
    keys = 2 * delta.key_heads * delta.key_dim
    widths = {"A_log": 1, "dt_bias": 1, "in_proj_a": 1, "in_proj_b": 1, "norm": 0}
    width = widths.get(kind, delta.value_dim)
    if not width:
        return None
    values = torch.arange(delta.value_heads * width).view(delta.key_heads, -1, width).transpose(0, 1).flatten()
    return torch.cat((torch.arange(keys), keys + values)) if kind in ("in_proj_qkv", "conv1d") else values
