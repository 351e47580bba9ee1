"""Times device steps of every width once, before the first decision is made from it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from slipstream.engine.gpu.step import DecodeStep
from slipstream.kernels.gpu.rows import LEAST_ROWS
from slipstream.models.gpu_models import GpuDrafter
from slipstream.speculative.costs import CostTable, StepShape

_ROWS = (16, 32, 64, 128, 256)
_ROUNDS = 8
Progress = Callable[[str, int, int], None]
StepMaker = Callable[[int, int, GpuDrafter | None, bool], tuple[DecodeStep, Callable[[], None]]]


@torch.inference_mode()
def measure_costs(
    step_of: StepMaker, drafter: GpuDrafter, most_rows: int, device: torch.device, progress: Progress | None
) -> CostTable:
    """Steps without sequences: what they take is weights and launches; attention is learnt from real ones."""
    widths = [rows for rows in _ROWS if rows <= most_rows]
    timed: dict[int, float] = {}
    for done, rows in enumerate(widths):
        sequences = max(1, rows // 64)
        _, run = step_of(sequences, rows // sequences, drafter, False)
        timed[rows] = _milliseconds(run, device)
        if progress is not None:
            progress("measuring step costs", done + 1, len(widths) + 1)
    # the widths that one sequence is likely to use are captured with it, not in the middle of an answer
    drafted = {rows: _milliseconds(step_of(1, rows, drafter, True)[1], device) for rows in widths if rows <= 64}
    draft_ms = max(0.01, drafted[LEAST_ROWS] - timed[LEAST_ROWS])
    if progress is not None:
        progress("measuring step costs", 1, 1)
    table = CostTable({1: timed[LEAST_ROWS], **timed}, {1: draft_ms, drafter.proposals: draft_ms})
    for rows, ms in timed.items():
        table.teach(StepShape(1, rows, 0, sampled=False, branching=True), ms)
    return table


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """The least of a few runs: what disturbs a run only ever makes it longer."""
    best = float("inf")
    for _ in range(_ROUNDS):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        best = min(best, (time.perf_counter() - began) * 1e3)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
