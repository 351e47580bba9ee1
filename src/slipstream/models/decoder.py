"""The decoder stack that llama and qwen3 share: one forward over rows for prefill, decoding and verify alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.matmul import Matrix, rough_twin
from slipstream.kernels.native.stack import LayerPools, NativeStack, PassResult
from slipstream.kernels.reference import rms_norm
from slipstream.kernels.rows import AttentionPattern, RowBatch
from slipstream.models.layers import RotaryRows, TransformerLayer
from slipstream.models.native_pass import native_stack, packed
from slipstream.models.rope import RopeConfig, RotaryTable
from slipstream.models.weights import Weights

KvLayers = Sequence[tuple[Tensor, Tensor]]  # per layer: keys and values [pages, kv heads, page tokens, dim]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Every number of a decoder stack, read from the checkpoint and never guessed."""

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


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """How one file format spells a family's tensors, and the order of its query and key rows."""

    file_name: Callable[[str], str]
    ignored: Callable[[str], bool]
    rotary_rows: RotaryRows | None = None


class Decoder:
    """A target model: embeds rows, runs the layers, records taps, and turns hidden rows into logits."""

    patterns = (AttentionPattern(),)

    def __init__(self, config: DecoderConfig, weights: Weights, names: FamilyNames) -> None:
        self.config = config
        self.weight_format = weights.weight_format
        self.embed = weights.embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [
            TransformerLayer(weights, config, f"model.layers.{index}.", AttentionPattern(), names.rotary_rows)
            for index in range(config.layers)
        ]
        self.norm = weights.vector("model.norm.weight", config.hidden_size)
        head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        self._head_source = weights.source(head, (config.vocab_size, config.hidden_size))
        # int4 products come out in bf16, too coarse to rank a vocabulary by
        self.head = weights.head(self._head_source, "int8" if weights.weight_format == "int4" else None)
        self.step_bytes, self.row_products = weights.step_bytes, weights.row_products
        self.rotary = RotaryTable(config.rope)
        self._native = native_stack(config, self.layers, self.norm)
        self._pools: tuple[KvLayers, LayerPools] | None = None
        weights.finish(names.ignored)

    def forward(self, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Hidden rows after the final norm, and the residual after each tapped layer side by side.

        Tap -1 is the embedding; tap i is the residual stream that layer i leaves, before any norm.
        """
        if self._native is not None:
            done = self._run_native(self._native, batch, kv, tap_layers, ())
            return done.hidden, done.taps
        x = self.embed(batch.token_ids)
        rotary = self.rotary.rows(batch.positions, batch.end)
        recorded = {-1: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, rotary, *kv[index])
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
            batch, self.embed(batch.token_ids), self._pools[1], self.rotary.tables(batch.end), tap_layers, wanted,
            packed(self.head),
        )

    @cached_property
    def draft_head(self) -> Matrix:
        """The head that drafts share; their logits need not be exact, so a coarser copy spares half of its bytes."""
        return rough_twin(self.head, self._head_source)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
