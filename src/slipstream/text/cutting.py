"""What is known about a text's tokens before it is tokenised: how many there are at least, and where it may be cut.

Tokenising takes up to 300 bytes of memory per byte of text. A text that is far too long is therefore refused by a lower
bound of its tokens, which its bytes give, and a long text is tokenised piece by piece. Neither may ever change a token
id or refuse a text that would fit, so both are used only with tokenizers whose every part is known to allow them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import models

from slipstream.text.gguf_vocab import SPLIT_PATTERNS, WORD_PATTERNS
from slipstream.text.token_bytes import SPACE_MARK, parts_of

# Characters of a piece. Tokenising a piece takes up to 2.5 MB of memory if it is ASCII, and up to four times that if
# its characters have 4 bytes each. With half as many characters, tokenising would take 1 % more time.
PIECE_CHARS = 1 << 13
# A text may be cut before a space or after a line break, if the characters around that space or break are no
# whitespace. The known patterns match nothing across such a place and do not look back over it, and a text that ends
# there has the same matches before it.
_CUT = re.compile(r"[ \n](?<=\S.)(?=\S)", re.DOTALL)
_SEARCH_CHARS = 1 << 16  # a search blocks other threads, and this many take 3 ms at most
_COUNT_BYTES = 1 << 16  # counting takes 8 bytes of memory for each of them
_CROSSING = re.compile(r"\S |\n\S")  # a token that contains one of these could span a cut

Part = dict[str, Any]
Shares = np.ndarray[Any, np.dtype[np.float64]]


def pieces(text: str) -> Iterator[str]:
    """Yields pieces whose tokens together are those of the whole text; a stretch without a place to cut stays whole."""
    start = 0
    while start < len(text):
        end = _next_cut(text, start + PIECE_CHARS)
        yield text[start:end]
        start = end


def _next_cut(text: str, start: int) -> int:
    """Returns the first place to cut at or after `start`, or the end of the text if there is none."""
    for place in range(start, len(text), _SEARCH_CHARS):
        if found := _CUT.search(text, place, place + _SEARCH_CHARS + 1):
            return found.start() if found[0] == " " else found.end()
    return len(text)


def can_cut(backend: Backend, vocabulary: Sequence[bytes]) -> bool:
    """Whether the tokens of the `pieces` of any text are the tokens of the whole text."""
    normalizers, pre_tokenizers = parts_of(backend.normalizer), parts_of(backend.pre_tokenizer)
    if not _is_plain_bpe(backend) or _strips(backend) or not all(map(_keeps_cuts, normalizers)):
        return False
    added = [token.content.replace(SPACE_MARK, " ") for token in backend.get_added_tokens_decoder().values()]
    if any(map(_CROSSING.search, added)):
        return False
    if pre_tokenizers:
        return all(map(_splits_at_cuts, pre_tokenizers)) and any(map(_splits_words, pre_tokenizers))
    # without a split into words, no token of the vocabulary may span a cut, because merging could produce it
    texts = (token.decode("utf-8", "replace") for token in vocabulary)
    has_all_bytes = len({token for token in vocabulary if len(token) == 1}) == 256
    return has_all_bytes and not any(map(_CROSSING.search, texts))


def token_shares(backend: Backend, vocabulary: Sequence[bytes]) -> Shares | None:
    """Returns for each byte value the least share of a token that such a byte has; 0 if the byte may vanish.

    Returns None if no share is certain with this tokenizer. The share of a byte is 1 / (the length of the longest token
    that contains it). The shares of a token's bytes add up to 1 at most, so the shares of a text's bytes add up to at
    most the number of its tokens.
    """
    parts = [*parts_of(backend.normalizer), *parts_of(backend.pre_tokenizer)]
    if not _is_plain_bpe(backend) or _strips(backend) or not all(map(_keeps_bytes, parts)):
        return None
    lengths = np.fromiter(map(len, vocabulary), np.int64, len(vocabulary))
    longest = np.zeros(256, np.int64)
    np.maximum.at(longest, np.frombuffer(b"".join(vocabulary), np.uint8), np.repeat(lengths, lengths))
    shares: Shares = 1.0 / np.maximum(longest, 1)
    # bytes that the vocabulary cannot write may vanish from a text, alone or with their whole character
    single = {token[0] for token in vocabulary if len(token) == 1}
    shares[[byte not in single for byte in range(256)]] = 0.0
    kinds = {part["type"] for part in parts}
    # NFC joins a letter and its accent into one character of fewer bytes
    if "NFC" in kinds or (len(single) < 256 and "ByteLevel" not in kinds):
        shares[128:] = 0.0
    return shares


def fewest_tokens(data: bytes, shares: Shares) -> int:
    """Returns a lower bound of the number of tokens of the text with these bytes."""
    values = np.frombuffer(data, np.uint8)
    if not shares[128:].any() and not data.isascii():
        # an ASCII character before another one stays as it is; before an accent it may be joined with it
        values = values[:-1][values[1:] < 128]
    # the count runs in stretches, because it takes 8 bytes of memory for each byte it looks at
    counts = np.zeros(256, np.int64)
    for start in range(0, len(values), _COUNT_BYTES):
        counts += np.bincount(values[start : start + _COUNT_BYTES], minlength=256)
    return int(np.ceil(float(counts @ shares) - 1e-6))


def _is_plain_bpe(backend: Backend) -> bool:
    model = backend.model
    return isinstance(model, models.BPE) and not (
        model.continuing_subword_prefix or model.end_of_word_suffix or model.dropout
    )


def _strips(backend: Backend) -> bool:
    """Whether an added token takes in the spaces around it, or depends on its neighbours."""
    added = backend.get_added_tokens_decoder().values()
    return any(token.lstrip or token.rstrip or token.single_word for token in added)


def _keeps_cuts(part: Part) -> bool:
    """Whether a normalizer changes the pieces of a text exactly as it changes the whole text."""
    return part["type"] == "NFC" or _marks_spaces(part)


def _marks_spaces(part: Part) -> bool:
    return part["type"] == "Replace" and (part["pattern"], part["content"]) == ({"String": " "}, SPACE_MARK)


def _splits_at_cuts(part: Part) -> bool:
    """Whether a pre-tokenizer never joins the text on the two sides of a cut."""
    if part["type"] == "Split":
        known = part["pattern"].get("Regex") in SPLIT_PATTERNS
        return known and part["behavior"] == "Isolated" and not part["invert"]
    return part["type"] == "Digits" or (part["type"] == "ByteLevel" and not part["add_prefix_space"])


def _splits_words(part: Part) -> bool:
    """Whether a pre-tokenizer of a known kind separates words."""
    return part["type"] == "Split" and part["pattern"].get("Regex") in WORD_PATTERNS or bool(part.get("use_regex"))


def _keeps_bytes(part: Part) -> bool:
    """Whether every byte of the input is in the output, except for those that NFC joins."""
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    return part["type"] in ("NFC", "Prepend", "Digits", "ByteLevel", "Metaspace") or _marks_spaces(part)
