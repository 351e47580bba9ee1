"""The settings of an engine and their defaults."""

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
PAGE_TOKENS = 64  # tokens in a cache page; the GPU's attention needs a power of two
DRAFT_WINDOW_LIMIT = 2048  # tokens; the largest attention window that a drafter gets by default
MOST_THREADS = 1024  # few machines have so many cores; further threads would only take memory for their stacks


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; a request cannot change them."""

    weight_format: WeightFormat = "auto"
    device: Device = "auto"  # "auto" takes a GPU if there is one
    kernels: Kernels = "triton"  # on a GPU only; "reference" is plain torch, slow and meant for comparison
    graphs: bool = True  # on a GPU only: a step is captured once as a CUDA graph and replayed
    exact: bool = False  # on a GPU only: limits a step to so few rows that no sum depends on the batch; costs speed
    max_context: int = 0  # tokens a sequence may hold; 0 means what the target's config allows
    max_sequences: int = 8
    cache_tokens: int = 0  # tokens the page pool holds over all sequences; 0 means a size chosen from free memory
    prefill_chunk: int = 0  # rows of one prompt in a step; 0 means the device's default, see `chunk_rows`
    step_rows: int = 512  # rows of all prompts together in a step that decodes nothing; otherwise one chunk
    max_waiting: int = 1024
    draft_window: int | None = None  # tokens; None means the drafter's own safe default, 0 means unlimited
    prefix_cache: bool = True
    check_integrity: bool = False
    threads: int = 0  # 0 means one per core that this process may use
    text_drafts: bool = True  # the text of a sequence is a source of drafts in modes auto and tree:ROWS:text

    def chunk_rows(self, on_gpu: bool) -> int:
        """Returns how many rows of one prompt a step computes.

        On two CPU cores 128 rows take up to 0.14 s, and sequences that are decoded get no token in that time. A GPU
        reads all weights for any number of rows, so 256 rows cost little more than 128.
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
