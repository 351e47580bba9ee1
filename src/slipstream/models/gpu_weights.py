"""Takes a model file's tensors onto a GPU: matrices as the file has them, or all of them in bf16."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
from torch import Tensor

from slipstream.config import WeightFormat
from slipstream.errors import ConfigError
from slipstream.formats.weights import WeightFile, WeightTensor
from slipstream.kernels.gpu.matmul import GpuMatrix, Scratch, make_gpu_matrix
from slipstream.kernels.matmul import Matrix
from slipstream.models.weights import BuiltParts, Embedding, Progress, Weights, keep_name


class GpuWeights(Weights):
    """Loads tensor by tensor, so that the model is never in memory as a whole but in the format it is kept in."""

    def __init__(
        self, file: WeightFile, weight_format: WeightFormat, scratch: Scratch,
        file_name: Callable[[str], str] = keep_name, progress: Progress | None = None,
        parts: BuiltParts | None = None, changed: Collection[str] = (),
    ) -> None:
        # a tied head is built once: what shares tensors shares matrices
        shared = {} if parts is None else parts
        super().__init__(file, weight_format, file_name, progress, parts=shared, changed=changed)
        self._scratch = scratch

    def vector(self, name: str, size: int) -> Tensor:
        return super().vector(name, size).to(self._scratch.device)

    def matrix(self, sources: Sequence[WeightTensor], weight_format: WeightFormat | None = None) -> Matrix:
        return cast(Matrix, self._built(sources, torch.bfloat16))

    def head(self, source: WeightTensor, weight_format: WeightFormat | None = None) -> Matrix:
        return cast(Matrix, self._built([source], torch.float32))

    def embedding(self, name: str, vocab: int, hidden: int, scale: float = 1.0) -> Embedding:
        if scale != 1.0:
            raise ConfigError("scaled embeddings do not run on a GPU yet", "use --device cpu")
        # a step reads a few rows of it, unless it is the head as well
        source = self.source(name, (vocab, hidden))
        return cast(Embedding, self.part("head", [source], lambda: self._make([source], torch.float32)))

    def _built(self, sources: Sequence[WeightTensor], dtype: torch.dtype) -> GpuMatrix:
        form = "head" if dtype is torch.float32 else "matrix"
        matrix = self.part(form, sources, lambda: self._make(sources, dtype))
        self.step_bytes += matrix.nbytes
        self.row_products += matrix.out_features * matrix.in_features
        return matrix

    def _make(self, sources: Sequence[WeightTensor], dtype: torch.dtype) -> GpuMatrix:
        return make_gpu_matrix(sources, self._scratch, self.weight_format, dtype)
