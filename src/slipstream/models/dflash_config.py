"""Reads a DFlash drafter's configuration from Hugging Face JSON or GGUF metadata, strictly."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.errors import ConfigError
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.config_reading import FULL, SLIDING, ConfigReader
from slipstream.models.dflash_names import ShapeOf
from slipstream.models.dflash_parts import DraftParts, read_parts, seen_parts
from slipstream.models.layers import LayerShape
from slipstream.models.rope import RopeConfig, read_gguf_rope, read_rope

# Other spellings of the keys about speculation; DeepSeek bundles use those that begin with `dspark_`.
_ALIASES = {
    "block_size": ("draft_block_size", "dspark_block_size"),
    "mask_token_id": ("dspark_noise_token_id",),
    "target_layer_ids": ("dspark_target_layer_ids", "aux_hidden_state_layer_ids"),
    "markov_rank": ("dspark_markov_rank",),
}
GGUF_EXPECTED_TAU = "dflash.expected_tau."  # the key goes on with the name of a class of prompts
_LAYERS_FROM_ONE = ("aux_hidden_state_layer_ids",)  # id i is the input of layer i, which is the tap of layer i - 1
_SPECULATORS_KEYS = ("speculators_config", "speculators_model_type", "speculators_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(LayerShape):
    """Every number of a drafter, and every convention that its checkpoint leaves unsaid."""

    label: str
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    patterns: tuple[AttentionPattern, ...]  # which keys the rows of each layer see
    trained_length: int  # the longest context in training, in tokens; 0: the files do not say
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    sample_from_anchor: bool = False  # row 0 proposes too, because each row proposes the token after its own
    parts: DraftParts = field(default_factory=DraftParts)
    draft_vocab_size: int = 0  # how many tokens the drafter's own head knows; 0: all tokens of the target
    target_family: str | None = None  # the family it was trained for; None: the files do not say
    # tokens per step that greedy decoding with full chains should reach, by class of prompts
    expected_tau: Mapping[str, float] = field(default_factory=dict)

    def pattern(self, index: int) -> AttentionPattern:
        return self.patterns[index]

    @property
    def first_slot(self) -> int:
        """The first block row whose logits are proposals."""
        return 0 if self.sample_from_anchor else 1

    @property
    def proposals(self) -> int:
        """How many tokens one block proposes."""
        return self.block_size - self.first_slot

    def __post_init__(self) -> None:
        parts, block, drafted = self.parts, self.block_size, self.draft_vocab_size
        group = parts.conv_group_size if parts.conv_kernel_size else 1
        checks = (
            (self.heads % self.kv_heads, f"{self.heads} heads cannot share {self.kv_heads} key heads evenly"),
            (not self.target_layer_ids, "target_layer_ids is empty", "the drafter must say which layers it reads"),
            (self.proposals < 1, f"block_size is {block}, it must be at least 2"),
            (drafted > self.vocab_size, f"{drafted} drafted tokens in a vocabulary of {self.vocab_size}"),
            (drafted and parts.any_head, "heads over a reduced vocabulary (draft_vocab_size) are not supported"),
            (
                parts.selector_top_k > self.vocab_size,
                f"selector_top_k is larger than the vocabulary of {self.vocab_size}",
            ),
            (self.hidden_size % group, f"{self.hidden_size} channels do not divide into groups of {group}"),
        )
        for wrong, said, *hint in checks:
            if wrong:
                raise ConfigError(f"{self.label}: {said}", *hint)
        for prompts, tau in self.expected_tau.items():
            if not prompts or not math.isfinite(tau) or not 1 <= tau <= self.proposals + 1:
                raise ConfigError(
                    f"{self.label}: expected_tau of '{prompts}' is {tau}",
                    f"name a class of prompts and its tokens per step, between 1 and {self.proposals + 1}",
                )


def read_hf(config: Mapping[str, object], label: str, shape_of: ShapeOf | None = None) -> DFlashConfig:
    """Reads config.json, whose fields about speculation stand in `dflash_config` or at top level.

    With the shapes of the weights, heads that the config does not mention are found, and heads that only the config has
    are refused.
    """
    reader = ConfigReader(_flat(config), label)
    nested = reader.section("dflash_config")

    def holder(key: str) -> ConfigReader:
        return nested if nested.has(key) else reader

    def find(key: str) -> tuple[ConfigReader, str]:
        for name in (key, *_ALIASES.get(key, ())):
            if holder(name).has(name):
                return holder(name), name
        return reader, key

    common = reader.common(even_heads=True)
    hidden, layers, vocabulary = common["hidden_size"], common["layers"], common["vocab_size"]
    taps, taps_key = find("target_layer_ids")
    if not taps.has(taps_key):
        raise ConfigError(
            f"{label}: no target_layer_ids", "add the ids the drafter was trained with; they cannot be guessed safely"
        )
    block, block_key = find("block_size")
    mask, mask_key = find("mask_token_id")
    parts = read_parts(find, label, seen_parts(shape_of, hidden) if shape_of is not None else None)
    reader.require("hidden_act", ("silu", "swish"), "this activation")
    for key in ("rope_is_neox_style", "is_neox_style"):
        reader.require(key, (True,), "interleaved rotary embeddings")
    scale_key, cap_key = "input_embedding_scale", "final_logit_softcapping"
    known = holder("draft_vocab_size").integer("draft_vocab_size", 0, least=0)
    return DFlashConfig(
        label=label,
        rope=_rope(reader, common["head_dim"]),
        attention_bias=reader.boolean("attention_bias", False),
        block_size=block.integer(block_key),
        mask_token_id=mask.integer(mask_key, least=0),
        target_layer_ids=tuple(layer - (taps_key in _LAYERS_FROM_ONE) for layer in taps.integers(taps_key)),
        num_target_layers=_optional_integer(holder("num_target_layers"), "num_target_layers"),
        patterns=_layer_patterns(reader, nested, layers),
        trained_length=holder("trained_length").integer("trained_length", 0, least=0),
        input_embedding_scale=holder(scale_key).number(scale_key) if holder(scale_key).has(scale_key) else None,
        output_multiplier=holder("output_multiplier").number("output_multiplier", 1.0),
        final_logit_softcapping=holder(cap_key).number(cap_key, 0.0),
        sample_from_anchor=holder("sample_from_anchor").boolean(
            "sample_from_anchor", _samples_from_anchor(reader, nested, parts)
        ),
        parts=parts,
        draft_vocab_size=known if known != vocabulary else 0,
        target_family=_target_family(holder("target_model_type"), "target_model_type", parts) or _verifier(reader),
        expected_tau=_expected_tau(holder("expected_tau")),
        **common,
    )


def _target_family(reader: ConfigReader, key: str, parts: DraftParts) -> str | None:
    """Returns the family that the drafter was trained for, if its files say so or its parts show it."""
    if reader.has(key):
        return reader.text(key)
    return "laguna" if parts.tap_norms else None


def _verifier(reader: ConfigReader) -> str | None:
    """Returns the target's family from a checkpoint in the speculators format: qwen3_moe for Qwen3MoeForCausalLM."""
    named = reader.section("speculators_config").section("verifier").values.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        return None
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", named[0].split("For")[0]).lower()


