"""Opens a model file and gives its tensors the same names and row order, whatever its format is.

The tensors that a model must have, and their shapes, are found by building the model with placeholders. They record
every tensor that its code loads, so no weights are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.formats.file_bytes import MemoryBytes, TensorEntry
from slipstream.formats.weight_files import WeightFile, WeightTensor, open_weights, read_config
from slipstream.models.decoder import DecoderConfig, FamilyNames
from slipstream.models.dflash import DFlashDrafter, read_drafter_config
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.dflash_names import GGUF_GLOBAL as DRAFTER_GLOBAL
from slipstream.models.dflash_names import names_in
from slipstream.models.llama import GGUF_GLOBAL as TARGET_GLOBAL
from slipstream.models.llama import GGUF_LAYER, gguf_name
from slipstream.models.loading import FAMILIES, read_target_config
from slipstream.models.weights import Weights, keep_name
from slipstream.tools.convert_plans import Source
from slipstream.tools.family_tensors import folder_tensors

Shape = tuple[int, ...]
Kind = Literal["target", "drafter"]
_SPECULATION = ("dflash_config", "target_layer_ids", "dspark_target_layer_ids")  # only drafters' configs have them
_FLOAT_BYTES = 4  # the placeholders are fp32
_FOREIGN = "the config does not belong to these weights"
_UNKNOWN = "the model has parts that this version does not know, and leaving them out would change it"

_LAYER = re.compile(r"(?:^|\.)(?:blk|layers)\.(\d{1,6})\.")
_CONVOLUTIONS = tuple(
    f"{module}.{part}"
    for module in ("attention_conv", "mlp_conv")
    for part in ("base_kernel", "kernel_projection.weight")
)


@dataclass(slots=True)
class ModelFile:
    """An opened model. Names are those of Hugging Face checkpoints; a drafter's names have no prefix."""

    path: Path
    file: WeightFile
    kind: Kind
    config: DecoderConfig | DFlashConfig | None  # None if it cannot be read; `problem` says why
    problem: str
    found: dict[str, str] = field(default_factory=dict)  # name -> the file's own name
    unknown: list[str] = field(default_factory=list)  # names in the file that belong to no known tensor
    ignored: list[str] = field(default_factory=list)  # names of tensors that no model computes with
    tensors: dict[str, Source] = field(default_factory=dict)  # in the layout of Hugging Face folders
    expected: dict[str, Shape] = field(default_factory=dict)  # every tensor that the configuration implies
    misfit: str = ""  # why the tensors could not be listed from the configuration; empty if they could

    @property
    def label(self) -> str:
        return self.path.name


@contextmanager
def open_model(path: Path) -> Iterator[ModelFile]:
    """Opens a target or a drafter. An unreadable configuration is not an error; `problem` then says why."""
    with open_weights(path) as file:
        yield _named(path, file)


def kind_of(metadata: dict[str, object], config: dict[str, object] | None, names: Sequence[str]) -> Kind:
    """Whether files hold a drafter or a target, judged by their metadata and, without that, by their tensors."""
    values = metadata | (config or {})
    if not any(key in values for key in ("model_type", "architectures", "general.architecture", *_SPECULATION)):
        return "drafter" if any(name.endswith("fc.weight") for name in names) else "target"
    return "drafter" if describes_drafter(values) else "target"


def describes_drafter(values: Mapping[str, object]) -> bool:
    """Whether a config.json or the metadata of a GGUF file is that of a drafter."""
    named = values.get("architectures")
    classes = [str(name).lower() for name in named] if isinstance(named, list) else []
    architectures = [*classes, str(values.get("general.architecture"))]
    return any(key in values for key in _SPECULATION) or any(
        word in name for word in ("dflash", "dspark") for name in architectures
    )


def refuse_impossible_layers(values: Mapping[str, object], tensors: int, label: str) -> None:
    """Refuses a file that claims more layers than it has tensors, because lists of that length would exhaust memory."""
    for key, value in values.items():
        if (key == "num_hidden_layers" or key.endswith(".block_count")) and isinstance(value, int) and value > tensors:
            raise ConfigError(
                f"{label} claims {value} layers but has {tensors} tensors", "the file is damaged: fetch it again"
            )


def _named(path: Path, file: WeightFile) -> ModelFile:
    raw = read_config(path)
    kind = kind_of(file.metadata, raw, file.names())
    is_gguf = raw is None and "general.architecture" in file.metadata
    config: DecoderConfig | DFlashConfig | None = None
    names: FamilyNames | None = None
    problem = ""
    try:
        refuse_impossible_layers(file.metadata if raw is None else raw, len(file.names()), path.name)
        if kind == "drafter":
            config = read_drafter_config(path, file)
        else:
            config, names = read_target_config(path, file)
    except SlipstreamError as error:
        problem = str(error)
    if kind == "drafter":
        spell: Callable[[str], str] = names_in(file)
    else:
        spell = names.file_name if names is not None else gguf_name if is_gguf else keep_name
    model = ModelFile(path, file, kind, config, problem)
    try:
        if isinstance(config, DFlashConfig):
            model.expected = drafter_tensors(config, file)
        elif config is not None and names is not None:
            model.expected = decoder_tensors(config, names, file)
    except SlipstreamError as error:
        model.misfit = str(error)
    own = set(file.names())
    for name in dict.fromkeys([*model.expected, *_possible_names(kind, file.names())]):
        if (spelled := spell(name)) in own:
            model.found[name] = spelled
            own.discard(spelled)
    ignored = names.ignored if names is not None else _holds_nothing
    model.ignored = sorted(name for name in own if ignored(name))
    model.unknown = sorted(own - set(model.ignored))
    model.tensors = _as_in_folders(model, is_gguf)
    return model


