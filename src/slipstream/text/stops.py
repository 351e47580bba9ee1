"""Finds stop strings in a text that arrives in pieces, without ever emitting part of one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from slipstream.errors import RequestError


class StopMatcher:
    """Passes text on until a stop string is complete.

    The stop string that is completed first ends the text; if one character completes two, the longer one does. The
    outcome therefore depends on the text alone and not on how it was cut into pieces.

    The matcher holds back the longest end of the text that is the beginning of a stop string. Each character extends
    this end by one or moves its start forward, so a text costs about two lookups per character, no matter how many stop
    strings there are or how long they are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty", "leave it out")
        self._stops = tuple(sorted(set(stops)))  # sorted, so that stop strings with the same beginning are neighbours
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that can be emitted, and whether a stop was found; after that nothing is emitted."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        seen = self._held + text
        start = 0  # start of the held-back end; a stop string that is completed later begins here or after it
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
        """Whether a stop string begins with these characters."""
        place = bisect_left(self._stops, piece)
        return place < len(self._stops) and self._stops[place].startswith(piece)

    def flush(self) -> str:
        """Returns the held-back text once the text is over, because it did not become a stop string."""
        held, self._held = self._held, ""
        return held
