"""Runs a whole stack of layers in one native call, where every part of every layer has a compiled kernel.

The structs are those of step.h, filled once per model and once per step.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from slipstream.kernels.cpu.linear import Matrix, NativeMatrix
from slipstream.kernels.cpu.native_attention import LANES, MAX_DIM, SlipBatch, batch_struct
from slipstream.kernels.cpu.native_library import Library, library, threads
from slipstream.kernels.cpu.native_matrix import SlipLinear
from slipstream.kernels.rows import AttentionPattern, RowBatch, RowPlaces
from slipstream.models.layers import Attention, Layer, LayerShape, Mlp

# Keys and values [pages, kv heads, page tokens, dim] of each layer that stores them.
KvLayers = Sequence[tuple[Tensor, Tensor]]
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


class NativeStack:
    """Layers that native code runs from the embeddings to the final norm, and through the head for chosen rows."""

    def __init__(self, compiled: Library, shape: LayerShape, layers: Sequence[Layer], norm: Tensor) -> None:
        self._forward = compiled.function("slip_forward", "p")
        self._owners = layers, norm  # the structs have only the addresses of what these own
        self._patterns = _patterns(layers)
        self._layers = (SlipLayer * len(layers))(*[_layer_struct(layer, self._patterns) for layer in layers])
        self._struct = SlipStack(
            len(layers),
            shape.hidden_size,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.intermediate_size,
            shape.rms_eps,
            ctypes.addressof(self._layers),
            norm.data_ptr(),
        )
        self._kv: KvLayers | None = None

    def run(
        self,
        embedded: Tensor,
        batch: RowBatch,
        kv: KvLayers,
        rotary: tuple[Tensor, Tensor],
        head: NativeMatrix | None,
        wanted: Sequence[int],
        tap_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns hidden rows after the norm, taps side by side, and under a `head` the logits of wanted rows.

        `embedded` is overwritten, because it becomes the residual stream; `rotary` has the whole tables by position.
        """
        if self._kv is not kv:
            # Addresses are read once per set of pools. The set is kept with them, so that no other set can be
            # allocated at the same address while these addresses are in use.
            self._kv = kv
            self._keys, self._values = ((_POINTER * len(kv))(*[pair[i].data_ptr() for pair in kv]) for i in (0, 1))
        rows, hidden_size = embedded.shape
        batches = (SlipBatch * len(self._patterns))(*[batch_struct(batch, pattern) for pattern in self._patterns])
        hidden = torch.empty_like(embedded)
        taps = torch.empty(rows, len(tap_layers) * hidden_size) if tap_layers else None
        layers, chosen = array("i", tap_layers), array("i", wanted)
        logits = torch.empty(len(wanted), head.out_features) if head is not None and wanted else None
        job = SlipForward(
            ctypes.addressof(self._struct),
            ctypes.addressof(batches),
            len(self._patterns),
            threads(),
            ctypes.addressof(self._keys),
            ctypes.addressof(self._values),
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
        return hidden, taps, logits


def native_stack(shape: LayerShape, layers: Sequence[Layer], norm: Tensor) -> NativeStack | None:
    """Makes one native pass of the layers; None if a part of them has no compiled kernel, so that torch computes it."""
    compiled = library()
    fits = shape.head_dim % LANES == 0 and shape.head_dim <= MAX_DIM and len(_patterns(layers)) <= MAX_PATTERNS
    if compiled is None or not fits or not all(_is_plain(layer, shape) for layer in layers):
        return None
    return NativeStack(compiled, shape, layers, norm)


def as_native(matrix: Matrix | None) -> NativeMatrix | None:
    return matrix if isinstance(matrix, NativeMatrix) else None


def _patterns(layers: Sequence[Layer]) -> list[AttentionPattern]:
    parts = [part for layer in layers for part in layer.parts]
    return list(dict.fromkeys(part.pattern for part in parts if isinstance(part, Attention)))


def _is_plain(layer: Layer, shape: LayerShape) -> bool:
    """Whether compiled code takes a layer: plain attention and a plain MLP, with the numbers that all layers share.

    Attention is plain if it has no gate, and keys and values of its own.
    """
    bare = all(
        each.norm is not None and each.post_norm is None and each.convolution is None for each in layer.sublayers
    )
    if layer.kind != (Attention, Mlp) or layer.scalar != 1.0 or not bare:
        return False
    attention, mlp = cast(Attention, layer.parts[0]), cast(Mlp, layer.parts[1])
    own = (attention.heads, attention.kv_heads, attention.head_dim, attention.rope, attention.scale)
    common = (shape.heads, shape.kv_heads, shape.head_dim, shape.rope, shape.head_dim**-0.5)
    stores = attention.owns_keys and attention.owns_values and not attention.norms_values
    fits = own == common and stores and attention.gate is None and mlp.activation == "silu"
    return fits and all(isinstance(matrix, NativeMatrix) for matrix in layer.matrices)


def _layer_struct(layer: Layer, patterns: Sequence[AttentionPattern]) -> SlipLayer:
    attention, mlp = cast(Attention, layer.parts[0]), cast(Mlp, layer.parts[1])
    biases = (attention.qkv_bias, attention.output_bias, mlp.gate_up_bias, mlp.down_bias)
    norms = (*(sublayer.norm for sublayer in layer.sublayers), attention.q_norm, attention.k_norm)
    return SlipLayer(
        *[cast(NativeMatrix, matrix).struct(bias) for matrix, bias in zip(layer.matrices, biases, strict=True)],
        *[None if norm is None else norm.data_ptr() for norm in norms],
        patterns.index(attention.pattern),
    )


class ContextWriter:
    """Projects the taps of committed rows into the draft layers' keys and values, in one native call."""

    def __init__(self, fc: NativeMatrix, projection: NativeMatrix, bias: Tensor | None) -> None:
        self._call = fc.library.function("slip_context", "p")
        self._fc = fc
        self._owners = projection, bias  # the struct has only their addresses, so they are kept alive here
        self._projection = projection.struct(bias)

    def write(
        self,
        taps: Tensor,
        places: RowPlaces,
        rotary: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        norm: Tensor,
        k_norms: Tensor,
        eps: float,
    ) -> None:
        """Pools are [layers, pages, heads, page tokens, dim], `k_norms` [layers, 1, dim]."""
        layers, _, heads, page_tokens, dim = keys.shape
        taps = taps.contiguous()
        job = SlipContext(
            self._fc.address,
            ctypes.addressof(self._projection),
            norm.data_ptr(),
            k_norms.data_ptr(),
            eps,
            taps.shape[0],
            layers,
            heads,
            dim,
            page_tokens,
            threads(),
            taps.data_ptr(),
            places.position_list.buffer_info()[0],
            places.page_list.buffer_info()[0],
            places.offset_list.buffer_info()[0],
            rotary[0].data_ptr(),
            rotary[1].data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
        )
        self._call(ctypes.byref(job))
