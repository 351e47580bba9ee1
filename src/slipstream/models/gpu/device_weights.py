"""Loads a model file's tensors onto a GPU: each matrix in the type that the file has, or all of them in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.config import WeightFormat
from slipstream.formats.weight_files import WeightTensor
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.gpu.expert_mixture import make_expert_stack, stack_kind
from slipstream.kernels.gpu.matrices import GpuMatrix, Scratch, make_gpu_matrix
from slipstream.models.weights import Embedding, Weights, rounded_scale


@dataclass(frozen=True, slots=True)
class GpuEmbedding:
    """A token table, which may be the head as well, and what the model multiplies its rows by."""

    table: GpuMatrix
    scale: float = 1.0


class GpuWeights(Weights):
    """The tensors of one model on a GPU.

    They are loaded one by one, so that the whole model is only ever in memory in its final format.
    """

    joins_gates = True  # a launch of its own for a gate's few rows would take as long as one with many rows

    def __init__(self, scratch: Scratch, *given: Any, **options: Any) -> None:
        """Passes `given` and `options` on to `Weights`."""
        super().__init__(*given, **options)
        self._scratch = scratch
        if self._parts is None:
            # Matrices of the same tensors are built once, so that a tied head and embedding share their memory.
            self._parts = {}

    def vector(self, name: str, size: int) -> Tensor:
        return super().vector(name, size).to(self._scratch.device)

    def matrix(self, sources: Sequence[WeightTensor], weight_format: WeightFormat | None = None) -> Matrix:
        return cast(Matrix, self._built(sources, torch.bfloat16))

    def head(self, source: WeightTensor, weight_format: WeightFormat | None = None) -> Matrix:
        return cast(Matrix, self._built([source], torch.float32))

    def embedding(self, name: str, vocab: int, hidden: int, scale: float = 1.0) -> Embedding:
        # The table does not count in `step_bytes`: a step reads few of its rows, and a tied head is counted as head.
        source = self.source(name, (vocab, hidden))
        table = self.part("head", [source], lambda: self._make([source], torch.float32))
        return cast(Embedding, GpuEmbedding(table, rounded_scale(scale, source)))

    def experts(self, each: Sequence[Sequence[WeightTensor]]) -> Sequence[Matrix]:
        """Makes one stack of all experts, so that one launch serves all experts that rows have chosen."""
        sources = [source for expert in each for source in expert]
        make = partial(make_expert_stack, each, self._scratch.device, self.weight_format)
        stack = self.part("experts", sources, make)
        self.step_bytes += stack.nbytes
        self.row_products += stack.experts * stack.outputs * stack.inputs
        return cast(Sequence[Matrix], stack)

    def takes_among(self, each: Sequence[Sequence[WeightTensor]], shared: Sequence[WeightTensor]) -> bool:
        sources = [source for expert in each for source in expert]
        return stack_kind([*sources, *shared], self.weight_format) == stack_kind(sources, self.weight_format)

    def _built(self, sources: Sequence[WeightTensor], dtype: torch.dtype) -> GpuMatrix:
        form = "head" if dtype is torch.float32 else "matrix"
        matrix = self.part(form, sources, lambda: self._make(sources, dtype))
        self.step_bytes += matrix.nbytes
        self.row_products += matrix.out_features * matrix.in_features
        return matrix

    def _make(self, sources: Sequence[WeightTensor], dtype: torch.dtype) -> GpuMatrix:
        return make_gpu_matrix(sources, self._scratch, self.weight_format, dtype)
