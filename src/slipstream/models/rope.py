"""Rotary position tables with Hugging Face semantics: default, linear, llama3, YaRN and proportional scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.config_reading import ConfigReader

_FIRST_TABLE_POSITIONS = 2048  # size of the first table; too small a value only makes the table grow more often


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The numbers that decide how a position is rotated; `factors` divide the frequencies, as GGUF files store them.

    Only the first `dim` dimensions of a head of `width` dimensions turn; if `width` is 0, all of them do.
    """

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
    width: int = 0

    @property
    def partial(self) -> bool:
        return self.width > self.dim


def read_rope(
    config: ConfigReader, head_dim: int, layer_type: str | None = None, allows_partial: bool = False
) -> RopeConfig:
    """Reads theta and scaling from `rope_parameters` first, then the legacy top-level keys; theta has no default.

    Where layers of different types turn differently, `rope_parameters` has a section for each type. A partial
    rotation is refused unless `allows_partial`.
    """
    nested, longest = config.section("rope_parameters"), config.integer("max_position_embeddings")
    if layer_type is not None and nested.has(layer_type):
        nested = nested.section(layer_type)
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
    holder = nested if nested.has("partial_rotary_factor") else config
    share = holder.number("partial_rotary_factor", 1.0)
    if share != 1.0 and not allows_partial:
        raise ConfigError(f"{config.label}: partial rotary embeddings are not supported for this family")
    if kind == "proportional":
        return _proportional(theta, head_dim, share, scaling.number("factor", 1.0))
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(f"{config.label}: {dim} of {head_dim} dimensions cannot turn in pairs")
    found = _scaled_rope(config, scaling, theta, dim, kind, longest)
    return replace(found, width=head_dim) if dim < head_dim else found


def _proportional(theta: float, head_dim: int, share: float, factor: float) -> RopeConfig:
    """Returns a rotation with the frequencies of a whole head, in which only the faster `share` of the pairs turns."""
    turning = int(share * head_dim // 2)
    factors = (factor,) * turning + (math.inf,) * (head_dim // 2 - turning)
    return RopeConfig(theta, head_dim, factors=factors)


def _scaled_rope(
    config: ConfigReader, scaling: ConfigReader, theta: float, dim: int, kind: str, longest: int
) -> RopeConfig:
    if kind in ("default", "linear"):
        return RopeConfig(theta, dim, kind, factor=scaling.number("factor", 1.0))
    if kind not in ("llama3", "yarn"):
        hint = "use default, linear, llama3, yarn or proportional"
        raise ConfigError(f"{config.label}: rope scaling '{kind}' is not supported", hint)
    original = scaling.integer("original_max_position_embeddings", longest)
    if kind == "llama3":
        return RopeConfig(
            theta,
            dim,
            kind,
            scaling.number("factor"),
            original,
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
        )
    for unsupported in ("mscale", "mscale_all_dim"):
        scaling.require(unsupported, (), "YaRN with its own scale")
    if scaling.has("truncate") and not scaling.boolean("truncate"):
        raise ConfigError(f"{scaling.label}: YaRN without truncation is not supported")
    factor = scaling.number("factor", longest / original)
    return RopeConfig(
        theta,
        dim,
        kind,
        factor,
        original,
        attention_factor=scaling.number("attention_factor", _attention_factor(factor)),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
    )


def read_gguf_rope(
    config: ConfigReader, arch: str, head_dim: int, sliding: bool = False, scalings: tuple[str, ...] = ("none", "yarn")
) -> RopeConfig:
    """Reads the rotation from GGUF keys; sliding layers have a theta and a count of turning dimensions of their own.

    YaRN's attention factor is Hugging Face's, because the keys hold that one. ggml computes with a compensated one,
    which is not stored in a file.
    """
    key, suffix = f"{arch}.rope.", "_swa" if sliding else ""
    if not config.has(f"{key}freq_base{suffix}"):
        raise ConfigError(f"{config.label}: no '{key}freq_base{suffix}'", "convert the model again with a newer tool")
    theta, dim = config.number(f"{key}freq_base{suffix}"), config.integer(f"{key}dimension_count{suffix}", head_dim)
    if dim % 2 or dim > head_dim:
        raise ConfigError(f"{config.label}: {dim} of {head_dim} dimensions cannot turn in pairs")
    kind = "none" if sliding else config.text(f"{key}scaling.type", "none")
    width = head_dim if dim < head_dim else 0
    if kind not in scalings:
        raise ConfigError(f"{config.label}: rope scaling '{kind}' in a GGUF target is not supported")
    if kind == "none":
        return RopeConfig(theta, dim, width=width)
    factor = config.number(f"{key}scaling.factor", 1.0 if kind == "linear" else None)
    if kind == "linear":
        return RopeConfig(theta, dim, kind, factor, width=width)
    return RopeConfig(
        theta,
        dim,
        "yarn",
        factor,
        config.integer(f"{key}scaling.original_context_length"),
        attention_factor=config.number(f"{key}scaling.yarn_attn_factor", _attention_factor(factor)),
        beta_fast=config.number(f"{key}scaling.yarn_beta_fast", 32.0),
        beta_slow=config.number(f"{key}scaling.yarn_beta_slow", 1.0),
        width=width,
    )


def _attention_factor(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def partial_rows(heads: int, head_dim: int, dim: int) -> Tensor:
    """Returns the order of a projection's rows with which a kernel for whole heads computes a partial rotation.

    A kernel pairs dimension i with i + head_dim / 2. The `dim` turning dimensions of a head are paired among
    themselves, so their halves are moved to the beginning of the head's halves; the dimensions after them do not turn.
    """
    half, still = dim // 2, (head_dim - dim) // 2
    own = torch.arange(head_dim)
    first, second, rest = own[:half], own[half:dim], own[dim:]
    order = torch.cat((first, rest[:still], second, rest[still:]))
    return (torch.arange(heads)[:, None] * head_dim + order).flatten()


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Returns one frequency per pair of dimensions."""
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
    """Tables of cos and sin by position, which grow when a position beyond their end is asked for."""

    def __init__(self, rope: RopeConfig) -> None:
        turning, width = inverse_frequencies(rope), max(rope.width, rope.dim)
        still = torch.zeros((width - rope.dim) // 2)
        self._frequencies = torch.cat((turning, still))
        # Dimensions that do not turn are not scaled either.
        self._scale = torch.cat((torch.full_like(turning, rope.attention_factor), still + 1.0))
        self._cos = torch.empty(0, width)
        self._sin = torch.empty(0, width)

    def rows(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Returns cos, and sin with its first half negated, as [rows, 1, width]; each position must be below `end`."""
        cos, sin = self.tables(end)
        return cos[positions][:, None], sin[positions][:, None]

    def tables(self, end: int) -> tuple[Tensor, Tensor]:
        """Returns the whole tables [positions, width], which reach at least to `end`."""
        if end > self._cos.shape[0]:
            self._grow(max(end, 2 * self._cos.shape[0], _FIRST_TABLE_POSITIONS))
        return self._cos, self._sin

    def _grow(self, size: int) -> None:
        angles = torch.arange(size, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._cos, self._sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
