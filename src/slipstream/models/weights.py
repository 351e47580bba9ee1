"""Takes tensors out of a model file by their Hugging Face names, checks every shape, and refuses leftovers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from slipstream.config import WeightFormat
from slipstream.errors import ConfigError
from slipstream.formats.weight_files import WeightFile, WeightTensor
from slipstream.kernels.cpu.linear import Matrix, make_matrix
from slipstream.kernels.cpu.native_library import library
from slipstream.kernels.cpu.native_matrix import KINDS, RowTable
from slipstream.types import Progress

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BuiltParts = dict[tuple[str, ...], object]  # what was built of a file's tensors, by its form and their names
_Part = TypeVar("_Part")


def keep_name(name: str) -> str:
    return name


def rounded_scale(scale: float, table: WeightTensor) -> float:
    """Rounds a scale to the table's type, because families that scale embeddings were trained with a rounded scale."""
    return float(torch.tensor(scale, dtype=FLOAT_TYPES.get(table.type_name, torch.float32)))


class Embedding:
    """A token table in memory, in the type of its file; rows are turned into floats when they are asked for."""

    def __init__(self, source: WeightTensor, scale: float = 1.0) -> None:
        self.scale = rounded_scale(scale, source)
        self.raw = _row_reader(source)  # the rows as the file has them, before the model's scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self.raw(token_ids)
        return rows if self.scale == 1.0 else rows * self.scale


def _row_reader(source: WeightTensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that gives the rows of tokens in fp32."""
    compiled, dtype = library(), FLOAT_TYPES.get(source.type_name)
    if compiled is not None and source.type_name in KINDS:
        return RowTable(compiled, source)
    if dtype is None:
        stored = source.in_memory()
        return lambda token_ids: stored.rows(token_ids).dense()
    table = source.dense().to(dtype)
    return lambda token_ids: table[token_ids].float()


class Weights:
    """The tensors of one model in one weight format; it remembers which tensors were taken."""

    joins_gates = False  # whether the rows of a gate join the matrix that computes what the gate weighs

    def __init__(
        self,
        file: WeightFile,
        weight_format: WeightFormat,
        file_name: Callable[[str], str] = keep_name,
        progress: Progress | None = None,
        rough: bool = False,
        parts: BuiltParts | None = None,
        changed: Collection[str] = (),
        norm_shift: float = 0.0,
    ) -> None:
        """Variants of a model share `parts`; `changed` names the tensors that belong to this variant alone."""
        self.file = file
        self.weight_format = weight_format
        self._norm_shift = norm_shift  # some families store a norm's weights minus this number
        self._rough = rough  # matrices need not be exact to the last bit
        self.step_bytes = 0  # bytes of the matrices that every step reads; no step can take less time than this reading
        self.row_products = 0  # multiplications with weights that every row needs
        self._file_name = file_name
        self._progress = progress
        self._parts = parts
        self._changed = changed
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return self._file_name(name) in self.file

    def source(self, name: str, shape: tuple[int, ...]) -> WeightTensor:
        """Takes one tensor, whose shape in the file must be the one that the config implies."""
        file_name = self._file_name(name)
        tensor = self.file.tensor(file_name)
        self._taken.add(file_name)
        if (1, *tensor.shape) == shape:
            tensor = tensor.as_row()
        if tensor.shape != shape:
            raise ConfigError(
                f"tensor '{file_name}' has shape {list(tensor.shape)} where the config implies {list(shape)}",
                "the config does not belong to these weights",
            )
        if self._progress is not None:
            self._progress("loading weights", len(self._taken), len(self.file.names()))
        return tensor

    def vector(self, name: str, size: int) -> Tensor:
        return self.source(name, (size,)).dense()

    def norm(self, name: str, size: int) -> Tensor:
        return self.vector(name, size) + self._norm_shift

    def optional_vector(self, name: str, size: int) -> Tensor | None:
        return self.vector(name, size) if self.has(name) else None

    def embedding(self, name: str, vocab: int, hidden: int, scale: float = 1.0) -> Embedding:
        source = self.source(name, (vocab, hidden))
        return self.part("embedding", [source], lambda: Embedding(source, scale))

    def part(self, form: str, sources: Sequence[WeightTensor], make: Callable[[], _Part]) -> _Part:
        """Returns what `make` builds of these tensors, or what another variant has already built of the same ones."""
        if self._parts is None or any(source.name in self._changed for source in sources):
            return make()
        key = (form, *(source.name for source in sources))
        if key not in self._parts:
            self._parts[key] = make()
        return cast(_Part, self._parts[key])

    def matrix(self, sources: Sequence[WeightTensor], weight_format: WeightFormat | None = None) -> Matrix:
        """Stacks tensors along the outputs into one matrix."""
        chosen = weight_format or self.weight_format
        form = f"matrix {chosen}{' rough' if self._rough else ''}"
        matrix = self.part(form, sources, lambda: make_matrix(list(sources), chosen, self._rough))
        self.step_bytes += matrix.nbytes
        self.row_products += matrix.out_features * matrix.in_features
        return matrix

    def linear(self, name: str, outputs: int, inputs: int, weight_format: WeightFormat | None = None) -> Matrix:
        """Takes one tensor as a matrix."""
        return self.matrix([self.source(name, (outputs, inputs))], weight_format)

    def head(self, source: WeightTensor, weight_format: WeightFormat | None = None) -> Matrix:
        """Makes a matrix whose products rank a vocabulary."""
        return self.matrix([source], weight_format)

    def experts(self, each: Sequence[Sequence[WeightTensor]]) -> Sequence[Matrix]:
        """Makes one projection of all experts; `each` has, for each expert, the tensors that its matrix consists of."""
        return [self.matrix(sources) for sources in each]

    def takes_among(self, each: Sequence[Sequence[WeightTensor]], shared: Sequence[WeightTensor]) -> bool:
        """Whether a shared expert should join the routed experts, and can be stored in the same form as they are."""
        return False

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Fails if the file has tensors that this model did not take, because their part would silently be missing."""
        left = [name for name in self.file.names() if name not in self._taken and not ignored(name)]
        if left:
            shown = ", ".join(sorted(left)[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            message = f"unknown tensors in {self.file.path.name}: {shown}"
            raise ConfigError(message, "the model has parts this version does not compute")
