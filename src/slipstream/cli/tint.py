"""Which characters of an answer were drafted, so that chat and demo can tint them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from slipstream.types import TokenOut


class Detokenizer(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...


class Tint:
    """Splits the engine's text into spans that were drafted and spans that were not.

    The engine's text is the truth about what is shown: it holds back half characters and possible stop strings. The
    detokeniser only tells how many characters each token brought.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._origins: deque[bool] = deque()
        self._last = False

    def spans(self, tokens: Sequence[TokenOut], text: str) -> Iterator[tuple[str, bool]]:
        for token in tokens:
            self._origins.extend([token.drafted] * len(self._detokenizer.push([token.id])))
        start = 0
        for end in range(1, len(text) + 1):
            origin = self._origins.popleft() if self._origins else self._last
            if origin != self._last and end - 1 > start:
                yield text[start : end - 1], self._last
                start = end - 1
            self._last = origin
        if text[start:]:
            yield text[start:], self._last
