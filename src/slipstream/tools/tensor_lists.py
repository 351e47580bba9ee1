"""Finds out which tensors a model must have, and their shapes, by building the model with placeholder weights.

The placeholders record every tensor that the model asks for and return empty ones, so no weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.errors import ConfigError
from slipstream.formats.file_bytes import MemoryBytes, TensorEntry
from slipstream.formats.weight_files import WeightFile, WeightTensor
from slipstream.models.decoder import DecoderConfig, FamilyNames
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.dflash_names import names_in
from slipstream.models.loading import FAMILIES
from slipstream.models.weights import Weights

Shape = tuple[int, ...]
_FLOAT_BYTES = 4
_FOREIGN = "the config does not belong to these weights"
_UNKNOWN = "the model has parts that this version does not know, and leaving them out would change it"


def decoder_tensors(config: DecoderConfig, names: FamilyNames, file: WeightFile) -> dict[str, Shape]:
    """The tensors of a target; if files may store the same values in different ways, as this file stores them."""
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
        # A false claim in a damaged file must not decide how much memory is allocated.
        if elements > self._most:
            raise ConfigError(f"'{name}' would be {list(shape)}, more than all of {self.file.path.name}", _FOREIGN)
        self._zeros = self._zeros or MemoryBytes(np.zeros(self._most * _FLOAT_BYTES, np.uint8))
        return WeightTensor(TensorEntry(name, "F32", shape, 1, _FLOAT_BYTES, 0, elements * _FLOAT_BYTES), self._zeros)

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
    """The tensors of a file by their Hugging Face names; it refuses missing, misshapen and unknown tensors."""
    found: dict[str, WeightTensor] = {}
    for name, shape in shapes.items():
        tensor = file.tensor(file_name(name))
        if tensor.shape != shape:
            raise ConfigError(
                f"tensor '{tensor.name}' has shape {list(tensor.shape)} where the config implies {list(shape)}",
                _FOREIGN,
            )
        found[name] = tensor
    _refuse_unknown(file, {tensor.name for tensor in found.values()}, ignored)
    return found


def _refuse_unknown(file: WeightFile, taken: Iterable[str], ignored: Callable[[str], bool]) -> None:
    left = sorted(name for name in set(file.names()).difference(taken) if not ignored(name))
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise ConfigError(f"{file.path.name} has tensors with no place in the other format: {shown}", _UNKNOWN)
