"""Turns a growing list of token ids into text as the ids arrive, and never emits half of a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from slipstream.text.tokenizer import Tokenizer, count_leading


class IncrementalDetokenizer:
    """Emits the text of each id; all texts together are exactly `tokenizer.decode` of all ids.

    It keeps only the bytes of an unfinished character, so that a step costs the same for a short and a long text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading = tokenizer.leading_spaces
        self._inside = False  # whether the last bytes are an unfinished character

    def push(self, ids: Sequence[int]) -> list[str]:
        """Returns for each id the text that becomes certain with it, which later ids cannot change any more."""
        if not self._inside and not self._leading:
            texts = self._tokenizer.whole_texts(ids)
            if None not in texts:
                return texts  # type: ignore[return-value]
        return [self._push_bytes(index) for index in ids]

    def _push_bytes(self, index: int) -> str:
        visible = not self._tokenizer.is_special(index)
        text = self._decoder.decode(self._tokenizer.token_bytes(index) if visible else b"")
        self._inside = bool(self._decoder.getstate()[0])
        return self._strip(text)

    def flush(self) -> str:
        """Returns the rest of the text; an unfinished character becomes U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        gone = count_leading(text, self._leading)
        self._leading = self._leading - gone if gone == len(text) else 0
        return text[gone:]
