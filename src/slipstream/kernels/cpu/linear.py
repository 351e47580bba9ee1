"""Matrices in the weight formats that are fast on a CPU, all with one interface: fp32 rows in, fp32 rows out.

In `native`, `int4` and `int8` the result of a row does not depend on how many rows share the call, which is why
speculative text equals plain text to the last bit.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.config import WeightFormat
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.native_library import Library, availability, library, threads
from slipstream.kernels.cpu.native_matrix import Coarsened, SlipLinear, SlipMatrix, StoredTensor, pack

DENSE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INT4_GROUP = 32  # weights that share a scale, as in GGUF's 4-bit types
_FINE_STEPS = 254.0  # times this, the rest after the coarse rounding (at most half a step) fits into a second int8


class MatrixSource(StoredTensor, Protocol):
    """The source of a matrix: a tensor of a model file that can return its values, bytes or 4-bit groups."""

    def q4_groups(self) -> tuple[Tensor, Tensor, Tensor] | None: ...


class Matrix(ABC):
    """A weight [out, in] that is ready to multiply rows."""

    out_features: int
    in_features: int
    nbytes: int

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """Returns rows @ weight^T in fp32 for fp32 rows [n, in]."""


class DenseMatrix(Matrix):
    """The weight as a plain tensor; torch's GEMM determines the order of its sums."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype).contiguous()
        self.out_features, self.in_features = weight.shape
        self.nbytes = self.weight.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows.to(self.weight.dtype), self.weight).float()


class Int8Matrix(Matrix):
    """int8 weights with a scale per output, and rows as the sum of two int8 terms (about 15 bits).

    Products and sums are integers and therefore exact in any order. A rough matrix uses one term only, which is half
    the work and accurate enough for drafts.
    """

    def __init__(self, weight: Tensor, rough: bool = False) -> None:
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
        self.codes = (weight / scale[:, None]).round().to(torch.int8).t()
        self.scale = scale
        self.out_features, self.in_features = weight.shape
        self.nbytes = self.codes.nbytes + scale.nbytes
        self.rough = rough

    def __call__(self, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        step = rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
        scaled = rows / step
        coarse = scaled.round()
        if self.rough:
            return torch._int_mm(coarse.to(torch.int8), self.codes).float() * step * self.scale
        fine = (scaled - coarse).mul_(_FINE_STEPS).round_()
        sums = torch._int_mm(torch.cat((coarse, fine)).to(torch.int8), self.codes).float()
        return (sums[:count] + sums[count:] / _FINE_STEPS) * step * self.scale


class Int4Matrix(Matrix):
    """4-bit weights in groups of 32 as the file has them, with bf16 rows and fp32 sums in the order of the inputs."""

    def __init__(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> None:
        self.out_features, self.in_features = codes.shape
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        # the kernel computes (code - 8) * scale + zero
        zero = minimum + 8.0 * scale
        self.scale_zero = torch.stack((scale.t(), zero.t()), dim=-1).to(torch.bfloat16).contiguous()
        self.nbytes = self.packed.nbytes + self.scale_zero.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.to(torch.bfloat16), self.packed, INT4_GROUP, self.scale_zero
        ).float()


class NativeMatrix(Matrix):
    """Weights in the types of the file, multiplied by the compiled kernels in one fixed order per row.

    The outputs of several tensors that read the same rows are stored one after the other. The kernel rounds rows to
    int8 unless the weights are floats.
    """

    def __init__(self, compiled: Library, sources: Sequence[StoredTensor]) -> None:
        self.in_features = sources[0].shape[1]
        self.out_features = sum(source.shape[0] for source in sources)
        parts = [pack(compiled, source) for source in sources]
        self.nbytes = sum(data.nbytes for _, data in parts)
        self.data = [data for _, data in parts]
        self.library = compiled
        self._product = compiled.function("slip_matmul", "ppipi")
        self._matrices = (SlipMatrix * len(parts))(*[matrix for matrix, _ in parts])
        self._struct = self.struct(None)
        self.address = ctypes.addressof(self._struct)

    def struct(self, bias: Tensor | None) -> SlipLinear:
        """Returns the struct that native code reads.

        It holds plain addresses, so the caller keeps this object and the bias alive.
        """
        return SlipLinear(
            len(self.data),
            self.out_features,
            ctypes.addressof(self._matrices),
            None if bias is None else bias.data_ptr(),
        )

    def __call__(self, rows: Tensor) -> Tensor:
        return self.multiply(rows, threads())

    def multiply(self, rows: Tensor, team_threads: int) -> Tensor:
        rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.out_features)
        self._product(self.address, rows.data_ptr(), rows.shape[0], out.data_ptr(), team_threads)
        return out


def rough_twin(matrix: Matrix, source: MatrixSource) -> Matrix:
    """Returns the same weight for products that need not be exact, in a faster form if there is one."""
    if isinstance(matrix, Int8Matrix):
        twin = copy(matrix)
        twin.rough = True
        return twin
    if isinstance(matrix, NativeMatrix) and Coarsened.helps(source):
        return NativeMatrix(matrix.library, [Coarsened(source)])
    return matrix


def make_matrix(sources: list[MatrixSource], weight_format: WeightFormat, rough: bool = False) -> Matrix:
    """Builds one matrix from tensors stacked along the outputs; in `int4`, weights that are not 4-bit become `int8`."""
    if weight_format == "native":
        compiled = library()
        if compiled is None:
            raise ConfigError(f"the native format is not available: {availability().reason}", "use --dtype auto")
        return NativeMatrix(compiled, sources)
    if weight_format in DENSE_DTYPES:
        return DenseMatrix(torch.cat([source.dense() for source in sources]), DENSE_DTYPES[weight_format])
    if weight_format == "int4":
        groups = [source.q4_groups() for source in sources]
        parts = [group for group in groups if group is not None]
        outputs = sum(source.shape[0] for source in sources)
        if len(parts) == len(groups) and outputs % 16 == 0:
            codes, scale, minimum = (torch.cat(columns) for columns in zip(*parts, strict=True))
            return Int4Matrix(codes, scale, minimum)
    if weight_format in ("int4", "int8"):
        return Int8Matrix(torch.cat([source.dense() for source in sources]), rough)
    raise ConfigError(f"unknown weight format '{weight_format}'", "choose one with --dtype")
