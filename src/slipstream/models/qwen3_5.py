"""Qwen3.5 and Qwen3.6 targets: gated delta nets, and attention with a gated output in every few layers.

Some checkpoints also have an image part; only their text part is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.delta_rule import DeltaShape
from slipstream.models.config_reading import FULL, ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.delta_net import load_delta_net
from slipstream.models.layers import HeadGate, LayerPart, Projections, load_attention, load_gate
from slipstream.models.llama import gguf_common, gguf_name, hf_common, hf_names
from slipstream.models.moe import GGUF_MOE, MoeShape
from slipstream.models.rope import partial_rows, read_gguf_rope, read_rope
from slipstream.models.weights import Weights

FAMILY, MOE_FAMILY = "qwen3_5", "qwen3_5_moe"
ARCH, MOE_ARCH = "qwen35", "qwen35moe"
LINEAR = "linear_attention"
_PERIOD = 4  # layers from one with attention to the next, for a file that does not say
_OTHER_PARTS = ("mtp.", "model.visual.", "visual.")  # the model's own drafter and its image part are ignored
GGUF_OWN = GGUF_MOE | {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(DecoderConfig):
    """The numbers of both kinds of layers, and of which kind each layer is."""

    recurrent: tuple[bool, ...]
    delta: DeltaShape
    as_gguf: bool  # the file has the tensors of the recurrence as llama.cpp's converter changes them

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        delta = self.delta
        if delta.value_heads % delta.key_heads:
            raise ConfigError(f"{delta.value_heads} value heads cannot share {delta.key_heads} key heads evenly")

    def pool(self, index: int) -> int:
        return self.recurrent[:index].count(False)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.kv_heads, self.head_dim),) * self.recurrent.count(False)

    @property
    def states(self) -> DeltaShape:
        return self.delta


class Qwen35(Decoder):
    """Most layers mix rows through a delta net; in every few layers attention does, and a sigmoid weighs its result."""

    config: Qwen35Config

    def make_mixer(self, weights: Weights, names: FamilyNames, index: int, prefix: str) -> LayerPart:
        config = self.config
        if config.recurrent[index]:
            state = config.recurrent[:index].count(True)
            prefix += "linear_attn."
            return load_delta_net(weights, config.delta, prefix, config.hidden_size, state, config.as_gguf)
        prefix += "self_attn."
        projections, gate = _gated_projections(weights, config, prefix)
        return load_attention(weights, config, index, prefix, projections, gate)


def _gated_projections(weights: Weights, config: Qwen35Config, prefix: str) -> tuple[Projections, HeadGate]:
    """Loads projections and gate; in the query projection, each head's rows are its queries and then its gate."""
    dim, order = config.head_dim, partial(partial_rows, head_dim=config.head_dim, dim=config.rope.dim)
    both = torch.arange(config.heads * 2 * dim).view(config.heads, 2, dim)
    rows = {
        "q": both[:, 0].flatten()[order(config.heads)],
        "k": order(config.kv_heads),
        "v": torch.arange(config.kv_heads * dim),
        "gate": both[:, 1].flatten(),
    }
    stored, biases = {}, {}
    for letter in "qkv":
        size = both.numel() if letter == "q" else config.kv_heads * dim
        stored[letter] = weights.source(f"{prefix}{letter}_proj.weight", (size, config.hidden_size))
        if config.attention_bias:
            biases[letter] = weights.vector(f"{prefix}{letter}_proj.bias", size)
    found = Projections(
        {letter: source.rows(rows[letter]) for letter, source in stored.items()},
        {letter: bias[rows[letter]] for letter, bias in biases.items()},
    )
    gate_bias = biases["q"][rows["gate"]] if biases else None
    return found, load_gate(weights, "sigmoid", stored["q"].rows(rows["gate"]), found, gate_bias)


MODEL = Qwen35


