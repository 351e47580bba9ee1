"""The runner on a GPU: the same works, as passes over rows on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.gpu.passes import Passes
from slipstream.engine.gpu.step import bucket
from slipstream.engine.runner import ForwardResult, RowWork, Runner
from slipstream.engine.variants import DraftVariants
from slipstream.kernels.gpu.rows import LEAST_ROWS
from slipstream.speculative.draft import BlockDrafter


class GpuRunner(Runner):
    """Logits come to the host here; the steps that matter (engine/gpu/step.py) leave them where they are."""

    def __init__(self, passes: Passes, drafter: BlockDrafter | None) -> None:
        self.target = passes.target.decoder
        self.variants = DraftVariants(drafter)
        self._passes = passes

    def forward(self, works: Sequence[RowWork]) -> ForwardResult:
        """Chunks of known tokens one after the other, all proposals together."""
        tapped = self.drafter.drafter.config.target_layer_ids if self.drafter and self._taps_wanted(works) else ()
        batches = [[work] for work in works if work.proposal is None]
        proposals = [work for work in works if work.proposal is not None]
        if proposals:
            batches.append(proposals)
        logits: dict[int, Tensor] = {}
        starts: dict[int, int] = {}
        taps: list[Tensor] = []
        done = 0
        for batch in batches:
            hidden, tap, each = self._passes.verify(batch, tapped)
            for index, (work, own) in enumerate(zip(batch, hidden, strict=True)):
                starts[id(work)] = done + index * each
                logits[id(work)] = self._logits(own[work.rows - work.logit_rows :])
            if tap is not None:
                taps.append(tap)
                done += tap.shape[0]
        return ForwardResult(
            works, [logits[id(work)] for work in works], torch.cat(taps) if taps else None,
            [starts[id(work)] for work in works],
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        if not hidden.shape[0]:
            return torch.empty(0, self.target.config.vocab_size)
        missing = bucket(hidden.shape[0], LEAST_ROWS) - hidden.shape[0]
        padded = torch.cat((hidden, hidden.new_zeros(missing, hidden.shape[1]))) if missing else hidden
        return self._passes.target.logits(padded)[: hidden.shape[0]].cpu()
