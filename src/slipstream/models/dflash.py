"""The DFlash drafter: turns target taps into draft context, and one block of masks into proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from slipstream.config import WeightFormat
from slipstream.errors import ConfigError, PairError
from slipstream.formats.weight_files import WeightFile, open_weights, read_config
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.torch_kernels import softcapped
from slipstream.kernels.rows import RowBatch, RowPlaces
from slipstream.lazy import cached_property
from slipstream.models import dflash_config
from slipstream.models.cpu.cpu_models import CpuDrafter
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.dflash_names import names_in, shapes_in
from slipstream.models.heads import DraftHeads
from slipstream.models.layers import (
    Attention,
    BlockConvolution,
    HeadGate,
    Layer,
    Projections,
    Sublayer,
    load_attention,
    load_gate,
    load_mlp,
    load_norms,
    load_projections,
)
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import Embedding, Weights

LUCEBOX_ARCH = "dflash-draft"
LUCEBOX_ARCHS = (LUCEBOX_ARCH, "qwen35-dflash-draft")  # both writers use the same keys


class DFlashDrafter:
    """A drafter, which borrows the target's embedding table and head unless its checkpoint brings its own."""

    def __init__(self, config: DFlashConfig, weights: Weights) -> None:
        self.config = config
        self.tap_width = _tap_width(config, weights)
        # The taps reach 24,000 where the stream has attention sinks; of torch's formats only fp32 takes that well.
        fc_format: WeightFormat = "native" if weights.weight_format == "native" else "fp32"
        self.fc = weights.linear("fc.weight", config.hidden_size, self.tap_width, fc_format)
        self.tap_norms: Tensor | None = None  # one row of weights per tap
        if config.parts.tap_norms:
            taps = range(len(config.target_layer_ids))
            width = self.tap_width // len(taps)
            self.tap_norms = torch.stack([weights.vector(f"aux_hidden_norms.{tap}.weight", width) for tap in taps])
        self.hidden_norm = weights.vector("hidden_norm.weight", config.hidden_size)
        self._load_layers(weights)
        self.norm = weights.vector("norm.weight", config.hidden_size)
        self.embed = (
            weights.embedding("embed_tokens.weight", config.vocab_size, config.hidden_size)
            if weights.has("embed_tokens.weight")
            else None
        )
        head_tokens = config.draft_vocab_size or config.vocab_size
        self.head: Matrix | None = (
            weights.head(weights.source("lm_head.weight", (head_tokens, config.hidden_size)))
            if weights.has("lm_head.weight")
            else None
        )
        self.known_tokens = self._load_known_tokens(weights) if config.draft_vocab_size else None
        self.softcap = config.final_logit_softcapping
        self.heads = DraftHeads(weights, config) if config.parts.any_head else None
        self.step_bytes = weights.step_bytes
        self.rotary = RotaryTable(config.rope)
        weights.finish(lambda name: name == "t2d")

    @cached_property
    def _on_cpu(self) -> CpuDrafter:
        return CpuDrafter(self)

    def _load_layers(self, weights: Weights) -> None:
        """Loads the layers, and the matrices that turn context rows into keys and values of all of them.

        The projections go out of scope once they are packed, because merged tensors of an adapter would otherwise stay
        in memory.
        """
        loaded = [self._load_layer(weights, index) for index in range(self.config.layers)]
        self.layers = [layer for layer, _ in loaded]
        sources = [[projections.sources["k"], projections.sources["v"]] for _, projections in loaded]
        self.context_kv = weights.matrix([source for pair in sources for source in pair])
        # Where every layer norms the context by itself, every layer has a projection of its own.
        self.context_each = [weights.matrix(pair) for pair in sources] if self.config.parts.context_norm else None
        biases = [found.biases[letter] for _, found in loaded for letter in "kv" if found.biases]
        self.context_bias = torch.cat(biases) if biases else None
        mixers = [cast(Attention, layer.parts[0]) for layer in self.layers]
        self.context_k_norm = torch.stack([mixer.k_norm for mixer in mixers if mixer.k_norm is not None])[:, None]

    def _load_layer(self, weights: Weights, index: int) -> tuple[Layer, Projections]:
        config, prefix = self.config, f"layers.{index}."
        projections = load_projections(weights, config, prefix + "self_attn.")
        gate = self._load_gate(weights, prefix + "self_attn.", projections) if config.parts.gate_width else None
        mixer = load_attention(weights, config, index, prefix + "self_attn.", projections, gate)
        first, second = load_norms(weights, config, prefix)
        layer = Layer([Sublayer(mixer, first), Sublayer(load_mlp(weights, config, prefix + "mlp."), second)])
        if config.parts.conv_kernel_size:
            for sublayer, name in zip(layer.sublayers, ("attention_conv.", "mlp_conv."), strict=True):
                sublayer.convolution = self._load_convolution(weights, prefix + name)
        return layer, projections

    def _load_gate(self, weights: Weights, prefix: str, projections: Projections) -> HeadGate:
        config, width = self.config, self.config.parts.gate_width
        if width not in (config.heads, config.heads * config.head_dim):
            raise ConfigError(f"{config.label}: a gate of {width} numbers fits neither heads nor what they say")
        source = weights.source(prefix + "g_proj.weight", (width, config.hidden_size))
        return load_gate(weights, "softplus", source, projections)

    def _load_convolution(self, weights: Weights, prefix: str) -> BlockConvolution:
        config, taps, group = self.config, self.config.parts.conv_kernel_size, self.config.parts.conv_group_size
        groups = config.hidden_size // group
        base = weights.source(prefix + "base_kernel", (2, taps, config.hidden_size)).dense()
        projection = weights.linear(prefix + "kernel_projection.weight", 2 * taps * groups, config.hidden_size)
        return BlockConvolution(base.view(2, taps, groups, group), projection, config.block_size)

    def _load_known_tokens(self, weights: Weights) -> Tensor:
        """Returns the target's ids of tokens that the head knows; Hugging Face files store each id minus its index."""
        if self.head is None:
            raise ConfigError(f"{self.config.label}: a reduced vocabulary (draft_vocab_size) needs a head of its own")
        stored = weights.source("d2t", (self.config.draft_vocab_size,)).dense().long()
        ids = stored if "general.architecture" in weights.file.metadata else stored + torch.arange(len(stored))
        if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise ConfigError(f"{self.config.label}: 'd2t' does not name {len(ids)} tokens of the target's vocabulary")
        return ids

    @property
    def input_norms(self) -> list[Tensor]:
        """The norm before the attention of every layer, which context rows go through as well in some drafters."""
        return [layer.sublayers[0].norm for layer in self.layers if layer.sublayers[0].norm is not None]

    def write_context(self, taps: Tensor, places: RowPlaces, keys: Tensor, values: Tensor) -> None:
        """Projects the taps of committed rows into all layers' keys and values [layers, pages, heads, tokens, dim]."""
        self._on_cpu.write_context(self, taps, places, keys, values)

    def borrow(self, embed: Embedding, softcap: float) -> Callable[[Tensor], Tensor]:
        """Takes the target's embedding and softcap, and returns the function that embeds the block's tokens.

        A borrowed embedding keeps the target's scale, unless the drafter has a scale of its own for the raw rows.
        """
        self.borrow_softcap(softcap)
        if self.embed is not None:
            return self.embed
        return embed if self.config.input_embedding_scale is None else embed.raw

    def borrow_softcap(self, softcap: float) -> None:
        """Takes the target's softcap together with its head, unless the drafter has a softcap of its own."""
        if self.head is None:
            self.softcap = self.config.final_logit_softcapping or softcap

    def forward_logits(
        self,
        embedded: Tensor,
        batch: RowBatch,
        keys: Tensor,
        values: Tensor,
        wanted: Sequence[int] = (),
        head: Matrix | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns all hidden rows of the blocks after the final norm, and the wanted rows' logits under `head`.

        Proposals begin at row `config.first_slot`.
        """
        scale = self.config.input_embedding_scale
        return self._on_cpu.run(embedded if scale is None else embedded * scale, batch, keys, values, wanted, head)

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Applies the drafter's multiplier and the softcap, and spreads the logits over the target's vocabulary."""
        multiplier, known = self.config.output_multiplier, self.known_tokens
        logits = softcapped(logits * multiplier if multiplier != 1.0 else logits, self.softcap)
        if known is None:
            return logits
        return logits.new_full((logits.shape[0], self.config.vocab_size), float("-inf")).index_copy_(1, known, logits)


def _tap_width(config: DFlashConfig, weights: Weights) -> int:
    """Returns the width of all taps of a row together, which is the number of inputs of `fc`."""
    fc = weights.file.tensor(names_in(weights.file)("fc.weight"))
    taps = len(config.target_layer_ids)
    if len(fc.shape) != 2 or fc.shape[1] % taps:
        raise ConfigError(
            f"{config.label}: fc.weight {list(fc.shape)} does not divide into {taps} taps",
            "target_layer_ids does not belong to these weights",
        )
    return fc.shape[1]


def load_drafter(path: Path, weight_format: WeightFormat) -> DFlashDrafter:
    """Loads the drafter at `path`, a folder with config.json or a GGUF file."""
    file = open_weights(path)
    config = read_drafter_config(path, file)
    return DFlashDrafter(config, Weights(file, weight_format, names_in(file), rough=True))


def read_drafter_config(path: Path, file: WeightFile) -> DFlashConfig:
    """Reads the configuration at `path` and checks it against the tensors of its file."""
    config = read_config(path)
    if config is not None:
        return dflash_config.read_hf(config, path.name, shapes_in(file))
    arch, metadata = file.metadata.get("general.architecture"), file.metadata
    if arch in LUCEBOX_ARCHS:
        metadata = dflash_config.llama_cpp_keys(metadata, str(arch))
    elif arch != "dflash":
        raise ConfigError(f"{path.name} is a '{arch}' model, not a DFlash drafter", "give the drafter to --draft")
    return dflash_config.read_gguf(metadata, file.path.name, shapes_in(file))


def check_pair(target: DecoderConfig, drafter: DFlashDrafter) -> None:
    """Raises PairError with the first reason why this target and this drafter cannot work together.

    Without this check only a low acceptance would show that they do not belong together.
    """
    config = drafter.config
    shares = drafter.embed is None or drafter.head is None
    width, trained = drafter.tap_width // len(config.target_layer_ids), config.num_target_layers
    outside = [layer for layer in config.target_layer_ids if not -1 <= layer < target.layers]
    checks = (
        (
            config.target_family not in (None, target.family),
            f"the drafter was trained on a '{config.target_family}' target, this one is '{target.family}'",
        ),
        (
            config.vocab_size != target.vocab_size,
            f"the drafter's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}",
        ),
        (
            shares and config.hidden_size != target.hidden_size,
            f"the drafter is {config.hidden_size} wide and shares the embedding of a target {target.hidden_size} wide",
        ),
        (width != target.hidden_size, f"the drafter reads taps {width} wide, the target's are {target.hidden_size}"),
        (
            trained not in (None, target.layers),
            f"the drafter was trained on a target of {trained} layers, this one has {target.layers}",
        ),
        (
            outside,
            f"the drafter taps layer {next(iter(outside), None)}, the target has layers 0 to {target.layers - 1}",
        ),
        (
            config.mask_token_id >= target.vocab_size,
            f"the drafter's mask token {config.mask_token_id} is not in the target's vocabulary of {target.vocab_size}",
        ),
    )
    for wrong, said in checks:
        if wrong:
            raise PairError(said, "use the drafter that was trained for this target")
