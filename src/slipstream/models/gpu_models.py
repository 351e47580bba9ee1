"""Targets and drafters as a GPU runs them: embedding, stack and head around rows that live on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.gpu.kernels import GpuKernels
from slipstream.kernels.gpu.rows import DeviceRows
from slipstream.kernels.matmul import Matrix
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.gpu_heads import device_heads
from slipstream.models.gpu_stack import GpuContext, GpuStack, RotaryPair
from slipstream.models.rope import RotaryTable
from slipstream.models.weights import Embedding


class GpuTarget:
    """A target whose weights are on a device."""

    def __init__(self, kernels: GpuKernels, decoder: Decoder, positions: int, device: torch.device) -> None:
        self.decoder = decoder
        self.vocab_size = decoder.config.vocab_size
        self._kernels = kernels
        rotary = rotary_pair(decoder.rotary, positions, device)
        self._stack = GpuStack(kernels, decoder.config, decoder.layers, decoder.norm, rotary)

    def run(
        self, rows: DeviceRows, keys: Tensor, values: Tensor, tap_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Normed hidden rows and taps."""
        residual = self._kernels.embed(self.decoder.embed, rows.tokens)
        return self._stack.run(residual, rows, keys, values, tap_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        return logits(self._kernels, self.decoder.head, hidden)


class GpuDrafter:
    """A drafter (a variant of one) on the target's device."""

    def __init__(
        self, kernels: GpuKernels, drafter: DFlashDrafter, target: Decoder, window: int, positions: int,
        device: torch.device,
    ) -> None:
        config = drafter.config
        if config.parts.tap_norms or config.parts.context_norm or drafter.known_tokens is not None:
            raise ConfigError(f"{config.label} has parts that do not run on a GPU yet", "use --device cpu")
        self.drafter = drafter
        self.block_size = config.block_size
        self.first_slot = config.first_slot
        self.proposals = config.proposals
        self.taps = config.target_layer_ids
        self._kernels = kernels
        self._window = window
        # heads that remember the whole path stay on the host
        self.heads = device_heads(drafter.heads, device) if drafter.heads is not None else None
        self.on_device = drafter.heads is None or self.heads is not None
        self.candidate_limit = drafter.heads.candidate_limit if drafter.heads is not None else 0
        self._embed: Embedding = drafter.embed or target.embed
        self._head: Matrix = drafter.head or target.draft_head
        rotary = rotary_pair(drafter.rotary, positions, device)
        self._stack = GpuStack(kernels, config, drafter.layers, drafter.norm, rotary)
        self.context = GpuContext(
            kernels, drafter.fc, drafter.context_kv, drafter.context_bias, drafter.hidden_norm,
            drafter.context_k_norm[:, 0].contiguous(), config.rms_eps, rotary,
        )

    def lay_out(self, rows: DeviceRows, anchors: Tensor, page_tokens: int) -> None:
        """Blocks of masks behind the anchors."""
        self._kernels.block_rows(rows, anchors, self.drafter.config.mask_token_id, self._window, page_tokens)

    def run(self, rows: DeviceRows, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden rows of the blocks and their logits."""
        residual = self._kernels.embed(self._embed, rows.tokens)
        scale = self.drafter.config.input_embedding_scale
        if scale is not None:
            residual.mul_(scale)
        hidden, _ = self._stack.run(residual, rows, keys, values)
        return hidden, self.drafter.shape_logits(logits(self._kernels, self._head, hidden))


def logits(kernels: GpuKernels, head: Matrix, hidden: Tensor) -> Tensor:
    """In fp32: bf16 is too coarse to rank a vocabulary by."""
    out = torch.empty(hidden.shape[0], head.out_features, dtype=torch.float32, device=hidden.device)
    return kernels.multiply(head, hidden, out)


def rotary_pair(table: RotaryTable, positions: int, device: torch.device) -> RotaryPair:
    cos, sin = table.tables(positions)
    return RotaryPair(cos[:positions].to(device), sin[:positions].to(device))
