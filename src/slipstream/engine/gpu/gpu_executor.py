"""Runs a pair on a GPU: passes over rows that the host lays out, and whole device steps for decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from slipstream.cache.cpu.page_pools import PoolShapes
from slipstream.cache.gpu.device_pools import GpuPools
from slipstream.cache.gpu.device_states import SLOTS_PER_SEQUENCE, gpu_state_pool
from slipstream.config import PAGE_TOKENS
from slipstream.engine.executor import ForwardResult, RowWork, bucket
from slipstream.engine.gpu.decode_loop import DecodeLoop, HeldContext
from slipstream.engine.gpu.decode_state import DecodeState
from slipstream.engine.gpu.decode_step import DecodeStep, drafted_widths
from slipstream.engine.gpu.gpu_costs import expert_bytes, measure_costs
from slipstream.engine.gpu.gpu_device import GpuDevice
from slipstream.engine.gpu.row_forward import forward_rows
from slipstream.engine.gpu.row_passes import GpuBlocks, Passes
from slipstream.engine.pool_sizes import StateRoom
from slipstream.engine.variants import DraftVariant, DraftVariants
from slipstream.errors import ConfigError
from slipstream.kernels.gpu.device_rows import LEAST_ROWS
from slipstream.kernels.gpu.tree_growth import MOST_ROWS
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.gpu.device_models import GpuDrafter, GpuTarget
from slipstream.speculative.costs import CostTable
from slipstream.types import Progress

# Share of the memory that is free once the weights are loaded; graphs and scratch tensors need the rest. With a larger
# share a capture may run out of memory, with a smaller one fewer tokens fit into the pool.
_POOL_SHARE = 0.8
_LEFT_FREE_BYTES = 2**30  # a capture that could wait is left out if less memory than this is free
# Positions beyond the longest context. The device may be a few steps beyond a sequence's last token, and unused rows
# stand after those; with too few, such a row would read beyond the rotary tables.
_AHEAD_POSITIONS = 4 * MOST_ROWS


class GpuExecutor:
    """A loaded pair with its pools, passes and device steps."""

    shares_generated = False  # decoding and prefill sum in different orders here
    spare_positions = 2 * MOST_ROWS  # a step launched ahead may already write after a sequence's last token

    def __init__(
        self,
        device: GpuDevice,
        target: Decoder,
        draft: DFlashDrafter | None,
        shapes: PoolShapes,
        max_context: int,
        draft_window: int,
        progress: Progress | None = None,
    ) -> None:
        self.device = device
        self.target = target
        self.exact = device.exact
        self._draft_window = draft_window
        self._progress = progress
        self._positions = max_context + _AHEAD_POSITIONS  # positions that the rotary tables cover
        config, graphs = device.config, device.graphs
        room, slots, states = self._state_room(shapes), 0, None
        self.pages = self._pool_pages(shapes, max_context, room)
        if shapes[0].states is not None:
            slots = room.slots(self.pages)
            states = gpu_state_pool(slots, shapes[0].states, room.stride, device.device)
        held = HeldContext(graphs)
        self.memory = GpuPools(self.pages, PAGE_TOKENS, *shapes, device.device, states, held.settle)
        most_pages = -(-self._positions // PAGE_TOKENS)
        gpu_target = GpuTarget(device.kernels, target, self._positions, device.device)
        self.passes = Passes(gpu_target, self.memory, most_pages, config.prefill_chunk, graphs)
        state = DecodeState(bucket(config.max_sequences), most_pages, self.pages, device.device, slots)
        make_step = partial(DecodeStep, device.kernels, state, self.memory, gpu_target)
        self.device_steps = DecodeLoop(state, make_step, graphs, held, device.most_rows)
        self.variants = DraftVariants(self.blocks(draft) if draft is not None else None)
        if graphs.enabled:
            device.scratch.seal()  # graphs keep its addresses, so it must not move any more
            self._warm_up()

    # The executor's calls.

    def forward(self, works: Sequence[RowWork]) -> ForwardResult:
        return forward_rows(self.passes, self.variants, works)

    def blocks(self, drafter: DFlashDrafter) -> GpuBlocks:
        device = self.device
        gpu = GpuDrafter(device.kernels, drafter, self.target, self._draft_window, self._positions, device.device)
        return GpuBlocks(self.passes, gpu, self._draft_window)

    def forget(self, variant: DraftVariant) -> None:
        if isinstance(variant.drafter, GpuBlocks):
            self.device_steps.forget_drafter(variant.drafter.gpu)
            variant.drafter.forget()

    @torch.inference_mode()
    def measure_costs(self) -> CostTable:
        # Steps advance the loaded sequences, so none are loaded while steps are timed.
        state = self.device_steps.state
        self.memory.settle()
        kept = state.snapshot()
        state.clear()
        read = partial(expert_bytes, self.target)
        bandwidth = self.device.read_bandwidth() if read(1) else 1.0
        costs = measure_costs(
            self.device_steps.step,
            self._base_drafter(),
            self.device.most_rows,
            bucket(self.device.config.max_sequences),
            self.device.device,
            self._progress,
            lambda rows: read(rows) / bandwidth * 1e3,
        )
        state.restore(kept)
        return costs

    @torch.inference_mode()
    def prepare_batches(self) -> None:
        """Captures the shapes that several sequences need; otherwise the first steps with them would wait.

        A shape that finds no room is captured when it is first needed. Recurrent targets capture nothing here: every
        shape keeps a log of its rows' inputs, and all of them at once take too much memory.
        """
        if not self.device.graphs.enabled or self.memory.states is not None:
            return
        base = self._base_drafter()
        drafter = base if base is not None and base.on_device else None
        most = bucket(self.device.config.max_sequences)
        captures = [
            partial(self.device_steps.step, sequences, each, drafter if kept else None, each > 1)
            for sequences, each, kept in batch_shapes(most, self.device.most_rows)
            if drafter is not None or not kept or (base is None and each > 1 and self.device.config.text_drafts)
        ]
        self._capture(captures, _LEFT_FREE_BYTES)

    # Construction: captures and memory.

    def _base_drafter(self) -> GpuDrafter | None:
        found = self.variants.drafter
        return found.gpu if isinstance(found, GpuBlocks) else None

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Captures the shapes that one sequence needs, so that the first request does not wait for compilers."""
        drafter, steps = self._base_drafter(), self.device_steps
        captures: list[Callable[[], object]] = [
            partial(self.passes.chunk_pass, None),
            partial(steps.step, 1, 1, None, False),
        ]
        if drafter is not None:
            captures += [
                partial(self.passes.chunk_pass, drafter),
                partial(steps.step, 1, 1, drafter, False),
                partial(steps.step, 1, LEAST_ROWS, drafter, True),
            ]
        self._capture(captures)

    def _capture(self, captures: Sequence[Callable[[], object]], left_free_bytes: int = 0) -> None:
        """Runs captures as long as enough memory is free, and reports the progress."""
        for done, capture in enumerate(captures):
            if self.device.free_bytes() >= left_free_bytes:
                capture()
            if self._progress is not None:
                self._progress("capturing graphs", done + 1, len(captures))

    def _state_room(self, shapes: PoolShapes) -> StateRoom:
        """Plans the memory of recurrent states beside the pages."""
        config = self.device.config
        return StateRoom.plan(shapes[0].states, config, _token_bytes(shapes), SLOTS_PER_SEQUENCE)

    def _pool_pages(self, shapes: PoolShapes, max_context: int, states: StateRoom) -> int:
        """Returns the number of pages: what was asked for, or a share of the memory that the weights have left free."""
        config = self.device.config
        token_bytes = _token_bytes(shapes) + states.token_bytes
        share = int(self.device.free_bytes() * _POOL_SHARE)
        if states.reserved_bytes > share:
            raise ConfigError(
                f"the recurrent states of all sequences need {states.reserved_bytes >> 20} MiB, "
                f"{share >> 20} MiB of the GPU are free for them",
                "allow fewer sequences at once",
            )
        room = (share - states.reserved_bytes) // token_bytes
        if config.cache_tokens > room:
            raise ConfigError(
                f"a cache of {config.cache_tokens} tokens needs {config.cache_tokens * token_bytes >> 20} MiB, "
                f"{room * token_bytes >> 20} MiB of the GPU are free for it",
                "ask for fewer tokens",
            )
        wanted = config.cache_tokens or config.max_sequences * (max_context + _AHEAD_POSITIONS)
        return max(1, min(wanted, room) // PAGE_TOKENS)


def batch_shapes(most_sequences: int, most_rows: int) -> list[tuple[int, int, bool]]:
    """Returns the step shapes that batches need: sequences, rows per sequence, and whether draft context is written."""
    shapes = []
    for sequences in (2**power for power in range(1, most_sequences.bit_length())):
        drafting = [(sequences, each, True) for each in drafted_widths(sequences, most_rows)]
        shapes += [(sequences, 1, False), (sequences, 1, True), *drafting]
    return shapes


def _token_bytes(shapes: PoolShapes) -> int:
    """Returns the bytes of one token in all pools; shapes count fp32 values, and the pools hold bf16 here."""
    return sum(shape.bytes_per_token() for shape in shapes if shape is not None) // 2
