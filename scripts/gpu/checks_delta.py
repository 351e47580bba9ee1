"""Checks gated delta nets on a GPU against torch and for equal bits in every order of rows, and times a layer.

python scripts/gpu/checks_delta.py          # on the GPU
python scripts/gpu/checks_delta.py --tiny   # on a CPU under Triton's interpreter: finds typos, times nothing
"""

# mypy: disable-error-code="arg-type, call-arg, unused-ignore"

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from checks_elementwise import COPY_GB_S, Asked, median_us
from torch import Tensor

from slipstream.cache.gpu.device_states import GpuStateTensors
from slipstream.kernels.cpu.delta_rule import DeltaRule, DeltaShape
from slipstream.kernels.gpu.delta_net_launch import TRITON, DeltaKernels, DeviceStates, Replay
from slipstream.kernels.gpu.delta_reference import REFERENCE
from slipstream.kernels.gpu.device_rows import MAX_DEPTH, DeviceRows, padded_rows

SHAPES = {
    "qwen3.6-27b": DeltaShape(48, 16, 48, 128, 128, 4),
    "qwen3.6-35b-a3b": DeltaShape(30, 16, 32, 128, 128, 4, tiled=True),
}
TINY_SHAPES = {"tiny": DeltaShape(2, 1, 2, 5, 12, 3, tiled=True)}
SCRATCH = 10**6
EPS = 1e-6
PARTS = ("mix", "recur", "gate", "layer", "plan")


