"""Runs a whole stack of layers in one native call: the structs of step.h, filled once per model and once per step."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.cpu.native_attention import SlipBatch, batch_struct
from slipstream.kernels.cpu.native_library import Library, threads
from slipstream.kernels.cpu.native_matrix import PackedLinear, SlipLinear
from slipstream.kernels.rows import AttentionPattern, RowBatch

MAX_PATTERNS = 4  # attention patterns per stack; step.cpp has room for this many
_INT, _POINTER, _FLOAT = ctypes.c_int32, ctypes.c_void_p, ctypes.c_float


class SlipLayer(ctypes.Structure):
    _fields_ = (
        ("qkv", SlipLinear),
        ("output", SlipLinear),
        ("gate_up", SlipLinear),
        ("down", SlipLinear),
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("pattern", _INT),
    )


class SlipStack(ctypes.Structure):
    _fields_ = (
        ("layers", _INT),
        ("hidden", _INT),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("head_dim", _INT),
        ("inner", _INT),
        ("eps", _FLOAT),
        ("layer", _POINTER),
        ("norm", _POINTER),
    )


class SlipForward(ctypes.Structure):
    _fields_ = (
        ("stack", _POINTER),
        ("batches", _POINTER),
        ("patterns", _INT),
        ("threads", _INT),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("x", _POINTER),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("taps", _INT),
        ("tap_layers", _POINTER),
        ("tapped", _POINTER),
        ("hidden", _POINTER),
        ("wanted", _INT),
        ("wanted_rows", _POINTER),
        ("head", _POINTER),
        ("logits", _POINTER),
    )


class SlipContext(ctypes.Structure):
    _fields_ = (
        ("fc", _POINTER),
        ("projection", _POINTER),
        ("norm", _POINTER),
        ("k_norms", _POINTER),
        ("eps", _FLOAT),
        ("rows", _INT),
        ("layers", _INT),
        ("kv_heads", _INT),
        ("head_dim", _INT),
        ("page_tokens", _INT),
        ("threads", _INT),
        ("taps", _POINTER),
        ("positions", _POINTER),
        ("pages", _POINTER),
        ("offsets", _POINTER),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("layer_stride", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The tensors of one layer that the native pass needs."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    pattern: AttentionPattern


@dataclass(frozen=True, slots=True)
class StackShape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float


class LayerPools:
    """The addresses of every layer's keys and values."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.keys = (_POINTER * len(keys))(*[tensor.data_ptr() for tensor in keys])
        self.values = (_POINTER * len(values))(*[tensor.data_ptr() for tensor in values])


class PassResult(NamedTuple):
    hidden: Tensor
    taps: Tensor | None
    logits: Tensor | None


class NativeStack:
    """Layers that native code runs from the embeddings to the final norm, and through the head for chosen rows."""

    def __init__(self, library: Library, shape: StackShape, layers: Sequence[LayerParts], norm: Tensor) -> None:
        self._forward = _function(library, "slip_forward")
        self._shape = shape
        self._parts = list(layers)
        self.patterns = list(dict.fromkeys(layer.pattern for layer in layers))
        self._norm = norm.contiguous()
        self._layers = (SlipLayer * len(layers))(*[self._layer(parts) for parts in layers])
        self._struct = SlipStack(
            len(layers),
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.inner,
            shape.eps,
            ctypes.addressof(self._layers),
            self._norm.data_ptr(),
        )

    def _layer(self, parts: LayerParts) -> SlipLayer:
        norms = (parts.input_norm, parts.post_norm, parts.q_norm, parts.k_norm)
        return SlipLayer(
            parts.qkv.struct(parts.qkv_bias),
            parts.output.struct(parts.output_bias),
            parts.gate_up.struct(parts.gate_up_bias),
            parts.down.struct(parts.down_bias),
            *[None if norm is None else norm.data_ptr() for norm in norms],
            self.patterns.index(parts.pattern),
        )

    def run(
        self,
        batch: RowBatch,
        embedded: Tensor,
        pools: LayerPools,
        rotary: tuple[Tensor, Tensor],
        tap_layers: Sequence[int] = (),
        wanted: Sequence[int] = (),
        head: PackedLinear | None = None,
    ) -> PassResult:
        """Runs one pass. `embedded` becomes the residual stream; `rotary` are the whole tables by position."""
        rows, hidden_size = embedded.shape
        batches = (SlipBatch * len(self.patterns))(*[batch_struct(batch, pattern) for pattern in self.patterns])
        hidden = torch.empty_like(embedded)
        taps = torch.empty(rows, len(tap_layers) * hidden_size) if tap_layers else None
        layers, chosen = array("i", tap_layers), array("i", wanted)
        logits = torch.empty(len(wanted), head.out_features) if head is not None and wanted else None
        job = SlipForward(
            ctypes.addressof(self._struct),
            ctypes.addressof(batches),
            len(self.patterns),
            threads(),
            ctypes.addressof(pools.keys),
            ctypes.addressof(pools.values),
            embedded.data_ptr(),
            rotary[0].data_ptr(),
            rotary[1].data_ptr(),
            len(tap_layers),
            layers.buffer_info()[0],
            None if taps is None else taps.data_ptr(),
            hidden.data_ptr(),
            0 if logits is None else len(wanted),
            chosen.buffer_info()[0],
            None if head is None else head.address,
            None if logits is None else logits.data_ptr(),
        )
        self._forward(ctypes.byref(job))
        return PassResult(hidden, taps, logits)


def write_context(library: Library, job: SlipContext) -> None:
    """Projects taps into draft context; the addresses in `job` must be valid until this call returns."""
    _function(library, "slip_context")(ctypes.byref(job))


@functools.cache
def _function(library: Library, name: str) -> Any:
    return library.function(name, [_POINTER])
