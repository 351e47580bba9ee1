"""Chooses where a pair runs: a GPU where there is one that can serve, the CPU otherwise."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.engine.gpu.backend import GpuBackend


def gpu_backend(config: EngineConfig) -> GpuBackend | None:
    """The GPU's side of an engine; None where the CPU serves."""
    device = gpu_device()
    if config.device == "cpu" or (config.device == "auto" and device is None):
        asked = {"--kernels": config.kernels != "triton", "--no-graphs": not config.graphs, "--exact": config.exact}
        for option, given in asked.items():
            if given:
                raise ConfigError(f"{option} is for a GPU, and this would run on the CPU", "leave it out")
        return None
    if device is None:
        raise ConfigError("there is no GPU that torch can use", "use --device cpu, or install torch with CUDA")
    if find_spec("triton") is None:
        raise ConfigError("the GPU's kernels need triton", "pip install triton, or use --device cpu")
    # imported here: without a GPU nothing of it is needed
    from slipstream.engine.gpu.backend import GpuBackend

    return GpuBackend(device, config)


def gpu_device() -> torch.device | None:
    return torch.device("cuda") if torch.cuda.is_available() else None
