"""Rewrites a GGUF file with its matrices in another type, and reports the error of every tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from slipstream.errors import FormatError, RequestError
from slipstream.formats.gguf_write import TensorPlan, Value, entries, stored_metadata, write_gguf
from slipstream.formats.quantise import encode_rows
from slipstream.formats.quants import NUMPY_TYPES, Bytes, Floats, decode_rows
from slipstream.formats.weight_files import WeightTensor, find_gguf, open_weights
from slipstream.tools.convert_plans import QUANTIZATION_VERSION
from slipstream.tools.quantize_recipes import Recipe, RecipeName, TypeChoice
from slipstream.types import Progress

CHUNK_ELEMENTS = 2**21  # values that are decoded at a time; this bounds the memory, however large a tensor is
_COPIED_TYPES = {*NUMPY_TYPES} - {"F32", "F16"}  # integers and doubles are no weights and are copied unchanged


@dataclass(slots=True)
class TensorResult:
    """One tensor before and after; `wanted` is empty if it was to stay exact, `reason` explains a fallback type."""

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    wanted: str
    reason: str
    bytes_before: int
    bytes_after: int = 0
    max_error: float = 0.0
    _squares: float = field(default=0.0, repr=False)
    _error_squares: float = field(default=0.0, repr=False)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def relative_rms(self) -> float:
        """The root mean square of the error relative to that of the values."""
        return math.sqrt(self._error_squares / self._squares) if self._squares else 0.0

    def add(self, values: Floats, kept: Floats) -> None:
        difference = np.abs(kept - values)
        self._squares += float(np.square(values, dtype=np.float64).sum())
        self._error_squares += float(np.square(difference, dtype=np.float64).sum())
        self.max_error = max(self.max_error, float(difference.max(initial=0.0)))

    def to_json(self) -> dict[str, object]:
        shown = {key: value for key, value in asdict(self).items() if not key.startswith("_")}
        return shown | {"shape": list(self.shape), "relative_rms": self.relative_rms}


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """Describes the file that was written."""

    source: Path
    out: Path
    recipe: str
    tensors: list[TensorResult]

    @property
    def matrices(self) -> list[TensorResult]:
        return [tensor for tensor in self.tensors if tensor.wanted]

    @property
    def share(self) -> float:
        """The share of the matrices' weights that have the type which the recipe wants for them."""
        total = sum(tensor.elements for tensor in self.matrices)
        served = sum(tensor.elements for tensor in self.matrices if tensor.after == tensor.wanted)
        return served / total if total else 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "source": str(self.source),
            "out": str(self.out),
            "type": self.recipe,
            "share": self.share,
            "bytes_before": self.source.stat().st_size,
            "bytes_after": self.out.stat().st_size,
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }


def quantize_file(
    source: Path, out: Path, recipe_name: RecipeName, *, force: bool = False, progress: Progress | None = None
) -> QuantizeReport:
    """Writes the GGUF file `source` as `out` with its matrices in the recipe's types; norms and vectors become F32."""
    if source.is_dir() and any(source.glob("*.gguf")):
        source = find_gguf(source)
    if source.is_dir() or source.suffix == ".safetensors":
        raise FormatError(f"{source} is not a GGUF file", "make one of it first: slipstream convert")
    _refuse_unsafe(source, out, force)
    with open_weights(source) as file:
        recipe = Recipe(recipe_name, file.names())
        plans: list[TensorPlan] = []
        results: list[TensorResult] = []
        for tensor in map(file.tensor, file.names()):
            copied = TypeChoice(tensor.type_name, "") if tensor.type_name in _COPIED_TYPES else None
            choice = copied or recipe.choose(tensor.name, tensor.shape, tensor.type_name)
            result = TensorResult(
                tensor.name,
                tensor.shape,
                tensor.type_name,
                choice.type_name,
                choice.wanted,
                choice.reason,
                bytes_before=tensor.nbytes,
            )
            plans.append(TensorPlan(tensor.name, choice.type_name, tensor.shape, partial(_pieces, tensor, result)))
            result.bytes_after = plans[-1].nbytes
            results.append(result)
        changes: dict[str, Value] = {"general.file_type": recipe.file_type}
        if any(result.after.startswith("Q") for result in results):
            changes["general.quantization_version"] = QUANTIZATION_VERSION
        write_gguf(out, stored_metadata(source) | entries(changes), plans, progress)
    return QuantizeReport(source, out, recipe_name, results)


def _refuse_unsafe(source: Path, out: Path, force: bool) -> None:
    if not out.exists():
        return
    if source.exists() and out.samefile(source):
        raise RequestError(f"{out} is the file that is read", "write to another one")
    if out.is_dir():
        raise RequestError(f"{out} is a folder", "name a file in it")
    if not force:
        raise RequestError(f"{out} already exists", "overwrite it with --force or name another file")


def _pieces(tensor: WeightTensor, result: TensorResult) -> Iterator[Bytes]:
    """Makes the tensor's bytes in its new type, a few rows at a time, and sums up the errors meanwhile."""
    width = tensor.shape[-1]
    rows, row_bytes = max(1, CHUNK_ELEMENTS // width), tensor.nbytes * width // math.prod(tensor.shape)
    for piece in tensor.raw_pieces(CHUNK_ELEMENTS):
        stored = piece.reshape(-1, row_bytes)
        for start in range(0, len(stored), rows):
            yield _rewritten(stored[start : start + rows], result)


def _rewritten(stored: Bytes, result: TensorResult) -> Bytes:
    if result.before in _COPIED_TYPES:
        return stored
    values = decode_rows(stored, result.before)
    if result.before == result.after:
        # The stored blocks already have the wanted type, and encoding them again would lose a little.
        if not np.isfinite(values).all():
            raise FormatError(f"tensor '{result.name}' holds numbers that are not finite", "fetch the model again")
        return stored
    encoded = encode_rows(values, result.after, result.name)
    result.add(values, decode_rows(encoded, result.after))
    return encoded
