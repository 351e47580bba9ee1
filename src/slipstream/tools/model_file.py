"""Opens a model file and gives its tensors the same names and row order, whatever its format is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.formats.weight_files import WeightFile, open_weights, read_config
from slipstream.models.decoder import DecoderConfig, FamilyNames
from slipstream.models.dflash import read_drafter_config
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.dflash_names import GGUF_GLOBAL as DRAFTER_GLOBAL
from slipstream.models.dflash_names import names_in
from slipstream.models.llama import GGUF_GLOBAL as TARGET_GLOBAL
from slipstream.models.llama import GGUF_LAYER, gguf_name
from slipstream.models.loading import read_target_config
from slipstream.models.weights import keep_name
from slipstream.tools.convert_plans import Source
from slipstream.tools.family_tensors import folder_tensors
from slipstream.tools.tensor_lists import decoder_tensors, drafter_tensors

Shape = tuple[int, ...]
Kind = Literal["target", "drafter"]
DRAFTER_ARCH = "dflash"  # it is part of every architecture name that drafters have in GGUF files

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
    misfit: str = ""  # why the tensors cannot be compared with the configuration

    @property
    def label(self) -> str:
        return self.path.name

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_model(path: Path) -> ModelFile:
    """Opens a target or a drafter; if its configuration cannot be read, `problem` reports it instead of an error."""
    file = open_weights(path)
    try:
        return _named(path, file)
    except BaseException:
        file.close()
        raise


def kind_of(metadata: Mapping[str, object], config: Mapping[str, object] | None, names: Sequence[str]) -> Kind:
    """Whether files hold a drafter or a target, judged by their metadata and, without that, by their tensors."""
    if config is not None and ("model_type" in config or "architectures" in config or "dflash_config" in config):
        return "drafter" if configures_drafter(config) else "target"
    if "general.architecture" in metadata:
        return "drafter" if DRAFTER_ARCH in str(metadata["general.architecture"]) else "target"
    return "drafter" if any(name.endswith("fc.weight") for name in names) else "target"


def configures_drafter(config: Mapping[str, object]) -> bool:
    named = config.get("architectures")
    names = [str(name).lower() for name in named] if isinstance(named, list) else []
    return "dflash_config" in config or any("dflash" in name or "dspark" in name for name in names)


def refuse_false_layers(values: Mapping[str, object], tensors: int, label: str) -> None:
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
        refuse_false_layers(file.metadata if raw is None else raw, len(file.names()), path.name)
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
