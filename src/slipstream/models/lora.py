"""Merges LoRA adapters into a drafter's weights, so that the drafter loads as if the adapter were part of its file.

Drafters store their query and key rows in the same order in every container, so an adapter fits files of any kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError, FormatError
from slipstream.formats.adapters import AdapterFile, AdapterPair, AdapterSource, read_adapter
from slipstream.formats.file_bytes import MemoryBytes, StoredBytes, TensorEntry
from slipstream.formats.quantise import ENCODABLE, encode_rows
from slipstream.formats.quants import BLOCKS
from slipstream.formats.weight_files import CHUNK_ELEMENTS, WeightFile, WeightTensor
from slipstream.models.dflash_names import GGUF_GLOBAL, canonical_name, gguf_spellings, names_in
from slipstream.models.llama import GGUF_LAYER
from slipstream.types import Progress, tracked

# All matrices and tables of a drafter. Norms, convolution kernels and biases are not among them, because they are too
# small for a low rank to mean anything.
_LAYER_MATRICES = (
    *(name for name in GGUF_LAYER if "norm" not in name),
    "attention_conv.kernel_projection",
    "mlp_conv.kernel_projection",
)
_OTHER_MATRICES = tuple(name for name in GGUF_GLOBAL if name.endswith(".weight") and "norm" not in name)
# Some trainers adapt several matrices as one matrix, with the outputs of one after those of another.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_FUSED_NAME = re.compile(r"(?:model\.)?(?:layers|blk)\.(?P<layer>\d{1,6})\.(?P<module>[a-z_.]+)\.weight")
_DRAFTER_ARCH = "dflash"  # every writer's name for drafters contains it


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits a drafter: the change to each matrix, by canonical name."""

    name: str
    scale: float
    fingerprint: str
    changes: Mapping[str, AdapterPair]

    @property
    def key(self) -> str:
        """Names the variant's draft context; the same adapter at another scale drafts differently."""
        return f"{self.fingerprint}@{self.scale!r}"


class MergedWeights(WeightFile):
    """A drafter's file in which the adapted tensors are the merged ones; all others are read from the file itself."""

    def __init__(self, base: WeightFile, merged: Mapping[str, tuple[TensorEntry, StoredBytes]]) -> None:
        super().__init__(base.path, merged, base.metadata)
        self._base = base
        self.adapted = frozenset(merged)  # the file's names of the tensors that are not shared with it

    def names(self) -> list[str]:
        return self._base.names()

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def tensor(self, name: str) -> WeightTensor:
        return super().tensor(name) if name in self.adapted else self._base.tensor(name)


def load_adapter(source: AdapterSource, file: WeightFile) -> Adapter:
    """Reads an adapter for the drafter in `file`; one that does not fit is refused before its numbers are used."""
    return fit_adapter(read_adapter(source), file)


def fit_adapter(adapter: AdapterFile, file: WeightFile) -> Adapter:
    """Finds the drafter's matrix for every pair of an adapter and checks that they fit."""
    if adapter.architecture is not None and _DRAFTER_ARCH not in adapter.architecture:
        raise ConfigError(
            f"the adapter {adapter.source.name} is made for '{adapter.architecture}' models", "it must be a drafter's"
        )
    shapes = _matrices(file)
    spelled = {spelling: name for name in shapes for spelling in gguf_spellings(name)}
    changes: dict[str, AdapterPair] = {}
    for pair in adapter.pairs:
        name = spelled.get(pair.name, canonical_name(pair.name))
        parts = {name: pair} if name in shapes else _parts(pair, shapes)
        if not parts:
            raise ConfigError(
                f"the adapter's tensor '{pair.down.tensor.name}' matches no matrix of {file.path.name}",
                "it was trained for another drafter",
            )
        for part, change in parts.items():
            if part in changes:
                raise FormatError(
                    f"the adapter's tensor '{change.down.tensor.name}' adapts '{part}' a second time",
                    "keep one pair per matrix",
                )
            _check_fit(part, shapes[part], change)
            changes[part] = change
    return Adapter(adapter.source.name, adapter.source.scale, adapter.fingerprint, changes)


