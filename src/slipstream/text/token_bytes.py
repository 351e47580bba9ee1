"""The bytes that a vocabulary entry stands for, in either of the two notations of vocabularies that keep every byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ConfigError

SPACE_MARK = "\u2581"  # how SentencePiece vocabularies write a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenNotation:
    """How a token's text becomes bytes, and how many spaces encoding adds at the start of a text."""

    byte_level: bool
    leading_spaces: int = 0

    @classmethod
    def of(cls, decoder: Any) -> TokenNotation:
        """Derives the notation from a decoder of the tokenizers library; other decoders lose bytes and are refused."""
        parts = parts_of(decoder)
        kinds = {part.get("type") for part in parts}
        if "ByteLevel" in kinds:
            return cls(byte_level=True)
        if kinds & {"Metaspace", "ByteFallback"}:
            return cls(byte_level=False, leading_spaces=max(map(_stripped, parts)))
        raise ConfigError(
            f"the tokenizer's decoder ({', '.join(sorted(map(str, kinds))) or 'none'}) is not supported",
            "byte-level and SentencePiece tokenizers are",
        )

    def to_bytes(self, token: str) -> bytes:
        """Returns the bytes of an ordinary token; added tokens are plain text and do not come here."""
        if self.byte_level:
            mapped = [_BYTE_OF.get(char) for char in token]
            return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def parts_of(component: Any) -> list[dict[str, Any]]:
    """Lists the steps of a decoder, normalizer or pre-tokenizer of the tokenizers library, each with its settings."""
    return [] if component is None else list(_parts(json.loads(component.__getstate__())))


def _parts(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = [part for name in ("decoders", "normalizers", "pretokenizers") for part in state.get(name, ())]
    if not inner:
        yield state
    for part in inner:
        yield from _parts(part)


def _stripped(part: dict[str, Any]) -> int:
    """Returns how many leading spaces one part of a decoder removes."""
    if part.get("type") == "Metaspace":
        return int(part.get("prepend_scheme") != "never")
    return int(part["start"]) if part.get("type") == "Strip" and part.get("content") == " " else 0


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 bytes are themselves, the others are characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
