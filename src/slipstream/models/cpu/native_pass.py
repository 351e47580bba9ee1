"""Hands a whole stack of layers to native code in one call, where every part of every layer has a compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

from torch import Tensor

from slipstream.kernels.cpu.linear import Matrix, NativeMatrix
from slipstream.kernels.cpu.native_attention import LANES, MAX_DIM
from slipstream.kernels.cpu.native_library import Library, library, threads
from slipstream.kernels.cpu.native_matrix import PackedLinear
from slipstream.kernels.cpu.native_stack import (
    MAX_PATTERNS,
    LayerParts,
    NativeStack,
    SlipContext,
    StackShape,
    write_context,
)
from slipstream.kernels.rows import RowPlaces
from slipstream.models.layers import Attention, Layer, LayerShape, Mlp, Sublayer


def native_stack(shape: LayerShape, layers: Sequence[Layer], norm: Tensor) -> NativeStack | None:
    """The layers as one native pass; None if some part of them has no compiled kernel and torch must compute it."""
    compiled = library()
    parts = [_layer_parts(layer, shape) for layer in layers]
    known = [part for part in parts if part is not None]
    patterns = {part.pattern for part in known}
    fits = shape.head_dim % LANES == 0 and shape.head_dim <= MAX_DIM and len(patterns) <= MAX_PATTERNS
    if compiled is None or len(known) < len(parts) or not fits:
        return None
    numbers = StackShape(
        shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size, shape.rms_eps
    )
    return NativeStack(compiled, numbers, known, norm)


def packed(matrix: Matrix | None) -> PackedLinear | None:
    return matrix.packed if isinstance(matrix, NativeMatrix) else None


def _layer_parts(layer: Layer, shape: LayerShape) -> LayerParts | None:
    """A layer as compiled code takes it: plain attention and a plain MLP, with the numbers that all layers share."""
    if layer.kind != (Attention, Mlp) or layer.scalar != 1.0:
        return None
    mixing, feeding = layer.sublayers
    attention, mlp = cast(Attention, mixing.part), cast(Mlp, feeding.part)
    if not (_is_plain(mixing) and _is_plain(feeding) and _fits(attention, shape) and mlp.activation == "silu"):
        return None
    qkv, output, gate_up, down = map(packed, (attention.qkv, attention.output, mlp.gate_up, mlp.down))
    if qkv is None or output is None or gate_up is None or down is None or mixing.norm is None or feeding.norm is None:
        return None
    return LayerParts(
        qkv,
        output,
        gate_up,
        down,
        mixing.norm,
        feeding.norm,
        attention.q_norm,
        attention.k_norm,
        attention.qkv_bias,
        attention.output_bias,
        mlp.gate_up_bias,
        mlp.down_bias,
        attention.pattern,
    )


def _is_plain(sublayer: Sublayer) -> bool:
    return sublayer.post_norm is None and sublayer.convolution is None


def _fits(attention: Attention, shape: LayerShape) -> bool:
    """Whether a layer attends as the whole stack does, to keys and values of its own, without a gate."""
    own = (attention.heads, attention.kv_heads, attention.head_dim, attention.rope, attention.scale)
    common = (shape.heads, shape.kv_heads, shape.head_dim, shape.rope, shape.head_dim**-0.5)
    stores = attention.owns_keys and attention.owns_values and not attention.norms_values
    return own == common and stores and attention.gate is None


class ContextWriter:
    """Projects the taps of committed rows into the draft layers' keys and values, in one native call."""

    def __init__(self, compiled: Library, fc: PackedLinear, projection: PackedLinear, bias: Tensor | None) -> None:
        self._library = compiled
        self._fc = fc
        self._owners = projection, bias  # the struct has only their addresses, so they are kept alive here
        self._projection = projection.struct(bias)

    @classmethod
    def make(cls, fc: Matrix, projection: Matrix, bias: Tensor | None) -> ContextWriter | None:
        compiled, own_fc, own_projection = library(), packed(fc), packed(projection)
        if compiled is None or own_fc is None or own_projection is None:
            return None
        return cls(compiled, own_fc, own_projection, bias)

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
        write_context(
            self._library,
            SlipContext(
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
            ),
        )
