"""Turns a growing list of token ids into text as the ids arrive, and never emits half of a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from slipstream.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Emits text piece by piece; all pieces together are exactly `tokenizer.decode` of all ids.

    It keeps only the bytes of an unfinished character, so that a step costs the same for a short and a long text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, *, continues: bool = False) -> None:
        """`continues` says that the ids continue an earlier text, so that a leading space belongs to it and stays."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading = 0 if continues else tokenizer.leading_spaces
        self._inside = False  # whether the last bytes are an unfinished character

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that later ids cannot change any more."""
        if self._skip_special and not self._inside and not self._leading:
            texts = [self._tokenizer.whole_text(index) for index in ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]
        kept = self._tokenizer.visible(ids) if self._skip_special else ids
        text = self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, kept)))
        self._inside = bool(self._decoder.getstate()[0])
        return self._strip(text)

    def flush(self) -> str:
        """Returns the rest of the text; an unfinished character becomes U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._leading and text:
            if text[0] != " ":
                self._leading = 0
            else:
                self._leading -= 1
                text = text[1:]
        return text
