"""Gemma 4 targets, dense and with experts: sliding and full layers, norms after each part, per-layer embeddings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from slipstream.models import gemma4_config
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, FamilyNames
from slipstream.models.gemma4_config import Gemma4Config
from slipstream.models.layers import (
    Layer,
    LayerPart,
    Mlp,
    SideEmbeddings,
    SideInput,
    Sublayer,
    load_attention,
    load_mlp,
    load_projections,
)
from slipstream.models.llama import gguf_name, hf_names
from slipstream.models.moe import MlpBesideExperts, MoeShape, load_experts
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


class Gemma4(Decoder):
    """Sublayers are normed before and after, a factor of each layer scales the stream, and layers may share keys.

    In some models each layer also reads its own embedding of the row's token.
    """

    config: Gemma4Config

    def make_layer(self, weights: Weights, names: FamilyNames, index: int) -> Layer:
        prefix, hidden = f"model.layers.{index}.", self.config.hidden_size

        def norm(name: str) -> Tensor:
            return weights.norm(f"{prefix}{name}.weight", hidden)

        attention = self.make_mixer(weights, names, index, prefix)
        sublayers = [Sublayer(attention, norm("input_layernorm"), norm("post_attention_layernorm"))]
        mlp = load_mlp(weights, self.config.layer(index), prefix + "mlp.", "gelu")
        mlp_norm, post_norm = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        if self.config.moe is None:
            sublayers.append(Sublayer(mlp, mlp_norm, post_norm))
        else:
            beside = _load_beside(weights, self.config, self.config.moe, prefix, mlp, mlp_norm)
            sublayers.append(Sublayer(beside, None, post_norm))
        if self.config.side_size:
            side = _load_side(weights, self.config, prefix, index)
            sublayers.append(Sublayer(side, None, norm("post_per_layer_input_norm")))
        scalar = weights.optional_vector(prefix + "layer_scalar", 1)
        return Layer(sublayers, 1.0 if scalar is None else float(scalar))

    def make_mixer(self, weights: Weights, names: FamilyNames, index: int, prefix: str) -> LayerPart:
        """Loads attention: only queries in layers that share keys, and no values where the keys are the values too."""
        config, prefix = self.config, prefix + "self_attn."
        letters = "q" if not config.owns_keys(index) else "qk" if config.keys_are_values[index] else "qkv"
        projections = load_projections(weights, config.layer(index), prefix, letters=letters)
        attention = load_attention(weights, config, index, prefix, projections)
        return replace(attention, scale=1.0, norms_values=True)

    def load_sides(self, weights: Weights) -> SideEmbeddings | None:
        config = self.config
        if not config.side_size:
            return None
        width = config.layers * config.side_size
        name, scale = "model.embed_tokens_per_layer.weight", config.side_size**0.5
        embed = weights.embedding(name, config.side_vocab, width, scale)
        projection = weights.linear("model.per_layer_model_projection.weight", width, config.hidden_size)
        norm = weights.norm("model.per_layer_projection_norm.weight", config.side_size)
        return SideEmbeddings(embed, projection, norm, config.layers, config.side_size)


def _load_beside(
    weights: Weights, config: Gemma4Config, moe: MoeShape, prefix: str, mlp: Mlp, mlp_norm: Tensor
) -> MlpBesideExperts:
    """Loads the experts beside an MLP; the router's norm has `router.scale` / sqrt(hidden size) as weights."""
    hidden = config.hidden_size
    router_scale = weights.vector(prefix + "router.scale", hidden) * hidden**-0.5
    return MlpBesideExperts(
        mlp,
        mlp_norm,
        weights.norm(prefix + "post_feedforward_layernorm_1.weight", hidden),
        load_experts(weights, prefix + "router.proj.weight", prefix + "experts.", moe, "gelu"),
        router_scale,
        weights.norm(prefix + "pre_feedforward_layernorm_2.weight", hidden),
        weights.norm(prefix + "post_feedforward_layernorm_2.weight", hidden),
        weights.vector(prefix + "router.per_expert_scale", moe.experts),
    )


def _load_side(weights: Weights, config: Gemma4Config, prefix: str, index: int) -> SideInput:
    hidden, side = config.hidden_size, config.side_size
    gate = weights.linear(prefix + "per_layer_input_gate.weight", side, hidden)
    return SideInput(index, gate, weights.linear(prefix + "per_layer_projection.weight", hidden, side))


MODEL = Gemma4


def read_hf(config: ConfigReader) -> tuple[Gemma4Config, FamilyNames]:
    read = gemma4_config.read_hf(config.text_part())
    names = hf_names(read.tied_head, multimodal=config.has("text_config"))
    return read, _ignoring_shared(read, names)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[Gemma4Config, FamilyNames]:
    read = gemma4_config.read_gguf(config, weights)
    names = FamilyNames(partial(gguf_name, own=GGUF_OWN), lambda name: name == "rope_freqs.weight")
    return read, _ignoring_shared(read, names)


def _ignoring_shared(config: Gemma4Config, names: FamilyNames) -> FamilyNames:
    """Ignores the tensors of keys and values in layers that share keys, because some checkpoints have them anyway."""
    layers = range(config.layers - config.sharing, config.layers)
    modules = ("k_proj", "v_proj", "k_norm")
    unused = {names.file_name(f"model.layers.{index}.self_attn.{name}.weight") for index in layers for name in modules}
    return replace(names, ignored=lambda name: name in unused or names.ignored(name))