def parents_of(kind: str, rows: int) -> list[int]:
    """The parents of a chain, or of a tree as drafts grow it: a trunk with short branches."""
    if kind == "chain":
        return list(range(-1, rows - 1))
    trunk = max(1, rows // 4)
    return [row - 1 if row < trunk or row % 3 == 0 else (row * 7) % trunk for row in range(rows)]


def line_to(parents: Sequence[int], row: int) -> list[int]:
    return [*(line_to(parents, parents[row]) if parents[row] >= 0 else []), row]


@dataclass
class World:
    """Slots with random contents, and random results of every layer's matmuls for some rows."""

    shape: DeltaShape
    device: torch.device
    rows: int
    slots: int = 6

    def __post_init__(self) -> None:
        shape = self.shape
        self.tensors = GpuStateTensors(self.slots, shape, self.device)
        self.tensors.windows.copy_(self._random(*self.tensors.windows.shape))
        self.tensors.memories.copy_(0.1 * self._random(*self.tensors.memories.shape))
        self.rule = DeltaRule(
            shape,
            0.5 * self._random(shape.channels, shape.kernel),
            -self._random(shape.value_heads).abs(),
            self._random(shape.value_heads),
        )
        self.norm = self._random(shape.value_dim)
        width = shape.channels + shape.value_heads * shape.value_dim
        padded = padded_rows(self.rows)
        self.inputs = [self._random(padded, width).bfloat16() for _ in range(min(shape.layers, 4))]
        self.gates = [self._random(padded, 2 * shape.value_heads).bfloat16() for _ in self.inputs]
        self.out = torch.full((padded, width - shape.channels), torch.nan, device=self.device).bfloat16()

    def _random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device)

    def lay(self, kind: str, parents: Sequence[Sequence[int]], each: int) -> DeviceRows:
        rows = DeviceRows.empty("tree" if kind == "tree" else "chain", len(parents), each, 1, self.device, SCRATCH)
        rows.places.fill_(SCRATCH)
        for sequence, own in enumerate(parents):
            for row in range(len(own)):
                at, line = sequence * each + row, line_to(own, row) if kind == "tree" else range(row + 1)
                rows.positions[at], rows.places[at] = len(line) - 1, at
                if kind == "tree":
                    rows.paths[at, : len(line)] = torch.tensor(line)
        return rows

    def layer(
        self, kernels: DeltaKernels, rows: DeviceRows, states: DeviceStates, layer: int, first: int = 0
    ) -> Tensor:
        """Runs one layer's launches over the inputs from row `first` on, and returns their output."""
        place = layer % len(self.inputs)
        count = rows.tokens.shape[0]
        inputs, gates = (
            torch.nn.functional.pad(part[first : first + count], (0, 0, 0, max(0, first + count - part.shape[0])))
            for part in (self.inputs[place], self.gates[place])
        )
        out, channels = self.out[:count], self.shape.channels
        kernels.mix(inputs[:, :channels], gates, rows, self.rule, states, layer)
        kernels.recur(rows, states, layer)
        kernels.gate(inputs[:, channels:], self.norm, EPS, rows, states, out)
        return out

    def tree(
        self, kernels: DeltaKernels, parents: Sequence[int], source: int, first: int = 0
    ) -> tuple[DeviceStates, list[Tensor]]:
        rows = self.lay("tree", [parents], 1 << (len(parents) - 1).bit_length())
        states = self.tensors.over(rows, numbers(self.device, source), SCRATCH)
        kernels.plan(rows, states)
        return states, [self.read(kernels, rows, states, layer, first) for layer in range(self.shape.layers)]

    def read(self, kernels: DeltaKernels, rows: DeviceRows, states: DeviceStates, layer: int, first: int) -> Tensor:
        states.log.reads.fill_(torch.nan)
        self.layer(kernels, rows, states, layer, first)
        used = rows.places[: rows.rows] < SCRATCH
        return states.log.reads[: rows.rows][used].clone()

    def chain(self, kernels: DeltaKernels, count: int, source: int, destination: int, first: int = 0) -> list[Tensor]:
        rows = self.lay("chain", [range(count)], 1 << (count - 1).bit_length())
        saves = torch.full((rows.each,), -1, dtype=torch.int32, device=self.device)
        saves[count - 1] = destination
        states = self.tensors.over(rows, numbers(self.device, source), SCRATCH, saves)
        kernels.plan(rows, states)
        return [self.read(kernels, rows, states, layer, first) for layer in range(self.shape.layers)]

    def state(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.tensors.windows[slot].clone(), self.tensors.memories[slot].clone()


def numbers(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def commit(
    kernels: DeltaKernels, states: DeviceStates, path: Sequence[int], each: int, source: int, destination: int
) -> None:
    line = torch.full((1, MAX_DEPTH), -1, dtype=torch.int32, device=states.source.device)
    line[0, : len(path)] = torch.tensor(path)
    ends = [numbers(states.source.device, slot) for slot in (source, destination)]
    kernels.commit(states, Replay(*ends, line, numbers(states.source.device, len(path)), each))


def check(shape: DeltaShape, device: torch.device, count: int) -> list[str]:
    """Describes each fault in a sentence."""
    world, wrong = World(replace(shape, layers=2), device, 2 * count), []
    parents = parents_of("tree", count)
    path = max((line_to(parents, row) for row in range(count)), key=len)
    each = 1 << (count - 1).bit_length()
    found = []
    for kernels in (TRITON, REFERENCE):
        states, reads = world.tree(kernels, parents, 0)
        commit(kernels, states, path, each, 0, 1)
        found.append([*reads, *(part.float() for part in world.state(1))])
    for ours, theirs in zip(*found, strict=True):
        error = ((ours - theirs).abs() / (theirs.abs() + theirs.abs().mean())).max()
        if not error < 1e-3:
            wrong.append(f"a tree of {count} rows: off by {error:.2e} (relative)")
    return wrong + check_bits(world, count, parents, path)


def check_bits(world: World, count: int, parents: Sequence[int], path: Sequence[int]) -> list[str]:
    """Checks that single rows, chunks and a committed chain give the same outputs and states, and so does a branch."""
    wrong, each = [], 1 << (count - 1).bit_length()
    alone = [world.chain(TRITON, 1, row and 2, 2, row) for row in range(count)]
    reads = [torch.cat([step[layer] for step in alone]) for layer in range(world.shape.layers)]
    expected = world.state(2)

    def compare(
        way: str, found: Sequence[Tensor], wanted: Sequence[Tensor], slot: int, state: Sequence[Tensor]
    ) -> None:
        if not all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)):
            wrong.append(f"{count} rows {way} read something else than one by one")
        if not all(torch.equal(*pair) for pair in zip(world.state(slot), state, strict=True)):
            wrong.append(f"{count} rows {way} leave another state than one by one")

    for chunk in (3, 7, count):
        parts = [
            world.chain(TRITON, min(chunk, count - start), start and 3, 3, start) for start in range(0, count, chunk)
        ]
        compare(f"in chunks of {chunk}", [torch.cat(layer) for layer in zip(*parts, strict=True)], reads, 3, expected)
    states, found = world.tree(TRITON, parents_of("chain", count), 0)
    commit(TRITON, states, range(count), each, 0, 4)
    compare("in a chain", found, reads, 4, expected)
    states, found = world.tree(TRITON, parents, 0)
    commit(TRITON, states, path, each, 0, 5)
    branch = [world.inputs, world.gates]
    world.inputs, world.gates = ([part[[*path, *path]] for part in parts] for parts in branch)
    alone = [world.chain(TRITON, 1, row and 2, 2, row) for row in range(len(path))]
    world.inputs, world.gates = branch
    wanted = [torch.cat([step[layer] for step in alone]) for layer in range(world.shape.layers)]
    compare("of a tree", [own[list(path)] for own in found], wanted, 5, world.state(2))
    return wrong


