"""What an engine shows of itself: plain values about its requests, its line and its pages.

The server, the command line and the tools read these values instead of the engine's own objects, so that the inside of
the engine can change without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.engine.active_sequence import ActiveSequence


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """How far one request has come.

    `phase` is `waiting` before the request's first slot, `prefill` or `decode` while it has a slot, `yielded` while it
    waits for its next turn, `paused`, or `paused-evicted` if other requests needed its pages while it was paused (a
    resumed request is then computed again from its tokens).
    """

    request_id: str
    phase: str
    prompt_tokens: int
    generated: int
    max_tokens: int
    cached_tokens: int  # tokens of the prompt that were found in the prefix cache
    mode: str
    draft_lora: str
    tau: float  # committed tokens per decoding step so far
    drafted: int
    accepted: int
    priority: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine at one moment; its sequences stand in the order in which their requests arrived."""

    sequences: tuple[SequenceSnapshot, ...]
    pages_used: int
    pages_cached: int  # used pages that the prefix cache remembers; running requests may share them
    pages_total: int


@dataclass(frozen=True, slots=True)
class LineSnapshot:
    """The engine's line: `newcomers` have never had a slot, `waiting` also counts requests between two turns."""

    newcomers: int
    waiting: int


def sequence_snapshot(sequence: ActiveSequence) -> SequenceSnapshot:
    request, stats = sequence.request, sequence.stats
    return SequenceSnapshot(
        request_id=request.id,
        phase=sequence.phase,
        prompt_tokens=len(request.prompt_ids),
        generated=sequence.generated,
        max_tokens=sequence.max_tokens,
        cached_tokens=sequence.cached_tokens,
        mode=str(request.mode),
        draft_lora=request.draft_lora,
        tau=stats.tau,
        drafted=stats.drafted,
        accepted=stats.accepted,
        priority=request.priority,
    )
