"""Estimates how much memory a pair will take, from the headers of its files and before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.cache.cpu.page_pools import PoolShape
from slipstream.config import PAGE_TOKENS, EngineConfig, WeightFormat
from slipstream.engine.pool_sizes import StateRoom, available_bytes, pool_pages
from slipstream.formats.sources import drafter_source, resolve
from slipstream.formats.weight_files import WeightFile, open_weights
from slipstream.kernels.cpu.native_library import library
from slipstream.models.dflash import read_drafter_config
from slipstream.models.loading import read_target_config
from slipstream.types import Progress

# Bytes of one weight in torch's formats, scales included; native weights take as much as in their file. If a number is
# too small, a pair may be loaded that does not fit.
_WEIGHT_BYTES: dict[WeightFormat, float] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1.125, "int4": 0.75}

__all__ = ["Footprint", "available_bytes", "footprint"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a loaded pair: weights, recurrent states, and the page pool, which fills up while it is used."""

    files: tuple[Path, ...]
    weight_bytes: int
    token_bytes: int  # bytes of one token in the pool
    max_context: int
    cache_tokens: int
    state_bytes: int = 0  # states of all sequences that may run at once

    @property
    def total(self) -> int:
        return self.weight_bytes + self.state_bytes + self.cache_tokens * self.token_bytes

    def within(self, budget: int) -> Footprint:
        """Returns this footprint with a pool of at most a quarter of the budget, or one context if that is more."""
        share = max(budget // 4 // self.token_bytes, self.max_context)
        room = max(0, budget - self.weight_bytes - self.state_bytes) // self.token_bytes
        pages = min(self.cache_tokens, share, room) // PAGE_TOKENS
        return replace(self, cache_tokens=max(1, pages) * PAGE_TOKENS)


def footprint(target: str, draft: str | None, config: EngineConfig, progress: Progress | None = None) -> Footprint:
    """Finds the files as `LLM` does, fetches them if need be, and adds up what `LLM` will allocate."""
    source = resolve(target, progress=progress)
    with open_weights(source.path) as file:
        shape, names = read_target_config(source.path, file)
        weights = _weight_bytes(file, config.weight_format)
        if shape.tied_head:  # the table is kept twice: to look tokens up, and packed for products as the head
            weights += file.tensor(names.file_name("model.embed_tokens.weight")).nbytes
    files, per_token = [source.path], PoolShape(shape.kv_shapes).bytes_per_token()
    wanted = drafter_source(target, draft)
    if wanted is not None:
        draft_path = resolve(wanted, progress=progress).path
        with open_weights(draft_path) as file:
            drafter = read_drafter_config(draft_path, file)
            weights += _weight_bytes(file, config.weight_format)
        files.append(draft_path)
        per_token += PoolShape.alike(drafter.layers, drafter.kv_heads, drafter.head_dim).bytes_per_token()
    max_context = config.max_context or shape.max_positions
    states = StateRoom.plan(shape.states, config, per_token)
    per_token += states.token_bytes
    pages = pool_pages(config.cache_tokens, max_context, per_token, states.reserved_bytes)
    return Footprint(tuple(files), weights, per_token, max_context, pages * PAGE_TOKENS, states.reserved_bytes)


def _weight_bytes(file: WeightFile, weight_format: WeightFormat) -> int:
    tensors = [file.tensor(name) for name in file.names()]
    if weight_format == "native" or (weight_format == "auto" and library() is not None):
        return sum(tensor.nbytes for tensor in tensors)
    elements = sum(math.prod(tensor.shape) for tensor in tensors)
    # Without compiled kernels `auto` measures which format is fastest; the largest one it may choose is the safe guess.
    return int(elements * _WEIGHT_BYTES.get(weight_format, 4))
