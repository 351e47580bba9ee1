"""Targets and drafters as a CPU runs them: one compiled pass where every part has a kernel, layer by layer elsewhere.

A model owns its passes. Where a pass needs more of the model than its layers, the model is an argument of the call. A
reference back to the model would close a cycle, and the weights of an unloaded model would stay in memory until Python
collects such cycles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.torch_kernels import rms_norm, rotate
from slipstream.kernels.rows import RowBatch, RowPlaces
from slipstream.models.cpu.native_pass import ContextWriter, KvLayers, as_native, native_stack
from slipstream.models.cpu.part_runs import CpuPass, biased, run_layer, unweighted_norm
from slipstream.models.layers import Layer, LayerShape
from slipstream.models.rope import RopeConfig, RotaryTable

if TYPE_CHECKING:
    from slipstream.models.dflash import DFlashDrafter


class CpuStack:
    """The layers of a target or a drafter with their final norm."""

    def __init__(
        self, shape: LayerShape, layers: Sequence[Layer], norm: Tensor, rotaries: Mapping[RopeConfig, RotaryTable]
    ) -> None:
        self._native = native_stack(shape, layers, norm)
        self._layers, self._norm, self._eps = layers, norm, shape.rms_eps
        self._rotaries = rotaries

    def run(
        self,
        x: Tensor,
        batch: RowBatch,
        kv: KvLayers,
        head: Matrix | None,
        wanted: Sequence[int],
        tap_layers: Sequence[int] = (),
        sides: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns hidden rows after the final norm, the taps side by side, and the wanted rows' logits under `head`.

        `x` has the embeddings of the rows.
        """
        if self._native is not None:
            (table,) = self._rotaries.values()  # compiled code takes layers only if all of them rotate alike
            rotary = table.tables(batch.end)
            hidden, taps, logits = self._native.run(x, batch, kv, rotary, as_native(head), wanted, tap_layers)
            if logits is not None:
                return hidden, taps, logits
        else:
            hidden, taps = self._by_layer(x, batch, kv, tap_layers, sides)
        return hidden, taps, head(hidden[torch.tensor(wanted)]) if wanted and head is not None else hidden[:0]

    def _by_layer(
        self, x: Tensor, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int], sides: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rotary = {rope: table.rows(batch.positions, batch.end) for rope, table in self._rotaries.items()}
        step = CpuPass(batch, rotary, kv, self._eps, sides)
        recorded = {-1: x}
        for index, layer in enumerate(self._layers):
            x = run_layer(layer, x, step)
            if index in tap_layers:
                recorded[index] = x
        taps = torch.cat([recorded[index] for index in tap_layers], dim=-1) if tap_layers else None
        return rms_norm(x, self._norm, self._eps), taps


class CpuDrafter:
    """The passes of a drafter whose weights are in the CPU's memory."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        config = drafter.config
        self._stack = CpuStack(config, drafter.layers, drafter.norm, {config.rope: drafter.rotary})
        self._kv: tuple[Tensor, KvLayers] | None = None  # the keys of all layers, and the pools layer by layer
        fc, projection = as_native(drafter.fc), as_native(drafter.context_kv)
        self._context: ContextWriter | None = None
        plain = not config.parts.tap_norms and not config.parts.context_norm
        if fc is not None and projection is not None and plain:
            self._context = ContextWriter(fc, projection, drafter.context_bias)

    def write_context(
        self, model: DFlashDrafter, taps: Tensor, places: RowPlaces, keys: Tensor, values: Tensor
    ) -> None:
        """Projects the taps of committed rows into all layers' keys and values [layers, pages, heads, tokens, dim]."""
        config = model.config
        if self._context is not None:
            rotary = model.rotary.tables(places.end)
            norms = model.hidden_norm, model.context_k_norm
            self._context.write(taps, places, rotary, keys, values, *norms, config.rms_eps)
            return
        projected = biased(_project(model, _context_rows(model, taps)), model.context_bias)
        projected = projected.view(-1, config.layers, 2, config.kv_heads, config.head_dim)
        # One call serves all layers, because the norms' weights are broadcast over them.
        normed = unweighted_norm(projected[:, :, 0], config.rms_eps) * model.context_k_norm
        cos, sin = model.rotary.rows(places.positions, places.end)
        keys[:, places.pages, :, places.offsets] = rotate(normed, cos[:, None], sin[:, None])
        values[:, places.pages, :, places.offsets] = projected[:, :, 1]

    def run(
        self, x: Tensor, batch: RowBatch, keys: Tensor, values: Tensor, wanted: Sequence[int], head: Matrix | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the blocks' hidden rows and wanted rows' logits; a block stands after its context in the pools."""
        if self._kv is None or self._kv[0] is not keys:
            self._kv = keys, list(zip(keys, values, strict=True))
        hidden, _, logits = self._stack.run(x, batch, self._kv[1], head, wanted)
        return hidden, logits


def _context_rows(model: DFlashDrafter, taps: Tensor) -> Tensor:
    eps = model.config.rms_eps
    if model.tap_norms is not None:
        each = taps.view(taps.shape[0], *model.tap_norms.shape)
        taps = (unweighted_norm(each, eps) * model.tap_norms).view_as(taps)
    return rms_norm(model.fc(taps), model.hidden_norm, eps)


def _project(model: DFlashDrafter, context: Tensor) -> Tensor:
    """Returns keys and values of all layers side by side."""
    if model.context_each is None:
        return model.context_kv(context)
    pairs = zip(model.input_norms, model.context_each, strict=True)
    return torch.cat([kv(rms_norm(context, norm, model.config.rms_eps)) for norm, kv in pairs], dim=-1)