def time_layer(name: str, shape: DeltaShape, device: torch.device, kind: str, count: int) -> str:
    """Microseconds of each launch of a layer; layers take turns, so that the L2 cache does not hold the states."""
    world = World(shape, device, count, slots=2)
    each = 1 << (count - 1).bit_length()
    saves = None
    if kind == "plain" or each > MAX_DEPTH:
        rows = world.lay("chain", [range(count)], each)
        saves = torch.full((each,), -1, dtype=torch.int32, device=device)
        saves[count - 1] = 1
    else:
        rows = world.lay("tree", [parents_of(kind, count)], each)
    states = world.tensors.over(rows, numbers(device, 0), SCRATCH, saves)
    TRITON.plan(rows, states)
    inputs, gates, channels = world.inputs[0], world.gates[0], shape.channels
    launches: dict[str, Callable[[int], None]] = {
        "mix": lambda layer: TRITON.mix(inputs[:, :channels], gates, rows, world.rule, states, layer),
        "recur": lambda layer: TRITON.recur(rows, states, layer),
        "gate": lambda layer: TRITON.gate(inputs[:, channels:], world.norm, EPS, rows, states, world.out),
    }
    took = {part: median_us([partial(run, layer) for layer in range(shape.layers)]) for part, run in launches.items()}
    together = [partial(run, layer) for layer in range(shape.layers) for run in launches.values()]
    took["layer"] = len(launches) * median_us(together)
    took["plan"] = median_us([lambda: TRITON.plan(rows, states)] * 8)
    floor = shape.state_bytes / shape.layers * (1 if saves is None else 2) / COPY_GB_S / 1e3
    parts = " ".join(f"{took[part]:>8.2f}" for part in PARTS)
    return f"{name:<16} {kind:<6} {count:>5} {parts} {floor:>9.2f}"


def time_commits(name: str, shape: DeltaShape, device: torch.device, taken: Sequence[int]) -> list[str]:
    """Times a commit of all layers, which reads and writes every state once."""
    world = World(shape, device, 16, slots=2)
    rows = world.lay("tree", [parents_of("chain", 16)], 16)
    states = world.tensors.over(rows, numbers(device, 0), SCRATCH)
    path = torch.arange(MAX_DEPTH, dtype=torch.int32, device=device)[None]
    lines = []
    for count in taken:
        replay = Replay(numbers(device, 0), numbers(device, 1), path, numbers(device, count), 16)
        us = median_us([partial(TRITON.commit, states, replay)] * 4)
        size = 2 * shape.state_bytes
        lines.append(
            f"{name:<16} commit of {count:>2} rows {us:>9.1f} us {size / us / 1e3:>7.0f} GB/s, "
            f"floor {size / COPY_GB_S / 1e3:.1f} us"
        )
    return lines


def main() -> None:
    asked = Asked.read(__doc__)
    tiny, device = asked.tiny, asked.device
    shapes = TINY_SHAPES if tiny else SHAPES
    kinds = (
        [("plain", 1), ("chain", 4), ("tree", 4)]
        if tiny
        else [("plain", 1), ("chain", 16), ("tree", 16), ("chain", 64), ("tree", 64), ("chain", 512)]
    )
    wrong, table = [], [f"{'shape':<16} {'rows':<12} {' '.join(f'{part:>8}' for part in PARTS)} {'floor us':>9}"]
    with torch.inference_mode():
        for name, shape in shapes.items():
            if asked.checks:
                for count in (4,) if tiny else (5, 16, 64):
                    wrong += [f"{name}: {sentence}" for sentence in check(shape, device, count)]
            if asked.times:
                table += [time_layer(name, shape, device, *kind) for kind in kinds]
                table += time_commits(name, shape, device, (2,) if tiny else (1, 4, 16))
    if asked.checks:
        print("\n".join(wrong) or "delta: all right, and the same bits on every way")
    if asked.times:
        print("\n".join(table))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
