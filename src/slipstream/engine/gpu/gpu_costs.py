"""Times device steps of every width once, before the policy makes its first decision from those times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import torch

from slipstream.engine.gpu.decode_step import DecodeStep, drafted_widths
from slipstream.kernels.gpu.device_rows import LEAST_ROWS
from slipstream.kernels.gpu.expert_mixture import ExpertStack
from slipstream.kernels.gpu.tree_growth import MOST_ROWS
from slipstream.models.decoder import Decoder
from slipstream.models.gpu.device_models import GpuDrafter
from slipstream.models.moe import routed_experts
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.text_drafts import MOST_TEXT_NODES
from slipstream.types import Progress

_ROWS = (16, 32, 64, 128, 256)  # rows of the steps that are timed; the cost table interpolates between them
_FEW = (4, 8)  # rows of steps that are padded to 16 rows; they take as long, except that they read fewer experts
_ROUNDS = 8  # runs of each step, of which the fastest counts; with fewer, a disturbed run may be taken for the cost
StepMaker = Callable[[int, int, GpuDrafter | None, bool], tuple[DecodeStep, Callable[[], None]]]
_TEXT_DRAFT_MS = 0.01  # the least time of a draft, and its time without a drafter; the cost table refuses 0


@torch.inference_mode()
def measure_costs(
    step_of: StepMaker,
    drafter: GpuDrafter | None,
    most_rows: int,
    most_sequences: int,
    device: torch.device,
    progress: Progress | None,
    experts_ms: Callable[[int], float] = lambda rows: 0.0,
) -> CostTable:
    """Times steps without sequences, which read weights and launch kernels; real steps teach what attention costs.

    Rows that belong to no sequence choose no experts, so the time of reading experts (`experts_ms`) is added.
    """
    widths = [rows for rows in _ROWS if rows <= min(most_rows, most_sequences * MOST_ROWS)]
    timed: dict[int, float] = {}
    for done, rows in enumerate(widths):
        sequences = max(1, rows // MOST_ROWS)
        _, run = step_of(sequences, rows // sequences, drafter, False)
        timed[rows] = _milliseconds(run, device)
        if progress is not None:
            progress("measuring step costs", done + 1, len(widths) + 1)
    # Timing captures the widths that one sequence is likely to use, so that no answer has to wait for a capture.
    drafted = {rows: _milliseconds(step_of(1, rows, drafter, True)[1], device) for rows in drafted_widths(1, most_rows)}
    draft_ms = max(_TEXT_DRAFT_MS, drafted[LEAST_ROWS] - timed[LEAST_ROWS])
    slots = drafter.proposals if drafter is not None else MOST_TEXT_NODES
    if progress is not None:
        progress("measuring step costs", 1, 1)
    timed = {rows: timed[max(rows, LEAST_ROWS)] + experts_ms(rows) for rows in (1, *_FEW, *timed)}
    table = CostTable(timed, {1: draft_ms, slots: draft_ms})
    for rows in widths:
        table.teach(StepShape(1, rows, 0, sampled=False, branching=True), timed[rows])
    return table


def expert_bytes(target: Decoder, rows: int) -> float:
    """Returns the expected bytes of a target's experts that so many rows read, if each row chooses independently."""
    read = 0.0
    for routed in routed_experts(target.layers):
        shape, stacks = routed.shape, cast(Sequence[ExpertStack], (routed.gate_up, routed.down))
        left_out = (1.0 - shape.active / shape.experts) ** rows
        read += (1.0 - left_out) * sum(stack.nbytes for stack in stacks)
    return read


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """Returns the time of the fastest of a few runs, because a disturbance can only make a run longer."""
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
