"""How much memory the page pool may take, and the recurrent states beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.delta_rule import DeltaShape

_SHARE = 0.25  # of what is free now; the rest stays with weights, activations and the user's other programs
_STATES_PER_SLOT = 2  # sequences that yielded or are paused hold on to their state as they do to their pages
_CONTEXTS = 4  # full-length sequences beyond this many rarely run on one machine at once


def available_bytes() -> int | None:
    """Memory this process could still take: the machine's, or its container's if that is less."""
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
    """What recurrent states take: some for sequences, and a checkpoint beside every few pages."""

    sequences: int = 0  # states that are theirs
    stride: int = 0  # pages between two checkpoints; 0: there are none
    state_bytes: int = 0
    token_bytes: int = 0  # of checkpoints, for one token of the pool

    @classmethod
    def plan(
        cls, states: DeltaShape | None, config: EngineConfig, page_tokens: int, token_bytes: int, per_sequence: int = 1
    ) -> StateRoom:
        """Checkpoints are as far apart as keeps them from taking more room than the keys they stand beside."""
        if states is None:
            return cls()
        size, sequences = states.state_bytes, _STATES_PER_SLOT * config.max_sequences * per_sequence
        if not config.prefix_cache:
            return cls(sequences, 0, size)
        stride = max(1, -(-size // max(1, page_tokens * token_bytes)))
        return cls(sequences, stride, size, -(-size // (stride * page_tokens)))

    @property
    def reserved_bytes(self) -> int:
        return self.sequences * self.state_bytes

    def slots(self, pages: int) -> int:
        return self.sequences + (pages // self.stride if self.stride else 0)


def pool_pages(
    asked_tokens: int, max_context: int, page_tokens: int, bytes_per_token: int, reserved_bytes: int = 0
) -> int:
    """Pages for the pool: what was asked for, or what free memory allows beside what is reserved."""
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
        return -(-asked_tokens // page_tokens)
    tokens = _CONTEXTS * max_context
    if free is not None:
        tokens = min(tokens, int((free - reserved_bytes) * _SHARE) // bytes_per_token)
    if tokens < page_tokens:
        raise ConfigError("there is no memory left for a cache", "free some memory or use a smaller model")
    return tokens // page_tokens
