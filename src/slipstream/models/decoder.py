"""The target model that all families share: embedding, layers, final norm and head, for any device.

Prefill, decoding and verification are one forward over rows. `Decoder.forward_logits` runs it on a CPU, by
`models/cpu/cpu_models.py`; on a GPU `GpuTarget` in `models/gpu/device_models.py` runs it with the same loaded layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.delta_rule import DeltaShape
from slipstream.kernels.cpu.linear import Matrix, rough_twin
from slipstream.kernels.cpu.torch_kernels import softcapped
from slipstream.kernels.rows import AttentionPattern, RowBatch
from slipstream.lazy import cached_property
from slipstream.models.cpu.cpu_models import CpuStack
from slipstream.models.cpu.native_pass import KvLayers
from slipstream.models.cpu.part_runs import side_rows
from slipstream.models.layers import (
    Layer,
    LayerPart,
    LayerShape,
    RotaryRows,
    SideEmbeddings,
    Sublayer,
    load_attention,
    load_mlp,
    load_norms,
    load_projections,
)
from slipstream.models.moe import MoeShape, load_expert_block
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(LayerShape):
    """Every number of a decoder stack, read from the checkpoint and never guessed.

    A family whose layers differ from each other extends it and overrides `kv_shapes` and the methods `layer` and `pool`
    of `LayerShape`.
    """

    family: str
    max_positions: int
    tied_head: bool
    moe: MoeShape | None = None  # the experts in the place of MLPs
    sparse: tuple[bool, ...] = ()  # which layers have the experts; empty: all of them
    sliding: tuple[bool, ...] = ()  # which layers see only a window; empty: none of them
    window: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} attention heads cannot share {self.kv_heads} key heads evenly")

    def pattern(self, index: int) -> AttentionPattern:
        """Which earlier keys the rows of a layer see."""
        return AttentionPattern(self.window if self.sliding and self.sliding[index] else 0)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Key heads and head size of each layer that stores keys and values."""
        return tuple((shape.kv_heads, shape.head_dim) for shape in map(self.layer, range(self.layers)))

    @property
    def states(self) -> DeltaShape | None:
        """The shape of the state that recurrent layers keep for a sequence; None: the model has no such layers."""
        return None

    @property
    def embedding_scale(self) -> float:
        """What the rows of the token table are multiplied by."""
        return 1.0

    @property
    def softcap(self) -> float:
        """The softcap: logits are bent to stay within plus or minus this; 0: there is no bound."""
        return 0.0


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """How one file format spells a family's tensors, and the order of its query and key rows."""

    file_name: Callable[[str], str]
    ignored: Callable[[str], bool] = lambda name: False
    rotary_rows: RotaryRows | None = None
    norm_shift: float = 0.0  # some files store norms' weights minus this; loading adds it back


class Decoder:
    """A target model: a family's module says what its layers consist of, and this class has all that families share."""

    def __init__(self, config: DecoderConfig, weights: Weights, names: FamilyNames) -> None:
        self.config = config
        self.weight_format = weights.weight_format
        self.embed = weights.embedding(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size, config.embedding_scale
        )
        self.layers = [self.make_layer(weights, names, index) for index in range(config.layers)]
        self.patterns = tuple(dict.fromkeys(map(config.pattern, range(config.layers))))
        self.norm = weights.norm("model.norm.weight", config.hidden_size)
        head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        self._head_source = weights.source(head, (config.vocab_size, config.hidden_size))
        # Products of int4 matrices come out in bf16, which is too coarse to rank a vocabulary by, so an int4 model
        # has an int8 head.
        self.head = weights.head(self._head_source, "int8" if weights.weight_format == "int4" else None)
        self.sides = self.load_sides(weights)
        self.step_bytes, self.row_products = weights.step_bytes, weights.row_products
        ropes = dict.fromkeys(config.layer(index).rope for index in range(config.layers))
        self.rotaries = {rope: RotaryTable(rope) for rope in ropes}
        weights.finish(names.ignored)

    def make_layer(self, weights: Weights, names: FamilyNames, index: int) -> Layer:
        """Loads one layer; a family whose layers are different overrides this, `make_mixer` or `make_feeder`."""
        prefix = f"model.layers.{index}."
        mixer = self.make_mixer(weights, names, index, prefix)
        first, second = load_norms(weights, self.config, prefix)
        feeder = self.make_feeder(weights, index, prefix + "mlp.")
        return Layer([Sublayer(mixer, first), Sublayer(feeder, second)])

    def make_mixer(self, weights: Weights, names: FamilyNames, index: int, prefix: str) -> LayerPart:
        """Loads the part in which a row reads the rows before it; `prefix` begins the names of the layer's tensors."""
        prefix += "self_attn."
        projections = load_projections(weights, self.config.layer(index), prefix, names.rotary_rows)
        return load_attention(weights, self.config, index, prefix, projections)

    def make_feeder(self, weights: Weights, index: int, prefix: str) -> LayerPart:
        """Loads the part that computes every row by itself, an MLP or experts; `prefix` begins its tensors' names."""
        config = self.config
        if config.moe is None or (config.sparse and not config.sparse[index]):
            return load_mlp(weights, config.layer(index), prefix)
        return load_expert_block(weights, prefix, config.moe)

    def load_sides(self, weights: Weights) -> SideEmbeddings | None:
        """Loads the embeddings that some families add to the residual stream of every layer."""
        return None

    @cached_property
    def _on_cpu(self) -> CpuStack:
        return CpuStack(self.config, self.layers, self.norm, self.rotaries)

    def forward_logits(
        self, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int], wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns logits of the wanted rows, and the residual after each tapped layer side by side, on a CPU.

        Tap -1 is the embedding; tap i is the residual stream that layer i leaves, before any norm. One native call does
        all of it where that is possible.
        """
        x, eps = self.embed(batch.token_ids), self.config.rms_eps
        sides = side_rows(self.sides, x, batch.token_ids, eps) if self.sides is not None else None
        _, taps, logits = self._on_cpu.run(x, batch, kv, self.head, wanted, tap_layers, sides)
        return softcapped(logits, self.config.softcap), taps

    @cached_property
    def draft_head(self) -> Matrix:
        """The head that drafts share: less exact and faster than `head` if its format has such a form.

        Draft logits need not be exact, because the target verifies every drafted token.
        """
        return rough_twin(self.head, self._head_source)
