"""The memory behind the pages on a GPU: one tensor for all layers, so that one launch moves a row everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.cache.pools import PoolShape
from slipstream.errors import ConfigError

Place = tuple[int, int]


class GpuPools:
    """Pools in bf16 that share page ids. Behind the last page lies a scratch page for rows that do not count."""

    def __init__(
        self, pages: int, page_tokens: int, target: PoolShape, draft: PoolShape | None, device: torch.device
    ) -> None:
        self.states = None  # recurrent targets run on the CPU
        self.pages = pages
        self.page_tokens = page_tokens
        self.scratch_place = pages * page_tokens
        self.device = device

        def zeros(shape: PoolShape | None) -> Tensor:
            # zeroed, since a masked slot still enters a sum as 0 * value and other memory may hold NaN
            if shape is None:
                return torch.zeros(0, dtype=torch.bfloat16, device=device)
            if len(set(shape.layers)) > 1:
                raise ConfigError("layers with different heads do not run on a GPU yet", "use --device cpu")
            kv_heads, head_dim = shape.layers[0]
            size = (len(shape.layers), pages + 1, kv_heads, page_tokens, head_dim)
            return torch.zeros(size, dtype=torch.bfloat16, device=device)

        self.target_keys, self.target_values = zeros(target), zeros(target)
        self.draft_keys, self.draft_values = zeros(draft), zeros(draft)

    @property
    def _all(self) -> list[Tensor]:
        pools = [self.target_keys, self.target_values, self.draft_keys, self.draft_values]
        return [pool for pool in pools if pool.numel()]

    def copy_page(self, source: int, destination: int) -> None:
        for pool in self._all:
            pool[:, destination] = pool[:, source]

    def move_rows(self, sources: Sequence[Place], destinations: Sequence[Place]) -> None:
        """Moves target keys and values between (page, offset) places; all are read before any is written."""
        (from_pages, from_offsets), (to_pages, to_offsets) = self._indices(sources), self._indices(destinations)
        for pool in (self.target_keys, self.target_values):
            pool[:, to_pages, :, to_offsets] = pool[:, from_pages, :, from_offsets]

    def clear_rows(self, places: Sequence[Place]) -> None:
        """Zeroes target keys and values at (page, offset) places."""
        pages, offsets = self._indices(places)
        for pool in (self.target_keys, self.target_values):
            pool[:, pages, :, offsets] = 0.0

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeroes pages that may hold NaN, and the scratch page with them."""
        ids = torch.tensor([*pages, self.pages], device=self.device)
        for pool in self._all:
            pool[:, ids] = 0.0

    def _indices(self, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
        pages, offsets = torch.tensor(places, device=self.device).t()
        return pages, offsets