def _flat(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the config with all keys at top level; the speculators format has those of the layers in a section."""
    inner = config.get("transformer_layer_config")
    return {**inner, **config} if isinstance(inner, Mapping) else config


def _rope(reader: ConfigReader, head_dim: int) -> RopeConfig:
    """Returns the rotation of all layers, and refuses a config in which types of layers have different rotations."""
    kinds = reader.values.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        kinds = [SLIDING if _window_alone(reader) else FULL]
    ropes = {read_rope(reader, head_dim, kind, allows_partial=True) for kind in sorted(set(map(str, kinds)))}
    if len(ropes) > 1:
        raise ConfigError(f"{reader.label}: layers that turn differently in one drafter are not supported")
    return ropes.pop()


def _expected_tau(reader: ConfigReader) -> dict[str, float]:
    """Returns the tokens per step that the config promises, by prompt class; without the section there are none."""
    if not reader.has("expected_tau"):
        return {}
    if not isinstance(reader.values["expected_tau"], Mapping):
        raise ConfigError(f"{reader.label}: 'expected_tau' must be an object", 'such as {"code": 4.2, "chat": 1.9}')
    section = reader.section("expected_tau")
    return {str(name): section.number(name) for name in section.values}


def _samples_from_anchor(reader: ConfigReader, nested: ConfigReader, parts: DraftParts) -> bool:
    """Returns the default of `sample_from_anchor`.

    It is true for DSpark, whose own tools never write the key and use every row, unless the file has the speculators
    format.
    """
    if any(reader.has(key) for key in _SPECULATORS_KEYS):
        return False
    named = [nested.values.get("projector_type"), reader.values.get("projector_type")]
    architectures = reader.values.get("architectures")
    named += architectures if isinstance(architectures, list) else []
    return parts.dspark or any(isinstance(name, str) and "dspark" in name.lower() for name in named)


def _optional_integer(reader: ConfigReader, key: str) -> int | None:
    return reader.integer(key) if reader.has(key) else None


def _layer_patterns(reader: ConfigReader, nested: ConfigReader, layers: int) -> tuple[AttentionPattern, ...]:
    """Returns window and causality of each layer: explicit flags decide, and without them the type of the layer."""
    forced: bool | None = None
    if reader.has("is_causal"):
        forced = reader.boolean("is_causal")
    elif nested.has("causal"):
        forced = nested.boolean("causal")
    elif any(reader.has(key) for key in _SPECULATORS_KEYS) and reader.boolean("sliding_window_non_causal", True):
        forced = False
    if reader.has("layer_types"):
        kinds = reader.layer_kinds("layer_types", layers, (FULL, SLIDING))
        sliding = [kind == SLIDING for kind in kinds]
        return _patterns(sliding, reader.integer("sliding_window") if any(sliding) else 0, forced)
    if nested.has("use_swa") and nested.boolean("use_swa"):
        return _patterns([True] * layers, nested.integer("swa_window_size"), bool(forced))
    window = _window_alone(reader)
    return _patterns([window > 0] * layers, window, forced)


def _patterns(sliding: Sequence[bool], window: int, forced: bool | None) -> tuple[AttentionPattern, ...]:
    """Returns the layers' patterns; sliding layers have the window, and only they are causal if `forced` is None."""
    return tuple(AttentionPattern(window if flag else 0, flag if forced is None else forced) for flag in sliding)


def _window_alone(reader: ConfigReader) -> int:
    """Returns the window of all layers in a config that does not give each layer a type, or 0 if there is none."""
    if not reader.has("sliding_window") or not reader.boolean("use_sliding_window", True):
        return 0
    return reader.integer("sliding_window", least=0)


def read_gguf(metadata: Mapping[str, object], label: str, shape_of: ShapeOf | None = None) -> DFlashConfig:
    """Reads a GGUF that follows llama.cpp's conventions, in which `target_layers` are layer ids plus one."""
    reader = ConfigReader(metadata, label)
    common = reader.common("dflash", even_heads=True)
    layers = common["layers"]
    if not reader.has("dflash.target_layers"):
        raise ConfigError(f"{label}: no dflash.target_layers", "convert the drafter again; a guess costs acceptance")
    if not reader.has("dflash.rope.freq_base"):
        raise ConfigError(f"{label}: no dflash.rope.freq_base", "convert the drafter again; a guess costs acceptance")
    parts = _gguf_parts(reader, common["hidden_size"], common["vocab_size"], shape_of)
    scale = "dflash.embedding_scale"
    known = shape_of("d2t") if shape_of is not None else None  # a GGUF shows a smaller vocabulary only by this table
    return DFlashConfig(
        label=label,
        rope=read_gguf_rope(reader, "dflash", common["head_dim"]),
        attention_bias=shape_of is not None and shape_of("layers.0.self_attn.q_proj.bias") is not None,
        block_size=reader.integer("dflash.block_size"),
        mask_token_id=reader.integer("tokenizer.ggml.mask_token_id", least=0),
        target_layer_ids=tuple(layer - 1 for layer in reader.integers("dflash.target_layers")),
        num_target_layers=_optional_integer(reader, "slipstream.num_target_layers"),
        patterns=_gguf_patterns(reader, layers),
        trained_length=reader.integer("slipstream.trained_length", 0, least=0),
        input_embedding_scale=reader.number(scale) if reader.has(scale) else None,
        output_multiplier=reader.number("dflash.logit_scale", 1.0),
        final_logit_softcapping=reader.number("dflash.final_logit_softcapping", 0.0),
        sample_from_anchor=reader.boolean("dflash.sample_from_anchor", parts.dspark),
        parts=parts,
        draft_vocab_size=known[0] if known else 0,
        target_family=_target_family(reader, "slipstream.target_model_type", parts),
        expected_tau={
            key.removeprefix(GGUF_EXPECTED_TAU): reader.number(key)
            for key in metadata
            if key.startswith(GGUF_EXPECTED_TAU)
        },
        **common,
    )


def llama_cpp_keys(metadata: Mapping[str, object], arch: str) -> dict[str, object]:
    """Renames the keys of another writer's drafter (`<arch>.dflash.*`, plain layer ids) to llama.cpp's keys."""
    renamed: dict[str, object] = {}
    for key, value in metadata.items():
        name = key.removeprefix(f"{arch}.dflash.") if key.startswith(f"{arch}.dflash.") else None
        if name == "mask_token_id":
            renamed["tokenizer.ggml.mask_token_id"] = value
        elif name == "target_layer_ids":
            ids = value if isinstance(value, list) else [value]
            renamed["dflash.target_layers"] = [layer + 1 if isinstance(layer, int) else layer for layer in ids]
        elif name not in ("n_target_layers", "n_target_features"):
            # Writers disagree on what these two counts mean, so they are dropped and the shape of fc decides.
            renamed[f"dflash.{name or key.removeprefix(f'{arch}.')}" if key.startswith(f"{arch}.") else key] = value
    return renamed


def _gguf_parts(reader: ConfigReader, hidden: int, vocab: int, shape_of: ShapeOf | None) -> DraftParts:
    """Finds a GGUF drafter's heads by their tensors, and checks the keys `dflash.dspark.*` that lucebox also writes."""

    def find(key: str) -> tuple[ConfigReader, str]:
        other = f"dflash.dspark.{key}"
        return reader, other if reader.has(other) else f"dflash.{key}"

    parts = read_parts(find, reader.label, seen_parts(shape_of, hidden) if shape_of is not None else None)
    if shape_of is None:
        return parts
    width = hidden + (parts.markov_rank if parts.confidence_head_with_markov else 0)
    expected = {
        "enabled": parts.dspark,
        "vocab_size": vocab,
        "confidence_dim": width if parts.enable_confidence_head else 0,
    }
    for key, value in expected.items():
        declared = reader.values.get(f"dflash.dspark.{key}", value)
        if declared != value:
            raise ConfigError(
                f"{reader.label}: 'dflash.dspark.{key}' is {declared!r} but the weights say {value!r}",
                "convert the drafter again",
            )
    return parts


def _gguf_patterns(reader: ConfigReader, layers: int) -> tuple[AttentionPattern, ...]:
    """Returns window and causality of each layer; `attention.causal` decides for all layers, whatever their window."""
    causal = "dflash.attention.causal"
    forced = reader.boolean(causal) if reader.has(causal) else None
    if not reader.has("dflash.attention.sliding_window"):
        return _patterns([False] * layers, 0, forced)
    window = reader.integer("dflash.attention.sliding_window", least=0)
    flags = reader.values.get("dflash.attention.sliding_window_pattern", [window > 0] * layers)
    if not isinstance(flags, list) or len(flags) != layers:
        raise ConfigError(f"{reader.label}: dflash.attention.sliding_window_pattern must have {layers} entries")
    return _patterns(list(map(bool, flags)), window, forced)
