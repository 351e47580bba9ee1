"""Tokenizers built from GGUF metadata and folders give the ids that transformers and SentencePiece would."""

# mypy: disable-error-code="arg-type, return-value, union-attr, unused-ignore"

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import generate_merges
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.llama.tokenization_llama import LlamaTokenizer
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

from slipstream.errors import ConfigError, FormatError, RequestError, SlipstreamError
from slipstream.formats.gguf_write import as_read
from slipstream.text import gguf_vocab
from slipstream.text.tokenizer import Tokenizer
from slipstream.tools.convert_vocab import folder_entries, write_folder
from tests.helpers_models import CHATML, byte_alphabet, smollm2_metadata, smollm2_path, tiny_vocab

TEXTS = [
    "", " ", "\n", "\r\n \r\n", "Hello world", "  two  spaces\n\n\n\ttab \t ", "1234567 12 3.14 1e-9 0x1F",
    "½ Ⅷ x٣ ² 一二三", "naïve café — “quotes” … €", "日本語のテスト、中文。한국어",
    "👩‍👩‍👧🏽 🇩🇪 ✌️", "e\u0301 \u200b \ufeff İ ß ﬁ",
    "def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass\n", "it's we'LL I'D they've", "a" * 300, "!?!?...---===",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>x<repo_name>y", "<|im_start",
    "x<|im_end|>12",
    "https://example.com/?q=a&b=c#d", "\x00\x01\x7f\x80", "مرحبا بالعالم", "नमस्ते दुनिया", "Ünïcödé" * 20,
]  # fmt: skip


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata())


@cache
def smollm2_oracle() -> Backend:
    """Reads the same file with transformers and the pre-tokenizer of the published SmolLM2 tokenizer.json.

    transformers leaves the digit splitting out when it reads GGUF, so that part is put back as published.
    """
    path = smollm2_path()
    backend = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def metadata(**changes: object) -> dict[str, object]:
    tokens, types, merges = tiny_vocab()
    found: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": CHATML,
    }  # fmt: skip
    return found | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_transformers(text: str) -> None:
    ids = smollm2().encode(text)
    assert ids == smollm2_oracle().encode(text, add_special_tokens=False).ids
    assert smollm2().decode(ids) == text


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=300)
def test_smollm2_equals_transformers_on_any_text(text: str) -> None:
    ids = smollm2().encode(text)
    assert ids == smollm2_oracle().encode(text, add_special_tokens=False).ids
    if smollm2_bytes().issuperset(text.encode()):
        assert smollm2().decode(ids) == text


@cache
def smollm2_bytes() -> frozenset[int]:
    """The bytes the vocabulary can write: SmolLM2's lacks a few that only rare scripts need."""
    single = (smollm2().token_bytes(index) for index in range(smollm2().vocab_size))
    return frozenset(token[0] for token in single if len(token) == 1)


def test_smollm2_knows_its_special_tokens() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token) == (1, "<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(100)
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.chat_template == smollm2_metadata()["tokenizer.chat_template"]


def test_bos_is_added_when_asked_or_when_the_model_says() -> None:
    plain = smollm2()
    assert plain.encode("hi", add_bos=True) == [1, *plain.encode("hi")]
    adding = Tokenizer.from_gguf(metadata(add_bos_token=True))
    assert adding.encode("hi")[0] == 1
    assert adding.encode("hi", add_bos=False) == adding.encode("hi")[1:]
    assert Tokenizer.from_gguf(metadata(pre="llama-bpe")).encode("hi")[0] == 1


def test_special_tokens_can_be_read_as_plain_text() -> None:
    tokenizer = smollm2()
    literal = tokenizer.encode("<|im_start|>x", parse_special=False)
    assert not any(map(tokenizer.is_special, literal))
    assert tokenizer.decode(literal) == "<|im_start|>x"
    assert tokenizer.encode("<|im_start|>x")[0] == 1


def test_decoding_can_skip_special_tokens() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert tokenizer.decode(ids, skip_special=True) == "user\nhi\n"
    assert tokenizer.decode([*ids, 10**6, -1], skip_special=True) == "user\nhi\n"


@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
@settings(deadline=None)
def test_decoding_any_ids_equals_transformers(ids: list[int], skip: bool) -> None:
    assert smollm2().decode(ids, skip_special=skip) == smollm2_oracle().decode(ids, skip_special_tokens=skip)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        smollm2().encode("\ud800")


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("qwen2", tokenization_qwen2.PRETOKENIZE_REGEX),
        ("qwen35", tokenization_qwen3_5.PRETOKENIZE_REGEX),
        ("llama-bpe", tokenization_qwen2.PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")),
        ("gpt-2", None),
    ],
)
def test_pre_tokenizers_cut_as_published(pre: str, pattern: str | None) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    published = (
        byte_level
        if pattern is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    )
    ours = gguf_vocab.build(metadata(pre=pre)).backend.pre_tokenizer
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text)


