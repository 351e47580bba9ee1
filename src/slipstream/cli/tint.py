"""Which characters of an answer were drafted, so that chat and demo can tint them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from slipstream.types import TokenOut


class Tint:
    """Splits the engine's text into spans that were drafted and spans that were not.

    What is shown is the engine's text, which holds back characters that may begin a stop string. The texts of the
    tokens only tell how many characters each token brought.
    """

    def __init__(self) -> None:
        self._origins: deque[bool] = deque()
        self._last = False

    def spans(self, tokens: Sequence[TokenOut], texts: Sequence[str], text: str) -> Iterator[tuple[str, bool]]:
        """The next `text` to show in spans of one origin; `texts` are what the tokens of its event brought."""
        for token, brought in zip(tokens, texts, strict=True):
            self._origins.extend([token.drafted] * len(brought))
        start = 0
        for end in range(1, len(text) + 1):
            origin = self._origins.popleft() if self._origins else self._last
            if origin != self._last and end - 1 > start:
                yield text[start : end - 1], self._last
                start = end - 1
            self._last = origin
        if text[start:]:
            yield text[start:], self._last
