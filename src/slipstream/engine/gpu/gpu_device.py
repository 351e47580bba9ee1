"""A GPU before a pair is loaded: its kernels, how weights get there, and whether its steps are exact."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch

from slipstream.config import EngineConfig
from slipstream.engine.gpu.graphs import Graphs
from slipstream.engine.pool_sizes import available_bytes
from slipstream.errors import ConfigError
from slipstream.kernels.gpu.device_rows import LEAST_ROWS
from slipstream.kernels.gpu.kernel_set import GpuKernels, gpu_kernels
from slipstream.kernels.gpu.matrices import Scratch
from slipstream.models.gpu.device_weights import GpuWeights
from slipstream.models.loading import MakeWeights

# Rows of a step up to which a row has the same bits whatever the other rows are; it follows from the matmul kernels. If
# it were larger, speculative text could differ from plain text although `exact` promises that it does not.
EXACT_ROWS = 64
MOST_STEP_ROWS = 256  # rows of one device step over all sequences; larger steps cost more than their tokens are worth


class GpuDevice:
    """One GPU; in tests the device is the CPU, where Triton's interpreter runs the kernels."""

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        if config.exact and config.max_sequences > EXACT_ROWS:
            raise ConfigError(
                f"{config.max_sequences} sequences do not fit into an exact step of {EXACT_ROWS} rows",
                f"allow at most {EXACT_ROWS} at once, or leave --exact out",
            )
        self.device = device
        self.config = replace(config, prefill_chunk=config.chunk_rows(on_gpu=True))
        self.scratch = Scratch(device)
        self.weights: MakeWeights = partial(GpuWeights, self.scratch)
        self.kernels: GpuKernels = gpu_kernels(config.kernels)
        self.graphs = Graphs(device, config.graphs and config.kernels == "triton")

    @property
    def most_rows(self) -> int:
        """The most rows that one device step may have over all its sequences."""
        return EXACT_ROWS if self.config.exact else MOST_STEP_ROWS

    def free_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return available_bytes() or 2**30

    @property
    def label(self) -> str:
        """Says which kernels run and on which device."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "Triton's interpreter"
        how = "captured graphs" if self.graphs.enabled else "without graphs"
        return f"{self.config.kernels} kernels on {name}, {how}"

    @property
    def exact(self) -> bool:
        """Whether speculative text equals plain text to the bit: with `exact`, or as long as steps stay small."""
        small = self.config.max_sequences * LEAST_ROWS <= EXACT_ROWS
        return self.config.kernels == "triton" and (self.config.exact or small)

    def read_bandwidth(self) -> float:
        """Measures the bytes per second that a large copy reads and writes.

        A step cannot take less time than its bytes over this bandwidth, which is its floor.
        """
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
