"""Decides how much memory the page pool may take, and the recurrent states beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.delta_rule import DeltaShape

# Share of the free memory that a pool takes if no size was asked for. The rest stays free for activations and for the
# user's other programs; with a larger share those may run out of memory.
_SHARE = 0.25
# Recurrent states for each slot of the engine. A sequence that has yielded or is paused keeps its state as it keeps its
# pages; with fewer states, sequences would have to be computed again more often.
_STATES_PER_SLOT = 2
# Full-length contexts for which a pool has room if no size was asked for. More of them rarely run on one machine at
# once, so a larger pool would be memory that is hardly used.
_CONTEXTS = 4


def available_bytes() -> int | None:
    """Returns the memory that this process could still take from the machine, or from its container if that is less.

    None means that the system does not say.
    """
    found: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdecimal():
        found.append(max(0, int(limit.read_text()) - int(used.read_text())))
    return min(found) if found else None


@dataclass(frozen=True, slots=True)
class StateRoom:
    """The number and size of recurrent states: those of sequences, and checkpoints, one beside every few pages."""

    sequences: int = 0  # states that belong to sequences
    stride: int = 0  # pages from one checkpoint to the next; 0 means that there are none
    state_bytes: int = 0
    token_bytes: int = 0  # bytes of checkpoints for one token of the pool

    @classmethod
    def plan(
        cls, states: DeltaShape | None, config: EngineConfig, token_bytes: int, per_sequence: int = 1
    ) -> StateRoom:
        """Spaces checkpoints so far apart that they take no more room than the keys that they stand beside."""
        if states is None:
            return cls()
        size, sequences = states.state_bytes, _STATES_PER_SLOT * config.max_sequences * per_sequence
        if not config.prefix_cache:
            return cls(sequences, 0, size)
        stride = max(1, -(-size // max(1, PAGE_TOKENS * token_bytes)))
        return cls(sequences, stride, size, -(-size // (stride * PAGE_TOKENS)))

    @property
    def reserved_bytes(self) -> int:
        return self.sequences * self.state_bytes

    def slots(self, pages: int) -> int:
        return self.sequences + (pages // self.stride if self.stride else 0)


def pool_pages(asked_tokens: int, max_context: int, bytes_per_token: int, reserved_bytes: int = 0) -> int:
    """Returns the pages of the pool: as many as were asked for, or as free memory allows beside the reserved bytes."""
    free = available_bytes()
    if free is not None and reserved_bytes > free:
        raise ConfigError(
            f"the recurrent states of all sequences need {reserved_bytes >> 20} MiB, {free >> 20} MiB are free",
            "allow fewer sequences at once",
        )
    if asked_tokens:
        if free is not None and asked_tokens * bytes_per_token + reserved_bytes > free:
            raise ConfigError(
                f"a cache of {asked_tokens} tokens needs {asked_tokens * bytes_per_token >> 20} MiB, "
                f"{free >> 20} MiB are free",
                "ask for fewer tokens",
            )
        return -(-asked_tokens // PAGE_TOKENS)
    tokens = _CONTEXTS * max_context
    if free is not None:
        tokens = min(tokens, int((free - reserved_bytes) * _SHARE) // bytes_per_token)
    if tokens < PAGE_TOKENS:
        raise ConfigError("there is no memory left for a cache", "free some memory or use a smaller model")
    return tokens // PAGE_TOKENS
