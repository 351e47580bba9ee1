"""Plans how each tensor is written into another file format: its type there, and its bytes, made piece by piece."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import FormatError
from slipstream.formats.gguf_write import Metadata, Piece, TensorPlan, Value
from slipstream.formats.quantise import encode_rows
from slipstream.formats.weight_files import WeightTensor

FLOATS = ("F32", "F16", "BF16")
_WIDENED_KEY = "slipstream.widened."  # + a type: names the tensors that had this type before they were widened to F32
# GGUF has these types in the place of others; F8 values are exact in BF16, and F64 values are rounded to F32.
_EXACT_IN = {"F64": "F32", "F8_E4M3": "BF16", "F8_E5M2": "BF16"}
# Values that are converted at a time; this bounds the memory, and smaller pieces would only take longer.
_PIECE_ELEMENTS = 2**22
# The numbers by which llama.cpp names the type that most of a file has.
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
_HF_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTIZATION_VERSION = 2  # ggml's number for the block layouts that are written here
# Matrices that stay in F32 because llama.cpp expects it: routers and the kernels of recurrent layers.
_EXACT = re.compile(r"conv1d|ffn_gate_inp|mlp\.gate\.|router\.proj|shared_expert_gate")
_EXPERTS = re.compile(r"experts\.|_exps\.")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be written, and the notes that the user should read."""

    tensors: list[TensorPlan]
    metadata: Metadata = field(default_factory=dict)  # of a GGUF file
    config: dict[str, object] = field(default_factory=dict)  # of a folder
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A tensor made of others: they are joined and reshaped, and `change` may alter their values."""

    name: str
    sources: tuple[WeightTensor, ...]
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor] | None = None  # applied to some rows at a time

    @property
    def type_name(self) -> str:
        return self.sources[0].type_name

    def dense(self) -> Tensor:
        parts = [source.dense() for source in self.sources]
        return torch.cat([part if self.change is None else self.change(part) for part in parts]).reshape(self.shape)

    def rows(self, index: Tensor) -> DerivedTensor:
        """The tensor with only the rows `index` of its first dimension, of which all sources hold equal shares."""
        share = len(self.sources) // self.shape[0]
        chosen = [self.sources[row * share + place] for row in index.tolist() for place in range(share)]
        sources = tuple(chosen) if len(self.sources) > 1 else (self.sources[0].rows(index),)
        return DerivedTensor(self.name, sources, (len(index), *self.shape[1:]), self.change)


Source = WeightTensor | DerivedTensor


def tensor_plan(name: str, tensor: Source, type_name: str) -> TensorPlan:
    """Plans a tensor under a new name: its bytes are copied if the type stays, and else decoded and encoded again."""
    sources, change = (tensor.sources, tensor.change) if isinstance(tensor, DerivedTensor) else ((tensor,), None)

    def pieces() -> Iterator[Piece]:
        for source in sources:
            if source.type_name == type_name and change is None:
                yield source.raw()
                continue
            count = source.shape[0]
            step = max(1, _PIECE_ELEMENTS // max(1, math.prod(source.shape[1:])))
            for start in range(0, count, step):
                values = source.rows(torch.arange(start, min(start + step, count))).dense()
                changed = values if change is None else change(values)
                yield encode_rows(changed.reshape(changed.shape[0], -1).numpy(), type_name, tensor.name)

    return TensorPlan(name, type_name, tensor.shape, pieces)


def is_matrix(tensor: Source) -> bool:
    """Whether a tensor may get a short type; norms, biases, kernels and single rows stay in F32."""
    stacked = len(tensor.shape) == 3 and _EXPERTS.search(tensor.name) is not None
    flat = len(tensor.shape) == 2 and tensor.shape[0] > 1 and not _EXACT.search(tensor.name)
    return stacked or flat


def gguf_type(tensor: Source, asked: str | None) -> str:
    """The type of a folder's tensor in a GGUF file."""
    stored = _EXACT_IN.get(tensor.type_name, tensor.type_name)
    if stored not in FLOATS:
        raise FormatError(f"tensor '{tensor.name}' is stored as {tensor.type_name}", "weights must be floating point")
    return asked or stored if is_matrix(tensor) else "F32"


def widened_keys(tensors: Mapping[str, Source]) -> dict[str, Value]:
    """Records which tensors are widened to F32 by `gguf_type`, so that converting back restores the same bytes."""
    found: dict[str, Value] = {}
    for type_name in ("BF16", "F16"):
        names = [name for name, tensor in tensors.items() if tensor.type_name == type_name and not is_matrix(tensor)]
        if names:
            found[_WIDENED_KEY + type_name.lower()] = names
    return found


def widened_types(metadata: Mapping[str, object]) -> dict[str, str]:
    """The types that tensors of a GGUF file had before they were widened, by their names in the file."""
    types: dict[str, str] = {}
    for type_name in ("BF16", "F16"):
        names = metadata.get(_WIDENED_KEY + type_name.lower())
        types |= {str(name): type_name for name in names} if isinstance(names, list) else {}
    return types


def safetensors_type(tensor: Source, asked: str | None, widened: Mapping[str, str]) -> str:
    """The type of a GGUF file's tensor in a safetensors file: its own, or F32 if it is quantised."""
    if is_matrix(tensor):
        return asked or (tensor.type_name if tensor.type_name in FLOATS else "F32")
    before = widened.get(tensor.name, "F32")
    # The file may have been edited since, so a tensor is narrowed only if its values fit.
    return before if before == "F32" or _fits(tensor, before) else "F32"


def _fits(tensor: Source, type_name: str) -> bool:
    values = tensor.dense()
    narrow = torch.bfloat16 if type_name == "BF16" else torch.float16
    return bool(torch.equal(values.to(narrow).float(), values))


def general_keys(architecture: str, name: str, plans: Sequence[TensorPlan]) -> dict[str, Value]:
    """The keys with which every GGUF model begins."""
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": _FILE_TYPES[_main_type(plans)],
        "general.quantization_version": QUANTIZATION_VERSION,
    }


def hf_dtype(plans: Sequence[TensorPlan]) -> str:
    """The number type for a config.json."""
    return _HF_TYPES[_main_type(plans)]


def shortest(value: float) -> float:
    """The shortest decimal of a 32-bit float: 1e-06 instead of 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def rounded(value: object) -> object:
    """A value with the precision of 32-bit floats, which files have; an object becomes a tuple of its fields."""
    if isinstance(value, float):
        return float(np.float32(value))
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(rounded(getattr(value, item.name)) for item in fields(value) if item.compare)
    return value


def _main_type(plans: Sequence[TensorPlan]) -> str:
    """The type that most of the values have."""
    totals: Counter[str] = Counter()
    for plan in plans:
        totals[plan.type_name] += math.prod(plan.shape)
    return totals.most_common(1)[0][0]
