"""Converts tokenizers between tokenizer.json and the `tokenizer.*` keys of GGUF, and checks them on sample texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.formats.file_bytes import read_json_object
from slipstream.formats.gguf import ValueKind
from slipstream.formats.gguf_write import Metadata, Value, as_read, entries, stored_metadata
from slipstream.text import gguf_vocab
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Progress

# The numbers that GGUF gives to the types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
END_KEY, MASK_KEY = "tokenizer.ggml.eos_token_id", "tokenizer.ggml.mask_token_id"
NO_END = "the tokenizer names no end-of-sequence token, so llama.cpp would choose one itself"
# Rules by which byte-level families split text. The first rule is taken under which the vocabulary gives the same ids
# as the folder's tokenizer.
_PRE_TOKENIZERS = ("gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe", "default")
_GEMMA_TURN = "<turn|>"  # only Gemma 4's vocabulary has it, and it needs its own tokenizer model in GGUF
# Sample texts. A converted tokenizer is accepted only if it gives the same ids for all of them; a kind of text that is
# not here could be split in another way without an error.
_PROBES = (
    "Hello world, it's 12345 o'clock (or 7:05)!",
    "  two leading spaces\n\n\tand a tab  \r\n",
    "\n \n  \n",
    "na\u00efve caf\u00e9 \u00c5NGSTR\u00d6M A\u030a \ufb01",
    "x=1234567; y=[0]*10  # 100%\n    return x**2\n",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u0639\u0631\u0628",
    "DON'T I'LL we've CamelCaseWords snake_case_words",
    "\u00a0non\u2009breaking\u3000space",
    "...!!!???",
    '<div class="x">&amp;</div> http://example.org/?q=1&r=2',
    "1 22 333 4444 55555",
    "\U0001f642 e\u0301 \u00bd \u00b2",
    "",
    " ",
    "a",
)


def folder_entries(folder: Path, vocab_size: int, progress: Progress | None = None) -> Metadata:
    """The tokenizer of a model folder as GGUF metadata; it refuses a tokenizer that GGUF cannot express."""
    tokenizer = Tokenizer.load(folder)
    described = read_json_object(folder / "tokenizer.json")
    model = described.get("model")
    if not isinstance(model, dict) or model.get("type") not in ("BPE", None):
        raise ConfigError(f"{folder.name}: GGUF supports only BPE tokenizers", "convert a model that has one")
    tokens, types = _tokens(described, model, vocab_size, folder.name)
    common = entries({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    common |= entries(_special_keys(tokenizer, model, tokens, folder))
    spellings = _spellings(model, tokens)
    for tried, spelling in enumerate(spellings):
        # A large vocabulary takes a second or two to build, and several may have to be tried.
        if progress is not None:
            progress("matching the tokenizer", tried, len(spellings))
        if _same(tokenizer, found := spelling | common):
            return found
    raise ConfigError(
        f"{folder.name}: no pre-tokenizer of GGUF splits text as this tokenizer does",
        f"known: {', '.join(_PRE_TOKENIZERS)}",
    )


def target_entries(target: Path, vocab_size: int, progress: Progress | None = None) -> Metadata:
    """The tokenizer's metadata of a target: that of its GGUF file, or new metadata made from its folder."""
    if target.is_dir() and (target / "tokenizer.json").is_file():
        return folder_entries(target, vocab_size, progress)
    file = target if target.is_file() else next(iter(sorted(target.glob("*.gguf"))), None)
    if file is None or file.suffix != ".gguf":
        raise ConfigError(f"{target} has no tokenizer", "put the model's tokenizer.json beside its weights")
    stored = stored_metadata(file)
    kept = {key: value for key, value in stored.items() if key.startswith("tokenizer.") and key != MASK_KEY}
    if not kept:
        raise ConfigError(f"{file.name} has no tokenizer", "use a file that carries its vocabulary")
    return kept


