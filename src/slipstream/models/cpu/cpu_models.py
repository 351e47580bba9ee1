"""Targets and drafters as a CPU runs them: one compiled pass where every part has a kernel, layer by layer elsewhere.

A model owns its passes and hands itself to them with every call. A reference back to the model would close a cycle, and
the weights of an unloaded model would stay in memory until Python collects such cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.native_stack import LayerPools, NativeStack, PassResult
from slipstream.kernels.cpu.torch_kernels import rms_norm, rotate
from slipstream.kernels.rows import RowBatch, RowPlaces
from slipstream.models.cpu.native_pass import ContextWriter, native_stack, packed
from slipstream.models.cpu.part_runs import CpuPass, KvLayers, biased, run_layer, side_rows, unweighted_norm
from slipstream.models.layers import Layer, LayerShape

if TYPE_CHECKING:
    from slipstream.models.decoder import Decoder
    from slipstream.models.dflash import DFlashDrafter


class CpuTarget:
    """The forward of a target whose weights are in the CPU's memory."""

    def __init__(self, shape: LayerShape, layers: Sequence[Layer], norm: Tensor) -> None:
        self._native = native_stack(shape, layers, norm)
        self._pools: tuple[KvLayers, LayerPools] | None = None

    def forward(
        self, model: Decoder, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden rows after the final norm, and the taps side by side."""
        if self._native is not None:
            done = self._run_native(self._native, model, batch, kv, tap_layers, ())
            return done.hidden, done.taps
        x = model.embed(batch.token_ids)
        step = _begin(model, x, batch, kv)
        recorded = {-1: x}
        for index, layer in enumerate(model.layers):
            x = run_layer(layer, x, step)
            if index in tap_layers:
                recorded[index] = x
        taps = torch.cat([recorded[index] for index in tap_layers], dim=-1) if tap_layers else None
        return rms_norm(x, model.norm, model.config.rms_eps), taps

    def native_logits(
        self, model: Decoder, batch: RowBatch, kv: KvLayers, tap_layers: Sequence[int], wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Logits of the wanted rows, and the taps, in one native call; None where that is not possible."""
        if self._native is None or not wanted:
            return None
        done = self._run_native(self._native, model, batch, kv, tap_layers, wanted)
        return None if done.logits is None else (done.logits, done.taps)

    def _run_native(
        self,
        stack: NativeStack,
        model: Decoder,
        batch: RowBatch,
        kv: KvLayers,
        tap_layers: Sequence[int],
        wanted: Sequence[int],
    ) -> PassResult:
        if self._pools is None or self._pools[0] is not kv:
            # Addresses are read once per set of pools. The set is kept with them, so that no other set can be
            # allocated at the same address while these addresses are in use.
            self._pools = kv, LayerPools([keys for keys, _ in kv], [values for _, values in kv])
        rotary = model.rotary.tables(batch.end)
        embedded = model.embed(batch.token_ids)
        return stack.run(batch, embedded, self._pools[1], rotary, tap_layers, wanted, packed(model.head))


def _begin(model: Decoder, x: Tensor, batch: RowBatch, kv: KvLayers) -> CpuPass:
    eps = model.config.rms_eps
    rotary = {rope: table.rows(batch.positions, batch.end) for rope, table in model.rotaries.items()}
    sides = side_rows(model.sides, x, batch.token_ids, eps) if model.sides is not None else None
    return CpuPass(batch, rotary, kv, eps, sides)


class CpuDrafter:
    """The passes of a drafter whose weights are in the CPU's memory."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        self._native = native_stack(drafter.config, drafter.layers, drafter.norm)
        self._pools: tuple[Tensor, LayerPools] | None = None  # the keys, and the addresses of all pools
        parts = drafter.config.parts
        plain = not parts.tap_norms and not parts.context_norm
        fc, projection, bias = drafter.fc, drafter.context_kv, drafter.context_bias
        self._context = ContextWriter.make(fc, projection, bias) if plain else None

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

    def forward(self, model: DFlashDrafter, x: Tensor, batch: RowBatch, keys: Tensor, values: Tensor) -> Tensor:
        """Hidden rows of the blocks after the final norm."""
        if self._native is not None:
            rotary = model.rotary.tables(batch.end)
            return self._native.run(batch, x, self._addresses(keys, values), rotary).hidden
        turns = {model.config.rope: model.rotary.rows(batch.positions, batch.end)}
        # The block stands after the context in the pools for the length of this pass.
        step = CpuPass(batch, turns, list(zip(keys, values, strict=True)), model.config.rms_eps)
        for layer in model.layers:
            x = run_layer(layer, x, step)
        return rms_norm(x, model.norm, model.config.rms_eps)

    def native_logits(
        self,
        model: DFlashDrafter,
        x: Tensor,
        batch: RowBatch,
        keys: Tensor,
        values: Tensor,
        wanted: Sequence[int],
        head: Matrix,
    ) -> tuple[Tensor, Tensor] | None:
        """All hidden rows and the wanted rows' logits under `head` in one native call; None if that is not possible."""
        own_head = packed(head)
        if self._native is None or own_head is None:
            return None
        rotary, pools = model.rotary.tables(batch.end), self._addresses(keys, values)
        done = self._native.run(batch, x, pools, rotary, wanted=wanted, head=own_head)
        return None if done.logits is None else (done.hidden, done.logits)

    def _addresses(self, keys: Tensor, values: Tensor) -> LayerPools:
        if self._pools is None or self._pools[0] is not keys:
            self._pools = keys, LayerPools(list(keys), list(values))
        return self._pools[1]


def _context_rows(model: DFlashDrafter, taps: Tensor) -> Tensor:
    eps = model.config.rms_eps
    if model.tap_norms is not None:
        each = taps.view(taps.shape[0], *model.tap_norms.shape)
        taps = (unweighted_norm(each, eps) * model.tap_norms).view_as(taps)
    return rms_norm(model.fc(taps), model.hidden_norm, eps)


def _project(model: DFlashDrafter, context: Tensor) -> Tensor:
    """Keys and values of all layers side by side."""
    if model.context_each is None:
        return model.context_kv(context)
    pairs = zip(model.input_norms, model.context_each, strict=True)
    return torch.cat([kv(rms_norm(context, norm, model.config.rms_eps)) for norm, kv in pairs], dim=-1)
