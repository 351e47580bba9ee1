"""The DFlash drafter: turns target taps into draft context, and one block of masks into proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import WeightFormat
from slipstream.errors import ConfigError
from slipstream.formats.weight_files import WeightFile, open_weights, read_config
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.native_matrix import PackedLinear
from slipstream.kernels.cpu.native_stack import LayerPools, NativeStack, PassResult
from slipstream.kernels.cpu.torch_kernels import rms_norm, rotate, softcapped
from slipstream.kernels.rows import RowBatch, RowPlaces
from slipstream.models import dflash_config
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.dflash_names import names_in, shapes_in
from slipstream.models.heads import DraftHeads
from slipstream.models.layers import BlockConvolution, HeadGate, TransformerLayer, biased
from slipstream.models.native_pass import ContextWriter, native_stack, packed
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import Embedding, Progress, Weights

LUCEBOX_ARCH = "dflash-draft"
LUCEBOX_ARCHS = (LUCEBOX_ARCH, "qwen35-dflash-draft")  # the same keys under either name


class DFlashDrafter:
    """A drafter without embedding table and head of its own unless the checkpoint brings them."""

    def __init__(self, config: DFlashConfig, weights: Weights) -> None:
        self.config = config
        fc = weights.file.tensor(names_in(weights.file)("fc.weight"))
        taps = len(config.target_layer_ids)
        if len(fc.shape) != 2 or fc.shape[1] % taps:
            raise ConfigError(
                f"{config.label}: fc.weight {list(fc.shape)} does not divide into {taps} taps",
                "target_layer_ids does not belong to these weights",
            )
        self.tap_width = fc.shape[1]
        # the taps reach 24,000 where the stream has attention sinks; of torch's formats only fp32 takes that well
        fc_format: WeightFormat = "native" if weights.weight_format == "native" else "fp32"
        self.fc = weights.matrix([weights.source("fc.weight", (config.hidden_size, self.tap_width))], fc_format)
        self.tap_norms = self._load_tap_norms(weights) if config.parts.tap_norms else None
        self.hidden_norm = weights.vector("hidden_norm.weight", config.hidden_size)
        layer_kind = GatedLayer if config.parts.gate_width else TransformerLayer
        self.layers = [
            layer_kind(weights, config, f"layers.{index}.", pattern) for index, pattern in enumerate(config.patterns)
        ]
        if config.parts.conv_kernel_size:
            self._load_convolutions(weights)
        self.norm = weights.vector("norm.weight", config.hidden_size)
        self.context_kv = weights.matrix([layer.projections[name] for layer in self.layers for name in ("k", "v")])
        self.context_each = self._load_context_each(weights) if config.parts.context_norm else None
        for layer in self.layers:
            layer.projections.clear()  # packed by now, and an adapter's merged tensors would stay in memory
        biases = [layer.biases[name] for layer in self.layers for name in ("k", "v") if layer.biases]
        self.context_bias = torch.cat(biases) if biases else None
        self.context_k_norm = torch.stack([layer.k_norm for layer in self.layers if layer.k_norm is not None])[:, None]
        self.embed = (
            weights.embedding("embed_tokens.weight", config.vocab_size, config.hidden_size)
            if weights.has("embed_tokens.weight")
            else None
        )
        self.head: Matrix | None = (
            weights.head(weights.source("lm_head.weight", (self._head_tokens, config.hidden_size)))
            if weights.has("lm_head.weight")
            else None
        )
        self.known_tokens = self._load_known_tokens(weights) if config.draft_vocab_size else None
        self._softcap = config.final_logit_softcapping
        self.heads = DraftHeads.load(weights, config)
        self.step_bytes = weights.step_bytes
        self.rotary = RotaryTable(config.rope)
        self._native = native_stack(config, self.layers, self.norm)
        self._pools: tuple[Tensor, LayerPools] | None = None  # the keys they belong to, and the addresses
        plain = not config.parts.tap_norms and not config.parts.context_norm
        self._context = ContextWriter.make(self.fc, self.context_kv, self.context_bias) if plain else None
        weights.finish(lambda name: name == "t2d")

    @property
    def _head_tokens(self) -> int:
        return self.config.draft_vocab_size or self.config.vocab_size

    def _load_tap_norms(self, weights: Weights) -> Tensor:
        """One row of weights per tap."""
        taps = range(len(self.config.target_layer_ids))
        width = self.tap_width // len(taps)
        return torch.stack([weights.vector(f"aux_hidden_norms.{tap}.weight", width) for tap in taps])

    def _load_context_each(self, weights: Weights) -> list[Matrix]:
        """Keys and values of the context layer by layer, where every layer norms it for itself."""
        return [weights.matrix([layer.projections["k"], layer.projections["v"]]) for layer in self.layers]

    def _load_known_tokens(self, weights: Weights) -> Tensor:
        """The target's id of every token the head knows; Hugging Face files store how far it is from its place."""
        if self.head is None:
            raise ConfigError(f"{self.config.label}: a reduced vocabulary (draft_vocab_size) needs a head of its own")
        stored = weights.source("d2t", (self._head_tokens,)).dense().long()
        ids = stored if "general.architecture" in weights.file.metadata else stored + torch.arange(len(stored))
        if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise ConfigError(f"{self.config.label}: 'd2t' does not name {len(ids)} tokens of the target's vocabulary")
        return ids

    def _load_convolutions(self, weights: Weights) -> None:
        config, parts = self.config, self.config.parts
        for index, layer in enumerate(self.layers):
            layer.attention_conv, layer.mlp_conv = (
                BlockConvolution(
                    weights,
                    f"layers.{index}.{name}.",
                    config.hidden_size,
                    parts.conv_kernel_size,
                    parts.conv_group_size,
                    config.block_size,
                )
                for name in ("attention_conv", "mlp_conv")
            )

    def write_context(self, taps: Tensor, places: RowPlaces, keys: Tensor, values: Tensor) -> None:
        """Projects the taps of committed rows into all layers' keys and values [layers, pages, heads, tokens, dim]."""
        config = self.config
        if self._context is not None:
            self._context.write(
                taps,
                places,
                self.rotary.tables(places.end),
                keys,
                values,
                self.hidden_norm,
                self.context_k_norm,
                config.rms_eps,
            )
            return
        projected = biased(self._project(self._context_rows(taps)), self.context_bias)
        projected = projected.view(-1, config.layers, 2, config.kv_heads, config.head_dim)
        # broadcasting over layers keeps one call for all of them
        normed = rms_norm(projected[:, :, 0], torch.ones(config.head_dim), config.rms_eps) * self.context_k_norm
        cos, sin = self.rotary.rows(places.positions, places.end)
        keys[:, places.pages, :, places.offsets] = rotate(normed, cos[:, None], sin[:, None])
        values[:, places.pages, :, places.offsets] = projected[:, :, 1]

    def _context_rows(self, taps: Tensor) -> Tensor:
        eps = self.config.rms_eps
        if self.tap_norms is not None:
            each = taps.view(taps.shape[0], *self.tap_norms.shape)
            taps = (rms_norm(each, torch.ones(each.shape[-1]), eps) * self.tap_norms).view_as(taps)
        return rms_norm(self.fc(taps), self.hidden_norm, eps)

    def _project(self, context: Tensor) -> Tensor:
        """Keys and values of all layers side by side."""
        if self.context_each is None:
            return self.context_kv(context)
        pairs = zip(self.layers, self.context_each, strict=True)
        return torch.cat([kv(rms_norm(context, layer.input_norm, self.config.rms_eps)) for layer, kv in pairs], dim=-1)

    def borrow(self, embed: Embedding, softcap: float) -> Callable[[Tensor], Tensor]:
        """Takes what the target lends and returns how the block's tokens are embedded.

        The target's embedding comes as scaled as the target has it, unless the drafter knows a scale for the raw one.
        """
        self.borrow_softcap(softcap)
        if self.embed is not None:
            return self.embed
        return embed if self.config.input_embedding_scale is None else embed.raw

    def borrow_softcap(self, softcap: float) -> None:
        """The target's softcap goes with its head, unless the drafter has one of its own."""
        if self.head is None:
            self._softcap = self.config.final_logit_softcapping or softcap

    @property
    def softcap(self) -> float:
        return self._softcap

    def forward(self, embedded: Tensor, batch: RowBatch, keys: Tensor, values: Tensor) -> Tensor:
        """Hidden rows of the blocks after the final norm; proposals begin at row `config.first_slot`."""
        x = self._scaled(embedded)
        if self._native is not None:
            return self._run_native(self._native, x, batch, keys, values, (), None).hidden
        rotary = self.rotary.rows(batch.positions, batch.end)
        # the block stands behind the context in the pools for the length of this pass
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, rotary, keys[index], values[index])
        return rms_norm(x, self.norm, self.config.rms_eps)

    def forward_logits(
        self, embedded: Tensor, batch: RowBatch, keys: Tensor, values: Tensor, wanted: Sequence[int], head: Matrix
    ) -> tuple[Tensor, Tensor]:
        """All hidden rows of the blocks and the wanted ones' logits under `head`, in one native call where possible."""
        own_head = packed(head)
        if self._native is not None and own_head is not None:
            done = self._run_native(self._native, self._scaled(embedded), batch, keys, values, wanted, own_head)
            if done.logits is not None:
                return done.hidden, done.logits
        hidden = self.forward(embedded, batch, keys, values)
        return hidden, head(hidden[torch.tensor(wanted)])

    def _scaled(self, embedded: Tensor) -> Tensor:
        scale = self.config.input_embedding_scale
        return embedded if scale is None else embedded * scale

    def _run_native(
        self,
        stack: NativeStack,
        x: Tensor,
        batch: RowBatch,
        keys: Tensor,
        values: Tensor,
        wanted: Sequence[int],
        head: PackedLinear | None,
    ) -> PassResult:
        if self._pools is None or self._pools[0] is not keys:
            self._pools = keys, LayerPools(list(keys), list(values))
        return stack.run(batch, x, self._pools[1], self.rotary.tables(batch.end), wanted=wanted, head=head)

    def shape_logits(self, logits: Tensor) -> Tensor:
        """The drafter's own multiplier, a softcap, and a place for every token of the target's vocabulary."""
        multiplier, known = self.config.output_multiplier, self.known_tokens
        logits = softcapped(logits * multiplier if multiplier != 1.0 else logits, self._softcap)
        if known is None:
            return logits
        return logits.new_full((logits.shape[0], self.config.vocab_size), float("-inf")).index_copy_(1, known, logits)


