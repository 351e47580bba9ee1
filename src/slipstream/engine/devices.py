"""Chooses where a pair runs: on a GPU if the configuration allows it and torch can use one, else on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from slipstream.config import EngineConfig
from slipstream.engine.cpu.cpu_executor import CpuExecutor, pool_shapes
from slipstream.engine.executor import Executor
from slipstream.errors import ConfigError
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.types import Progress

if TYPE_CHECKING:
    from slipstream.engine.gpu.gpu_device import GpuDevice


def chosen_gpu(config: EngineConfig) -> GpuDevice | None:
    """Returns the GPU that the pair runs on; None means the CPU. Refuses GPU options if the pair runs on the CPU."""
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
    # Imported here, because nothing of it is needed without a GPU.
    from slipstream.engine.gpu.gpu_device import GpuDevice

    return GpuDevice(device, config)


def make_executor(
    gpu: GpuDevice | None,
    target: Decoder,
    draft: DFlashDrafter | None,
    config: EngineConfig,
    max_context: int,
    draft_window: int,
    progress: Progress | None,
) -> Executor:
    """Returns the executor of a loaded pair, on the chosen GPU or on the CPU."""
    if gpu is None:
        return CpuExecutor.sized(target, draft, config, max_context, draft_window, progress)
    from slipstream.engine.gpu.gpu_executor import GpuExecutor

    return GpuExecutor(gpu, target, draft, pool_shapes(target, draft), max_context, draft_window, progress)


def gpu_device() -> torch.device | None:
    return torch.device("cuda") if torch.cuda.is_available() else None
