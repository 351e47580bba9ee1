"""Gemma 4 targets, dense and with experts: two kinds of attention layers, four norms a layer, per-layer embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.native_attention import attention
from slipstream.kernels.cpu.torch_kernels import rms_norm, rotate, row_by_row, write_rows
from slipstream.kernels.rows import RowBatch
from slipstream.models import gemma4_config
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, FamilyNames, KvLayers, Step
from slipstream.models.gemma4_config import Gemma4Config
from slipstream.models.layers import RotaryRows, TransformerLayer, biased
from slipstream.models.llama import gguf_name, hf_names, multimodal_names
from slipstream.models.moe import Experts, Router
from slipstream.models.weights import Weights

GGUF_OWN = {
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.gate_proj": "ffn_gate_exps.weight",
    "experts.up_proj": "ffn_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Gemma4Experts:
    """The experts beside a layer's MLP; the router reads the residual stream itself, scaled in its own way."""

    def __init__(self, weights: Weights, prefix: str, shape: Gemma4Config) -> None:
        assert shape.moe is not None, "only layers with experts ask for them"
        hidden = shape.hidden_size
        self._eps = shape.rms_eps
        self.router = Router(weights, prefix + "router.proj.weight", shape.moe)
        self.router_scale = weights.vector(prefix + "router.scale", hidden) * hidden**-0.5
        self.expert_scale = weights.vector(prefix + "router.per_expert_scale", shape.moe.experts)
        self.experts = Experts(weights, prefix + "experts.", shape.moe, gelu)
        self.pre_norm = weights.norm(prefix + "pre_feedforward_layernorm_2.weight", hidden)
        self.post_norm = weights.norm(prefix + "post_feedforward_layernorm_2.weight", hidden)
        self.mlp_norm = weights.norm(prefix + "post_feedforward_layernorm_1.weight", hidden)

    @property
    def matrices(self) -> list[Matrix]:
        return [self.router.matrix, self.experts.gate_up[0], self.experts.down[0]]

    def join(self, x: Tensor, answer: Tensor) -> Tensor:
        """The MLP's answer and the experts' to the same stream, each normed for itself."""
        chosen, shares = self.router(rms_norm(x, self.router_scale, self._eps))
        mixed = self.experts(rms_norm(x, self.pre_norm, self._eps), chosen, shares * self.expert_scale[chosen])
        return rms_norm(answer, self.mlp_norm, self._eps) + rms_norm(mixed, self.post_norm, self._eps)


