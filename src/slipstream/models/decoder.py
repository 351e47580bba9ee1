"""The decoder stack all families share: one forward over rows for prefill, decoding and verify alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.delta_rule import DeltaShape
from slipstream.kernels.cpu.linear import Matrix, rough_twin
from slipstream.kernels.cpu.native_stack import LayerPools, NativeStack, PassResult
from slipstream.kernels.cpu.torch_kernels import rms_norm, softcapped
from slipstream.kernels.rows import AttentionPattern, RowBatch
from slipstream.lazy import cached_property
from slipstream.models.layers import RotaryRows, TransformerLayer
from slipstream.models.native_pass import native_stack, packed
from slipstream.models.rope import RopeConfig, RotaryTable
from slipstream.models.weights import Weights

# of each layer that stores them: keys and values [pages, kv heads, page tokens, dim]
KvLayers = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Every number of a decoder stack, read from the checkpoint and never guessed.

    A family whose layers differ from each other extends it and overrides `layer`, `pool` and `kv_shapes`.
    """

    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeConfig
    max_positions: int
    tied_head: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} attention heads cannot share {self.kv_heads} key heads evenly")

    def layer(self, index: int) -> Self:
        """The numbers of one layer, as if all were like it."""
        return self

    def pattern(self, index: int) -> AttentionPattern:
        """Which keys a layer's rows see."""
        return AttentionPattern()

    def pool(self, index: int) -> int:
        """Which of the stored keys and values a layer reads."""
        return index

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Key heads and head size of each layer that stores keys and values."""
        return tuple((shape.kv_heads, shape.head_dim) for shape in map(self.layer, range(self.layers)))

    @property
    def states(self) -> DeltaShape | None:
        """What recurrent layers keep of a sequence; None: there are none."""
        return None

    @property
    def embedding_scale(self) -> float:
        return 1.0

    @property
    def softcap(self) -> float:
        """Logits are bent towards plus and minus this; 0: they are not."""
        return 0.0


_Config = TypeVar("_Config", bound=DecoderConfig)


def extended(base: DecoderConfig, kind: type[_Config], **own: object) -> _Config:
    """A family's own config: the common fields as `base` has them, and what the family adds."""
    common = {field.name: getattr(base, field.name) for field in fields(base)}
    return kind(**common | own)


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """How one file format spells a family's tensors, and the order of its query and key rows."""

    file_name: Callable[[str], str]
    ignored: Callable[[str], bool]
    rotary_rows: RotaryRows | None = None
    norm_shift: float = 0.0  # what is missing from the norms' weights as the file has them


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward hands to every layer."""

    batch: RowBatch
    rotary: Mapping[RopeConfig, tuple[Tensor, Tensor]]
    kv: KvLayers
    sides: Tensor | None = None  # what a family gives its layers beside the stream: [rows, layers, ...]


class Decoder:
    """A target model: embeds rows, runs the layers, records taps, and turns hidden rows into logits."""

    def __init__(self, config: DecoderConfig, weights: Weights, names: FamilyNames) -> None:
        self.config = config
        self.weight_format = weights.weight_format
        self.embed = weights.embedding(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size, config.embedding_scale
        )
        self.layers = [self.make_layer(weights, names, index) for index in range(config.layers)]
        self.patterns = tuple(dict.fromkeys(layer.pattern for layer in self.layers))
        self.norm = weights.norm("model.norm.weight", config.hidden_size)
        head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        self._head_source = weights.source(head, (config.vocab_size, config.hidden_size))
        # int4 products come out in bf16, too coarse to rank a vocabulary by
        self.head = weights.head(self._head_source, "int8" if weights.weight_format == "int4" else None)
        self.load_rest(weights)
        self.step_bytes, self.row_products = weights.step_bytes, weights.row_products
        self.rotaries = {rope: RotaryTable(rope) for rope in {layer.shape.rope for layer in self.layers}}
        self.rotary = self.rotaries[self.layers[0].shape.rope]  # of all layers, where a compiled pass takes them
        self._native = native_stack(config, self.layers, self.norm)
        self._pools: tuple[KvLayers, LayerPools] | None = None
        weights.finish(names.ignored)

    def make_layer(self, weights: Weights, names: FamilyNames, index: int) -> TransformerLayer:
        """Builds one layer; families with layers of their own override it."""
        config = self.config
        shape, prefix = config.layer(index), f"model.layers.{index}."
        return TransformerLayer(weights, shape, prefix, config.pattern(index), names.rotary_rows)

    def load_rest(self, weights: Weights) -> None:
        """Takes what a family has beside embedding, layers, final norm and head."""

    def begin(self, x: Tensor, batch: RowBatch, kv: KvLayers) -> Step:
        rotary = {rope: table.rows(batch.positions, batch.end) for rope, table in self.rotaries.items()}
        return Step(batch, rotary, kv)

    def run_layer(self, index: int, x: Tensor, step: Step) -> Tensor:
        layer = self.layers[index]
        return layer(x, step.batch, step.rotary[layer.shape.rope], *step.kv[self.config.pool(index)])

    def forward(self, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Hidden rows after the final norm, and the residual after each tapped layer side by side.

        Tap -1 is the embedding; tap i is the residual stream that layer i leaves, before any norm.
        """
        if self._native is not None:
            done = self._run_native(self._native, batch, kv, tap_layers, ())
            return done.hidden, done.taps
        x = self.embed(batch.token_ids)
        step = self.begin(x, batch, kv)
        recorded = {-1: x}
        for index in range(len(self.layers)):
            x = self.run_layer(index, x, step)
            if index in tap_layers:
                recorded[index] = x
        taps = torch.cat([recorded[index] for index in tap_layers], dim=-1) if tap_layers else None
        return rms_norm(x, self.norm, self.config.rms_eps), taps

    def forward_logits(
        self, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int], wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """`forward`, with the wanted rows taken through the head: in one native call where that is possible."""
        if self._native is not None and wanted:
            done = self._run_native(self._native, batch, kv, tap_layers, wanted)
            if done.logits is not None:
                return done.logits, done.taps
        hidden, taps = self.forward(batch, kv, tap_layers)
        return (self.logits(hidden[torch.tensor(wanted)]) if wanted else hidden[:0]), taps

    def _run_native(
        self, stack: NativeStack, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int], wanted: Sequence[int]
    ) -> PassResult:
        if self._pools is None or self._pools[0] is not kv:
            # addresses are read once per set of pools, which is kept so that it cannot become another one's
            self._pools = kv, LayerPools([keys for keys, _ in kv], [values for _, values in kv])
        return stack.run(
            batch,
            self.embed(batch.token_ids),
            self._pools[1],
            self.rotary.tables(batch.end),
            tap_layers,
            wanted,
            packed(self.head),
        )

    @cached_property
    def draft_head(self) -> Matrix:
        """The head that drafts share; their logits need not be exact, so a coarser copy spares half of its bytes."""
        return rough_twin(self.head, self._head_source)

    def logits(self, hidden: Tensor) -> Tensor:
        return softcapped(self.head(hidden), self.config.softcap)
