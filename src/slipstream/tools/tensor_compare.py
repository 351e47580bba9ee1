"""Compares two files of one model tensor by tensor: how far their values differ, and which tensors are outliers.

Names, formats and row orders may differ; only a few rows of each tensor are in memory at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream.models.llama import stored_rotary_rows
from slipstream.tools.convert_plans import Source
from slipstream.tools.model_file import ModelFile, open_model
from slipstream.types import Progress, tracked

Array = NDArray[np.float64]
CHUNK_ELEMENTS = 2**20  # values of each file that are in memory at once
# A tensor is an outlier if its error is above this many times the median error of tensors stored in the same two types.
OUTLIER_FACTOR = 4.0
# An error up to this is never an outlier, because it may be rounding in the last place of a float32.
OUTLIER_FLOOR = 1e-6
_UNLIKE = 0.5  # No quantisation causes a relative RMS above this, so such a tensor is an outlier in any case.
_SAMPLED_ROWS = 8  # Rows that are compared to find out whether two tensors are the same.
_NO_SETTINGS = ("label", "expected_tau")  # fields of a configuration that do not affect what a model computes
_SAME = 0.3  # A tensor with another name or row order counts as the same if its relative error is below this.


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor in both files; errors are relative to the first file's values."""

    name: str
    types: tuple[str, str]
    shape: tuple[int, ...]
    elements: int
    relative_rms: float  # root mean square of the difference over that of the first file's values
    max_error: float  # the largest absolute difference
    worst_row: int  # the row with the largest error
    row_error: float  # that row's error relative to its own norm or the mean norm, whichever is larger
    non_finite: int = 0  # values that are NaN or infinite in either file
    outlier: str = ""  # why the tensor is an outlier; empty if it is none
    explanation: str = ""  # what the second file seems to hold in its place

    def to_json(self) -> dict[str, object]:
        found = asdict(self) | {"types": list(self.types), "shape": list(self.shape)}
        return {key: _json_number(value) for key, value in found.items()}


@dataclass(slots=True)
class FileComparison:
    """The tensors of both files, those of only one file, and the settings that differ."""

    first: str
    second: str
    kind: str
    tensors: list[TensorDifference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # tensors of the first file only
    extra: list[str] = field(default_factory=list)  # tensors of the second file only
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    settings: list[tuple[str, object, object]] = field(default_factory=list)  # settings that differ
    notes: list[str] = field(default_factory=list)

    @property
    def outliers(self) -> list[TensorDifference]:
        return [tensor for tensor in self.tensors if tensor.outlier]

    @property
    def largest_error(self) -> float:
        """The largest relative RMS of any tensor; infinite if a tensor cannot be compared."""
        if self.missing or self.extra or self.shapes:
            return math.inf
        return max((tensor.relative_rms for tensor in self.tensors), default=0.0)

    @property
    def mean_error(self) -> float:
        """The relative RMS over all tensors, weighted by their elements."""
        total = sum(tensor.elements for tensor in self.tensors)
        return math.sqrt(sum(t.relative_rms**2 * t.elements for t in self.tensors) / total) if total else 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "first": self.first,
            "second": self.second,
            "kind": self.kind,
            "largest_error": _json_number(self.largest_error),
            "mean_error": _json_number(self.mean_error),
            "outliers": [tensor.name for tensor in self.outliers],
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "missing": self.missing,
            "extra": self.extra,
            "shapes": [{"name": name, "first": list(a), "second": list(b)} for name, a, b in self.shapes],
            "settings": [{"name": name, "first": str(a), "second": str(b)} for name, a, b in self.settings],
            "notes": self.notes,
        }


