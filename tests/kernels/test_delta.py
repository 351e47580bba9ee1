"""Delta nets on a GPU give the numbers of the CPU's step, and the same bits in whatever way rows are batched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from slipstream.cache.gpu.device_states import GpuStateTensors, LoggedRows
from slipstream.kernels.cpu.delta_rule import DeltaShape, DeltaStep
from slipstream.kernels.gpu.delta_net_launch import TRITON, DeltaKernels, DeviceStates, Replay, most_shelves
from slipstream.kernels.gpu.delta_reference import REFERENCE
from slipstream.kernels.gpu.device_rows import MAX_DEPTH, DeviceRows
from tests.deltas import SHAPE, draw, make_rule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDE = DeltaShape(layers=2, key_heads=2, value_heads=4, key_dim=16, value_dim=24, kernel=3, tiled=True)
SMALL = DeltaShape(layers=1, key_heads=1, value_heads=2, key_dim=5, value_dim=12, kernel=3)  # the interpreter is slow
KINDS = pytest.mark.parametrize(
    ("kernels", "shape"),
    [
        (REFERENCE, SHAPE),
        (REFERENCE, WIDE),
        (REFERENCE, replace(WIDE, kernel=2, layers=1)),
        (TRITON, SMALL),
        (TRITON, replace(SMALL, layers=2, key_heads=2, value_dim=3, kernel=4, tiled=True)),
    ],
    ids=["torch", "torch-wide", "torch-short", "triton", "triton-tiled"],
)
SOME_KINDS = pytest.mark.parametrize(
    ("kernels", "shape"), [(REFERENCE, SHAPE), (REFERENCE, WIDE), (TRITON, SMALL)], ids=["torch", "wide", "triton"]
)
SCRATCH = 1000  # the place of padding rows
TREE = [-1, 0, 1, 0, 2, 3]


@dataclass(frozen=True, slots=True)
class Stretch:
    """The rows of one sequence: the numbers of their inputs, and their parents (None: a chain)."""

    inputs: Sequence[int]
    parents: Sequence[int] | None = None

    def line(self, row: int) -> list[int]:
        if self.parents is None:
            return list(range(row + 1))
        return [*(self.line(self.parents[row]) if row else []), row]


def lay_rows(stretches: Sequence[Stretch | None], each: int, chain: bool) -> DeviceRows:
    rows = DeviceRows.empty("chain" if chain else "tree", len(stretches), each, 1, DEVICE, SCRATCH)
    rows.places.fill_(SCRATCH)
    for sequence, stretch in enumerate(stretches):
        rows.base[sequence] = 7 * sequence
        rows.positions[sequence * each : (sequence + 1) * each] = 7 * sequence
        for row in range(len(stretch.inputs)) if stretch is not None else ():
            assert stretch is not None
            at, line = sequence * each + row, stretch.line(row)
            rows.positions[at], rows.places[at] = 7 * sequence + len(line) - 1, 20 * sequence + row
            if not chain:
                rows.paths[at, : len(line)] = torch.tensor(line)
    return rows


class World:
    """States on a device, and layers whose rows are identified by a number."""

    def __init__(self, shape: DeltaShape, kernels: DeltaKernels, slots: int = 6) -> None:
        self.shape, self.kernels = shape, kernels
        self.rules = [make_rule(shape, seed=100 * layer).to(DEVICE) for layer in range(shape.layers)]
        self.norm = draw(shape.value_dim, seed=5).to(DEVICE)
        self.tensors = GpuStateTensors(slots, shape, DEVICE)
        for slot in range(slots):
            self.tensors.windows[slot] = draw(*self.tensors.windows.shape[1:], seed=slot).to(DEVICE)
            self.tensors.memories[slot] = draw(*self.tensors.memories.shape[1:], seed=50 + slot).to(DEVICE)

    def inputs(self, layer: int, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns what the matmuls give: the convolution's inputs and then the output's gate, and the other gates."""
        width = self.shape.channels + self.shape.value_heads * self.shape.value_dim
        both, gates = (
            torch.stack([draw(size, seed=31 * number + layer) for number in numbers]).bfloat16().to(DEVICE)
            for size in (width, 2 * self.shape.value_heads)
        )
        return both, gates

    def run(self, rows: DeviceRows, stretches: Sequence[Stretch | None], states: DeviceStates) -> list[Tensor]:
        """Returns what every layer's rows read, and the same after norm and gate."""
        found = []
        self.kernels.plan(rows, states)
        for layer, rule in enumerate(self.rules):
            both, gates = (
                torch.full((rows.tokens.shape[0], part.shape[1]), torch.nan, device=DEVICE, dtype=torch.bfloat16)
                for part in self.inputs(layer, [0])
            )
            for sequence, stretch in enumerate(stretches):
                if stretch is not None:
                    own = slice(sequence * rows.each, sequence * rows.each + len(stretch.inputs))
                    both[own], gates[own] = self.inputs(layer, stretch.inputs)
            out = torch.full((both.shape[0], both.shape[1] - self.shape.channels), torch.nan, device=DEVICE)
            states.log.reads.fill_(torch.nan)
            self.kernels.mix(both[:, : self.shape.channels], gates, rows, rule, states, layer)
            self.kernels.recur(rows, states, layer)
            weighed = out.bfloat16()
            self.kernels.gate(both[:, self.shape.channels :], self.norm, 1e-5, rows, states, weighed)
            found += [states.log.reads[: rows.rows].clone(), weighed]
        return found

    def tree(self, stretches: Sequence[Stretch | None], slots: Sequence[int], each: int) -> tuple[Logged, list[Tensor]]:
        rows = lay_rows(stretches, each, chain=False)
        states = self.tensors.over(rows, numbers(*slots), SCRATCH)
        return Logged(self, rows, states, slots), self.run(rows, stretches, states)

    def chain(self, stretch: Stretch, slot: int, saves: dict[int, int], each: int) -> list[Tensor]:
        rows = lay_rows([stretch], each, chain=True)
        wanted = torch.full((each,), -1, dtype=torch.int32, device=DEVICE)
        for row, destination in saves.items():
            wanted[row] = destination
        return self.run(rows, [stretch], self.tensors.over(rows, numbers(slot), SCRATCH, wanted))

    def state(self, slot: int) -> list[Tensor]:
        return [self.tensors.windows[slot].clone(), self.tensors.memories[slot].clone()]


