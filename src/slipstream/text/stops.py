"""Finding stop strings in text that arrives in pieces, without ever emitting part of one."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import RequestError


class StopMatcher:
    """Passes text on until a stop string is complete.

    The stop that is completed first ends the text, of two completed by the same character the longer one: so the
    outcome depends on the text alone, never on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty", "leave it out")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can safely be emitted, and whether a stop was hit; nothing is emitted after a hit."""
        if self.matched is not None:
            return "", True
        seen = self._held + text
        hits = [(seen.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in seen]
        if hits:
            end, _, self.matched = min(hits)
            self._held = ""
            return seen[: end - len(self.matched)], True
        keep = max((_overlap(seen, stop) for stop in self._stops), default=0)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], False

    def flush(self) -> str:
        """What was held back in case it became a stop, once the text is over."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins, the whole of `stop` excluded."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