def test_the_default_pre_tokenizer_cuts_as_llama_cpp_does() -> None:
    cutter = gguf_vocab.build(metadata(pre="default")).backend.pre_tokenizer
    pieces = [piece for piece, _ in cutter.pre_tokenize_str("it's a 1234567, b<=c")]
    assert pieces == ["it", "'", "s", "Ġa", "Ġ", "123", "456", "7", ",", "Ġb", "<=", "c"]


def test_llama3_takes_whole_words_before_merging() -> None:
    tokens, types, _ = tiny_vocab()
    changes: dict[str, Any] = {"tokens": [*tokens, "world"], "token_type": [*types, 1], "add_bos_token": False}
    assert Tokenizer.from_gguf(metadata(pre="llama-bpe", **changes)).encode("world") == [len(tokens)]
    assert len(Tokenizer.from_gguf(metadata(pre="qwen2", **changes)).encode("world")) == 5


def spm_vocab() -> tuple[list[str], list[float], list[int]]:
    """A vocabulary as SentencePiece trains one: pieces of a text, scored by the order in which they were merged."""
    words = ["▁the", "▁there", "▁then", "▁hello", "▁help", "▁a", "▁an", "▁and", "▁banana", "▁aaa", "▁."]
    pieces = [
        "▁t", "he", "▁the", "re", "er", "▁there", "in", "en", "▁h", "ell", "el", "ll", "lo", "▁hello", "▁a", "an", "na",
        "nana", "aa", "aaa", "▁an", "and", "▁and", "▁▁", "ba",
    ]  # fmt: skip
    letters = sorted({char for word in words for char in word})
    chosen = random.Random(3).sample(pieces, len(pieces))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *chosen, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(chosen) + len(letters))]
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * (len(chosen) + len(letters))


def spm_metadata(**changes: object) -> dict[str, object]:
    tokens, scores, types = spm_vocab()
    found: dict[str, object] = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": types,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (found | changes).items()}


def spm_encode(text: str) -> list[int]:
    """Applies SentencePiece's rule slowly: it joins the neighbours whose joined piece scores best, leftmost first."""
    tokens, scores, _ = spm_vocab()
    known = {token: index for index, token in enumerate(tokens) if index >= 259}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[known[a + b]], place)
            for place, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in known
        ]
        if not joins:
            break
        _, place = min(joins)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [known[symbol]] if symbol in known else [3 + byte for byte in symbol.encode()]
    return ids


@given(st.text("then lodba.é", min_size=1, max_size=24))
@settings(deadline=None, max_examples=400)
def test_sentencepiece_vocabularies_join_by_score(text: str) -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode(text, add_bos=False) == spm_encode(text)
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata())


def test_sentencepiece_equals_the_transformers_conversion() -> None:
    tokens, scores, types = spm_vocab()
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)), skip_tokens=tokens[:259])
    assert set(gguf_vocab.merges_from_scores(tokens, types, scores)) == set(merges)
    oracle = LlamaTokenizer(vocab=vocab, merges=merges, legacy=True).backend_tokenizer
    # No text starts with a space: the transformers class then leaves SentencePiece's own prefix out.
    for text in ("the hello", "there  and", "banana aaaa an", "hé\n the"):
        assert sentencepiece().encode(text, add_bos=False) == oracle.encode(text, add_special_tokens=False).ids


def test_sentencepiece_adds_bos_and_decodes_bytes() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.decode(tokenizer.encode("x日👩"), skip_special=True) == "x日👩"
    assert Tokenizer.from_gguf(spm_metadata(add_space_prefix=False)).decode(tokenizer.encode("the")[1:]) == " the"


GEMMA_MERGES = [
    "▁ t", "h e", "▁t he", "\n \n", "l l", "e ll", "▁ h", "▁h ell", "▁hell o", "▁ ▁", "▁▁ ▁▁", "n a", "na na",
]  # fmt: skip


def gemma_metadata(**changes: object) -> dict[str, object]:
    """Metadata as llama.cpp's converter writes it for Gemma 4: merges, a special end of turn, no pre-tokenizer."""
    letters = ["\n", "▁", *"abehlnot"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*letters, *(merge.replace(" ", "") for merge in GEMMA_MERGES)]
    types = [3, 3, 3, 3, 4, 3] + [6] * 256 + [1] * (len(tokens) - 262)
    found: dict[str, object] = {
        "model": "gemma4", "tokens": tokens, "token_type": types, "merges": GEMMA_MERGES, "bos_token_id": 2,
        "eos_token_id": 1, "unknown_token_id": 3, "add_space_prefix": False, "scores": [0.0] * len(tokens),
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (found | changes).items()}


