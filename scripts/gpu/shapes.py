"""Makes random weights of real shapes directly on the device; they serve to time steps, and their text is nonsense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from slipstream.formats.quantise import encode_rows
from slipstream.formats.weight_files import WeightTensor
from slipstream.kernels.cpu.delta_rule import DeltaShape
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.gpu.expert_mixture import ExpertStack
from slipstream.kernels.gpu.matrices import GpuDense, GpuMatrix, GpuQuantised, Scratch
from slipstream.kernels.gpu.packing import KINDS, TILE_ROWS, QuantPlanes, pack
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.gpu.device_weights import GpuEmbedding
from slipstream.models.laguna import LagunaConfig
from slipstream.models.moe import MoeShape
from slipstream.models.qwen3_5 import Qwen35Config
from slipstream.models.rope import RopeConfig
from slipstream.models.weights import Embedding, Weights

_PATTERN_ROWS = 256  # rows that are quantised once and repeated, because encoding billions of weights takes minutes
_WHOLE_OUTPUTS = 512  # files do not quantise matrices with fewer outputs, such as routers and gates
QWEN3_8B = DecoderConfig(
    family="qwen3",
    hidden_size=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    rms_eps=1e-6,
    rope=RopeConfig(1e6, 128),
    max_positions=40960,
    tied_head=False,
)
TINY = DecoderConfig(
    family="qwen3",
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=512,
    rms_eps=1e-6,
    rope=RopeConfig(1e6, 16),
    max_positions=4096,
    tied_head=False,
)

QWEN3_6_27B = Qwen35Config(
    family="qwen3_5",
    hidden_size=5120,
    layers=64,
    heads=24,
    kv_heads=4,
    head_dim=256,
    intermediate_size=17408,
    vocab_size=248320,
    rms_eps=1e-6,
    rope=RopeConfig(1e7, 64, width=256),
    max_positions=262144,
    tied_head=False,
    qk_norm=True,
    attention_bias=False,
    mlp_bias=False,
    recurrent=(True, True, True, False) * 16,
    delta=DeltaShape(48, 16, 48, 128, 128, 4),
    as_gguf=False,
    moe=None,
)
QWEN3_6_35B_A3B = replace(
    QWEN3_6_27B,
    family="qwen3_5_moe",
    hidden_size=2048,
    layers=40,
    heads=16,
    kv_heads=2,
    intermediate_size=512,
    recurrent=(True, True, True, False) * 10,
    delta=DeltaShape(30, 16, 32, 128, 128, 4),
    moe=MoeShape(2048, 256, 8, 512, shared_size=512, shared_gate=True),
)
LAGUNA_XS_2 = LagunaConfig(
    family="laguna",
    hidden_size=2048,
    layers=40,
    heads=48,
    kv_heads=8,
    head_dim=128,
    intermediate_size=8192,
    vocab_size=100352,
    rms_eps=1e-6,
    rope=RopeConfig(5e5, 64, width=128),
    max_positions=131072,
    tied_head=False,
    qk_norm=True,
    attention_bias=False,
    mlp_bias=False,
    layer_heads=(48, 64, 64, 64) * 10,
    sliding=(False, True, True, True) * 10,
    window=512,
    sliding_rope=RopeConfig(1e4, 128),
    sparse=(False, *(True,) * 39),
    moe=MoeShape(2048, 256, 8, 512, "sigmoid", scale=2.5, selection_bias=True, shared_size=512),
    gate_per_head=True,
)
FAMILIES: dict[str, DecoderConfig] = {
    "Qwen3.6-27B": QWEN3_6_27B,
    "Qwen3.6-35B-A3B": QWEN3_6_35B_A3B,
    "Laguna-XS.2": LAGUNA_XS_2,
}


def few_layers(name: str) -> DecoderConfig:
    """A family of real size with only a few layers, at least one of every kind."""
    whole = FAMILIES[name]
    if isinstance(whole, LagunaConfig):
        return replace(
            whole, layers=4, layer_heads=whole.layer_heads[:4], sliding=whole.sliding[:4], sparse=whole.sparse[:4]
        )
    assert isinstance(whole, Qwen35Config)
    return replace(whole, layers=4, recurrent=whole.recurrent[:4], delta=replace(whole.delta, layers=3))


def tiny_family(name: str) -> DecoderConfig:
    """A family with all its parts, small enough for torch's kernels on a CPU."""
    few = replace(
        few_layers(name), hidden_size=64, heads=4, kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=512
    )
    if isinstance(few, LagunaConfig):
        return replace(
            few,
            rope=RopeConfig(5e5, 8, width=16),
            layer_heads=(4, 6, 6, 6),
            window=128,
            sliding_rope=RopeConfig(1e4, 16),
            moe=_tiny_experts(few.moe),
        )
    assert isinstance(few, Qwen35Config)
    return replace(
        few,
        rope=RopeConfig(1e7, 4, width=16),
        delta=DeltaShape(3, 2, 4, 16, 16, 4),
        moe=_tiny_experts(few.moe) if few.moe is not None else None,
    )


def _tiny_experts(moe: MoeShape) -> MoeShape:
    return replace(moe, hidden_size=64, experts=12, active=3, intermediate_size=32, shared_size=32)