class GatedLayer(TransformerLayer):
    """A draft layer whose heads are weighed before they are joined."""

    shape: DFlashConfig

    def _load_gate(self, weights: Weights, prefix: str) -> HeadGate:
        width, heads = self.shape.parts.gate_width, self.shape.heads
        if width not in (heads, heads * self.shape.head_dim):
            raise ConfigError(f"{self.shape.label}: a gate of {width} numbers fits neither heads nor what they say")
        return HeadGate(weights, prefix + "g_proj.weight", width, self.shape.hidden_size)


def load_drafter(path: Path, weight_format: WeightFormat, progress: Progress | None = None) -> DFlashDrafter:
    """The drafter at `path`, a folder with config.json or a GGUF file."""
    file = open_weights(path)
    config = read_drafter_config(path, file)
    return DFlashDrafter(config, Weights(file, weight_format, names_in(file), progress, rough=True))


def read_drafter_config(path: Path, file: WeightFile) -> DFlashConfig:
    """The configuration at `path`, checked against the tensors of its file."""
    config = read_config(path)
    if config is not None:
        return dflash_config.read_hf(config, path.name, shapes_in(file))
    arch, metadata = file.metadata.get("general.architecture"), file.metadata
    if arch in LUCEBOX_ARCHS:
        metadata = dflash_config.llama_cpp_keys(metadata, str(arch))
    elif arch != "dflash":
        raise ConfigError(f"{path.name} is a '{arch}' model, not a DFlash drafter", "give the drafter to --draft")
    return dflash_config.read_gguf(metadata, file.path.name, None, shapes_in(file))