@pytest.mark.parametrize("text", ["the hello", " the  banana\n\n\nhell", "    o\n", "hé 日 the", "", "\nthe"])
def test_gemma4_vocabularies_equal_transformers(text: str) -> None:
    metadata = gemma_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    merges = [tuple(merge.split(" ")) for merge in GEMMA_MERGES]
    oracle = GemmaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=merges).backend_tokenizer
    ours = Tokenizer.from_gguf(metadata)
    ids = ours.encode(text)
    assert ids == [2, *oracle.encode(text, add_special_tokens=False).ids]
    assert ours.decode(ids[1:]) == text


def test_a_gemma4_vocabulary_ends_its_turns_and_survives_a_conversion(tmp_path: Path) -> None:
    metadata = gemma_metadata()
    ours = Tokenizer.from_gguf(metadata)
    assert ours.eos_ids == {1, 5}
    assert write_folder(metadata, tmp_path) == ""
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    again = as_read(folder_entries(tmp_path, len(tokens)))
    assert (again["tokenizer.ggml.model"], again["tokenizer.ggml.merges"]) == ("gemma4", GEMMA_MERGES)
    assert Tokenizer.from_gguf(again).encode(" the\n\nhello<turn|>") == ours.encode(" the\n\nhello<turn|>")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "no tokenizer"),
        ({"model": "gemma4", "merges": None}, "merges is not a list"),
        ({"model": "bert"}, "'bert'"),
        ({"pre": "deepseek-v9"}, "known: .*qwen2.*smollm"),
        ({"tokens": None}, "tokens is not a list of strings"),
        ({"tokens": [1, 2]}, "tokens is not a list of strings"),
        ({"token_type": [1]}, "no type for each token"),
        ({"merges": ["h"]}, "merge 'h'"),
        ({"merges": ["h zzz"]}, "merge 'h zzz'"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"tokens": ["a", "a"], "token_type": None}, "repeats a token"),
        ({"model": "llama", "scores": [0.0]}, "no score for each token"),
    ],
)
def test_bad_metadata_is_explained(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SlipstreamError, match=said):
        Tokenizer.from_gguf(metadata(**changes))


def save(folder: Path, **files: object) -> Path:
    Tokenizer.from_gguf(metadata()).backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_gives_the_same_tokenizer(tmp_path: Path) -> None:
    save(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": CHATML},
        generation_config={"eos_token_id": [2, 17]},
        config={"eos_token_id": 19},
    )
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == Tokenizer.from_gguf(metadata()).encode(text)
    assert tokenizer.eos_ids == {0, 2, 17, 19}
    assert (tokenizer.bos_id, tokenizer.eos_token, tokenizer.chat_template) == (1, "<|im_end|>", CHATML)
    assert Tokenizer.load(tmp_path / "model.safetensors").eos_ids == tokenizer.eos_ids


def test_a_folder_template_may_stand_in_its_own_file_or_have_a_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    save(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.load(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(tmp_path).chat_template == "J"


def test_a_post_processor_decides_about_bos(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    save(tmp_path, tokenizer_config={"bos_token": "<|im_start|>"})
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("hello", add_bos=False) == tokenizer.encode("hello")[1:]
    assert tokenizer.encode("hello", add_bos=True) == tokenizer.encode("hello")
    assert len(tokenizer.encode("abcdefgh")) == 9  # a tokenizer.json's own truncation would lose the prompt


def test_missing_and_damaged_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Tokenizer.load(tmp_path)
    assert Tokenizer.load(tmp_path / "m.gguf", metadata()).bos_id == 1
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FormatError, match="tokenizer.json cannot be read"):
        Tokenizer.load(tmp_path)
    save(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(FormatError, match="generation_config.json is not a JSON object"):
        Tokenizer.load(tmp_path)


def test_decoders_that_lose_bytes_are_refused() -> None:
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(backend)


def test_every_byte_has_its_token() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    start = len(tiny_vocab()[0]) - 256 - len(tiny_vocab()[2])
    assert {tokenizer.token_bytes(start + rank) for rank in range(256)} == {bytes([byte]) for byte in range(256)}
    assert len(byte_alphabet()) == 256


BROKEN_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("part", "value"),
    [("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}), ("post_processor", BROKEN_TEMPLATE)],
    ids=["when it is read", "when it is used"],
)
def test_a_tokenizer_that_panics_is_refused(tmp_path: Path, part: str, value: object) -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, part: value}))
    with pytest.raises(FormatError, match=r"tokenizer\.json cannot be read: .*fetch it again"):
        Tokenizer.load(tmp_path)


def test_a_panic_over_a_text_is_that_requests_error() -> None:
    backend = Backend.from_str(
        json.dumps(
            {
                "version": "1.0",
                "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
                "post_processor": BROKEN_TEMPLATE,
                "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            }
        )
    )
    with pytest.raises(RequestError, match="the model's tokenizer fails on this text"):
        Tokenizer(backend).encode("a")
