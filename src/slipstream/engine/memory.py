"""How much memory the page pool may take."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import ConfigError

_SHARE = 0.25  # of what is free now; the rest stays with weights, activations and the user's other programs
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


def pool_pages(asked_tokens: int, max_context: int, page_tokens: int, bytes_per_token: int) -> int:
    """Pages for the pool: what was asked for, or what free memory allows."""
    free = available_bytes()
    if asked_tokens:
        if free is not None and asked_tokens * bytes_per_token > free:
            raise ConfigError(
                f"a cache of {asked_tokens} tokens needs {asked_tokens * bytes_per_token >> 20} MiB, "
                f"{free >> 20} MiB are free",
                "ask for fewer tokens",
            )
        return -(-asked_tokens // page_tokens)
    tokens = _CONTEXTS * max_context
    if free is not None:
        tokens = min(tokens, int(free * _SHARE) // bytes_per_token)
    if tokens < page_tokens:
        raise ConfigError("there is no memory left for a cache", "free some memory or use a smaller model")
    return tokens // page_tokens