def _as_in_folders(model: ModelFile, is_gguf: bool) -> dict[str, Source]:
    """Brings a GGUF file's tensors into the layout of folders, unless some of them are missing or misshapen."""
    stored = {name: model.file.tensor(own) for name, own in model.found.items()}
    whole = all(name in stored and stored[name].shape == shape for name, shape in model.expected.items())
    if not is_gguf or not whole or not isinstance(model.config, DecoderConfig):
        return dict(stored)
    meant = {name: tensor for name, tensor in stored.items() if name in model.expected}
    others = {name: tensor for name, tensor in stored.items() if name not in model.expected}
    return folder_tensors(model.config, meant) | others


def _holds_nothing(name: str) -> bool:
    return name in ("rope_freqs.weight", "t2d") or name.endswith("rotary_emb.inv_freq")


def _possible_names(kind: Kind, names: Sequence[str]) -> Iterator[str]:
    """Every name that a tensor of a model of this kind with these layers could have."""
    layers = sorted({int(found[1]) for name in names if (found := _LAYER.search(name))})
    prefix = "model.layers" if kind == "target" else "layers"
    yield from TARGET_GLOBAL if kind == "target" else DRAFTER_GLOBAL
    for layer in layers:
        for module in GGUF_LAYER:
            yield f"{prefix}.{layer}.{module}.weight"
            yield f"{prefix}.{layer}.{module}.bias"
        if kind == "drafter":
            yield from (f"layers.{layer}.{name}" for name in _CONVOLUTIONS)


# ---- the tensors that a model must have


def decoder_tensors(config: DecoderConfig, names: FamilyNames, file: WeightFile) -> dict[str, Shape]:
    """The tensors of a target. Where formats may store the same values in different ways, this follows the file."""
    weights = _Asked(file, names.file_name)
    FAMILIES[config.family].MODEL(config, weights, names)
    return weights.shapes


def drafter_tensors(config: DFlashConfig, file: WeightFile) -> dict[str, Shape]:
    """The tensors of a drafter by their canonical names; optional tensors are listed if the file has them."""
    weights = _Asked(file, names_in(file))
    DFlashDrafter(config, weights)
    return weights.shapes


class _Nothing:
    """Replaces a matrix or a table that is never used."""

    nbytes = out_features = in_features = 0
    place = (0, 0)


class _Asked(Weights):
    """Records every tensor that a model asks for; a tensor that the file lacks, or has in another shape, is zeros."""

    def __init__(self, file: WeightFile, file_name: Callable[[str], str]) -> None:
        super().__init__(file, "fp32", file_name)
        self.shapes: dict[str, Shape] = {}
        self._most = sum(math.prod(file.tensor(name).shape) for name in file.names())
        self._zeros: MemoryBytes | None = None

    def source(self, name: str, shape: Shape) -> WeightTensor:
        self.shapes[name] = shape
        if self.has(name):
            found = self.file.tensor(self._file_name(name))
            if (1, *found.shape) == shape:
                self.shapes[name] = found.shape  # the file stores the row as a vector
                return found.as_row()
            if found.shape == shape:
                return found
        elements = math.prod(shape)
        # A wrong size in a damaged file must not decide how much memory is allocated.
        if elements > self._most:
            raise ConfigError(f"'{name}' would have the shape {list(shape)}, more than the whole file", _FOREIGN)
        self._zeros = self._zeros or MemoryBytes(np.zeros(self._most * _FLOAT_BYTES, np.uint8))
        return WeightTensor(TensorEntry(name, "F32", shape, 0, elements * _FLOAT_BYTES), self._zeros)

    def part(self, form: str, sources: Sequence[WeightTensor], make: Callable[[], Any]) -> Any:
        return _Nothing()

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Does nothing, because the caller handles tensors that the model did not ask for."""


def take_tensors(
    file: WeightFile,
    shapes: Mapping[str, Shape],
    file_name: Callable[[str], str],
    ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, WeightTensor]:
    """Returns the tensors of a file by their Hugging Face names; refuses missing, misshapen and unknown tensors."""
    found: dict[str, WeightTensor] = {}
    for name, shape in shapes.items():
        tensor = file.tensor(file_name(name))
        if tensor.shape != shape:
            raise ConfigError(
                f"tensor '{tensor.name}' has shape {list(tensor.shape)} where the config implies {list(shape)}",
                _FOREIGN,
            )
        found[name] = tensor
    taken = {tensor.name for tensor in found.values()}
    left = sorted(name for name in set(file.names()) - taken if not ignored(name))
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise ConfigError(f"{file.path.name} has tensors with no place in the other format: {shown}", _UNKNOWN)
    return found
