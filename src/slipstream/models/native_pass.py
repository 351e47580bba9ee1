"""Hands a stack of transformer layers to native code as a whole, where every part of it has a compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

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
from slipstream.models.layers import LayerShape, TransformerLayer


def native_stack(shape: LayerShape, layers: Sequence[TransformerLayer], norm: Tensor) -> NativeStack | None:
    """The layers as one native pass; None where some part of them is torch's to compute."""
    compiled = library()
    parts = [_parts(layer) for layer in layers]
    known = [part for part in parts if part is not None]
    patterns = {layer.pattern for layer in layers}
    fits = shape.head_dim % LANES == 0 and shape.head_dim <= MAX_DIM and len(patterns) <= MAX_PATTERNS
    if compiled is None or len(known) < len(parts) or not fits:
        return None
    numbers = StackShape(
        shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size, shape.rms_eps
    )
    return NativeStack(compiled, numbers, known, norm)


def packed(matrix: Matrix | None) -> PackedLinear | None:
    return matrix.packed if isinstance(matrix, NativeMatrix) else None


def _parts(layer: TransformerLayer) -> LayerParts | None:
    if type(layer) is not TransformerLayer:
        return None  # a family's own layers have parts that compiled code does not know
    qkv, output, gate_up, down = map(packed, (layer.qkv, layer.output, layer.gate_up, layer.down))
    convolved = layer.attention_conv is not None or layer.mlp_conv is not None
    if qkv is None or output is None or gate_up is None or down is None or convolved:
        return None
    return LayerParts(
        qkv,
        output,
        gate_up,
        down,
        layer.input_norm,
        layer.post_norm,
        layer.q_norm,
        layer.k_norm,
        layer.qkv_bias,
        layer.output_bias,
        layer.gate_up_bias,
        layer.down_bias,
        layer.pattern,
    )


class ContextWriter:
    """Taps of committed rows into the draft layers' keys and values, in one native call."""

    def __init__(self, compiled: Library, fc: PackedLinear, projection: PackedLinear, bias: Tensor | None) -> None:
        self._library = compiled
        self._fc = fc
        self._bias = bias
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
