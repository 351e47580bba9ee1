"""Tokenizers between folders and GGUF files: what comes out cuts text as what went in, or there is an error."""

# mypy: disable-error-code="arg-type, index, unused-ignore"

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.formats.gguf import read_gguf
from slipstream.formats.gguf_write import as_read
from slipstream.text.tokenizer import Tokenizer
from slipstream.tools.conversion import convert
from slipstream.tools.convert_vocab import folder_entries, write_folder
from tests.fuzz_formats import write_sentencepiece
from tests.helpers_models import CHATML, tiny_vocab
from tests.oracles import edit_config
from tests.unit.test_convert import target_folder


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_a_byte_level_tokenizer_keeps_its_way_of_cutting(pre: str, tmp_path: Path) -> None:
    tokens, types, merges = tiny_vocab()
    for merge in ("1 2", "12 3", "123 4", "C a", "! ?", "Ġ Ġ", "e Ì", "ĠĠ Ġ"):
        merges.append(merge)
        tokens.append(merge.replace(" ", ""))
        types.append(1)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": pre == "llama-bpe",
        "tokenizer.chat_template": CHATML,
    }
    assert write_folder(metadata, tmp_path) == ""
    before, folder = Tokenizer.from_gguf(metadata), Tokenizer.load(tmp_path)
    after = as_read(folder_entries(tmp_path, len(tokens) + 4))
    again = Tokenizer.from_gguf(after)
    for text in ("hello 1234 12345", "Café!? e\u0301   x", "<|im_start|>user\nhi<|im_end|>"):
        assert before.encode(text) == folder.encode(text) == again.encode(text)
    assert again.eos_ids == before.eos_ids and again.chat_template == CHATML and again.bos_id == 1
    kept = ("tokens", "token_type", "merges")
    assert [after[f"tokenizer.ggml.{key}"][: len(metadata[f"tokenizer.ggml.{key}"])] for key in kept] == [
        metadata[f"tokenizer.ggml.{key}"] for key in kept
    ]
    assert after["tokenizer.ggml.tokens"][-1] == f"[PAD{len(tokens) + 3}]"
    assert after["tokenizer.ggml.token_type"][-4:] == [5] * 4
    with pytest.raises(ConfigError, match="outside the model's vocabulary"):
        folder_entries(tmp_path, len(tokens) - 1)


def test_a_sentencepiece_tokenizer_survives(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "s.gguf")
    metadata = read_gguf(tmp_path / "s.gguf").metadata
    assert write_folder(metadata, tmp_path) == ""
    (tmp_path / "s.gguf").unlink()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    again = Tokenizer.from_gguf(as_read(folder_entries(tmp_path, len(tokens))))
    for text in ("hello he", " he  hel\n", "höl"):
        assert again.encode(text) == Tokenizer.from_gguf(metadata).encode(text)


def test_a_tokenizer_gguf_has_no_words_for_is_refused(tmp_path: Path) -> None:
    source = target_folder(tmp_path / "hf")
    described = json.loads((source / "tokenizer.json").read_text())
    described["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"String": "e"}, "behavior": "Removed", "invert": False},
            described["pre_tokenizer"],
        ],
    }
    (source / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="pre-tokenizer"):
        convert(source, tmp_path / "t.gguf")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        convert(source, tmp_path / "t.gguf")


def test_a_tokenizer_without_an_end_is_remarked_on(tmp_path: Path) -> None:
    source = target_folder(tmp_path / "hf")
    edit_config(source, drop=("eos_token_id",))
    for file in source.glob("generation_config.json"):
        file.unlink()
    described = json.loads((source / "tokenizer.json").read_text())
    assert not described["added_tokens"]
    assert "end-of-sequence" in convert(source, tmp_path / "t.gguf").notes[0]
