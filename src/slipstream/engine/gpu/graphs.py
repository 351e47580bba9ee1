"""Captured graphs: a step's launches recorded once per shape and replayed with one call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import torch

_WARM_UPS = 2  # runs before a capture: a kernel's first launch compiles it, and a compilation during a capture fails


class Graphs:
    """Captured graphs by key; if graphs are switched off or there is no GPU, the launches themselves run each time."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._device = device
        self._captured: dict[Hashable, Callable[[], None]] = {}
        self._pool: Any = None  # memory that all graphs share, since they run one after another
        self.bytes = 0  # device memory that belongs to graphs

    def __len__(self) -> int:
        return len(self._captured)

    def runner(self, key: Hashable, launches: Callable[[], None]) -> Callable[[], None]:
        """Returns a call that runs `launches`, captured now if this key is new.

        A graph keeps addresses, so all tensors that the launches touch must stay where they are.
        """
        found = self._captured.get(key)
        if found is None:
            found = self._capture(launches) if self.enabled else launches
            self._captured[key] = found
        return found

    def forget(self, matches: Callable[[Hashable], bool]) -> None:
        """Drops the graphs with matching keys, because their tensors are about to be freed."""
        for key in [key for key in self._captured if matches(key)]:
            del self._captured[key]
        if not self._captured:
            self._pool = None  # it goes with the last of its graphs

    def _capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        before = torch.cuda.memory_reserved(self._device)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                launches()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a collection in the middle of a capture may free device memory, which ends the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                launches()
        finally:
            if collecting:
                gc.enable()
        self._pool = self._pool or graph.pool()
        self.bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay
