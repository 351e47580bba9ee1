"""The memory behind the pages on a GPU: layers of one shape share a tensor, so that one launch moves their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.cache.cpu.page_pools import PoolShape
from slipstream.cache.pages import Place
from slipstream.cache.recurrent import StatePool


class GpuPools:
    """Pools in bf16 that share page ids. After the last page lies a scratch page for padding rows.

    The target's layers of the same shape lie in one tensor (a group); `target` has a view per layer.
    """

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        target: PoolShape,
        draft: PoolShape | None,
        device: torch.device,
        states: StatePool | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`settle` writes the draft context that device steps hold back; it runs before pages are copied or cleared."""
        self.states = states
        self.settle = settle
        self.pages = pages
        self.page_tokens = page_tokens
        self.scratch_place = pages * page_tokens
        self.device = device

        def zeros(layers: int, kv_heads: int, head_dim: int) -> Tensor:
            # the memory is zeroed because a masked slot still enters a sum as 0 * value, and other memory may hold NaN
            size = (layers, pages + 1, kv_heads, page_tokens, head_dim)
            return torch.zeros(size, dtype=torch.bfloat16, device=device)

        alike = Counter(target.layers)
        found = {shape: (zeros(count, *shape), zeros(count, *shape)) for shape, count in alike.items()}
        self.groups: list[tuple[Tensor, Tensor]] = list(found.values())
        views = {shape: zip(*pair, strict=True) for shape, pair in found.items()}
        self.target: list[tuple[Tensor, Tensor]] = [next(views[shape]) for shape in target.layers]
        layers = draft.layers if draft is not None else ()
        draft_size = (len(layers), *(layers[0] if layers else (0, 0)))
        self.draft_keys, self.draft_values = zeros(*draft_size), zeros(*draft_size)
        # The token of every place (page * page tokens + offset), which drafts from the text read.
        self.tokens = torch.zeros((pages + 1) * page_tokens, dtype=torch.int32, device=device)

    @property
    def _target_tensors(self) -> list[Tensor]:
        return [pool for group in self.groups for pool in group]

    @property
    def _all(self) -> list[Tensor]:
        drafts = [pool for pool in (self.draft_keys, self.draft_values) if pool.numel()]
        return [*self._target_tensors, *drafts]

    def copy_page(self, source: int, destination: int) -> None:
        self.settle()
        for pool in self._all:
            pool[:, destination] = pool[:, source]
        tokens = self.tokens.view(-1, self.page_tokens)
        tokens[destination] = tokens[source]

    def move_rows(self, sources: Sequence[Place], destinations: Sequence[Place]) -> None:
        """Moves target keys, values and tokens between (page, offset) places, reading all before any is written."""
        (from_pages, from_offsets), (to_pages, to_offsets) = self._indices(sources), self._indices(destinations)
        for pool in self._target_tensors:
            pool[:, to_pages, :, to_offsets] = pool[:, from_pages, :, from_offsets]
        tokens = self.tokens.view(-1, self.page_tokens)
        tokens[to_pages, to_offsets] = tokens[from_pages, from_offsets]

    def store_tokens(self, places: Tensor, tokens: Tensor) -> None:
        self.tokens.index_copy_(0, places.long(), tokens)

    def clear_rows(self, places: Sequence[Place]) -> None:
        """Zeroes target keys and values at (page, offset) places."""
        pages, offsets = self._indices(places)
        for pool in self._target_tensors:
            pool[:, pages, :, offsets] = 0.0

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeroes pages that may hold NaN, and the scratch page."""
        self.settle()
        ids = torch.tensor([*pages, self.pages], device=self.device)
        for pool in self._all:
            pool[:, ids] = 0.0

    def _indices(self, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
        pages, offsets = torch.tensor(places, device=self.device).t()
        return pages, offsets