@dataclass(frozen=True, slots=True)
class Logged:
    world: World
    rows: DeviceRows
    states: DeviceStates
    slots: Sequence[int]

    def commit(self, paths: Sequence[Sequence[int]], destinations: Sequence[int]) -> None:
        """Commits as a whole device step does."""
        path = torch.full((len(paths), MAX_DEPTH), -1, dtype=torch.int32, device=DEVICE)
        for sequence, own in enumerate(paths):
            path[sequence, : len(own)] = torch.tensor(own)
        taken = numbers(*(len(own) for own in paths))
        self.world.kernels.commit(
            self.states, Replay(numbers(*self.slots), numbers(*destinations), path, taken, self.rows.each)
        )

    def replay(self, item: int, path: Sequence[int], slot: int) -> None:
        """Commits as the host does."""
        rows = LoggedRows(self.world.kernels, self.states, self.rows.each, self.slots)
        self.world.tensors.write(slot, rows.after(item, path))


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(77.0), b.nan_to_num(77.0)) for a, b in zip(one, other, strict=True))


def cpu_step(world: World, stretches: Sequence[Stretch], slots: Sequence[int]) -> tuple[DeltaStep, list[Tensor]]:
    tensors = world.tensors
    step = DeltaStep(
        tensors.windows.float().cpu(),
        tensors.memories.mT.contiguous().cpu(),
        slots,
        [(len(own.inputs), own.parents) for own in stretches],
        [() for _ in stretches],
    )
    read = []
    for layer, rule in enumerate(world.rules):
        both, gates = world.inputs(layer, [number for own in stretches for number in own.inputs])
        host = rule.to(torch.device("cpu"))
        gated = host.gates(*gates.float().cpu().chunk(2, dim=-1))
        read.append(step.run(layer, host, both[:, : world.shape.channels].float().cpu(), *gated))
    return step, read


