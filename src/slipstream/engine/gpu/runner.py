"""The runner on a GPU: the same works, as passes over rows on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.gpu.passes import GpuBlocks, Passes
from slipstream.engine.gpu.step import bucket
from slipstream.engine.runner import ForwardResult, RowWork, Runner
from slipstream.engine.variants import DraftVariants
from slipstream.kernels.gpu.device_rows import LEAST_ROWS
from slipstream.models.gpu.device_models import GpuDrafter
from slipstream.speculative.draft import BlockDrafter


class GpuRunner(Runner):
    """Logits come to the host here; the steps that matter (engine/gpu/step.py) leave them where they are."""

    def __init__(self, passes: Passes, drafter: BlockDrafter | None) -> None:
        self.target = passes.target.decoder
        self.variants = DraftVariants(drafter)
        self._passes = passes

    def forward(self, works: Sequence[RowWork]) -> ForwardResult:
        """Chunks of known tokens one after the other, all proposals together; the host waits once, for all logits."""
        logits: dict[int, Tensor] = {}
        starts: dict[int, int] = {}
        taps: Tensor | None = None
        for work in works:
            if work.proposal is None:
                hidden = self._passes.chunk(work, self._context_of(work))
                logits[id(work)] = self._logits(hidden[work.rows - work.logit_rows :])
        proposals = [work for work in works if work.proposal is not None]
        if proposals:
            drafter = self.drafter if self._taps_wanted(proposals) else None
            tapped = drafter.drafter.config.target_layer_ids if drafter is not None else ()
            parts, taps, each = self._passes.verify(proposals, tapped)
            for index, (work, own) in enumerate(zip(proposals, parts, strict=True)):
                starts[id(work)] = index * each
                logits[id(work)] = self._logits(own[work.rows - work.logit_rows :])
        return ForwardResult(
            works, _brought([logits[id(work)] for work in works]), taps, [starts.get(id(work), 0) for work in works]
        )

    def write_context(self, result: ForwardResult, kept: Sequence[tuple[int, Sequence[int]]]) -> None:
        """What is kept of proposals; known tokens became draft context on their way."""
        super().write_context(result, [own for own in kept if result.works[own[0]].proposal is not None])

    def _context_of(self, work: RowWork) -> GpuDrafter | None:
        """Whose draft context a sequence needs."""
        if not work.state.drafting:
            return None
        blocks = self.variants[work.state.variant].blocks
        assert isinstance(blocks, GpuBlocks)
        return blocks.gpu

    def _logits(self, hidden: Tensor) -> Tensor:
        if not hidden.shape[0]:
            return torch.empty(0, self.target.config.vocab_size, device=hidden.device)
        missing = bucket(hidden.shape[0], LEAST_ROWS) - hidden.shape[0]
        padded = torch.cat((hidden, hidden.new_zeros(missing, hidden.shape[1]))) if missing else hidden
        return self._passes.target.logits(padded)[: hidden.shape[0]]


def _brought(parts: list[Tensor]) -> list[Tensor]:
    """All of them on the host, in one copy; where there is nothing to bring nobody waits."""
    there = parts[0] if len(parts) == 1 else torch.cat(parts)
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    if len(there):
        here.copy_(there, non_blocking=True)
        if there.is_cuda:
            torch.cuda.current_stream(there.device).synchronize()
    return list(here.split([len(part) for part in parts]))
