"""Says whether a pair fits into memory with a given context, and what would fit; it reads headers and loads nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.config import PAGE_TOKENS, EngineConfig, WeightFormat
from slipstream.engine.memory_estimate import Footprint, available_bytes, footprint
from slipstream.errors import ConfigError, RequestError
from slipstream.formats.quants import BLOCKS
from slipstream.formats.weight_files import read_config
from slipstream.models.decoder import DecoderConfig
from slipstream.tools.convert_plans import Source
from slipstream.tools.family_tensors import gguf_tensors
from slipstream.tools.model_file import open_model
from slipstream.tools.quantize_recipes import Recipe, RecipeName
from slipstream.types import Progress

# Python, torch and the work space of a step, as measured in a process with the default pair beyond weights and cache.
# If it is too small, a pair that is said to fit runs out of memory.
RUNTIME_BYTES = 480 * 10**6
# The types that `slipstream quantize` could give the target.
QUANTS: tuple[RecipeName, ...] = ("bf16", "q8_0", "q6_k", "q5_k", "q5_0", "q4_k_m", "q4_k", "q4_0")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class QuantFit:
    """The same pair if the target were quantised with a recipe of `slipstream quantize`."""

    type: str  # the recipe
    weight_bytes: int
    total_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class FitReport:
    """What a pair needs, compared with a memory; counts are for the requested context."""

    fits: bool
    memory_bytes: int
    context: int
    target_bytes: int
    draft_bytes: int
    runtime_bytes: int
    token_bytes: int  # of the cache, for target and draft context together
    cache_bytes: int
    total_bytes: int
    trained_context: int  # the longest context that the target supports
    largest_context: int  # the longest single sequence that there is room for, in whole pages; 0 if there is none
    sequences: int  # how many sequences of the context can be held at once
    best_quant: str | None  # the largest quantised target that fits with this context; None if none fits
    without_draft: bool  # whether the target would fit without the drafter
    quants: list[QuantFit]

    def advice(self) -> list[str]:
        """Says in sentences what would fit; the first sentence says whether this pair does."""
        if self.fits:
            count = "one sequence" if self.sequences == 1 else f"{self.sequences} sequences"
            return [f"It fits: {count} of {self.context} tokens at once."]
        lines = [f"It does not fit: {_megabytes(self.total_bytes - self.memory_bytes)} are missing."]
        if self.largest_context:
            lines.append(f"A context of {self.largest_context} tokens fits.")
        if self.best_quant is not None:
            lines.append(f"With the target quantised to {self.best_quant} it would fit.")
        if self.without_draft:
            lines.append("Without the drafter it would fit.")
        if len(lines) == 1:
            lines.append(f"It needs {_megabytes(self.total_bytes)}, or a smaller model.")
        return lines

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"advice": self.advice()}


def parse_size(text: str) -> int:
    """Bytes from `8G`, `512MiB`, `1.5GB` or a plain number; G means 10 to the 9, Gi means 2 to the 30."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise RequestError(f"'{text}' is not a size of memory", "give bytes, or a unit as in 8GB or 512MiB")
    number, unit, binary = found.groups()
    size = int(float(number) * (1024 if binary else 1000) ** _UNITS[unit.upper()])
    if size < 1:
        raise RequestError(f"'{text}' is less than one byte of memory", "give a size above 0")
    return size


def fit(
    target: str,
    draft: str | None,
    *,
    context: int = 0,
    memory: int | None = None,
    weight_format: WeightFormat = "auto",
    progress: Progress | None = None,
) -> FitReport:
    """What a pair needs for one sequence of `context` tokens (0: all the target allows), against `memory` bytes."""
    if context < 0:
        raise RequestError(f"a context cannot have {context} tokens", "give 1 or more, or 0 for the target's own")
    config = EngineConfig(weight_format=weight_format, cache_tokens=PAGE_TOKENS)  # the pool's size is computed below
    alone = footprint(target, "none", config, progress)
    pair = footprint(target, draft, config, progress)
    available = memory if memory is not None else available_bytes()
    if available is None:
        raise ConfigError("this system does not say how much memory is free", "give it with --memory")
    asked = context or alone.max_context
    pages = -(-asked // PAGE_TOKENS)  # of one sequence

    def total(weights: int, needs: Footprint) -> int:
        return weights + RUNTIME_BYTES + pages * PAGE_TOKENS * needs.token_bytes

    draft_bytes, needed = pair.weight_bytes - alone.weight_bytes, total(pair.weight_bytes, pair)
    room = max(0, available - pair.weight_bytes - RUNTIME_BYTES) // (PAGE_TOKENS * pair.token_bytes)  # in pages
    smaller = [(size, name) for name, size in quantised_bytes(alone.files[0]).items() if size < alone.weight_bytes]
    quants = [
        QuantFit(name, size, then := total(size + draft_bytes, pair), then <= available)
        for size, name in sorted(smaller, reverse=True)
    ]
    return FitReport(
        fits=needed <= available,
        memory_bytes=available,
        context=asked,
        target_bytes=alone.weight_bytes,
        draft_bytes=draft_bytes,
        runtime_bytes=RUNTIME_BYTES,
        token_bytes=pair.token_bytes,
        cache_bytes=pages * PAGE_TOKENS * pair.token_bytes,
        total_bytes=needed,
        trained_context=alone.max_context,
        largest_context=min(room * PAGE_TOKENS, alone.max_context),
        sequences=room // pages,
        best_quant=next((quant.type for quant in quants if quant.fits), None),
        without_draft=bool(draft_bytes) and total(alone.weight_bytes, alone) <= available,
        quants=quants,
    )


def quantised_bytes(path: Path, recipes: Sequence[RecipeName] = QUANTS) -> dict[RecipeName, int]:
    """The bytes of a target's tensors after `slipstream quantize --type`, computed without quantising anything."""
    with open_model(path) as model:
        stored: Mapping[str, Source] = {own: model.file.tensor(own) for own in model.found.values()}
        if isinstance(model.config, DecoderConfig) and read_config(path) is not None:
            stored = gguf_tensors(model.config, {name: model.file.tensor(own) for name, own in model.found.items()})
        return {name: sum(_sizes(stored, Recipe(name, stored))) for name in recipes}


def _sizes(stored: Mapping[str, Source], recipe: Recipe) -> Iterator[int]:
    for name, tensor in stored.items():
        block, size = BLOCKS[recipe.choose(name, tensor.shape, tensor.type_name).type_name]
        yield math.prod(tensor.shape) // block * size


def _megabytes(count: int) -> str:
    return f"{-(-count // 10**6)} MB"
