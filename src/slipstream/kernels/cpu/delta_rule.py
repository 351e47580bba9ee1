"""The gated delta rule after a short causal convolution, computed over rows: a row continues its parent's state.

Plain decoding, prefill, the verification of chains and trees and the replay of an accepted path all use the same few
operations per row in the same order, so a state does not depend on the way in which it was computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cpu.torch_kernels import rms_norm, row_by_row

_NORM_EPS = 1e-6  # added to the squared norm of queries and keys; the models define it

Parents = Sequence[int] | None  # the parent of each of a sequence's rows, -1 for a root; None for a chain


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a model's recurrent layers, which are the same for all of them."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # positions that the convolution sees, including the row's own
    # Whether value head i uses key head i modulo the number of key heads; otherwise value heads of one key head are
    # neighbours. Files differ in this order, but it does not make two models different.
    tiled: bool = field(default=False, compare=False)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def window(self) -> int:
        """How many earlier inputs of the convolution a state remembers."""
        return self.kernel - 1

    @property
    def state_bytes(self) -> int:
        """How many bytes the state of one sequence takes in all layers."""
        numbers = self.window * self.channels + self.value_heads * self.key_dim * self.value_dim
        return self.layers * numbers * torch.float32.itemsize

    def for_values(self, heads: Tensor) -> Tensor:
        """Repeats tensors of key heads [rows, key heads, dim] for every value head that uses one."""
        share = self.value_heads // self.key_heads
        return heads.repeat(1, share, 1) if self.tiled else heads.repeat_interleave(share, dim=1)


class DeltaRule:
    """One layer's recurrence: its convolution, and how fast each of its heads forgets."""

    def __init__(self, shape: DeltaShape, kernel: Tensor, rates: Tensor, shift: Tensor) -> None:
        """`kernel` is [channels, taps]; `rates` (negative) and `shift` have one number per value head.

        A tap is one of the inputs that the convolution weighs for a row.
        """
        self.shape = shape
        self.kernel = kernel.t().contiguous()  # [taps, channels]
        self.rates, self.shift = rates, shift
        # an rms norm with these weights is the l2 norm, and for queries includes their scale
        self._query_scale = torch.full((shape.key_dim,), 1 / shape.key_dim, device=kernel.device)
        self._key_scale = torch.full((shape.key_dim,), shape.key_dim**-0.5, device=kernel.device)

    def to(self, device: torch.device) -> DeltaRule:
        """Returns the same rule in the memory of a device."""
        kernel, rates, shift = (numbers.to(device) for numbers in (self.kernel.t(), self.rates, self.shift))
        return DeltaRule(self.shape, kernel, rates, shift)

    def gates(self, write: Tensor, forget: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how much of a row is written and how much of the state stays.

        Both are [rows, value heads], computed from two projections of that shape.
        """
        left = row_by_row(torch.exp, self.rates * row_by_row(F.softplus, forget + self.shift))
        return row_by_row(torch.sigmoid, write), left

    def convolve(self, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values [rows, value heads, dim] of rows that see inputs [rows, taps, channels]."""
        queries, keys, values = self.mix(seen)
        return self.shape.for_values(queries), self.shape.for_values(keys), values

    def mix(self, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Does the same as `convolve`, but with one query and key per key head instead of per value head."""
        shape, rows = self.shape, seen.shape[0]
        total = seen[:, 0] * self.kernel[0]
        for tap in range(1, shape.kernel):
            total = total + seen[:, tap] * self.kernel[tap]
        mixed = row_by_row(F.silu, total)
        queries, keys, values = mixed.split(
            [shape.key_heads * shape.key_dim] * 2 + [shape.value_heads * shape.value_dim], dim=-1
        )
        eps = _NORM_EPS / shape.key_dim
        queries = rms_norm(queries.reshape(rows, shape.key_heads, shape.key_dim), self._query_scale, eps)
        keys = rms_norm(keys.reshape(rows, shape.key_heads, shape.key_dim), self._key_scale, eps)
        return queries, keys, values.reshape(rows, shape.value_heads, shape.value_dim)


@dataclass(frozen=True, slots=True)
class Level:
    """Rows that are computed together.

    Their parents are in the level above. The rows of the first level continue the stored states of their sequences.
    """

    rows: Tensor
    parents: Tensor | None  # indices into the level above; None if they are 0, 1, 2, ...
    kept: Tensor | None  # indices in this level whose states are needed later


@dataclass(frozen=True, slots=True)
class _LayerRun:
    """The inputs of a layer in a step, and the states that it kept [kept rows, heads, key dim, value dim]."""

    rule: DeltaRule
    inputs: Tensor
    write: Tensor
    left: Tensor
    kept: Tensor


class DeltaStep:
    """The recurrent layers' part of one forward over any number of sequences.

    It does not change the sequences' states. Until it is known which rows stay, it remembers the inputs of all rows,
    and for some rows the state after them.
    """

    def __init__(
        self,
        windows: Tensor,
        memories: Tensor,
        slots: Sequence[int],
        stretches: Sequence[tuple[int, Parents]],
        kept: Sequence[Collection[int]],
    ) -> None:
        """The states are `windows` [slots, layers, window, channels] and `memories` [slots, layers, heads, key dim,
        value dim]. A stretch is one sequence's rows: how many there are, and their parents. `kept` lists, for each
        stretch, the rows after which the state is stored.
        """
        self._windows, self._memories = windows, memories
        self._slots = torch.tensor(slots)
        self._starts = [sum(rows for rows, _ in stretches[:item]) for item in range(len(stretches))]
        self._kept: dict[int, int] = {}  # row of the batch -> index among the kept states
        self._runs: list[_LayerRun] = []
        window = windows.shape[2]
        # Which inputs every row sees, oldest first. An input is an index into the concatenation of all sequences'
        # windows and then all rows.
        seen: list[tuple[int, ...]] = []
        depths: list[list[tuple[int, int, bool]]] = []  # per level: row of the batch, parent's index, whether kept
        for item, (rows, parents) in enumerate(stretches):
            start = self._starts[item]
            # inputs before the root, then before row i's children
            before = [tuple(range(item * window, (item + 1) * window))]
            places: list[tuple[int, int]] = []  # level of every row, and its index there
            for row in range(rows):
                parent = row - 1 if parents is None else parents[row]
                seen.append((*before[parent + 1], len(stretches) * window + start + row))
                before.append(seen[-1][1:])
                depth, above = (places[parent][0] + 1, places[parent][1]) if parent >= 0 else (0, item)
                if depth == len(depths):
                    depths.append([])
                places.append((depth, len(depths[depth])))
                depths[depth].append((start + row, above, row in kept[item]))
        self._sources = torch.tensor(seen)
        widths = [len(stretches), *map(len, depths)]
        self._levels = [self._make_level(*given) for given in zip(depths, widths, strict=False)]

    def _make_level(self, level: Sequence[tuple[int, int, bool]], width: int) -> Level:
        """Makes the tensors of one level; `width` is the number of rows in the level above."""
        rows, above, wanted = zip(*level, strict=True)
        chosen = [place for place, want in enumerate(wanted) if want]
        for place in chosen:
            self._kept[rows[place]] = len(self._kept)
        return Level(
            torch.tensor(rows),
            None if list(above) == list(range(width)) else torch.tensor(above),
            torch.tensor(chosen) if chosen else None,
        )

    def run(self, layer: int, rule: DeltaRule, inputs: Tensor, write: Tensor, left: Tensor) -> Tensor:
        """Returns what every row reads [rows, heads, value dim]; the layers must be run in their order."""
        queries, keys, values = rule.convolve(self._seen(layer, inputs, self._sources))
        states = self._memories[self._slots, layer]
        read = torch.empty_like(values)
        kept: list[Tensor] = []
        for level in self._levels:
            rows = level.rows
            if level.parents is not None:
                states = states[level.parents]
            states = _advanced(states, keys[rows], values[rows], write[rows], left[rows])
            read[rows] = (states * queries[rows][..., None]).sum(-2)
            if level.kept is not None:
                kept.append(states[level.kept])
        self._runs.append(_LayerRun(rule, inputs, write, left, torch.cat(kept) if kept else states[:0]))
        return read

    def after(self, item: int, path: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, layer by layer, the window and the memory of a stretch's sequence after the rows of a path."""
        rows = torch.tensor([self._starts[item] + row for row in path])
        last = int(rows[-1])
        slot, kept = int(self._slots[item]), self._kept.get(last)
        for layer, run in enumerate(self._runs):
            window = self._seen(layer, run.inputs, self._sources[last, 1:])
            if kept is not None:
                yield window, run.kept[kept]
            else:
                seen = self._seen(layer, run.inputs, self._sources[rows])
                yield window, self._replayed(run, seen, rows, self._memories[slot, layer])

    def _seen(self, layer: int, inputs: Tensor, places: Tensor) -> Tensor:
        """Gathers inputs of a convolution by index: first the windows of the sequences, then the rows."""
        before = self._windows[self._slots, layer].flatten(0, 1)
        earlier, own = before[places.clamp(max=len(before) - 1)], inputs[(places - len(before)).clamp(min=0)]
        return torch.where((places < len(before))[..., None], earlier, own)

    def _replayed(self, run: _LayerRun, seen: Tensor, rows: Tensor, memory: Tensor) -> Tensor:
        _, keys, values = run.rule.convolve(seen)
        states, write, left = memory[None], run.write[rows], run.left[rows]
        for row in range(len(rows)):
            one = slice(row, row + 1)
            states = _advanced(states, keys[one], values[one], write[one], left[one])
        return states[0]


def _advanced(states: Tensor, keys: Tensor, values: Tensor, write: Tensor, left: Tensor) -> Tensor:
    """Advances states [n, heads, key dim, value dim] by one row each.

    A state fades, and then learns the difference between the row's value and what the faded state predicts for its key.
    """
    faded = states * left[..., None, None]
    foreseen = (faded * keys[..., None]).sum(-2)
    learnt = (values - foreseen) * write[..., None]
    return faded + keys[..., None] * learnt[..., None, :]


@torch.inference_mode()
def delta_is_exact(shape: DeltaShape, rows: int = 16) -> bool:
    """Whether rows run one by one, together and as a tree give the same states and results here, bit for bit."""
    source = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=source)

    rule = DeltaRule(shape, draw(shape.channels, shape.kernel), -draw(shape.value_heads).abs(), draw(shape.value_heads))
    inputs = draw(rows, shape.channels)
    write, forget = draw(rows, shape.value_heads), draw(rows, shape.value_heads)
    window = torch.zeros(1, 1, shape.window, shape.channels)
    memory = torch.zeros(1, 1, shape.value_heads, shape.key_dim, shape.value_dim)
    tree = DeltaStep(window, memory, [0], [(rows, range(-1, rows - 1))], [()])
    together = tree.run(0, rule, inputs, *rule.gates(write, forget))
    ((_, replayed),) = tree.after(0, range(rows))
    for row in range(rows):
        one = slice(row, row + 1)
        step = DeltaStep(window, memory, [0], [(1, None)], [(0,)])
        if not torch.equal(step.run(0, rule, inputs[one], *rule.gates(write[one], forget[one]))[0], together[row]):
            return False
        ((window_after, memory_after),) = step.after(0, [0])
        window, memory = window_after[None, None], memory_after[None, None]
    return torch.equal(memory[0, 0], replayed) and math.isfinite(float(replayed.sum()))
