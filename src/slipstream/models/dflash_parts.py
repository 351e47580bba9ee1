"""Finds the parts that a drafter has beyond the plain DFlash backbone, from its configuration and its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from slipstream.errors import ConfigError
from slipstream.models.config_reading import ConfigReader
from slipstream.models.dflash_names import ShapeOf

MARKOV_TYPES = ("vanilla", "gated", "rnn")
Find = Callable[[str], tuple[ConfigReader, str]]  # a key -> the section that has it, and its spelling there
_Value = TypeVar("_Value", int, str, bool)


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The heads and convolutions of a drafter; a rank or kernel size of 0 says that the part is not there."""

    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    tap_norms: bool = False  # every tap goes through a norm of its own before fc
    context_norm: bool = False  # the context goes through each layer's input norm, as the block does
    gate_width: int = 0  # columns of the gate on attention's result

    @property
    def dspark(self) -> bool:
        return self.markov_rank > 0 or self.enable_confidence_head

    @property
    def any_head(self) -> bool:
        return self.dspark or self.selector_rank > 0


def seen_parts(shape_of: ShapeOf, hidden_size: int) -> DraftParts:
    """Returns the parts that the tensors show; they do not show how many candidates a selector was trained with."""

    def shape(name: str) -> tuple[int, ...]:
        return shape_of(name) or ()

    rank = (shape("markov_head.markov_w2.weight") or shape("markov_head.markov_w1.weight") or (0,))[-1]
    gated, recurrent = (shape(f"markov_head.{name}.weight") for name in ("gate_proj", "joint_proj"))
    confidence = shape("confidence_head.proj.weight")
    kernel = shape("layers.0.attention_conv.base_kernel")
    projection = shape("layers.0.attention_conv.kernel_projection.weight")
    taps = kernel[1] if len(kernel) == 3 and projection else 0
    # Drafters that norm their taps also norm the context in every layer; no tensor of its own shows the latter.
    normed = shape_of("aux_hidden_norms.0.weight") is not None
    return DraftParts(
        markov_rank=rank,
        markov_head_type="rnn" if recurrent else "gated" if gated else "vanilla",
        enable_confidence_head=bool(confidence),
        confidence_head_with_markov=rank > 0 and confidence[-1:] == (hidden_size + rank,),
        conv_kernel_size=taps,
        conv_group_size=hidden_size // max(1, projection[0] // (2 * taps)) if taps else 0,
        selector_rank=(shape("candidate_selector.hidden_projection.weight") or (0,))[0],
        tap_norms=normed,
        context_norm=normed,
        gate_width=(shape("layers.0.self_attn.g_proj.weight") or (0,))[0],
    )


def read_parts(find: Find, label: str, seen: DraftParts | None) -> DraftParts:
    """Returns the parts that the config declares or the tensors show; a contradiction between them is an error.

    `seen` is None if the tensors are not known.
    """

    def take(key: str, default: _Value) -> _Value:
        """Takes one value from config and tensors, which must agree; without the key the tensors decide."""
        reader, name = find(key)
        shown: _Value | None = getattr(seen, key, None)
        if not reader.has(name):
            return default if shown is None else shown
        reads: dict[type, Callable[[str], Any]] = {
            bool: reader.boolean,
            str: reader.text,
            int: partial(reader.integer, least=0),
        }
        declared: _Value = reads[type(default)](name)
        if shown is not None and declared != shown:
            found = f"the weights say {shown!r}" if shown else "the weights have no such part"
            raise ConfigError(
                f"{label}: '{name}' is {declared!r} but {found}", "the config does not belong to these weights"
            )
        return declared

    rank = take("markov_rank", 0)
    kind = take("markov_head_type", "vanilla") if rank else "vanilla"
    if kind not in MARKOV_TYPES:
        hint = f"use one of {', '.join(MARKOV_TYPES)}"
        raise ConfigError(f"{label}: Markov heads of type '{kind}' are not supported", hint)
    confident = take("enable_confidence_head", False)
    wide = confident and take("confidence_head_with_markov", False)
    if wide and not rank:
        raise ConfigError(f"{label}: the confidence head reads a Markov head that is not there")
    taps = take("conv_kernel_size", 0)
    group = take("conv_group_size", 0) if taps else 0
    if taps and not group:
        raise ConfigError(f"{label}: the config has no 'conv_group_size'", "the file is incomplete")
    selector = take("selector_rank", 0)
    if selector and rank:
        raise ConfigError(f"{label}: a Markov head and a candidate selector in one drafter are not supported")
    (selecting, top_k), (norming, context_norm) = find("selector_top_k"), find("context_kv_layer_norm")
    shown = DraftParts() if seen is None else seen  # only the tensors show gates and norms of taps
    return DraftParts(
        markov_rank=rank,
        markov_head_type=kind,
        enable_confidence_head=confident,
        confidence_head_with_markov=wide,
        conv_kernel_size=taps,
        conv_group_size=group,
        selector_rank=selector,
        selector_top_k=selecting.integer(top_k) if selector else 0,
        tap_norms=shown.tap_norms,
        context_norm=norming.boolean(context_norm, shown.context_norm),
        gate_width=shown.gate_width,
    )