def merged_weights(file: WeightFile, adapter: Adapter, progress: Progress | None = None) -> MergedWeights:
    """Returns the drafter's file with an adapter merged in.

    Tensors keep their type if it can be written, so that the drafter stays as fast. A pair that adds nothing leaves its
    matrix as it is, to the bit.
    """
    names, shapes = names_in(file), _matrices(file)
    merged: dict[str, tuple[TensorEntry, StoredBytes]] = {}
    for name, change in tracked(list(adapter.changes.items()), f"merging {adapter.name}", progress):
        if name not in shapes:
            raise ConfigError(f"{file.path.name} has no matrix '{name}'", f"{adapter.name} is for another drafter")
        _check_fit(name, shapes[name], change)
        source = file.tensor(names(name))
        down, up = change.down.dense(), change.up.dense()
        if change.factor and down.any() and up.any():
            merged[source.name] = _merge(source, change.factor, up, down, adapter.name)
    return MergedWeights(file, merged)


def _matrices(file: WeightFile) -> dict[str, tuple[int, int]]:
    """Returns canonical names and shapes of the matrices that an adapter may change, for the drafter in a file."""
    names, layers = names_in(file), 0
    while names(f"layers.{layers}.self_attn.q_proj.weight") in file:
        layers += 1
    own = [f"layers.{index}.{name}.weight" for index in range(layers) for name in _LAYER_MATRICES]
    shapes: dict[str, tuple[int, int]] = {}
    for name in (*_OTHER_MATRICES, *own):
        if names(name) not in file:
            continue
        shape = file.tensor(names(name)).shape
        if len(shape) <= 2:
            # Some writers drop the confidence head's dimension of size one.
            shapes[name] = (shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape))
    return shapes


def _parts(pair: AdapterPair, shapes: Mapping[str, tuple[int, int]]) -> dict[str, AdapterPair]:
    """Splits a pair for several matrices into one pair for each; empty if it is not such a pair."""
    match = _FUSED_NAME.fullmatch(pair.name)
    modules = _FUSED.get(match["module"], ()) if match is not None else ()
    names = [f"layers.{int(match['layer'])}.{module}.weight" for module in modules] if match is not None else []
    if not names or any(name not in shapes for name in names):
        return {}
    outputs = sum(shapes[name][0] for name in names)
    if pair.up.shape[0] != outputs:
        raise FormatError(
            f"the adapter's tensor '{pair.up.tensor.name}' has shape {list(pair.up.tensor.shape)} where "
            f"{' + '.join(names)} have {outputs} outputs",
            "it was trained for another drafter",
        )
    parts, start = {}, 0
    for name in names:
        stop = start + shapes[name][0]
        parts[name] = replace(pair, up=pair.up.rows(start, stop))
        start = stop
    return parts


def _check_fit(name: str, shape: tuple[int, int], change: AdapterPair) -> None:
    rank, (outputs, inputs) = change.down.shape[0], shape
    for factor, wanted in ((change.down, (rank, inputs)), (change.up, (outputs, rank))):
        if factor.shape != wanted:
            stored = wanted[::-1] if factor.transposed else wanted
            raise FormatError(
                f"the adapter's tensor '{factor.tensor.name}' has shape {list(factor.tensor.shape)} where '{name}' of "
                f"the drafter needs {list(stored)}",
                "it was trained for another drafter",
            )
    if rank > max(shape):
        raise FormatError(
            f"the adapter's tensor '{change.down.tensor.name}' has rank {rank} for a matrix {list(shape)}",
            "no matrix needs more than its own size: the file is damaged or no adapter",
        )


def _merge(
    source: WeightTensor, factor: float, up: Tensor, down: Tensor, label: str
) -> tuple[TensorEntry, StoredBytes]:
    """Returns one merged tensor in memory of its own, made a few rows at a time and stored as a file would have it."""
    # A type that no code here can write becomes bf16.
    kind = source.type_name if source.type_name in ENCODABLE else "BF16"
    rows, width = up.shape[0], down.shape[1]
    block, item = BLOCKS[kind]
    size = rows * width // block * item
    out = np.empty((rows, size // rows), np.uint8)
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        flat = len(source.shape) == 1
        weight = source.dense()[None] if flat else source.rows(torch.arange(start, stop)).dense()
        if not bool(weight.isfinite().all()):
            raise FormatError(f"the drafter's tensor '{source.name}' holds NaN or infinity", "fetch the drafter again")
        try:
            out[start:stop] = encode_rows((weight + factor * (up[start:stop] @ down)).numpy(), kind)
        except FormatError:
            raise FormatError(
                f"tensor '{source.name}' overflows {kind} with the adapter {label} merged in", "use a smaller scale"
            ) from None
    return TensorEntry(source.name, kind, source.shape, 0, size), MemoryBytes(out.reshape(-1))
