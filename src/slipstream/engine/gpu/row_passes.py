"""Single passes over rows that the host lays out: prefill chunks, and sequences that a device step cannot serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.cache.gpu.device_pools import GpuPools
from slipstream.cache.gpu.device_states import LoggedRows, device_tensors, save_chunk
from slipstream.cache.sequence import SequenceState
from slipstream.engine.executor import RowWork, bucket
from slipstream.engine.gpu.graphs import Graphs
from slipstream.engine.gpu.step_report import parts, room
from slipstream.kernels.gpu.delta_net_launch import DeviceStates
from slipstream.kernels.gpu.device_rows import LEAST_ROWS, MAX_DEPTH, DeviceRows, Kind
from slipstream.kernels.rows import RowPlaces
from slipstream.models.gpu.device_models import GpuDrafter, GpuTarget
from slipstream.speculative.draft import BlockDrafter, DraftJob

# Rows per sequence of a verify pass. With more widths there are more graphs, with fewer more rows are padding.
_VERIFY_WIDTHS = (1, 4, 16, 32, 64)
_STAGES = 4  # host buffers in rotation: the host may be so many passes ahead of the device before it has to wait


class _Staged:
    """Row tables that the host fills in and one copy sends to the device, which fetches them when it gets there."""

    def __init__(self, rows: DeviceRows) -> None:
        shapes = [part.shape for part in (rows.tokens, rows.positions, rows.places, rows.base, rows.pages)]
        pinned, size = rows.tokens.is_cuda, room(shapes)
        self._there = torch.zeros(size, dtype=torch.int32, device=rows.tokens.device)
        tokens, positions, places, base, pages = parts(self._there, shapes)
        places.copy_(rows.places)
        self.rows = replace(rows, tokens=tokens, positions=positions, places=places, base=base, pages=pages)
        here = [torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_STAGES)]
        self._stages = cycle(
            [
                (
                    flat.copy_(self._there),
                    [part.numpy() for part in parts(flat, shapes)],
                    torch.cuda.Event() if pinned else None,
                )
                for flat in here
            ]
        )
        self._filled: tuple[Tensor, torch.cuda.Event | None] | None = None

    def fill(self) -> list[NDArray[np.int32]]:
        """Returns host arrays for tokens, positions, places, base and pages.

        An array that the caller does not write keeps what an earlier pass wrote there.
        """
        flat, numbers, fetched = next(self._stages)
        if fetched is not None:
            fetched.synchronize()
        self._filled = flat, fetched
        return numbers

    def send(self) -> None:
        """Queues the copy of the arrays that `fill` returned last."""
        assert self._filled is not None
        flat, fetched = self._filled
        self._there.copy_(flat, non_blocking=True)
        if fetched is not None:
            fetched.record()


@dataclass(slots=True)
class _Pass:
    """The tensors from which a captured pass reads its rows, and those in which it leaves its results."""

    staged: _Staged
    anchors: Tensor
    states: DeviceStates | None = None  # only if the target is recurrent
    hidden: Tensor | None = None
    other: Tensor | None = None  # the taps of a target pass, or the logits of a draft pass

    @property
    def rows(self) -> DeviceRows:
        return self.staged.rows


class Passes:
    """The passes of one pair over one set of pools."""

    def __init__(self, target: GpuTarget, pools: GpuPools, most_pages: int, chunk: int, graphs: Graphs) -> None:
        self.target = target
        # Every chunk of a prompt has the same number of rows for the matmuls. Otherwise a row's bits would depend on
        # how much of the prompt was found in the cache.
        self._chunk = bucket(chunk, LEAST_ROWS)
        self.pools = pools
        self.graphs = graphs
        self._most_pages = most_pages
        self._passes: dict[tuple[object, ...], _Pass] = {}
        self._tensors = device_tensors(pools.states)

    def chunk(self, work: RowWork, drafter: GpuDrafter | None) -> Tensor:
        """Returns the hidden rows of known tokens, valid until the next pass; with a drafter, writes draft context too.

        Known tokens always stay, so their draft context need not wait for any verdict.
        """
        if drafter is not None:
            self.pools.settle()
        found, run = self.chunk_pass(drafter)
        self._lay_out(found, [work])
        run()
        assert found.hidden is not None
        return found.hidden[: work.rows]

    def chunk_pass(self, drafter: GpuDrafter | None) -> tuple[_Pass, Callable[[], None]]:
        """Returns the rows of a chunk and the call that runs them, captured now if it has not been yet."""
        key = ("chunk", drafter)
        found, pools = self._pass(key, "chain", 1, self._chunk), self.pools

        def launches() -> None:
            rows, tapped = found.rows, drafter.taps if drafter is not None else ()
            pools.store_tokens(rows.places, rows.tokens)
            found.hidden, taps = self.target.run(rows, pools, tapped, found.states)
            if drafter is not None:
                assert taps is not None
                drafter.context.write(taps, rows.positions, rows.places, pools.draft_keys, pools.draft_values)

        return found, self.graphs.runner(key, launches)

    def verify(self, works: Sequence[RowWork], tap_layers: Sequence[int]) -> tuple[list[Tensor], Tensor | None, int]:
        """Returns the hidden rows of each proposal, the taps of all of them, and the taps' rows per proposal."""
        sequences = bucket(len(works))
        most = max(work.rows for work in works)
        each = next(width for width in _VERIFY_WIDTHS if width >= most)
        key = ("verify", sequences, each, tuple(tap_layers))
        found = self._pass(key, "tree", sequences, each)
        self._lay_out(found, works)

        def launches() -> None:
            self.pools.store_tokens(found.rows.places, found.rows.tokens)
            found.hidden, found.other = self.target.run(found.rows, self.pools, tap_layers, found.states)

        self.graphs.runner(key, launches)()
        assert found.hidden is not None
        hidden = [found.hidden[i * each : i * each + work.rows] for i, work in enumerate(works)]
        # The next pass writes over the tensors in which a graph leaves its results, so the taps are copied.
        return hidden, None if found.other is None else found.other.clone(), each

    def draft(self, drafter: GpuDrafter, jobs: Sequence[DraftJob], variant: object) -> tuple[Tensor, Tensor]:
        """Returns the hidden rows and the logits of the jobs' blocks, valid until the next pass."""
        self.pools.settle()
        sequences, size = bucket(len(jobs)), drafter.block_size
        key = ("draft", variant, sequences)
        found = self._pass(key, "block", sequences, size)
        anchors = np.zeros(sequences, np.int32)
        anchors[: len(jobs)] = [job.state.tokens[job.state.length] for job in jobs]
        *_, base, pages = found.staged.fill()
        self._put_sequences(base, pages, [(job.state, job.state.length) for job in jobs])
        found.staged.send()
        found.anchors.copy_(torch.from_numpy(anchors))

        def launches() -> None:
            drafter.lay_out(found.rows, found.anchors, self.pools.page_tokens)
            found.hidden = drafter.run(found.rows, self.pools.draft_keys, self.pools.draft_values)
            found.other = drafter.logits(found.hidden)

        self.graphs.runner(key, launches)()
        assert found.hidden is not None and found.other is not None
        return found.hidden[: len(jobs) * size], found.other[: len(jobs) * size]

    def write_context(self, drafter: GpuDrafter, taps: Tensor, places: RowPlaces) -> None:
        """Writes draft context from the taps of committed rows."""
        self.pools.settle()
        count = taps.shape[0]
        padded = bucket(count, LEAST_ROWS)
        positions = np.zeros(padded, np.int32)
        slots = np.full(padded, self.pools.scratch_place, np.int32)
        positions[:count] = places.position_list
        slots[:count] = np.asarray(places.page_list) * self.pools.page_tokens + np.asarray(places.offset_list)
        rows = torch.cat((taps, taps.new_zeros(padded - count, taps.shape[1]))) if padded > count else taps
        drafter.context.write(
            rows.contiguous(),
            self._device(positions),
            self._device(slots),
            self.pools.draft_keys,
            self.pools.draft_values,
        )

    def forget(self, variant: object, drafter: GpuDrafter) -> None:
        """Drops the passes and graphs of a variant that was removed."""

        def belongs(key: object) -> bool:
            return isinstance(key, tuple) and key[:2] in (("draft", variant), ("chunk", drafter))

        for key in [key for key in self._passes if belongs(key)]:
            del self._passes[key]
        self.graphs.forget(belongs)

    def _pass(self, key: tuple[object, ...], kind: Kind, sequences: int, each: int) -> _Pass:
        found = self._passes.get(key)
        if found is None:
            place = self.pools.scratch_place
            rows = DeviceRows.empty(kind, sequences, each, self._most_pages, self.pools.device, place)
            found = self._passes[key] = _Pass(_Staged(rows), torch.zeros_like(rows.base))
            if self._tensors is not None and kind != "block":
                found.states = self._make_states(found.rows)
        return found

    def _lay_out(self, found: _Pass, works: Sequence[RowWork]) -> None:
        """Sends the rows of all work items to the device; padding rows use the scratch place."""
        rows = found.rows
        tokens, positions, places, base, pages = found.staged.fill()
        tokens[:], positions[:], places[:] = 0, 0, self.pools.scratch_place
        for index, work in enumerate(works):
            first = index * rows.each
            span = slice(first, first + work.rows)
            tokens[span] = work.tokens
            positions[span] = work.positions
            places[span] = self._places(work.state, work.start, work.rows)
            positions[first + work.rows : first + rows.each] = work.start
        self._put_sequences(base, pages, [(work.state, work.start) for work in works])
        found.staged.send()
        if rows.kind == "tree":
            rows.paths.copy_(torch.from_numpy(_paths(works, rows)))
        if found.states is not None:
            self._continue_states(found.states, rows, works)

    def _make_states(self, rows: DeviceRows) -> DeviceStates:
        """Returns what recurrent layers need for the rows.

        A chunk writes its states while it runs; the states after a proposal are written when its kept rows are known.
        """
        assert self._tensors is not None
        saves = torch.full_like(rows.positions, -1) if rows.kind == "chain" else None
        return self._tensors.over(rows, torch.zeros_like(rows.base), self.pools.scratch_place, saves)

    def _continue_states(self, states: DeviceStates, rows: DeviceRows, works: Sequence[RowWork]) -> None:
        """Tells recurrent layers from which slots they read states, and into which ones a chunk writes them."""
        assert self._tensors is not None
        recurrent = [work.state.recurrent for work in works]
        slots = [each.slot for each in recurrent if each is not None and each.slot is not None]
        assert len(slots) == len(works), "every sequence of a recurrent target has a state"
        source = np.full(rows.sequences, self._tensors.scratch_slot, np.int32)
        source[: len(slots)] = slots
        states.source.copy_(torch.from_numpy(source))
        logged = LoggedRows(self.target.kernels.delta, states, rows.each, slots)
        for item, (work, each) in enumerate(zip(works, recurrent, strict=True)):
            assert each is not None
            if states.saves is None:
                each.try_rows(logged, item)
                continue
            saves = np.full(states.saves.shape, -1, np.int32)
            for row, slot in save_chunk(each, work.rows, work.state.checkpoint_rows(work.rows)).items():
                saves[row] = slot
            states.saves.copy_(torch.from_numpy(saves))

    def _put_sequences(
        self, base: NDArray[np.int32], pages: NDArray[np.int32], works: Sequence[tuple[SequenceState, int]]
    ) -> None:
        base[:], pages[:] = 0, self.pools.pages
        for index, (state, start) in enumerate(works):
            base[index] = start
            pages[index, : len(state.pages)] = state.pages

    def _places(self, state: SequenceState, start: int, count: int) -> NDArray[np.int32]:
        slots = np.arange(start, start + count)
        pages = np.asarray(state.pages, np.int32)[slots // self.pools.page_tokens]
        return (pages * self.pools.page_tokens + slots % self.pools.page_tokens).astype(np.int32)

    def _device(self, numbers: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(numbers).to(self.pools.device)


class GpuBlocks(BlockDrafter):
    """A drafter over pages on the device; the host ranks candidates, because it holds constraints and penalties."""

    def __init__(self, passes: Passes, drafter: GpuDrafter, window: int) -> None:
        super().__init__(drafter.drafter, window)
        self.gpu = drafter
        self._passes = passes

    def logits(self, jobs: Sequence[DraftJob]) -> tuple[Tensor, Tensor]:
        hidden, logits = self._passes.draft(self.gpu, jobs, self)
        picked = logits[torch.tensor(self.wanted_rows(jobs), device=logits.device)]
        return hidden.float().cpu(), picked.cpu()

    def write_context(self, taps: Tensor, places: RowPlaces) -> None:
        self._passes.write_context(self.gpu, taps, places)

    def forget(self) -> None:
        """Drops the graphs of this drafter and the memory that they keep."""
        self._passes.forget(self, self.gpu)


def _paths(works: Sequence[RowWork], rows: DeviceRows) -> NDArray[np.int32]:
    """Returns the ancestors of every row, indexed by depth."""
    paths = np.zeros((rows.rows, MAX_DEPTH), np.int32)
    for index, work in enumerate(works):
        assert work.proposal is not None
        first = index * rows.each
        for row, parent in enumerate(work.proposal.parents):
            paths[first + row] = paths[first + max(parent, 0)]
            paths[first + row, work.proposal.depths[row]] = row
    return paths