def compare_files(first: Path, second: Path, progress: Progress | None = None) -> FileComparison:
    """Compares two targets or two drafters; the first is the reference."""
    with open_model(first) as a, open_model(second) as b:
        if a.kind != b.kind:
            raise ConfigError(
                f"{a.label} is a {a.kind} and {b.label} a {b.kind}", "compare two drafters or two targets"
            )
        result = FileComparison(a.label, b.label, a.kind, settings=_settings(a, b))
        result.notes = [f"{model.label}: {model.problem}" for model in (a, b) if model.problem]
        names_a, names_b = _names(a), _names(b)
        result.missing = [name for name in names_a if name not in names_b]
        result.extra = [name for name in names_b if name not in names_a]
        shared = [name for name in names_a if name in names_b]
        for name in tracked(shared, "comparing tensors", progress):
            mine, theirs = names_a[name], names_b[name]
            if mine.shape != theirs.shape and not _same_values(mine.shape, theirs.shape):
                result.shapes.append((name, mine.shape, theirs.shape))
            else:
                result.tensors.append(_difference(name, mine, theirs))
        result.tensors = mark_outliers(result.tensors)
        result.tensors = [_explained(tensor, a, b) if tensor.outlier else tensor for tensor in result.tensors]
        return result


def _names(model: ModelFile) -> dict[str, Source]:
    """All tensors of a model; a tensor without a known name keeps the file's own name."""
    return model.tensors | {name: model.file.tensor(name) for name in model.unknown}


