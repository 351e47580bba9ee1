"""Builds a tokenizer from the vocabulary in a GGUF file's metadata: byte-level BPE or SentencePiece BPE.

SentencePiece vocabularies come with scores (kind `llama`) or, for Gemma 4, with merges (kind `gemma4`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from slipstream.errors import ConfigError, FormatError
from slipstream.text.token_bytes import SPACE_MARK

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # the GGUF codes of token types
# In practice merging does not produce longer tokens, and finding a token's splits costs the square of its length.
MAX_MERGED_CHARS = 256

_PREFIX = "tokenizer.ggml."
_DAMAGED = "the file is damaged or was converted badly"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _TAIL
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + _TAIL
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How one family of models splits a text before merging: patterns in order, each isolating its matches."""

    patterns: tuple[str, ...]
    compose: bool = False  # whether the text is first composed to NFC
    ignore_merges: bool = False  # whether a word that is itself a token is taken whole
    adds_bos: bool = False


_PRE: dict[str, _PreTokenizer] = {
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2": _PreTokenizer((_QWEN2,), compose=True),
    "qwen35": _PreTokenizer((_QWEN35,), compose=True),
    "llama-bpe": _PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
SPLIT_PATTERNS = frozenset(pattern for pre in _PRE.values() for pattern in pre.patterns)
WORD_PATTERNS = frozenset({_GPT2, _QWEN2, _QWEN35, _LLAMA3})  # the patterns that separate words
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "gpt2": "gpt-2"}


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """A tokenizer built from metadata, and what the metadata says about its use."""

    backend: Backend
    bos_id: int | None
    eos_ids: tuple[int, ...]  # the end of a sequence comes first, then the ends of turns and messages
    add_bos: bool
    chat_template: str | None


def build(metadata: Mapping[str, object]) -> GgufVocab:
    """Builds a tokenizer from the `tokenizer.*` keys of a GGUF file."""
    kind = metadata.get(_PREFIX + "model")
    if kind is None:
        raise ConfigError("the GGUF file has no tokenizer", "use a file that carries its vocabulary, or a model folder")
    tokens = _strings(metadata, "tokens")
    types = [NORMAL] * len(tokens)
    if metadata.get(_PREFIX + "token_type") is not None:
        types = _column(metadata, "token_type", int, len(tokens), "no type for each token")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise FormatError("the vocabulary of the GGUF file repeats a token", _DAMAGED)
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata)
        backend, adds_bos = _byte_level(vocab, _merges(metadata, vocab), pre), pre.adds_bos
    elif kind == "llama":
        scores = _column(metadata, "scores", float, len(tokens), "no score for each token")
        merges = merges_from_scores(tokens, types, scores)
        prefix = _flag(metadata, "add_space_prefix", True)
        backend, adds_bos = _sentencepiece(metadata, tokens, vocab, merges, prefix), True
    elif kind == "gemma4":
        backend, adds_bos = _sentencepiece(metadata, tokens, vocab, _merges(metadata, vocab), prefix=False), True
    else:
        known = "gpt2, llama and gemma4 are"
        raise ConfigError(f"the tokenizer kind '{kind}' of the GGUF file is not supported", known)
    _add_special(backend, tokens, types)
    eos = [_token_id(metadata, name, len(tokens)) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    template = metadata.get("tokenizer.chat_template")
    return GgufVocab(
        backend=backend,
        bos_id=_token_id(metadata, "bos_token_id", len(tokens)),
        eos_ids=tuple(index for index in eos if index is not None),
        add_bos=_flag(metadata, "add_bos_token", adds_bos),
        chat_template=template if isinstance(template, str) and template else None,
    )


def _pre_tokenizer(metadata: Mapping[str, object]) -> _PreTokenizer:
    name = metadata.get(_PREFIX + "pre", "default")
    pre = _PRE.get(_ALIASES.get(str(name), str(name)))
    if pre is None:
        known = ", ".join(sorted({*_PRE, *_ALIASES}))
        raise ConfigError(f"the pre-tokenizer '{name}' of the GGUF file is not known", f"known: {known}")
    return pre


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], pre: _PreTokenizer) -> Backend:
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.compose:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(metadata: Mapping[str, object], vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for merge in _strings(metadata, "merges"):
        # The first part may itself begin with a space, so the separator is the first space after its first character.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(f"the merge {merge!r:.60} of the GGUF file does not fit its vocabulary", _DAMAGED)
        pairs.append((left, right))
    return pairs


def _sentencepiece(
    metadata: Mapping[str, object],
    tokens: list[str],
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    prefix: bool,
) -> Backend:
    unknown = _token_id(metadata, "unknown_token_id", len(tokens))
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marking = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marking]) if prefix else marking
    unmarking = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*unmarking, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns merges with which BPE joins pieces in SentencePiece's order: the best-scored joined piece first."""
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token not in pieces or len(token) > MAX_MERGED_CHARS:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-score, -len(left), -len(right), left, right))
    ranked.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_special(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Marks control tokens as special, so that decoding can skip them, and user-defined ones as never split."""
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _column(metadata: Mapping[str, object], name: str, kind: type, count: int, said: str) -> list[Any]:
    """Returns a list of one value for each token."""
    values = metadata.get(_PREFIX + name)
    if not isinstance(values, list) or len(values) != count or not all(type(value) is kind for value in values):
        raise FormatError(f"the GGUF file has {said} of its vocabulary", _DAMAGED)
    return values


def _strings(metadata: Mapping[str, object], name: str) -> list[str]:
    values = metadata.get(_PREFIX + name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise FormatError(f"the GGUF file's {_PREFIX}{name} is not a list of strings", _DAMAGED)
    return cast(list[str], values)


def _token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < count:
        raise FormatError(f"the GGUF file's {_PREFIX}{name} is {value!r:.40}", f"it must be one of its {count} tokens")
    return value


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name)
    return value if isinstance(value, bool) else default
