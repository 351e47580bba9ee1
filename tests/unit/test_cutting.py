"""Tokenising in pieces has the ids of the whole text, and refusing by bytes never refuses what would fit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from slipstream.errors import RequestError
from slipstream.text import cutting, gguf_vocab
from slipstream.text.tokenizer import Tokenizer, TooLongError
from tests.helpers_models import smollm2_metadata
from tests.unit.test_tokenizer import TEXTS, metadata, spm_metadata

KINDS = ("smollm2", "gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe", "default", "gemma")
LETTERS = [
    *"ab  \n\n\t.,'12é日🇩-<|",
    "\r\n",
    "e\u0301",
    "\u00a0",
    "<|im_end|>",
    "it's ",
    " the",
    "\x1c",
    "\u2028",
    "\x04",
]


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "smollm2":
        return Tokenizer.from_gguf(smollm2_metadata())
    if kind == "gemma":
        tokens: Any = spm_metadata()["tokenizer.ggml.tokens"]
        merges = [f"{a} {b}" for a, b in (("▁", "a"), ("a", "n"), ("l", "l"), ("e", "ll"), ("▁a", "n"), ("▁", "t"))]
        return Tokenizer.from_gguf(
            {
                **spm_metadata(),
                "tokenizer.ggml.model": "gemma4",
                "tokenizer.ggml.merges": merges,
                "tokenizer.ggml.tokens": tokens,
            }
        )
    return Tokenizer.from_gguf(metadata(pre=kind))


def random_text(seed: int, length: int = 400) -> str:
    chance = random.Random(seed)
    return "".join(chance.choices(LETTERS, k=length))


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cutting, "PIECE_CHARS", 8)
    yield


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_of_the_whole(kind: str, short_pieces: None) -> None:
    ours = tokenizer(kind)
    assert ours.can_cut
    cuts = 0
    for text in [*TEXTS, *(random_text(seed) for seed in range(60))]:
        whole = ours.backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_bos=False) == whole
        assert ours.encode(text) == ([ours.bos_id] if ours.add_bos else []) + whole
        literal = ours.literal_backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_bos=False, parse_special=False) == literal
        parts = list(cutting.pieces(text))
        assert [word for part in parts for word in words(ours.backend, part)] == words(ours.backend, text)
        cuts += len(parts) - 1
    assert cuts > 500


def words(backend: Backend, text: str) -> list[str]:
    """Returns the pieces that are merged separately, as ids of a small vocabulary do not show every wrong cut."""
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return list(normal)
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]


@pytest.mark.parametrize("special", [False, True])
def test_one_call_has_the_ids_of_the_library_s_plain_one(special: bool) -> None:
    backend = tokenizer("smollm2").backend
    for text in [*TEXTS, *(random_text(seed) for seed in range(20))]:
        fast = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        assert fast == backend.encode(text, add_special_tokens=special).ids


def test_what_a_backend_puts_around_a_text_stands_around_the_pieces(short_pieces: None) -> None:
    backend = gguf_vocab.build(metadata(pre="qwen2")).backend
    start, end = (backend.get_vocab()[name] for name in ("<|im_start|>", "<|im_end|>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", start), ("<|im_end|>", end)]
    )
    ours = Tokenizer(backend)
    for text in ("", "short", "a text with some words that is cut " * 3):
        assert ours.encode(text) == backend.encode(text).ids
        assert ours.encode(text, add_bos=False) == backend.encode(text, add_special_tokens=False).ids


def test_half_characters_are_refused_anywhere(short_pieces: None) -> None:
    for text in ("\ud800", "some words before it \ud800 and behind it", "words " * 9 + "\udfff"):
        for limit in (None, 3, 1000):
            with pytest.raises(RequestError, match="not valid Unicode|more than 3 tokens"):
                tokenizer("smollm2").encode(text, limit=limit)


def odd_backends() -> Iterator[tuple[str, Backend]]:
    """Tokenizers whose texts must not be cut, each for another reason; all but the first also lose bytes."""

    def plain() -> Backend:
        return gguf_vocab.build(metadata(pre="qwen2")).backend

    words = plain()
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[^ ]+ [^ ]+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=True)]
    )
    yield "unknown pattern", words
    removing = plain()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    yield "spaces removed", removing
    stripping = plain()
    stripping.normalizer = normalizers.Strip()
    yield "stripped", stripping
    swallowing = plain()
    swallowing.add_tokens([AddedToken("<x>", rstrip=True)])
    yield "an added token takes spaces", swallowing
    other = Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    yield "another model", other


def test_tokenizers_that_are_not_known_through_and_through_are_left_alone() -> None:
    every = [bytes([byte]) for byte in range(256)]
    for name, backend in odd_backends():
        assert not cutting.can_cut(backend, every), name
        assert (cutting.token_shares(backend, every) is None) == (name != "unknown pattern"), name


def test_a_token_across_a_cut_forbids_cutting() -> None:
    added = gguf_vocab.build(metadata(pre="qwen2")).backend
    added.add_tokens(["a b"])
    assert not cutting.can_cut(added, [])
    backend, every = tokenizer("gemma").backend, tokenizer("gemma").vocabulary
    assert cutting.can_cut(backend, every)
    assert not cutting.can_cut(backend, [*every, b"a b"])
    assert not cutting.can_cut(backend, [token for token in every if token != b"\xff"]), "unknown parts are joined"


@pytest.mark.parametrize("kind", KINDS)
def test_the_fewest_tokens_are_never_more_than_there_are(kind: str) -> None:
    ours = tokenizer(kind)
    assert ours.token_shares is not None
    tight = 0
    odd = ["1" * 500, "\u1100\u1161\u11a8" * 90, "e\u0301" * 99, "\x04" * 99]
    for text in [*TEXTS, *odd, *(random_text(seed) for seed in range(60))]:
        count = len(ours.encode(text, add_bos=False))
        fewest = cutting.fewest_tokens(text.encode(), ours.token_shares)
        assert fewest <= count, repr(text)
        tight += fewest > count / 4
        assert ours.encode(text, add_bos=False, limit=count) == ours.encode(text, add_bos=False)
        if count:
            with pytest.raises(TooLongError, match=f"more than {count - 1} tokens"):
                ours.encode(text, add_bos=False, limit=count - 1)
    assert tight > 20, "a bound that says nothing would pass as well"


def test_a_text_that_is_far_too_long_is_not_tokenised_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tokenizer("smollm2")
    asked: list[str] = []
    monkeypatch.setattr(ours, "encode_pieces", lambda text, **_: asked.append(text) or iter([[]]))
    for text in ("a" * 4_000_000, "1" * 10_000, "some words of a text. " * 100_000, " " * 4_000_000):
        with pytest.raises(TooLongError):
            ours.encode(text, limit=8191)
    assert not asked
    ours.encode("日" * 8000, limit=8191)
    assert asked


def test_tokenising_ends_as_soon_as_a_text_is_too_long(monkeypatch: pytest.MonkeyPatch, short_pieces: None) -> None:
    ours = tokenizer("smollm2")
    taken: list[str] = []

    def counted(text: str) -> Iterator[str]:
        for piece in pieces(text):
            taken.append(piece)
            yield piece

    pieces = cutting.pieces
    monkeypatch.setattr(cutting, "pieces", counted)
    with pytest.raises(TooLongError):
        ours.encode("some plain words " * 1000, limit=2000)
    assert 1000 < sum(map(len, taken)) < 0.8 * 17_000
