"""Which tensors a model must have and of what shape, by their Hugging Face names, as its configuration implies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from slipstream.errors import ConfigError
from slipstream.formats.weights import WeightFile, WeightTensor
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.dflash_names import names_in

Shape = tuple[int, ...]
_FOREIGN = "the config does not belong to these weights"
_UNKNOWN = "the model has parts this version does not know, and leaving them out would change it"


def decoder_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """The tensors of a target."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.layers):
        shapes |= _layer_tensors(config, f"model.layers.{index}.")
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def drafter_tensors(config: DFlashConfig, file: WeightFile) -> dict[str, Shape]:
    """The tensors of a drafter by their canonical names; what a drafter may do without is listed if the file has it."""
    names, hidden, taps = names_in(file), config.hidden_size, len(config.target_layer_ids)
    width = (*file.tensor(names("fc.weight")).shape, 0)[1]
    if not width or width % taps:
        raise ConfigError(
            f"{config.label}: fc.weight does not divide into {taps} taps",
            "target_layer_ids does not belong to these weights",
        )
    shapes: dict[str, Shape] = {"fc.weight": (hidden, width), "hidden_norm.weight": (hidden,)}
    for index in range(config.layers):
        shapes |= _layer_tensors(config, f"layers.{index}.") | _convolutions(config, f"layers.{index}.")
    shapes["norm.weight"] = (hidden,)
    tables: Shape = (config.vocab_size, hidden)
    optional = {"embed_tokens.weight": tables, "lm_head.weight": tables}
    # one output: some writers drop the dimension of size one
    confidence = names("confidence_head.proj.weight")
    shapes |= _heads(config, confidence in file and len(file.tensor(confidence).shape) == 1)
    optional |= _head_biases(config)
    return shapes | {name: shape for name, shape in optional.items() if names(name) in file}


def _layer_tensors(config: DecoderConfig | DFlashConfig, prefix: str) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, rows, columns in (
        ("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)
    ):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if config.attention_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        shapes[f"mlp.{name}_proj.weight"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"mlp.{name}_proj.bias"] = (rows,)
    return {prefix + name: shape for name, shape in shapes.items()}


def _convolutions(config: DFlashConfig, prefix: str) -> dict[str, Shape]:
    parts, hidden = config.parts, config.hidden_size
    if not parts.conv_kernel_size:
        return {}
    projected = 2 * parts.conv_kernel_size * (hidden // parts.conv_group_size)
    shapes: dict[str, Shape] = {}
    for name in ("attention_conv", "mlp_conv"):
        shapes[f"{prefix}{name}.base_kernel"] = (2, parts.conv_kernel_size, hidden)
        shapes[f"{prefix}{name}.kernel_projection.weight"] = (projected, hidden)
    return shapes


def _heads(config: DFlashConfig, flat_confidence: bool) -> dict[str, Shape]:
    parts, hidden, vocab = config.parts, config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {}
    if rank := parts.markov_rank:
        shapes |= {f"markov_head.markov_w{number}.weight": (vocab, rank) for number in (1, 2)}
        if parts.markov_head_type == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        if parts.markov_head_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
    if parts.enable_confidence_head:
        width = hidden + (parts.markov_rank if parts.confidence_head_with_markov else 0)
        shapes["confidence_head.proj.weight"] = (width,) if flat_confidence else (1, width)
    if rank := parts.selector_rank:
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}.weight"] = (vocab, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    return shapes


def _head_biases(config: DFlashConfig) -> dict[str, Shape]:
    rank = config.parts.markov_rank
    shapes: dict[str, Shape] = {}
    if config.parts.enable_confidence_head:
        shapes["confidence_head.proj.bias"] = (1,)
    if config.parts.markov_head_type == "gated":
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config.parts.markov_head_type == "rnn":
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    return shapes


def take_tensors(
    file: WeightFile, shapes: Mapping[str, Shape], file_name: Callable[[str], str],
    ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, WeightTensor]:
    """The tensors of a file under their Hugging Face names; a missing, a misshapen and an unknown one are errors."""
    found: dict[str, WeightTensor] = {}
    for name, shape in shapes.items():
        tensor = file.tensor(file_name(name))
        if tensor.shape != shape:
            raise ConfigError(
                f"tensor '{tensor.name}' has shape {list(tensor.shape)} where the config implies {list(shape)}",
                _FOREIGN,
            )
        found[name] = tensor
    _refuse_unknown(file, {tensor.name for tensor in found.values()}, ignored)
    return found


def _refuse_unknown(file: WeightFile, taken: Iterable[str], ignored: Callable[[str], bool]) -> None:
    left = sorted(name for name in set(file.names()).difference(taken) if not ignored(name))
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise ConfigError(f"{file.path.name} has tensors with no place in the other format: {shown}", _UNKNOWN)