def read_hf(config: ConfigReader) -> tuple[Qwen35Config, FamilyNames]:
    """Reads the config of a Hugging Face checkpoint, with or without an image part, and how it names its tensors."""
    text, own = config.text_part(), dict[str, Any]()
    text.require("hidden_act", ("silu", "swish"), "this activation")
    mixture = config.text("model_type").startswith(MOE_FAMILY)
    if mixture:
        shared = text.integer("shared_expert_intermediate_size")
        moe = MoeShape.read(text, shared_size=shared, shared_gate=True)
        own = {"moe": moe, "intermediate_size": moe.intermediate_size}
    tied = (config if config.has("tie_word_embeddings") else text).boolean("tie_word_embeddings", False)
    common = hf_common(text, tied_head=tied, **own)
    recurrent = _hf_recurrent(text, common["layers"])
    delta = DeltaShape(
        recurrent.count(True),
        text.integer("linear_num_key_heads"),
        text.integer("linear_num_value_heads"),
        text.integer("linear_key_head_dim"),
        text.integer("linear_value_head_dim"),
        text.integer("linear_conv_kernel_dim", least=2),
    )
    # A quarter of a head turns in a config that does not say: this is Hugging Face's own default.
    rope_source = ConfigReader({"partial_rotary_factor": 0.25, **text.values}, text.label)
    rope = read_rope(rope_source, common["head_dim"], allows_partial=True)
    family = MOE_FAMILY if mixture else FAMILY
    read = Qwen35Config(family=family, rope=rope, recurrent=recurrent, delta=delta, as_gguf=False, **common)
    return read, hf_names(tied, config.has("text_config"), _OTHER_PARTS, norm_shift=1.0)


def _hf_recurrent(text: ConfigReader, layers: int) -> tuple[bool, ...]:
    if text.has("layer_types"):
        return tuple(kind == LINEAR for kind in text.layer_kinds("layer_types", layers, (LINEAR, FULL)))
    return _every_few(text.integer("full_attention_interval", _PERIOD), layers)


def read_gguf(config: ConfigReader, weights: Weights) -> tuple[Qwen35Config, FamilyNames]:
    """Does what `read_hf` does, from llama.cpp's keys; later blocks are the model's own drafter and are ignored."""
    mixture, own = config.is_of(MOE_ARCH), dict[str, Any]()
    family, arch = (MOE_FAMILY, MOE_ARCH) if mixture else (FAMILY, ARCH)
    if mixture:
        inner = config.integer(f"{arch}.expert_feed_forward_length")
        shared = config.integer(f"{arch}.expert_shared_feed_forward_length", inner)
        moe = MoeShape.read(config, arch, shared_size=shared, shared_gate=True)
        own = {"moe": moe, "intermediate_size": inner}
    drafting = config.integer(f"{arch}.nextn_predict_layers", 0, least=0)
    layers = config.layers(f"{arch}.block_count") - drafting
    common = gguf_common(config, arch, weights, layers=layers, attention_bias=False, **own)
    recurrent = _gguf_recurrent(config, arch, layers)
    value_heads = config.integer(f"{arch}.ssm.time_step_rank")
    delta = DeltaShape(
        recurrent.count(True),
        config.integer(f"{arch}.ssm.group_count"),
        value_heads,
        config.integer(f"{arch}.ssm.state_size"),
        config.integer(f"{arch}.ssm.inner_size") // value_heads,
        config.integer(f"{arch}.ssm.conv_kernel", least=2),
        tiled=True,
    )
    rope = read_gguf_rope(config, arch, common["head_dim"])
    read = Qwen35Config(family=family, rope=rope, recurrent=recurrent, delta=delta, as_gguf=True, **common)
    own_drafter = tuple(f"blk.{index}." for index in range(layers, layers + drafting))
    return read, FamilyNames(partial(gguf_name, own=GGUF_OWN), lambda name: name.startswith(own_drafter))


def _gguf_recurrent(config: ConfigReader, arch: str, layers: int) -> tuple[bool, ...]:
    flags = config.values.get(f"{arch}.attention.recurrent_layers")
    if isinstance(flags, list):
        if len(flags) < layers:
            raise ConfigError(f"{config.label}: '{arch}.attention.recurrent_layers' must have {layers} entries")
        return tuple(map(bool, flags[:layers]))
    return _every_few(config.integer(f"{arch}.full_attention_interval", _PERIOD), layers)


def _every_few(period: int, layers: int) -> tuple[bool, ...]:
    return tuple((index + 1) % period != 0 for index in range(layers))
