"""Random weights of real shapes, straight onto the device: enough to time steps, not to say anything sensible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.formats.weights import WeightTensor
from slipstream.kernels.matmul import Matrix
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.rope import RopeConfig
from slipstream.models.weights import Embedding, Weights

QWEN3_8B = DecoderConfig(
    "qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 1e-6, RopeConfig(1e6, 128), 40960, False, True, False, False
)
TINY = DecoderConfig("qwen3", 64, 2, 4, 2, 16, 128, 512, 1e-6, RopeConfig(1e6, 16), 4096, False, True, False, False)


def drafter_config(target: DecoderConfig, layers: int = 5, block: int = 16) -> DFlashConfig:
    taps = tuple(sorted({round((target.layers - 3) * i / max(1, layers - 1)) + 1 for i in range(layers)}))
    return DFlashConfig(
        "random", target.hidden_size, layers, target.heads, target.kv_heads, target.head_dim,
        target.intermediate_size, target.vocab_size, target.rms_eps, target.rope, False, block, 3, taps,
        target.layers, (AttentionPattern(causal=False),) * layers, 0,
    )


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor that is only a name and a shape until somebody builds a matrix of it."""

    name: str
    shape: tuple[int, ...]


class NoFile:
    """What a drafter asks its file for: the shape of the projection that reads the taps."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self.metadata: dict[str, object] = {}

    def names(self) -> list[str]:
        return ["fc.weight"]

    def __contains__(self, name: object) -> bool:
        return name == "fc.weight"

    def tensor(self, name: str) -> Shaped:
        return Shaped(name, self._shape)


class RandomWeights(Weights):
    """Stands in for a file; every layer gets memory of its own, so that a step reads as many bytes as a real one."""

    def __init__(
        self, device: torch.device, make_matrix: Callable[[Sequence[tuple[int, ...]]], Matrix],
        fc_shape: tuple[int, int] = (0, 0),
    ) -> None:
        self.file = NoFile(fc_shape)  # type: ignore[assignment]
        self.weight_format = "native"
        self.step_bytes = self.row_products = 0
        self._norm_shift = 0.0
        self._device = device
        self._make_matrix = make_matrix

    def has(self, name: str) -> bool:
        return False

    def source(self, name: str, shape: tuple[int, ...]) -> WeightTensor:
        return Shaped(name, shape)  # type: ignore[return-value]

    def vector(self, name: str, size: int) -> Tensor:
        return 1.0 + 0.1 * torch.randn(size, device=self._device)

    def embedding(self, name: str, vocab: int, hidden: int, scale: float = 1.0) -> Embedding:
        return self._make_matrix([(vocab, hidden)])  # type: ignore[return-value]

    def head(self, source: WeightTensor, weight_format: object = None) -> Matrix:
        return self.matrix([source])

    def matrix(self, sources: Sequence[WeightTensor], weight_format: object = None) -> Matrix:
        matrix = self._make_matrix([source.shape for source in sources])
        self.step_bytes += matrix.nbytes
        self.row_products += matrix.out_features * matrix.in_features
        return matrix

    def finish(self, ignored: Callable[[str], bool]) -> None:
        pass
