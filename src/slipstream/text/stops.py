"""Finding stop strings in text that arrives in pieces, without ever emitting part of one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from slipstream.errors import RequestError


class StopMatcher:
    """Passes text on until a stop string is complete.

    The stop that is completed first ends the text, of two completed by the same character the longer one: so the
    outcome depends on the text alone, never on how it was cut into pieces.

    What is held back is the longest end of the text that a stop begins with. A character extends it by one, or moves
    its beginning forward, so a text costs about two lookups per character however many stops there are and however
    long they are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty", "leave it out")
        self._stops = tuple(sorted(set(stops)))  # sorted: those that begin alike stand together
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can safely be emitted, and whether a stop was hit; nothing is emitted after a hit."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        seen = self._held + text
        start = 0  # where the end that is held back begins; a stop that is completed later begins there or behind it
        for end in range(len(self._held) + 1, len(seen) + 1):
            if seen.endswith(self._stops, start, end):
                self._held = ""
                self.matched = max((stop for stop in self._stops if seen.endswith(stop, start, end)), key=len)
                return seen[: end - len(self.matched)], True
            while start < end and not self._begins(seen[start:end]):
                start += 1
        self._held = seen[start:]
        return seen[:start], False

    def _begins(self, piece: str) -> bool:
        """Whether a stop begins with these characters."""
        place = bisect_left(self._stops, piece)
        return place < len(self._stops) and self._stops[place].startswith(piece)

    def flush(self) -> str:
        """What was held back in case it became a stop, once the text is over."""
        held, self._held = self._held, ""
        return held
