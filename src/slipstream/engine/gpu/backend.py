"""Builds the engine on a GPU: weights, pools, graphs and the loop, and says what of it can be promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from slipstream.cache.cpu.page_pools import PoolShape
from slipstream.cache.gpu.device_pools import GpuPools
from slipstream.cache.gpu.device_states import SLOTS_PER_SEQUENCE, gpu_state_pool
from slipstream.cache.pages import PageTable
from slipstream.config import PAGE_TOKENS, EngineConfig, WeightFormat
from slipstream.engine.gpu.costing import expert_bytes, measure_costs
from slipstream.engine.gpu.engine import GpuEngine
from slipstream.engine.gpu.graphs import Graphs
from slipstream.engine.gpu.loop import DecodeLoop
from slipstream.engine.gpu.passes import GpuBlocks, Passes
from slipstream.engine.gpu.runner import GpuRunner
from slipstream.engine.gpu.state import DecodeState
from slipstream.engine.gpu.step import DecodeStep, bucket, drafted_widths
from slipstream.engine.memory import StateRoom, available_bytes
from slipstream.errors import ConfigError
from slipstream.formats.weight_files import WeightFile
from slipstream.kernels.gpu.device_rows import LEAST_ROWS
from slipstream.kernels.gpu.kernel_set import GpuKernels, gpu_kernels
from slipstream.kernels.gpu.matrices import Scratch
from slipstream.kernels.gpu.tree_growth import MOST_ROWS
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.gpu.device_models import GpuDrafter, GpuTarget
from slipstream.models.gpu.device_weights import GpuWeights
from slipstream.models.weights import BuiltParts, Progress, Weights, keep_name
from slipstream.speculative.costs import CostTable
from slipstream.speculative.draft import BlockDrafter
from slipstream.text.tokenizer import Tokenizer

_POOL_SHARE = 0.8  # of the memory that is free once the weights are loaded; graphs and scratch need the rest
_LEFT_FREE = 2**30  # bytes, that captures which could wait do not take
MOST_STEP_ROWS = 256  # of one device step over all sequences
EXACT_ROWS = 64  # up to here a row has the same bits in any company


@dataclass(slots=True)
class _Machine:
    """What exists once a target is loaded."""

    target: GpuTarget
    pools: GpuPools
    passes: Passes
    state: DecodeState
    loop: DecodeLoop
    drafter: GpuDrafter | None  # the base of all variants
    positions: int  # that rotary tables reach
    draft_window: int
    progress: Progress | None


class GpuBackend:
    """One GPU, or the CPU under Triton's interpreter where tests give it that device."""

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        if config.exact and config.max_sequences > EXACT_ROWS:
            raise ConfigError(
                f"{config.max_sequences} sequences do not fit into an exact step of {EXACT_ROWS} rows",
                f"allow at most {EXACT_ROWS} at once, or leave --exact out",
            )
        self.device = device
        self._config = replace(config, prefill_chunk=config.chunk_rows(on_gpu=True))
        self.scratch = Scratch(device)
        self._kernels: GpuKernels = gpu_kernels(config.kernels)
        self.graphs = Graphs(device, config.graphs and config.kernels == "triton")
        self._machine: _Machine | None = None

    def weights(
        self,
        file: WeightFile,
        weight_format: WeightFormat,
        file_name: Callable[[str], str] = keep_name,
        progress: Progress | None = None,
        rough: bool = False,
        parts: BuiltParts | None = None,
        changed: Collection[str] = (),
        norm_shift: float = 0.0,
    ) -> Weights:
        return GpuWeights(file, weight_format, self.scratch, file_name, progress, parts, changed, norm_shift)

    def build(
        self,
        target: Decoder,
        draft: DFlashDrafter | None,
        pool_shapes: tuple[PoolShape, PoolShape | None],
        tokenizer: Tokenizer,
        max_context: int,
        draft_window: int,
        draft_key: str | None,
        progress: Progress | None,
    ) -> GpuEngine:
        """The engine around a loaded pair."""
        room, slots = self._state_room(pool_shapes), 0
        pages, states = self._pages(pool_shapes, max_context, room), None
        if pool_shapes[0].states is not None:
            slots = room.slots(pages)
            states = gpu_state_pool(slots, pool_shapes[0].states, room.stride, self.device)
        pools = GpuPools(pages, PAGE_TOKENS, *pool_shapes, self.device, states)
        # a sequence may stand a few steps behind its last token, and unused rows behind those
        positions = max_context + 4 * MOST_ROWS
        most_pages = -(-positions // PAGE_TOKENS)
        gpu_target = GpuTarget(self._kernels, target, positions, self.device)
        passes = Passes(gpu_target, pools, most_pages, self._config.prefill_chunk, self.graphs)
        most = bucket(self._config.max_sequences)
        state = DecodeState(most, most_pages, pages, self.device, slots)
        loop = DecodeLoop(state, self._make_step, self.graphs, self.device)
        pools.settle = loop.settle
        self._machine = _Machine(gpu_target, pools, passes, state, loop, None, positions, draft_window, progress)
        blocks = self.in_blocks(draft) if draft is not None else None
        self._machine.drafter = blocks.gpu if isinstance(blocks, GpuBlocks) else None
        engine = GpuEngine(
            GpuRunner(passes, blocks),
            pools,
            PageTable(pages),
            tokenizer,
            self._config,
            max_context,
            draft_key,
            False,
            partial(self._measure_costs, blocks),
        )
        engine.install(loop, self._most_rows)
        if self.graphs.enabled:
            self.scratch.seal()  # graphs keep its addresses
            self._warm_up()
        return engine

    @property
    def _most_rows(self) -> int:
        return EXACT_ROWS if self._config.exact else MOST_STEP_ROWS

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Captures what one sequence needs, so that a first request does not wait for compilers."""
        machine = self._built
        drafter = machine.drafter
        captures: list[Callable[[], object]] = [
            partial(machine.passes.chunk_pass, None),
            partial(machine.loop.step, 1, 1, None, False),
        ]
        if drafter is not None:
            captures += [
                partial(machine.passes.chunk_pass, drafter),
                partial(machine.loop.step, 1, 1, drafter, False),
                partial(machine.loop.step, 1, LEAST_ROWS, drafter, True),
            ]
        self._capture(captures)

    @torch.inference_mode()
    def capture_batches(self) -> None:
        """Captures what several sequences need, which otherwise happens when they first run together and have to wait.

        What finds no room is left for then. Nothing for recurrent targets: every shape keeps a log of its rows' inputs,
        and all of them at once are too much.
        """
        machine = self._built
        if not self.graphs.enabled or machine.pools.states is not None:
            return
        drafter = machine.drafter if machine.drafter is not None and machine.drafter.on_device else None
        self._capture(
            [
                partial(machine.loop.step, sequences, each, drafter if kept else None, each > 1)
                for sequences, each, kept in batch_shapes(bucket(self._config.max_sequences), self._most_rows)
                if drafter is not None or not kept
            ],
            _LEFT_FREE,
        )

    def _capture(self, captures: Sequence[Callable[[], object]], left_free: int = 0) -> None:
        progress = self._built.progress
        for done, capture in enumerate(captures):
            if self._free_bytes() >= left_free:
                capture()
            if progress is not None:
                progress("capturing graphs", done + 1, len(captures))

    def in_blocks(self, drafter: DFlashDrafter) -> BlockDrafter:
        machine = self._built
        gpu = GpuDrafter(
            self._kernels, drafter, machine.target.decoder, machine.draft_window, machine.positions, self.device
        )
        return GpuBlocks(machine.passes, gpu, machine.draft_window)

    def _make_step(self, sequences: int, each: int, drafter: GpuDrafter | None, drafting: bool) -> DecodeStep:
        machine = self._built
        return DecodeStep(
            self._kernels, machine.state, machine.pools, machine.target, sequences, each, drafter, drafting
        )

    @torch.inference_mode()
    def _measure_costs(self, blocks: BlockDrafter | None) -> CostTable:
        assert isinstance(blocks, GpuBlocks), "only speculation asks for costs"
        # steps move sequences on: nobody's are loaded meanwhile
        machine = self._built
        machine.loop.settle()
        kept = machine.state.snapshot()
        machine.state.clear()
        read = partial(expert_bytes, machine.target.decoder)
        bandwidth = self.read_bandwidth() if read(1) else 1.0
        costs = measure_costs(
            machine.loop.step,
            blocks.gpu,
            self._most_rows,
            bucket(self._config.max_sequences),
            self.device,
            machine.progress,
            lambda rows: read(rows) / bandwidth * 1e3,
        )
        machine.state.restore(kept)
        return costs

    def _state_room(self, shapes: tuple[PoolShape, PoolShape | None]) -> StateRoom:
        """What recurrent states take beside the pages."""
        per_token = _token_bytes(shapes)
        return StateRoom.plan(shapes[0].states, self._config, PAGE_TOKENS, per_token, SLOTS_PER_SEQUENCE)

    def _pages(self, shapes: tuple[PoolShape, PoolShape | None], max_context: int, states: StateRoom) -> int:
        """Pages for the pools: what was asked for, or a share of what the weights have left free."""
        config = self._config
        token_bytes = _token_bytes(shapes) + states.token_bytes
        share = int(self._free_bytes() * _POOL_SHARE)
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
        # a sequence may stand a few steps behind its last token
        wanted = config.cache_tokens or config.max_sequences * (max_context + 4 * MOST_ROWS)
        return max(1, min(wanted, room) // PAGE_TOKENS)

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return available_bytes() or 2**30

    @property
    def label(self) -> str:
        """Which kernels serve."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "Triton's interpreter"
        how = "captured graphs" if self.graphs.enabled else "without graphs"
        return f"{self._config.kernels} kernels on {name}, {how}"

    @property
    def exact(self) -> bool:
        """Whether speculative text equals plain text to the bit: with `exact`, or as long as steps stay small."""
        small = self._config.max_sequences * LEAST_ROWS <= EXACT_ROWS
        return self._config.kernels == "triton" and (self._config.exact or small)

    def read_bandwidth(self) -> float:
        """Bytes per second that a large copy reads and writes: the floor under a step is its bytes over this."""
        size = 2**30 if self.device.type == "cuda" else 2**20
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        best = 0.0
        for _ in range(5):
            self.wait()
            began = time.perf_counter()
            target.copy_(source)
            self.wait()
            best = max(best, 2 * size / (time.perf_counter() - began))
        return best

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def state(self) -> DecodeState:
        return self._built.state

    @property
    def _built(self) -> _Machine:
        if self._machine is None:
            raise ConfigError("the engine is not built yet")
        return self._machine


def batch_shapes(most_sequences: int, most_rows: int) -> list[tuple[int, int, bool]]:
    """Sequences, rows of each and whether a drafter's context is kept, of the steps that batches need."""
    shapes = []
    for sequences in (2**power for power in range(1, most_sequences.bit_length())):
        drafting = [(sequences, each, True) for each in drafted_widths(sequences, most_rows)]
        shapes += [(sequences, 1, False), (sequences, 1, True), *drafting]
    return shapes


def _token_bytes(shapes: tuple[PoolShape, PoolShape | None]) -> int:
    """What a token takes in all pools, which are bf16 here."""
    return sum(shape.bytes_per_token() for shape in shapes if shape is not None) // 2
