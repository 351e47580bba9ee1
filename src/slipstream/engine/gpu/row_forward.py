"""One pass of the target over rows that the host laid out, with the logits brought to the host.

Steps that run as a whole on the device (`decode_step.py`) leave their logits there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.executor import ForwardResult, RowWork, bucket
from slipstream.engine.gpu.decode_loop import device_drafter
from slipstream.engine.gpu.row_passes import Passes
from slipstream.engine.variants import DraftVariants
from slipstream.kernels.gpu.device_rows import LEAST_ROWS


def forward_rows(passes: Passes, variants: DraftVariants, works: Sequence[RowWork]) -> ForwardResult:
    """Runs chunks of known tokens one after the other and all proposals together.

    The host waits for the device once, when the logits of all work items are copied.
    """
    logits: dict[int, Tensor] = {}
    starts = [0] * len(works)
    taps: Tensor | None = None
    proposals = [item for item, work in enumerate(works) if work.proposal is not None]
    for item, work in enumerate(works):
        if work.proposal is None:
            drafter = device_drafter(variants[work.state.variant]) if work.state.drafting else None
            hidden = passes.chunk(work, drafter)
            logits[item] = _logits(passes, hidden[work.rows - work.logit_rows :])
    if proposals:
        verified = [works[item] for item in proposals]
        base = variants.drafter if any(work.state.drafting for work in verified) else None
        tapped = base.drafter.config.target_layer_ids if base is not None else ()
        parts, taps, each = passes.verify(verified, tapped)
        for index, (item, own) in enumerate(zip(proposals, parts, strict=True)):
            starts[item] = index * each
            logits[item] = _logits(passes, own[works[item].rows - works[item].logit_rows :])
    brought = _to_host([logits[item] for item in range(len(works))])
    # A chunk of known tokens has written its draft context itself (`Passes.chunk`).
    return ForwardResult(works, brought, taps, starts, frozenset(range(len(works))) - frozenset(proposals))


def _logits(passes: Passes, hidden: Tensor) -> Tensor:
    """Returns the logits of some rows, which are padded to a shape whose sums do not depend on the number of rows."""
    if not hidden.shape[0]:
        return torch.empty(0, passes.target.vocab_size, device=hidden.device)
    missing = bucket(hidden.shape[0], LEAST_ROWS) - hidden.shape[0]
    padded = torch.cat((hidden, hidden.new_zeros(missing, hidden.shape[1]))) if missing else hidden
    return passes.target.logits(padded)[: hidden.shape[0]]


def _to_host(parts: list[Tensor]) -> list[Tensor]:
    """Copies all parts to the host at once; if they are empty, the host does not wait."""
    there = parts[0] if len(parts) == 1 else torch.cat(parts)
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    if len(there):
        here.copy_(there, non_blocking=True)
        if there.is_cuda:
            torch.cuda.current_stream(there.device).synchronize()
    return list(here.split([len(part) for part in parts]))