@KINDS
def test_rows_read_and_leave_what_they_do_on_the_cpu(shape: DeltaShape, kernels: DeltaKernels) -> None:
    world = World(shape, kernels)
    stretches = [Stretch(range(6), TREE), Stretch(range(20, 23), range(-1, 2))]
    step, expected = cpu_step(world, stretches, [4, 1])
    path = [0, 1, 2, 4]
    left = [list(step.after(0, path)), list(step.after(1, [0, 1]))]
    untouched = [part for slot in (1, 3, 4) for part in world.state(slot)]
    logged, found = world.tree([stretches[0], None, stretches[1]], [4, 6, 1], 8)
    for read, ours, weighed in zip(expected, found[::2], found[1::2], strict=True):
        assert torch.allclose(torch.cat((ours[:6], ours[16:19])).cpu(), read, rtol=1e-5, atol=1e-5)
        assert weighed.isfinite().all() and not weighed[6:16].any() and weighed[:6].abs().amax(-1).min() > 0
    logged.commit([path, [], [0, 1]], [2, 6, 5])
    for slot, states in ((2, left[0]), (5, left[1])):
        for layer, (window, memory) in enumerate(states):
            assert torch.equal(world.tensors.windows[slot, layer].float().cpu(), window)
            assert torch.allclose(world.tensors.memories[slot, layer].mT.cpu(), memory, rtol=1e-5, atol=1e-5)
    assert same([part for slot in (1, 3, 4) for part in world.state(slot)], untouched)


def bushy(depth: int) -> list[int]:
    """Returns parents of a tree with two equal branches at every node; its walk keeps the most states for its size."""
    if depth == 0:
        return [-1, 0]
    branch = bushy(depth - 1)
    return [-1, *(parent + start if parent >= 0 else 0 for start in (1, 1 + len(branch)) for parent in branch)]


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_a_walk_passes_every_row_behind_its_parent(rows: int) -> None:
    """Torch plans the same walk, and every restored state is the one that was kept."""
    rng = random.Random(rows)
    trees = [[-1, *(rng.randrange(max(0, row - 9), row) for row in range(1, rows - sequence))] for sequence in range(3)]
    stretches = [None, *(Stretch(range(len(tree)), tree) for tree in trees), Stretch([0], [-1])]
    laid = lay_rows(stretches, rows, chain=False)
    found = []
    for kernels in (TRITON, REFERENCE):
        states = World(SMALL, kernels, slots=1).tensors.over(laid, numbers(*[0] * 5), SCRATCH)
        states.walk.counts.fill_(-1)
        states.walk.steps.fill_(-1)
        kernels.plan(laid, states)
        found.append([states.walk.counts.float(), states.walk.steps.float()])
    assert same(*found) and found[0][0].tolist() == [0, rows, rows - 1, rows - 2, 1]
    for tree, line in zip(trees, found[0][1][1:4].int().tolist(), strict=True):
        steps = line[: len(tree)]
        assert sorted(step % 256 for step in steps) == list(range(len(tree)))
        state, kept = -1, dict[int, int]()  # the row after which it is
        for step in steps:
            row, shelf = step % 256, step // 2048
            state = kept[shelf] if step & 1024 else state
            assert state == tree[row] and bool(step & 256) == (row not in tree)
            if step & 512:
                assert shelf < most_shelves(rows)
                kept[shelf] = state
            state = state if step & 256 else row


def test_the_most_branched_tree_has_room() -> None:
    parents = bushy(4)
    assert len(parents) <= 64 and max(parents.count(row) for row in parents) == 2
    ours, expected = (
        World(SMALL, kernels).tree([Stretch(range(47), parents)], [1], 64)[1][0][:47] for kernels in (TRITON, REFERENCE)
    )
    assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)
    for rows, shelves in ((2, 0), (4, 1), (8, 1), (16, 2), (32, 3), (64, 4)):
        assert most_shelves(rows) == shelves