def drafter_config(target: DecoderConfig, layers: int = 5, block: int = 16) -> DFlashConfig:
    taps = tuple(sorted({round((target.layers - 3) * i / max(1, layers - 1)) + 1 for i in range(layers)}))
    return DFlashConfig(
        label="random",
        hidden_size=target.hidden_size,
        layers=layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        vocab_size=target.vocab_size,
        rms_eps=target.rms_eps,
        rope=target.rope,
        attention_bias=False,
        block_size=block,
        mask_token_id=3,
        target_layer_ids=taps,
        num_target_layers=target.layers,
        patterns=(AttentionPattern(causal=False),) * layers,
        trained_length=0,
    )


class RandomMatrices:
    """Makes matrices and stacks of experts in one weight format."""

    def __init__(self, scratch: Scratch, kind: str) -> None:
        self._scratch = scratch
        self._kind = kind
        self._patterns: dict[int, QuantPlanes] = {}

    def matrix(self, shapes: Sequence[tuple[int, ...]]) -> GpuMatrix:
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        if not self._quantises(inputs) or outputs <= _WHOLE_OUTPUTS:
            return GpuDense(self.dense_weights(outputs, inputs), self._scratch)
        return GpuQuantised(self._packed(outputs, inputs), self._scratch)

    def experts(self, each: Sequence[Sequence[tuple[int, ...]]]) -> ExpertStack:
        outputs, inputs = sum(shape[0] for expert in each for shape in expert), each[0][0][1]
        # As with a file, experts that do not fill tiles are not kept as blocks.
        whole = not self._quantises(inputs) or any(shape[0] % TILE_ROWS for expert in each for shape in expert)
        return ExpertStack(self.dense_weights(outputs, inputs) if whole else self._packed(outputs, inputs), len(each))

    def _quantises(self, inputs: int) -> bool:
        """Whether a file would store such rows as blocks."""
        return self._kind in KINDS and inputs % KINDS[self._kind].block == 0

    def dense_weights(self, outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, dtype=torch.bfloat16, device=self._scratch.device).mul_(0.02)

    def _packed(self, outputs: int, inputs: int) -> QuantPlanes:
        """Quantises a few rows once and repeats them on the device as often as needed."""
        if inputs not in self._patterns:
            values = np.random.default_rng(inputs).standard_normal((_PATTERN_ROWS, inputs), np.float32) * 0.02
            raw = encode_rows(values, self._kind)
            self._patterns[inputs] = pack([raw], KINDS[self._kind], inputs, self._scratch.device)
        pattern, tiles = self._patterns[inputs], -(-outputs // TILE_ROWS)

        def repeated(plane: Tensor | None) -> Tensor | None:
            if plane is None:
                return None
            times = -(-tiles // plane.shape[0])
            return plane.repeat(times, *[1] * (plane.dim() - 1))[:tiles].contiguous()

        words, scales = cast(Tensor, repeated(pattern.words)), cast(Tensor, repeated(pattern.scales))
        return replace(
            pattern,
            outputs=outputs,
            words=words,
            high=repeated(pattern.high),
            scales=scales,
            offsets=repeated(pattern.offsets),
        )


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor that is only a name and a shape until a matrix is built of it."""

    name: str
    shape: tuple[int, ...]

    def rows(self, index: Tensor) -> Shaped:
        return Shaped(self.name, (len(index), *self.shape[1:]))

    def dense(self) -> Tensor:
        return torch.randn(self.shape) * 0.1


class NoFile:
    """What a drafter asks of its file: the shape of the projection that reads the taps."""

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
    """Takes the place of a file; every layer gets its own memory, so that a step reads as many bytes as a real one."""

    joins_gates = True

    def __init__(self, scratch: Scratch, kind: str, fc_shape: tuple[int, int] = (0, 0)) -> None:
        self.file = NoFile(fc_shape)  # type: ignore[assignment]
        self.weight_format = "native"
        self.step_bytes = self.row_products = 0
        self._norm_shift = 0.0
        self._device = scratch.device
        self._matrices = RandomMatrices(scratch, kind)

    def has(self, name: str) -> bool:
        return False

    def source(self, name: str, shape: tuple[int, ...]) -> WeightTensor:
        return Shaped(name, shape)  # type: ignore[return-value]

    def vector(self, name: str, size: int) -> Tensor:
        centre = 0.0 if name.endswith("bias") else 1.0  # a router's bias must not outweigh its rows
        return centre + 0.1 * (centre or 0.1) * torch.randn(size, device=self._device)

    def embedding(self, name: str, vocab: int, hidden: int, scale: float = 1.0) -> Embedding:
        return cast(Embedding, GpuEmbedding(self._matrices.matrix([(vocab, hidden)]), scale))

    def head(self, source: WeightTensor, weight_format: object = None) -> Matrix:
        return self.matrix([source])

    def matrix(self, sources: Sequence[WeightTensor], weight_format: object = None) -> Matrix:
        matrix = self._matrices.matrix([source.shape for source in sources])
        self.step_bytes += matrix.nbytes
        self.row_products += matrix.out_features * matrix.in_features
        return cast(Matrix, matrix)

    def experts(self, each: Sequence[Sequence[WeightTensor]]) -> Sequence[Matrix]:
        stack = self._matrices.experts([[source.shape for source in expert] for expert in each])
        self.step_bytes += stack.nbytes
        return cast(Sequence[Matrix], stack)

    def takes_among(self, each: Sequence[Sequence[WeightTensor]], shared: Sequence[WeightTensor]) -> bool:
        return True

    def finish(self, ignored: Callable[[str], bool]) -> None:
        pass