def write_folder(metadata: Mapping[str, object], folder: Path) -> str:
    """Writes the tokenizer of a GGUF file beside its weights; returns '', or the reason why this is not possible."""
    if "tokenizer.ggml.model" not in metadata:
        return "the file has no tokenizer"
    try:
        vocab = gguf_vocab.build(metadata)
    except SlipstreamError as error:
        return error.message
    if vocab.add_bos and vocab.bos_id is not None:
        name = vocab.backend.id_to_token(vocab.bos_id)
        vocab.backend.post_processor = TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", "$B"], special_tokens=[(name, vocab.bos_id)]
        )
    vocab.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, index in (("bos_token", vocab.bos_id), ("eos_token", (*vocab.eos_ids, None)[0])):
        if index is not None:
            config[key] = vocab.backend.id_to_token(index)
    if vocab.chat_template:
        config["chat_template"] = vocab.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    if vocab.eos_ids:
        ends = {"eos_token_id": list(dict.fromkeys(vocab.eos_ids))}
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=2), "utf-8")
    return ""


def _tokens(
    described: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int, label: str
) -> tuple[list[str], list[int]]:
    """Tokens and their types by id; unused ids, which padded tables have, get names such as [PAD7]."""
    found: dict[int, tuple[str, int]] = {
        index: (token, BYTE if model.get("byte_fallback") and _is_byte(token) else NORMAL)
        for token, index in model.get("vocab", {}).items()
    }
    for added in described.get("added_tokens") or []:
        found[added["id"]] = added["content"], CONTROL if added.get("special") else USER_DEFINED
    for index, (token, kind) in found.items():
        if token == model.get("unk_token") and kind == NORMAL:
            found[index] = token, UNKNOWN
    if found and max(found) >= vocab_size:
        raise ConfigError(
            f"{label}: token {max(found)} is outside the model's vocabulary of {vocab_size}",
            "the tokenizer does not belong to these weights",
        )
    entries = [found.get(index, (f"[PAD{index}]", UNUSED)) for index in range(vocab_size)]
    return [token for token, _ in entries], [kind for _, kind in entries]


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _special_keys(
    tokenizer: Tokenizer, model: Mapping[str, Any], tokens: Sequence[str], folder: Path
) -> dict[str, Value]:
    config = folder / "tokenizer_config.json"
    named = read_json_object(config) if config.is_file() else {}
    bos = tokenizer.bos_id
    ids = {"bos": bos}
    first = tokens.index(tokenizer.eos_token) if tokenizer.eos_token in tokens else None
    ends = ([first] if first is not None else []) + sorted(tokenizer.eos_ids - {first})
    ids |= zip(("eos", "eot", "eom"), ends, strict=False)
    for key, text in (("unknown", model.get("unk_token")), ("padding", named.get("pad_token"))):
        content = text.get("content") if isinstance(text, dict) else text
        ids[key] = tokens.index(content) if content in tokens else None
    found: dict[str, Value] = {f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items() if i is not None}
    found["tokenizer.ggml.add_bos_token"] = bos is not None and tokenizer.encode("a")[:1] == [bos]
    return found | ({"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {})


def _spellings(model: Mapping[str, Any], tokens: Sequence[str]) -> list[Metadata]:
    """The candidates for the metadata that says how text is split and joined; `_same` tells which one fits."""
    merged = model.get("merges", [])
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merged]
    merges = entries({"tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs]}, ValueKind.STRING)
    if not model.get("byte_fallback"):
        rules = ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre} for pre in _PRE_TOKENIZERS)
        return [entries(rule) | merges for rule in rules]
    # SentencePiece ranks pieces by score, so the piece that is merged first gets the best score.
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    scores = entries({"tokenizer.ggml.scores": [-float(ranks.get(token, len(pairs))) for token in tokens]})
    spaced, unspaced = (entries({"tokenizer.ggml.add_space_prefix": prefix}) for prefix in (True, False))
    llama = entries({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}) | scores
    gemma = [entries({"tokenizer.ggml.model": "gemma4"}) | scores | merges | unspaced] if _GEMMA_TURN in tokens else []
    return [*gemma, llama | spaced, llama | unspaced]


def _same(tokenizer: Tokenizer, metadata: Metadata) -> bool:
    """Whether the metadata makes a tokenizer that gives the same ids as the folder's tokenizer on sample texts."""
    try:
        other = Tokenizer.from_gguf(as_read(metadata))
    except SlipstreamError:
        return False
    special = "".join(tokenizer.token_text(index) for index in sorted(tokenizer.eos_ids)[:4])
    texts = [*_PROBES, f"before{special}after", f" {special} \n"]
    same = all(tokenizer.encode(text) == other.encode(text) for text in texts)
    return same and tokenizer.eos_ids == other.eos_ids and tokenizer.bos_id == other.bos_id
