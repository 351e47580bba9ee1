"""Checks with an independent fp64 forward in numpy whether two texts differ because of a near-tie.

It reads files with the same code as the engine, but it uses none of the engine's arithmetic, so that it does not repeat
a mistake of that arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from slipstream.errors import ConfigError
from slipstream.models.decoder import DecoderConfig
from slipstream.models.rope import RopeConfig
from slipstream.tools.convert_plans import Source
from slipstream.tools.model_file import open_model
from slipstream.tools.tensor_compare import Array, dense_values
from slipstream.types import SamplingParams

Tensors = Mapping[str, Source]  # by the names of Hugging Face folders
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
    with open_model(path) as model:
        config, tensors = model.config, model.tensors
        if not isinstance(config, DecoderConfig) or config.family not in ("llama", "qwen3"):
            named = model.problem or getattr(config, "family", model.kind)
            raise ConfigError(f"near-ties cannot be proven for '{named}' models")
        if config.rope != RopeConfig(config.rope.theta, config.head_dim):
            raise ConfigError("near-ties cannot be proven for scaled rotary embeddings")
        table = tensors["model.embed_tokens.weight"]
        x = dense_values(table.rows(torch.tensor(context)))
        rates = config.rope.theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.arange(len(context))[:, None] * rates
        turn = np.cos(angles)[:, None], np.sin(angles)[:, None]
        for index in range(config.layers):
            x = _layer(x, tensors, f"model.layers.{index}.", config, turn)
        head = table if config.tied_head else tensors["lm_head.weight"]
        return np.asarray(dense_values(head) @ _norm(x[-1], tensors, "model.norm", config))


def _project(x: Array, tensors: Tensors, name: str) -> Array:
    out = x @ dense_values(tensors[f"{name}.weight"]).T
    return out + dense_values(tensors[f"{name}.bias"]) if f"{name}.bias" in tensors else out


def _norm(x: Array, tensors: Tensors, name: str, config: DecoderConfig) -> Array:
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_eps)
    return x / scale * dense_values(tensors[f"{name}.weight"])


def _layer(x: Array, tensors: Tensors, prefix: str, config: DecoderConfig, turn: tuple[Array, Array]) -> Array:
    length, attention, mlp = len(x), f"{prefix}self_attn.", f"{prefix}mlp."
    y = _norm(x, tensors, f"{prefix}input_layernorm", config)
    q, k, v = (
        _project(y, tensors, f"{attention}{name}_proj").reshape(length, -1, config.head_dim) for name in ("q", "k", "v")
    )
    if config.qk_norm:
        q, k = _norm(q, tensors, f"{attention}q_norm", config), _norm(k, tensors, f"{attention}k_norm", config)
    q, k = _turn(q, *turn), _turn(k, *turn)
    group = config.heads // config.kv_heads
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
    scores += np.triu(np.full((length, length), -np.inf), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
    x = x + _project(mixed, tensors, f"{attention}o_proj")
    y = _norm(x, tensors, f"{prefix}post_attention_layernorm", config)
    gate = _project(y, tensors, f"{mlp}gate_proj")
    inner = gate / (1 + np.exp(-gate)) * _project(y, tensors, f"{mlp}up_proj")
    return x + _project(inner, tensors, f"{mlp}down_proj")


def _turn(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