def _same_values(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether two shapes hold the same values; some writers leave out dimensions of size one."""
    return [size for size in first if size > 1] == [size for size in second if size > 1]


def _settings(a: ModelFile, b: ModelFile) -> list[tuple[str, object, object]]:
    if a.config is None or b.config is None or type(a.config) is not type(b.config):
        return []
    mine, theirs = _flat(asdict(a.config)), _flat(asdict(b.config))
    return [
        (key, mine.get(key), theirs.get(key))
        for key in mine | theirs
        if key.partition(".")[0] not in _NO_SETTINGS and not _close(mine.get(key), theirs.get(key))
    ]


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        found |= {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


def _close(first: object, second: object) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        # GGUF stores 32-bit floats where JSON has 64 bits.
        return math.isclose(first, second, rel_tol=1e-6)
    return first == second


def _pieces(first: Source, second: Source) -> Iterator[tuple[Array, Array]]:
    """The same rows of both tensors as fp64 [rows, elements], a bounded number at a time."""
    rows, elements = (first.shape[0] if first.shape else 1), math.prod(first.shape)
    if not elements:
        return
    step = max(1, CHUNK_ELEMENTS * rows // elements)
    if first.shape != second.shape or len(first.shape) < 2 or step >= rows:
        yield dense_values(first).reshape(rows, -1), dense_values(second).reshape(rows, -1)
        return
    for index in torch.arange(rows).split(step):
        mine, theirs = dense_values(first.rows(index)), dense_values(second.rows(index))
        yield mine.reshape(len(index), -1), theirs.reshape(len(index), -1)


def dense_values(tensor: Source) -> Array:
    return tensor.dense().numpy().astype(np.float64)


def _difference(name: str, first: Source, second: Source) -> TensorDifference:
    bad, largest = 0, 0.0
    norms: list[Array] = []
    gaps: list[Array] = []
    for mine, theirs in _pieces(first, second):
        finite = np.isfinite(mine) & np.isfinite(theirs)
        if not finite.all():
            bad += int((~finite).sum())
            mine, theirs = np.where(finite, mine, 0.0), np.where(finite, theirs, 0.0)
        gap = np.abs(mine - theirs)
        norms.append(np.square(mine).sum(axis=1))
        gaps.append(np.square(gap).sum(axis=1))
        largest = max(largest, float(gap.max(initial=0.0)))
    row_norms, row_gaps = (np.concatenate(parts) if parts else np.zeros(0) for parts in (norms, gaps))
    squares, errors = float(row_norms.sum()), float(row_gaps.sum())
    floor = squares / max(1, len(row_norms))
    scale = np.maximum(row_norms, floor)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_row = np.where(row_gaps > 0, np.sqrt(row_gaps / scale), 0.0)
    worst = int(per_row.argmax()) if len(per_row) else 0
    return TensorDifference(
        name,
        (first.type_name, second.type_name),
        first.shape,
        math.prod(first.shape),
        relative_rms=math.inf if bad else _relative(errors, squares),
        max_error=largest,
        worst_row=worst,
        row_error=float(per_row[worst]) if len(per_row) else 0.0,
        non_finite=bad,
    )


def _relative(errors: float, squares: float) -> float:
    if not errors:
        return 0.0
    return math.sqrt(errors / squares) if squares else math.inf


def mark_outliers(tensors: Sequence[TensorDifference]) -> list[TensorDifference]:
    """Marks the tensors whose error is far above the median of those stored in the same two types."""
    groups: dict[tuple[str, str], list[TensorDifference]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.types, []).append(tensor)
    middle = {
        types: (statistics.median(t.relative_rms for t in group), statistics.median(t.row_error for t in group))
        for types, group in groups.items()
    }
    return [replace(tensor, outlier=_reason(tensor, *middle[tensor.types])) for tensor in tensors]


def _reason(tensor: TensorDifference, rms: float, row: float) -> str:
    if tensor.non_finite:
        return f"{tensor.non_finite} values are not finite"
    if tensor.relative_rms > max(OUTLIER_FACTOR * rms, OUTLIER_FLOOR):
        return f"{tensor.relative_rms / rms:.1f} x the median RMS of its types" if rms else "others are the same"
    if tensor.relative_rms > _UNLIKE:
        return "nothing like the reference"
    if tensor.row_error > max(OUTLIER_FACTOR * row, OUTLIER_FLOOR):
        # A single bad row of a large matrix hardly changes the matrix's RMS.
        times = f": {tensor.row_error / row:.1f} x the median worst row" if row else ""
        return f"row {tensor.worst_row}{times}"
    return ""


def _explained(tensor: TensorDifference, a: ModelFile, b: ModelFile) -> TensorDifference:
    """Looks for what the second file holds in this tensor's place; the explanation stays empty if nothing fits."""
    if tensor.non_finite or tensor.name not in a.tensors or tensor.relative_rms < _SAME:
        return tensor
    mine = a.tensors[tensor.name]
    if len(mine.shape) != 2:
        return tensor
    if _is_reordered(tensor.name, mine, b):
        return replace(tensor, explanation="its rows are in the other rotary order")
    sample = _sample(mine)
    for other, theirs in b.tensors.items():
        if other != tensor.name and theirs.shape == mine.shape and _near(sample, _sample(theirs)):
            return replace(tensor, explanation=f"the second file has '{other}' here")
    theirs_sample = _sample(b.tensors[tensor.name])
    factor = float((sample * theirs_sample).sum() / max(float(np.square(sample).sum()), 1e-300))
    if abs(factor) > 1e-6 and _near(sample * factor, theirs_sample):
        return replace(tensor, explanation=f"it is scaled by {factor:.3g}")
    return tensor


def _is_reordered(name: str, mine: Source, b: ModelFile) -> bool:
    config = b.config
    if config is None or not (".q_proj." in name or ".k_proj." in name) or mine.shape[0] % config.head_dim:
        return False
    order = stored_rotary_rows(mine.shape[0] // config.head_dim, config.head_dim)
    theirs, sample = b.tensors[name], _sample(mine)
    return any(_near(sample, _sample(theirs.rows(rows))) for rows in (order, torch.argsort(order)))


def _sample(tensor: Source) -> Array:
    index = torch.linspace(0, tensor.shape[0] - 1, min(_SAMPLED_ROWS, tensor.shape[0])).long()
    return dense_values(tensor.rows(index))


def _near(first: Array, second: Array) -> bool:
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return False
    squares, errors = float(np.square(first).sum()), float(np.square(first - second).sum())
    return squares > 0 and math.sqrt(errors / squares) < _SAME


def _json_number(value: object) -> object:
    """A number as JSON can express it, which has neither infinity nor NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
