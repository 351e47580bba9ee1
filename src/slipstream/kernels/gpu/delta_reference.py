"""The launchers of kernels/gpu/delta_net_launch.py in plain torch: the same operations, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cpu.delta_rule import DeltaRule, DeltaShape
from slipstream.kernels.cpu.torch_kernels import rms_norm, row_by_row
from slipstream.kernels.gpu.delta_net_launch import DeltaKernels, DeviceStates, Replay, is_line
from slipstream.kernels.gpu.delta_walk import BACK, KEEP, LAST, ROW, SHELF
from slipstream.kernels.gpu.device_rows import DeviceRows


def plan_reference(rows: DeviceRows, states: DeviceStates) -> None:
    walk = states.walk
    for sequence in range(rows.sequences):
        first = sequence * rows.each
        used = int((rows.places[first : first + rows.each] < states.scratch_place).sum())
        walk.counts[sequence] = used
        if not is_line(rows):
            for place, step in enumerate(_steps([_path_to(rows, sequence, row) for row in range(used)])):
                walk.steps[sequence, place] = step


def _steps(paths: list[list[int]]) -> list[int]:
    """Returns the steps of a walk through a tree: rows follow their parents, and the largest branch comes last."""
    sizes = [sum(row in path for path in paths) for row in range(len(paths))]
    steps: list[int] = []

    def visit(parent: list[int], shelf: int) -> None:
        branches = sorted((row for row, path in enumerate(paths) if path[:-1] == parent), key=lambda row: sizes[row])
        back = 0
        for row in branches:
            last, keep = sizes[row] == 1, int(sizes[row] > 1 and row != branches[-1])
            steps.append(row + LAST.value * last + KEEP.value * keep + BACK.value * back + SHELF.value * shelf)
            visit(paths[row], shelf + keep)
            back = int(not last)

    visit([], 0)
    return steps


def _path_to(rows: DeviceRows, sequence: int, row: int) -> list[int]:
    """Returns the rows that lead to a row, including the row itself."""
    if is_line(rows):
        return list(range(row + 1))
    at = sequence * rows.each + row
    depth = int(rows.positions[at]) - int(rows.base[sequence])
    return rows.paths[at, : depth + 1].tolist()


def mix_reference(
    inputs: Tensor, gates: Tensor, rows: DeviceRows, rule: DeltaRule, states: DeviceStates, layer: int
) -> None:
    shape, log = states.shape, states.log
    keys, values, write, left, kept = log.of(layer)
    used, seen = [], []
    for row in (rows.places[: rows.rows] < states.scratch_place).nonzero().flatten().tolist():
        sequence, own = divmod(row, rows.each)
        line = [sequence * rows.each + ancestor for ancestor in _path_to(rows, sequence, own)[-shape.kernel :]]
        window = states.windows[int(states.source[sequence]), layer]
        used.append(row)
        seen.append(torch.cat((window, inputs[line]))[-shape.kernel :])
    if not used:
        return
    queries, own_keys, own_values = rule.mix(torch.stack(seen).float())
    written, rest = rule.gates(*gates[used].float().chunk(2, dim=-1))
    log.queries[used], log.products[used] = queries, (queries * own_keys).sum(-1)
    keys[used], values[used], write[used], left[used] = own_keys, own_values, written, rest
    kept[used] = inputs[used]


def _advanced(shape: DeltaShape, state: Tensor, row: int, brought: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Returns a state [heads, value dim, key dim] after a row, and what the row has added to it."""
    keys, values, write, left, _ = brought
    key, rest = shape.for_values(keys[row][None])[0, :, None, :], left[row][:, None]
    learnt = (values[row] - (state * key).sum(-1) * rest) * write[row][:, None]
    return state * rest[..., None] + key * learnt[..., None], learnt


def recur_reference(rows: DeviceRows, states: DeviceStates, layer: int) -> None:
    shape, log = states.shape, states.log
    brought = log.of(layer)
    for sequence in range(rows.sequences):
        first, slot = sequence * rows.each, int(states.source[sequence])
        behind = {-1: (states.memories[slot, layer].clone(), states.windows[slot, layer].clone())}
        for step in range(int(states.walk.counts[sequence])):
            own = step if is_line(rows) else int(states.walk.steps[sequence, step]) & ROW.value
            row, path = first + own, _path_to(rows, sequence, own)
            state, window = behind[path[-2] if len(path) > 1 else -1]
            query = shape.for_values(log.queries[row][None])[0, :, None, :]
            product = shape.for_values(log.products[row][None, :, None])[0]
            recalled = (state * query).sum(-1) * brought[3][row][:, None]
            state, learnt = _advanced(shape, state, row, brought)
            log.reads[row] = recalled + product * learnt
            window = torch.cat((window, brought[4][row][None]))[1:]
            if states.saves is not None and states.saves[row] >= 0:
                states.memories[int(states.saves[row]), layer] = state
                states.windows[int(states.saves[row]), layer] = window
            if is_line(rows):
                behind.clear()
            behind[own] = state, window


def gate_reference(
    gates: Tensor, weight: Tensor, eps: float, rows: DeviceRows, states: DeviceStates, out: Tensor
) -> None:
    shape, count = states.shape, out.shape[0]
    read = rms_norm(states.log.reads[:count], weight, eps)
    weighed = read * row_by_row(F.silu, gates.float()).view(count, shape.value_heads, shape.value_dim)
    unused = (rows.places >= states.scratch_place)[:, None]
    out.copy_(weighed.flatten(1).masked_fill(unused, 0.0))


def commit_reference(states: DeviceStates, replay: Replay) -> None:
    shape = states.shape
    for sequence, taken in enumerate(replay.taken.tolist()):
        if not taken:
            continue
        first = replay.first + sequence * replay.each
        line = [first + row for row in replay.path[sequence, :taken].tolist()]
        slot, wanted = int(replay.source[sequence]), int(replay.destination[sequence])
        for layer in range(shape.layers):
            brought = states.log.of(layer)
            state = states.memories[slot, layer].clone()
            for row in line:
                state, _ = _advanced(shape, state, row, brought)
            window = torch.cat((states.windows[slot, layer], brought[4][line]))
            states.memories[wanted, layer], states.windows[wanted, layer] = state, window[-shape.window :]


def swap_reference(source: Tensor, destination: Tensor, taken: Tensor) -> None:
    old, new, moved = source.clone(), destination.clone(), taken > 0
    source.copy_(torch.where(moved, new, old))
    destination.copy_(torch.where(moved, old, new))


REFERENCE = DeltaKernels(
    plan_reference, mix_reference, recur_reference, gate_reference, commit_reference, swap_reference
)
