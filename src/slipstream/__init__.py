"""Slipstream: DFlash speculative decoding that writes the same text as plain decoding.

`from slipstream import LLM; print(LLM("smollm2").generate("Once upon a time").text)`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.config import EngineConfig
from slipstream.errors import SlipstreamError
from slipstream.stats import RequestStats
from slipstream.types import GenEvent, Mode, SamplingParams, TokenOut
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM, Completion

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "GenEvent",
    "Mode",
    "RequestStats",
    "SamplingParams",
    "SlipstreamError",
    "TokenOut",
    "__version__",
]

# Importing the engine imports torch, which takes seconds: `slipstream --help` must not wait for it.
_FROM_ENGINE = frozenset({"LLM", "Completion"})


def __getattr__(name: str) -> object:
    if name in _FROM_ENGINE:
        from slipstream.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | _FROM_ENGINE)
