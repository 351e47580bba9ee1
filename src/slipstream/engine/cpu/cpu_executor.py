"""Runs planned work on a CPU as one target forward: the only place where the CPU's rows are laid out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.cache.cpu.page_pools import KvPools, PoolShape, PoolShapes
from slipstream.cache.cpu.state_tensors import StateTensors, Stretch
from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.cpu.cpu_blocks import CpuBlocks
from slipstream.engine.executor import ForwardResult, RowWork
from slipstream.engine.pool_sizes import StateRoom, pool_pages
from slipstream.engine.variants import DraftVariant, DraftVariants
from slipstream.kernels.cpu.delta_rule import DeltaStep, delta_is_exact
from slipstream.kernels.cpu.exactness import ROW_INVARIANT_FORMATS, attention_is_exact, matrix_is_exact
from slipstream.kernels.rows import AttentionPattern, RowBatch, RowGroup, make_group, make_tree_group
from slipstream.lazy import cached_property
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.costs import CostTable
from slipstream.types import Progress


class CpuExecutor:
    """A pair and its pools on the CPU; a step runs phase by phase, so that the host may look at a draft first."""

    spare_positions = 0
    device_steps = None

    def __init__(
        self,
        target: Decoder,
        draft: DFlashDrafter | None,
        pools: KvPools,
        pages: int,
        draft_window: int,
        progress: Progress | None = None,
    ) -> None:
        self.target = target
        self.memory = pools
        self.pages = pages
        self._draft = draft
        # Layers whose outputs become draft context.
        self.tapped_layers: Sequence[int] = draft.config.target_layer_ids if draft is not None else ()
        self._draft_window = draft_window
        self._progress = progress
        self._torch_threads = torch.get_num_threads()
        self.variants = DraftVariants(self.blocks(draft) if draft is not None else None)

    @classmethod
    def sized(
        cls,
        target: Decoder,
        draft: DFlashDrafter | None,
        config: EngineConfig,
        max_context: int,
        draft_window: int,
        progress: Progress | None,
    ) -> CpuExecutor:
        """Returns an executor with pools as large as the configuration asks for, or as free memory allows."""
        shapes = pool_shapes(target, draft)
        per_token = sum(shape.bytes_per_token() for shape in shapes if shape is not None)
        room = StateRoom.plan(shapes[0].states, config, per_token)
        pages = pool_pages(config.cache_tokens, max_context, per_token + room.token_bytes, room.reserved_bytes)
        pools = KvPools(pages, PAGE_TOKENS, *shapes, room.slots(pages), room.stride)
        return cls(target, draft, pools, pages, draft_window, progress)

    @cached_property
    def exact(self) -> bool:
        config, layers = self.target.config, self.target.layers
        one_of_each = {layer.kind: layer for layer in layers}.values()
        heads = {(one.heads, one.kv_heads, one.head_dim) for one in map(config.layer, range(config.layers))}
        return (
            self.target.weight_format in ROW_INVARIANT_FORMATS
            and all(matrix_is_exact(matrix) for layer in one_of_each for matrix in layer.matrices)
            and all(attention_is_exact(*shape) for shape in heads)
            and (config.states is None or delta_is_exact(config.states))
        )

    @property
    def shares_generated(self) -> bool:
        return self.exact

    def forward(self, works: Sequence[RowWork]) -> ForwardResult:
        self._set_threads()
        batch, starts, wanted = self._batch(works)
        if self.memory.state_tensors is not None:
            batch.recurrent = _recurrent_step(self.memory.state_tensors, works)
        tapped = self.tapped_layers if any(work.state.drafting for work in works) else ()
        logits, taps = self.target.forward_logits(batch, self.memory.target, tapped, wanted)
        parts = [logits] if len(works) == 1 else list(logits.split([work.logit_rows for work in works]))
        return ForwardResult(works, parts, taps, starts)

    def blocks(self, drafter: DFlashDrafter) -> CpuBlocks:
        return CpuBlocks(self.target, drafter, self.memory, self._draft_window)

    def forget(self, variant: DraftVariant) -> None:
        """The variant's matrices go with the variant; nothing else is kept for it."""

    def measure_costs(self) -> CostTable:
        from slipstream.engine.cpu.cpu_costs import measure_costs

        self._set_threads()
        return measure_costs(self.target, self._draft, self._progress)

    def prepare_batches(self) -> None:
        """A CPU has nothing to prepare for batches."""

    def _set_threads(self) -> None:
        """Gives torch the number of threads that it had when this executor was made.

        Another model that was loaded since may have set another number for the whole process.
        """
        if torch.get_num_threads() != self._torch_threads:
            torch.set_num_threads(self._torch_threads)

    def _batch(self, works: Sequence[RowWork]) -> tuple[RowBatch, list[int], list[int]]:
        """All rows, the first row of each work item, and the rows that need logits."""
        tokens: list[int] = []
        positions: list[int] = []
        page_ids: list[int] = []
        offsets: list[int] = []
        starts: list[int] = []
        wanted: list[int] = []
        for work in works:
            starts.append(len(tokens))
            tokens += work.tokens
            wanted += range(len(tokens) - work.logit_rows, len(tokens))
            positions += work.positions
            # Rows of a tree share positions, so each is stored after the others until it is clear which rows stay.
            pages, slots = work.state.places(work.start, len(work.tokens))
            page_ids += pages
            offsets += slots
        groups = {
            pattern: [_group(start, work, pattern) for start, work in zip(starts, works, strict=True)]
            for pattern in self.target.patterns
        }
        return RowBatch(tokens, positions, page_ids, offsets, max(positions) + 1, groups), starts, wanted


def pool_shapes(target: Decoder, draft: DFlashDrafter | None) -> PoolShapes:
    """What the pools hold for every position, in the target's layers and as draft context."""
    shape, own = target.config, draft.config if draft is not None else None
    return (
        PoolShape(shape.kv_shapes, shape.states),
        PoolShape.alike(own.layers, own.kv_heads, own.head_dim) if own is not None else None,
    )


def _recurrent_step(tensors: StateTensors, works: Sequence[RowWork]) -> DeltaStep:
    stretches = []
    for work in works:
        assert work.state.recurrent is not None, "every sequence of a recurrent target has a state"
        parents = work.tree.parents if work.tree is not None else None
        stretches.append(Stretch(work.state.recurrent, work.rows, parents, work.state.checkpoint_rows(work.rows)))
    return tensors.begin(stretches)


def _group(row_start: int, work: RowWork, pattern: AttentionPattern) -> RowGroup:
    tree, pages, size = work.tree, work.state.pages, PAGE_TOKENS
    if tree is not None:
        return make_tree_group(row_start, work.start, tree.parents, pages, size, pattern)
    return make_group(row_start, range(work.start, work.start + len(work.tokens)), pages, size, pattern)