def test_the_interpreter_does_what_torch_does() -> None:
    def everything(kernels: DeltaKernels) -> list[Tensor]:
        world = World(SMALL, kernels)
        logged, found = world.tree([Stretch(range(6), TREE), None], [4, 6], 8)
        logged.commit([[0, 3, 5], []], [0, 6])
        found += world.chain(Stretch(range(3, 6)), 2, {1: 3, 2: 5}, 4)
        source, other = numbers(4, 6, 1), numbers(0, 6, 2)
        kernels.swap(source, other, numbers(3, 0, 1))
        return [*found, world.tensors.windows.float(), world.tensors.memories, source.float(), other.float()]

    for ours, expected in zip(everything(TRITON), everything(REFERENCE), strict=True):
        tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(ours.float(), expected.float(), rtol=tolerance, atol=1e-5, equal_nan=True)


@SOME_KINDS
def test_every_way_leads_to_the_same_bits(shape: DeltaShape, kernels: DeltaKernels) -> None:
    """Runs rows alone, in chunks, in a chain and along a tree's branch, committed or replayed in pieces."""
    total, chunks = (9, (1, 3, 7)) if kernels is REFERENCE else (4, (3,))
    alone, reads = World(shape, kernels), []
    for number in range(total):  # a step reads one slot and writes the other
        rows, own = lay_rows([Stretch([number])], 1, chain=False), [Stretch([number])]
        source, other = numbers(number % 2), numbers(1 - number % 2)
        reads.append(alone.run(rows, own, alone.tensors.over(rows, source, SCRATCH, other)))
    read = [torch.cat([step[2 * layer][:1] for step in reads]) for layer in range(shape.layers)]
    expected = alone.state(total % 2)
    for chunk in chunks:
        world = World(shape, kernels)
        for start in range(0, total, chunk):
            count = min(chunk, total - start)
            found = world.chain(Stretch(range(start, start + count)), 0, {count - 1: 0}, 8)
            assert same([own[:count] for own in found[::2]], [own[start : start + count] for own in read])
        assert same(world.state(0), expected), chunk
    world = World(shape, kernels)
    logged, found = world.tree([None, Stretch(range(total), range(-1, total - 1))], [6, 0], total)
    assert same([own[total:] for own in found[::2]], read)
    logged.commit([[], range(total)], [6, 3])
    assert same(world.state(3), expected)
    # the line is a path through a tree with arbitrary other rows
    inputs, parents, line = [0, 70, 1, 71, 2, 72, 3], [-1, 0, 0, 1, 2, 2, 4], [0, 2, 4, 6]
    logged, found = world.tree([Stretch(inputs, parents)], [0], 8)
    assert same([own[line] for own in found[::2]], [own[:4] for own in read])
    logged.replay(0, line[:2], 5)
    logged.commit([line[:3]], [4])
    rest = [Stretch(range(start, total), range(-1, total - start - 1)) for start in (3, 2)]
    logged, found = world.tree(rest, [4, 5], 8)
    logged.replay(1, range(total - 2), 5)
    logged.commit([range(total - 3), ()], [4, 4])
    assert same(world.state(4), expected) and same(world.state(5), expected)


@pytest.mark.parametrize(("kernels", "shape"), [(REFERENCE, SHAPE), (TRITON, SMALL)], ids=["torch", "triton"])
def test_a_chunk_keeps_states_on_its_way(shape: DeltaShape, kernels: DeltaKernels) -> None:
    world, other = World(shape, kernels), World(shape, kernels)
    world.chain(Stretch(range(3)), 0, {0: 3, 2: 1}, 3)
    for last, slot in ((0, 3), (2, 1)):
        other.chain(Stretch(range(last + 1)), 0, {last: 2}, 3)
        assert same(world.state(slot), other.state(2))
    assert same(world.state(0), other.state(0))