class Gemma4Layer(TransformerLayer):
    """One layer; `post_norm` follows attention here. Layers that share keys have neither keys nor values to load."""

    shape: Gemma4Config

    def __init__(self, weights: Weights, config: Gemma4Config, index: int) -> None:
        self.owns_keys = config.owns_keys(index)
        self.owns_values = self.owns_keys and not config.keys_are_values[index]
        prefix, hidden, side = f"model.layers.{index}.", config.hidden_size, config.side_size
        super().__init__(weights, config.layer(index), prefix, config.pattern(index))
        self.pre_mlp_norm = weights.norm(prefix + "pre_feedforward_layernorm.weight", hidden)
        self.post_mlp_norm = weights.norm(prefix + "post_feedforward_layernorm.weight", hidden)
        self.experts = Gemma4Experts(weights, prefix, config) if config.moe is not None else None
        self.side_gate: Matrix | None = None
        self.side_up: Matrix | None = None
        if side:
            gate, up = prefix + "per_layer_input_gate.weight", prefix + "per_layer_projection.weight"
            self.side_gate = weights.matrix([weights.source(gate, (side, hidden))])
            self.side_up = weights.matrix([weights.source(up, (hidden, side))])
            self.side_norm = weights.norm(prefix + "post_per_layer_input_norm.weight", hidden)
        scalar = weights.optional_vector(prefix + "layer_scalar", 1)
        self.scalar = 1.0 if scalar is None else float(scalar)
        self._plain = torch.ones(self.shape.head_dim)  # values are normed without weights

    @property
    def matrices(self) -> list[Matrix]:
        others = [matrix for matrix in (self.side_gate, self.side_up) if matrix is not None]
        return [*super().matrices, *others, *(self.experts.matrices if self.experts is not None else [])]

    def _load_mixer(self, weights: Weights, prefix: str, rotary_rows: RotaryRows | None) -> None:
        shape, prefix = self.shape, prefix + "self_attn."
        hidden, width = shape.hidden_size, shape.heads * shape.head_dim
        parts = [("q", shape.heads)]
        parts += [("k", shape.kv_heads)] if self.owns_keys else []
        parts += [("v", shape.kv_heads)] if self.owns_values else []
        sizes = {f"{prefix}{name}_proj.": heads * shape.head_dim for name, heads in parts}
        self.qkv = weights.matrix([weights.source(name + "weight", (size, hidden)) for name, size in sizes.items()])
        biases = [weights.vector(name + "bias", size) for name, size in sizes.items()] if shape.attention_bias else []
        self.qkv_bias = torch.cat(biases) if biases else None
        self.output = weights.matrix([weights.source(prefix + "o_proj.weight", (hidden, width))])
        self.output_bias = weights.vector(prefix + "o_proj.bias", hidden) if shape.attention_bias else None
        self.q_norm = weights.norm(prefix + "q_norm.weight", shape.head_dim)
        self.k_norm = weights.norm(prefix + "k_norm.weight", shape.head_dim) if self.owns_keys else None

    def __call__(
        self,
        x: Tensor,
        batch: RowBatch,
        rotary: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        side: Tensor | None = None,
    ) -> Tensor:
        eps = self.shape.rms_eps
        y = self._attend(rms_norm(x, self.input_norm, eps), batch, rotary, keys, values)
        x = x + rms_norm(biased(self.output(y), self.output_bias), self.post_norm, eps)
        y = self._feed(rms_norm(x, self.pre_mlp_norm, eps))
        if self.experts is not None:
            y = self.experts.join(x, y)
        x = x + rms_norm(y, self.post_mlp_norm, eps)
        if side is not None and self.side_gate is not None and self.side_up is not None:
            x = x + rms_norm(self.side_up(row_by_row(gelu, self.side_gate(x)) * side), self.side_norm, eps)
        return x * self.scalar

    def _attend(
        self, y: Tensor, batch: RowBatch, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> Tensor:
        shape, heads = self.shape, self.shape.heads
        parts = biased(self.qkv(y), self.qkv_bias).view(y.shape[0], -1, shape.head_dim)
        assert self.q_norm is not None, "every layer norms its queries"
        queries = rotate(rms_norm(parts[:, :heads], self.q_norm, shape.rms_eps), *rotary)
        if self.k_norm is not None:
            raw = parts[:, heads : heads + shape.kv_heads]
            own = parts[:, heads + shape.kv_heads :] if self.owns_values else raw
            turned = rotate(rms_norm(raw, self.k_norm, shape.rms_eps), *rotary)
            write_rows(keys, batch.pages, batch.offsets, turned)
            write_rows(values, batch.pages, batch.offsets, rms_norm(own, self._plain, shape.rms_eps))
        return attention(queries, keys, values, batch.groups[self.pattern], 1.0)

    def _feed(self, y: Tensor) -> Tensor:
        gate, up = self.gate_up(y).chunk(2, dim=-1)
        return self.down(gelu(gate) * up)


class Gemma4(Decoder):
    """A stack of Gemma 4 layers, each given an embedding of its own beside the stream where the model has them."""

    config: Gemma4Config
    layers: list[Gemma4Layer]  # type: ignore[assignment]

    def make_layer(self, weights: Weights, names: FamilyNames, index: int) -> Gemma4Layer:
        return Gemma4Layer(weights, self.config, index)

    def load_rest(self, weights: Weights) -> None:
        config = self.config
        if not config.side_size:
            return
        width = config.layers * config.side_size
        self.side_embed = weights.embedding(
            "model.embed_tokens_per_layer.weight", config.side_vocab, width, config.side_size**0.5
        )
        source = weights.source("model.per_layer_model_projection.weight", (width, config.hidden_size))
        self.side_projection = weights.matrix([source])
        self.side_norm = weights.norm("model.per_layer_projection_norm.weight", config.side_size)

    def begin(self, x: Tensor, batch: RowBatch, kv: KvLayers) -> Step:
        config, step = self.config, super().begin(x, batch, kv)
        if not config.side_size:
            return step
        shape = (batch.rows, config.layers, config.side_size)
        projected = (self.side_projection(x) * config.hidden_size**-0.5).view(shape)
        projected = rms_norm(projected, self.side_norm, config.rms_eps)
        return replace(step, sides=(projected + self.side_embed(batch.token_ids).view(shape)) * 2.0**-0.5)

    def run_layer(self, index: int, x: Tensor, step: Step) -> Tensor:
        layer = self.layers[index]
        side = step.sides[:, index] if step.sides is not None else None
        return layer(x, step.batch, step.rotary[layer.shape.rope], *step.kv[self.config.pool(index)], side)


MODEL = Gemma4


def read_hf(config: ConfigReader) -> tuple[Gemma4Config, FamilyNames]:
    read = gemma4_config.read_hf(config.text_part())
    names = multimodal_names(read.tied_head) if config.has("text_config") else hf_names(read.tied_head)
    return read, _ignoring(names, _shared_parts(read, names.file_name))


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[Gemma4Config, FamilyNames]:
    read = gemma4_config.read_gguf(config, weights)
    names = FamilyNames(partial(gguf_name, own=GGUF_OWN), lambda name: name == "rope_freqs.weight")
    return read, _ignoring(names, _shared_parts(read, names.file_name))


def _shared_parts(config: Gemma4Config, file_name: Callable[[str], str]) -> set[str]:
    """Keys and values of layers that do without: some checkpoints carry them all the same."""
    layers = range(config.layers - config.sharing, config.layers)
    modules = ("k_proj", "v_proj", "k_norm")
    return {file_name(f"model.layers.{index}.self_attn.{name}.weight") for index in layers for name in modules}


def _ignoring(names: FamilyNames, others: set[str]) -> FamilyNames:
    return replace(names, ignored=lambda name: name in others or names.ignored(name))
