"""One place for every default of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.errors import ConfigError

WeightFormat = Literal["auto", "native", "fp32", "fp16", "bf16", "int8", "int4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("auto", "native", "fp32", "fp16", "bf16", "int8", "int4")
Device = Literal["auto", "cpu", "cuda"]
Kernels = Literal["triton", "reference"]
DEVICES: tuple[Device, ...] = ("auto", "cpu", "cuda")
KERNELS: tuple[Kernels, ...] = ("triton", "reference")
PAGE_TOKENS = 64
DRAFT_WINDOW_LIMIT = 2048
MOST_THREADS = 1024  # more than one machine has cores; each thread takes memory for its stack


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; a request cannot change them."""

    weight_format: WeightFormat = "auto"
    device: Device = "auto"  # a GPU where there is one
    kernels: Kernels = "triton"  # on a GPU; "reference" is plain torch, slow, for comparison
    graphs: bool = True  # on a GPU: steps are captured once and replayed
    exact: bool = False  # on a GPU: no step has more rows than sum alike, whatever the batch loses by it
    max_context: int = 0  # tokens a sequence may hold; 0: what the target's config allows
    max_sequences: int = 8
    cache_tokens: int = 0  # tokens the page pool holds over all sequences; 0: chosen from free memory
    prefill_chunk: int = 0  # rows of a prompt in a step; 0: `chunk_rows` of the device
    step_rows: int = 512  # of prompts in one step where nothing is decoded; beside that it is one chunk's rows
    max_waiting: int = 1024
    draft_window: int | None = None  # None: the drafter's own safe default; 0: unlimited
    prefix_cache: bool = True
    check_integrity: bool = False
    threads: int = 0  # 0: the cores this process may use

    def chunk_rows(self, on_gpu: bool) -> int:
        """Rows of a prompt in a step. On two cores 128 take up to 0.14 s, while streams beside them are silent. A GPU
        reads all weights for any number of rows, and more rows are nearly free.
        """
        return self.prefill_chunk or (256 if on_gpu else 128)

    def __post_init__(self) -> None:
        if self.weight_format not in WEIGHT_FORMATS:
            raise ConfigError(f"unknown dtype '{self.weight_format}'", f"use one of {', '.join(WEIGHT_FORMATS)}")
        for name, known in (("device", DEVICES), ("kernels", KERNELS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} '{getattr(self, name)}'", f"use one of {', '.join(known)}")
        for name in ("max_sequences", "step_rows", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", "it must be 1 or more")
        if self.threads > MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}", f"it must be at most {MOST_THREADS}; 0 is automatic")
        for name in ("max_context", "cache_tokens", "prefill_chunk", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", "it must be 0 (automatic) or more")
        if self.draft_window is not None and self.draft_window < 0:
            raise ConfigError(f"draft_window is {self.draft_window}", "it must be 0 (unlimited) or more")
