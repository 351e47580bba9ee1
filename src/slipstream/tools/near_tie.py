"""Checks with an independent fp64 forward in numpy whether two texts differ because of a near-tie.

It uses nothing of the engine's arithmetic, so a mistake there cannot hide itself here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream.formats.weight_files import WeightFile, open_weights, read_config
from slipstream.types import SamplingParams

Array = NDArray[np.float64]
# The largest difference between two logits that rounding alone may reverse, per weight format. A larger value would
# excuse real mistakes, a smaller one would report rounding as a mistake.
TOLERANCE = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 0.25, "int8": 0.1, "int4": 0.25}


@dataclass(frozen=True, slots=True)
class NearTie:
    """The first token at which two texts differ, and how far apart the two tokens' scores are in fp64."""

    index: int
    tokens: tuple[int, int]
    margin: float
    tolerance: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= self.tolerance


@dataclass(frozen=True, slots=True)
class _Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    gguf: bool
    permuted: bool


def explain_difference(
    path: Path,
    prompt_ids: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    sampling: SamplingParams,
    weight_format: str,
    exact: bool,
) -> NearTie:
    """Measures the margin at the first token in which two completions of one prompt differ.

    If the engine's sums are `exact`, rounding cannot explain a difference, and only a true tie passes.
    """
    pairs = enumerate(zip(first, second, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), None)
    tolerance = 0.0 if exact else TOLERANCE[weight_format]
    if index is None:
        # One text is the beginning of the other, which no choice between two tokens explains.
        return NearTie(min(len(first), len(second)), (-1, -1), math.inf, tolerance)
    tokens = (first[index], second[index])
    if sampling.penalised or sampling.top_k or sampling.top_p < 1.0 or sampling.min_p:
        # The edge of a filter can decide as well, and this check does not cover it.
        return NearTie(index, tokens, math.inf, tolerance)
    context = [*prompt_ids, *first[:index]]
    scores = next_logits(path, context)
    if not sampling.greedy:
        scores = scores / sampling.temperature + gumbel_noise(sampling.seed, len(context), len(scores))
        tolerance /= sampling.temperature
    return NearTie(index, tokens, float(scores.max() - min(scores[tokens[0]], scores[tokens[1]])), tolerance)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Array:
    """The noise at one position by definition: Philox4x32-10 with the seed as key, (token, position) as counter."""
    low = np.uint64(0xFFFFFFFF)
    words = [np.arange(-(-vocab_size // 4), dtype=np.uint64)]
    words += [np.full_like(words[0], value) for value in (position & 0xFFFFFFFF, position >> 32, 0)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, third = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (third >> np.uint64(32)) ^ words[1] ^ np.uint64(key[0]),
            third & low,
            (first >> np.uint64(32)) ^ words[3] ^ np.uint64(key[1]),
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    uniform = (np.stack(words, axis=-1).reshape(-1)[:vocab_size] + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log1p(-uniform)))


def next_logits(path: Path, context: Sequence[int]) -> Array:
    """The logits after a context, with every operation in fp64."""
    file, config = open_weights(path), read_config(path)
    shape = _shape(config if config is not None else file.metadata, file, gguf=config is None)
    length = len(context)
    table = file.tensor("token_embd.weight" if shape.gguf else "model.embed_tokens.weight").dense().numpy()
    x = table[list(context)].astype(np.float64)
    angles = np.arange(length)[:, None] * shape.theta ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    for layer in range(shape.layers):
        x = _layer(x, file, shape, layer, cos, sin)
    final = _get(file, shape, "norm", None)
    head_name = "output.weight" if shape.gguf else "lm_head.weight"
    head = file.tensor(head_name).dense().numpy() if head_name in file else table
    return np.asarray(head.astype(np.float64) @ _norm(x[-1], final, shape.eps))


def _shape(values: Mapping[str, object], file: WeightFile, gguf: bool) -> _Shape:
    arch = str(values.get("general.architecture" if gguf else "model_type"))
    if arch not in ("llama", "qwen3"):
        raise ConfigError(f"near-ties cannot be proven for '{arch}' models")

    def number(key: str, default: float | None = None) -> float:
        value = values.get(key, default)
        if not isinstance(value, int | float):
            raise ConfigError(f"near-ties cannot be proven without '{key}'")
        return float(value)

    if gguf:
        if "rope_freqs.weight" in file or values.get(f"{arch}.rope.scaling.type", "none") != "none":
            raise ConfigError("near-ties cannot be proven for scaled rotary embeddings")
        prefix = f"{arch}.attention."
        heads = number(prefix + "head_count")
        return _Shape(
            int(number(f"{arch}.block_count")),
            int(heads),
            int(number(prefix + "head_count_kv", heads)),
            int(number(prefix + "key_length", number(f"{arch}.embedding_length") / heads)),
            number(prefix + "layer_norm_rms_epsilon"),
            number(f"{arch}.rope.freq_base"),
            True,
            arch == "llama",
        )
    rope = values.get("rope_parameters")
    nested = rope if isinstance(rope, Mapping) else {}
    if nested.get("rope_type", "default") != "default" or values.get("rope_scaling"):
        raise ConfigError("near-ties cannot be proven for scaled rotary embeddings")
    heads = number("num_attention_heads")
    theta = float(nested["rope_theta"]) if "rope_theta" in nested else number("rope_theta")
    return _Shape(
        int(number("num_hidden_layers")),
        int(heads),
        int(number("num_key_value_heads", heads)),
        int(number("head_dim", number("hidden_size") / heads)),
        number("rms_norm_eps"),
        theta,
        False,
        False,
    )


_NAMES = {
    "norm": ("model.norm", "output_norm"),
    "before": ("input_layernorm", "attn_norm"),
    "after": ("post_attention_layernorm", "ffn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "qn": ("self_attn.q_norm", "attn_q_norm"),
    "kn": ("self_attn.k_norm", "attn_k_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}


def _name(shape: _Shape, key: str, layer: int | None, kind: str) -> str:
    name = _NAMES[key][shape.gguf]
    prefix = "" if layer is None else f"blk.{layer}." if shape.gguf else f"model.layers.{layer}."
    return f"{prefix}{name}.{kind}"


def _get(file: WeightFile, shape: _Shape, key: str, layer: int | None, kind: str = "weight") -> Array:
    values = file.tensor(_name(shape, key, layer, kind)).dense().numpy().astype(np.float64)
    if shape.permuted and key in ("q", "k"):
        split = values.reshape(-1, shape.head_dim // 2, 2, *values.shape[1:])
        values = split.swapaxes(1, 2).reshape(values.shape)
    return np.asarray(values)


def _project(x: Array, file: WeightFile, shape: _Shape, key: str, layer: int) -> Array:
    out = x @ _get(file, shape, key, layer).T
    if _name(shape, key, layer, "bias") in file:
        out = out + _get(file, shape, key, layer, "bias")
    return out


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _layer(x: Array, file: WeightFile, shape: _Shape, layer: int, cos: Array, sin: Array) -> Array:
    length, dim = len(x), shape.head_dim
    y = _norm(x, _get(file, shape, "before", layer), shape.eps)
    q, k, v = (_project(y, file, shape, key, layer).reshape(length, -1, dim) for key in ("q", "k", "v"))
    if _name(shape, "qn", layer, "weight") in file:
        q = _norm(q, _get(file, shape, "qn", layer), shape.eps)
        k = _norm(k, _get(file, shape, "kn", layer), shape.eps)
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    group = shape.heads // shape.kv_heads
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    scores += np.triu(np.full((length, length), -np.inf), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    x = x + _project(np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1), file, shape, "o", layer)
    y = _norm(x, _get(file, shape, "after", layer), shape.eps)
    gate = _project(y, file, shape, "gate", layer)
    return x + _project(gate / (1 + np.exp(-gate)) * _project(y, file, shape, "up", layer), file, shape, "down", layer)


def _turn(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
