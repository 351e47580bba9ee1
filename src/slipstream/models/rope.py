"""Rotary position tables with Hugging Face semantics: default, linear, llama3 and YaRN scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.config_reading import ConfigReader

_FIRST_TABLE = 2048


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What decides the rotation of a position; `factors` divide the frequencies (as GGUF files store them)."""

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] = ()


def read_rope(config: ConfigReader, dim: int, max_positions: int) -> RopeConfig:
    """Reads theta and scaling from `rope_parameters` first, then the legacy top-level keys; theta has no default."""
    nested = config.section("rope_parameters")
    scaling = nested if nested.has("rope_type") or nested.has("type") else config.section("rope_scaling")
    if nested.has("rope_theta"):
        theta = nested.number("rope_theta")
    elif config.has("rope_theta"):
        theta = config.number("rope_theta")
    else:
        raise ConfigError(
            f"{config.label}: no rope_theta in rope_parameters or at top level",
            "add the value the model was trained with; a guess would cost acceptance silently",
        )
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    for section in (nested, config):
        if section.has("partial_rotary_factor") and section.number("partial_rotary_factor") != 1.0:
            raise ConfigError(f"{config.label}: partial rotary embeddings are not supported for this family")
    if kind in ("default", "linear"):
        return RopeConfig(theta, dim, kind, factor=scaling.number("factor", 1.0))
    original = scaling.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return RopeConfig(
            theta, dim, kind, scaling.number("factor"), original,
            scaling.number("low_freq_factor"), scaling.number("high_freq_factor"),
        )
    if kind == "yarn":
        return _read_yarn(scaling, theta, dim, original, max_positions)
    supported = "supported: default, linear, llama3, yarn"
    raise ConfigError(f"{config.label}: rope scaling '{kind}' is not supported", supported)


def _read_yarn(scaling: ConfigReader, theta: float, dim: int, original: int, max_positions: int) -> RopeConfig:
    for unsupported in ("mscale", "mscale_all_dim"):
        scaling.require(unsupported, (), "YaRN with its own scale")
    if scaling.has("truncate") and not scaling.boolean("truncate"):
        raise ConfigError(f"{scaling.label}: YaRN without truncation is not supported")
    factor = scaling.number("factor", max_positions / original)
    attention = scaling.number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return RopeConfig(
        theta, dim, "yarn", factor, original, attention_factor=attention,
        beta_fast=scaling.number("beta_fast", 32.0), beta_slow=scaling.number("beta_slow", 1.0),
    )


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """One frequency per pair of dimensions."""
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.factors:
        return plain / torch.tensor(rope.factors)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / plain
        smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - smooth) * plain / rope.factor + smooth * plain
        scaled = torch.where(wavelength > rope.original_context / rope.low_freq_factor, plain / rope.factor, blended)
        return torch.where(wavelength < rope.original_context / rope.high_freq_factor, plain, scaled)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, plain)
    return plain


def _yarn_frequencies(rope: RopeConfig, plain: Tensor) -> Tensor:
    def dimension_of(rotations: float) -> float:
        return rope.dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), rope.dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


class RotaryTable:
    """cos and sin per position, grown as positions are reached."""

    def __init__(self, rope: RopeConfig) -> None:
        self._frequencies = inverse_frequencies(rope)
        self._scale = rope.attention_factor
        self._cos = torch.empty(0, rope.dim)
        self._sin = torch.empty(0, rope.dim)

    def rows(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos, and sin with its first half negated, [rows, 1, dim] for positions below `end`."""
        cos, sin = self.tables(end)
        return cos[positions][:, None], sin[positions][:, None]

    def tables(self, end: int) -> tuple[Tensor, Tensor]:
        """The same by position [positions, dim], at least up to `end`."""
        if end > self._cos.shape[0]:
            self._grow(max(end, 2 * self._cos.shape[0], _FIRST_TABLE))
        return self._cos, self._sin

    def _grow(self, size: int) -> None:
        angles = torch.arange(size, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._cos, self._sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
