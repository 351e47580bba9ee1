"""Feeds damaged and hostile model files: each must load or be refused with our error, quickly and in little memory."""

from __future__ import annotations

import random
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.formats.weight_files import open_weights
from slipstream.text.tokenizer import Tokenizer
from slipstream.tools.file_report import inspect_file
from tests.helpers_models import safetensors_bytes, write_gguf

# Bytes beyond the file's (unpacked) size, for the Python objects of a header.
MAX_OVERHEAD, MAX_COPIES = 4 << 20, 4
MAX_SECONDS = 2.0
MAX_EXPANSION = 64  # float32 bytes per file byte; the smallest block quant needs 29, and more would be a false claim
HOSTILE_U64 = (0, 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
HOSTILE_U32 = (0, 5, 7, 8, 9, 13, 99, 2**31, 2**32 - 1)


@dataclass
class FuzzReport:
    """What happened to the files; `failures` must be empty."""

    cases: int = 0
    loaded: int = 0
    refused: int = 0
    slowest: float = 0.0
    largest_allocation: int = 0
    failures: list[str] = field(default_factory=list)


def run(count: int, seed: int) -> FuzzReport:
    """Tries `count` damaged files; the same seed gives the same files."""
    chooser = random.Random(seed)
    report = FuzzReport()
    with tempfile.TemporaryDirectory() as folder:
        seeds = _seeds(Path(folder))
        # The files are used once outside the measurements, because the first use pays for imports and lookup tables.
        for number, (suffix, data) in enumerate(seeds):
            _use(_write(Path(folder) / f"seed{number}{suffix}", data))
        for number in range(count):
            suffix, data = chooser.choice(seeds)
            damage = chooser.choice(_GGUF_DAMAGE if suffix == ".gguf" else _SAFETENSORS_DAMAGE)
            path = _write(Path(folder) / f"case{suffix}", damage(chooser, data))
            name = f"case {number} of seed {seed} ({damage.__name__}{suffix})"
            watched(partial(_use, path), name, report, MAX_COPIES * path.stat().st_size + MAX_OVERHEAD)
            path.unlink()
    return report


def watched(use: Callable[[], object], name: str, report: FuzzReport, most_bytes: int) -> None:
    """Uses one damaged file, and records the result, the processor time and the memory."""
    tracemalloc.start()
    start = time.process_time()
    try:
        use()
        report.loaded += 1
    except SlipstreamError:
        report.refused += 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a native library is not a subclass of Exception
        report.failures.append(f"{name}: {type(error).__name__}: {error}")
    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    report.cases += 1
    report.slowest = max(report.slowest, seconds)
    report.largest_allocation = max(report.largest_allocation, peak)
    if seconds > MAX_SECONDS:
        report.failures.append(f"{name}: took {seconds:.1f} s")
    if peak > most_bytes:
        report.failures.append(f"{name}: allocated {peak >> 10} kB, more than {most_bytes >> 10}")


def _use(path: Path) -> None:
    """Does everything a user of the file would do: describe it, load each tensor, tokenize."""
    refused: SlipstreamError | None = None
    try:
        inspect_file(path)
    except SlipstreamError as error:
        refused = error
    with open_weights(path) as weights:
        tensors = [weights.tensor(name) for name in weights.names()]
        # torch's memory is not traced, so the declared shapes are checked before anything is loaded.
        declared = sum(4 * int(np.prod(tensor.shape, dtype=object)) for tensor in tensors)
        if declared > MAX_EXPANSION * path.stat().st_size:
            raise AssertionError(f"tensors of {declared} bytes in a file of {path.stat().st_size}")
        for tensor in tensors:
            tensor.dense()
            tensor.q4_groups()
        if weights.metadata:
            tokenizer = Tokenizer.from_gguf(weights.metadata)
            ids = tokenizer.encode("hello <|im_start|> wörld\n 12")
            tokenizer.decode(ids)
    if refused is not None:
        raise AssertionError(f"inspect refuses a file that loads: {refused}")


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _seeds(folder: Path) -> list[tuple[str, bytes]]:
    path = folder / "seed.gguf"
    write_gguf(path)
    byte_level = path.read_bytes()
    write_sentencepiece(path)
    sentencepiece = path.read_bytes()
    path.unlink()
    return [(".gguf", byte_level), (".gguf", sentencepiece), (".safetensors", _safetensors_seed())]


def write_sentencepiece(path: Path) -> None:
    """Writes a SentencePiece vocabulary, and tensors of every read-only type filled with random bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "l", "he", "▁he"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = np.random.default_rng(0)
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.Q2_K, kinds.Q3_K, kinds.Q4_K, kinds.Q5_K, kinds.Q6_K, kinds.IQ4_NL, kinds.IQ1_S, kinds.MXFP4):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = generator.integers(0, 256, (2, 256 // block * size), np.uint8)
        writer.add_tensor(kind.name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _safetensors_seed() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [128, 160]},
        "c": {"dtype": "F8_E4M3", "shape": [2, 4, 2], "data_offsets": [160, 176]},
        "d": {"dtype": "I64", "shape": [], "data_offsets": [176, 184]},
        "e": {"dtype": "BOOL", "shape": [0, 3], "data_offsets": [184, 184]},
    }
    return safetensors_bytes(header, bytes(range(184)))


def flip_bits(chooser: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    # Most bit flips are near the start, because the header there says how to read the rest.
    reach = min(len(data), chooser.choice((64, 512, len(data))))
    for _ in range(chooser.randint(1, 8)):
        damaged[chooser.randrange(reach)] ^= 1 << chooser.randrange(8)
    return bytes(damaged)


def truncate(chooser: random.Random, data: bytes) -> bytes:
    return data[: chooser.randrange(len(data))]


def put_integers(chooser: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(chooser.randint(1, 3)):
        pattern, values = ("<Q", HOSTILE_U64) if chooser.random() < 0.6 else ("<I", HOSTILE_U32)
        value = struct.pack(pattern, chooser.choice(values))
        position = chooser.randrange(len(data) - 8)
        damaged[position : position + len(value)] = value
    return bytes(damaged)


def move_pieces(chooser: random.Random, data: bytes) -> bytes:
    start, target = chooser.randrange(len(data)), chooser.randrange(len(data))
    piece = data[start : start + chooser.randint(1, 256)]
    return data[:target] + piece + data[target + (0 if chooser.random() < 0.5 else len(piece)) :]


def damage_vocabulary(chooser: random.Random, data: bytes) -> bytes:
    """Renames or retypes a tokenizer key: the file stays readable, but its tokenizer makes no sense."""
    keys = [b"tokens", b"merges", b"token_type", b"scores", b"bos_token_id", b"model", b"pre", b"unknown_token_id"]
    key = b"tokenizer.ggml." + chooser.choice(keys)
    position = data.find(key)
    if position < 0:
        return flip_bits(chooser, data)
    damaged = bytearray(data)
    if chooser.random() < 0.3:
        damaged[position + 10] ^= 1
    else:
        end = position + len(key) + chooser.choice((0, 4, 8, 16, 24, 40))
        damaged[end] = chooser.choice((0, 1, 2, 4, 6, 8, 9, 255))
    return bytes(damaged)


def change_words(chooser: random.Random, data: bytes) -> bytes:
    """Changes letters of the vocabulary's merges or tokens: every length still fits, but the words are wrong."""
    start = data.find(chooser.choice((b"tokenizer.ggml.merges", b"tokenizer.ggml.tokens")))
    if start < 0:
        return flip_bits(chooser, data)
    damaged = bytearray(data)
    letters = [place for place in range(start + 40, min(start + 4000, len(data))) if 0x61 <= data[place] <= 0x7A]
    for place in chooser.sample(letters, chooser.randint(1, 4)):
        damaged[place] = chooser.choice(b"abcxyz ")
    return bytes(damaged)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def described(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def hostile_gguf(chooser: random.Random, _: bytes) -> bytes:
    """A header made to do harm: impossible counts, lengths, nesting, shapes and offsets."""
    huge = chooser.choice(HOSTILE_U64[2:])
    align = text(b"general.alignment") + struct.pack("<II", 4, chooser.choice((0, 3, 2**31, 1)))
    nested = text(b"deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 500
    variants = [
        head(huge, 0),
        head(0, huge),
        head(0, 1) + struct.pack("<Q", huge) + b"key",
        head(0, 1) + text(b"key") + struct.pack("<IQ", 8, huge),
        head(0, 1) + text(b"key") + struct.pack("<IIQ", 9, chooser.choice((0, 4, 8, 9, 12)), huge),
        head(0, 1) + nested,
        head(1, 0) + tensor(b"t", [huge, huge], 0, 0) + bytes(64),
        head(1, 0) + tensor(b"t", [2**32, 2**32, 2**32, 2**32], 8, 0) + bytes(64),
        head(1, 0) + tensor(b"t", [0], 0, 0) + bytes(64),
        head(1, 0) + tensor(b"t", [33], 2, 0) + bytes(64),
        head(1, 0) + tensor(b"t", [8], 0, huge & ~31) + bytes(64),
        head(1, 0) + tensor(b"t", [8], chooser.choice(HOSTILE_U32), 0) + bytes(64),
        head(2, 0) + tensor(b"t", [8], 0, 0) + tensor(b"t", [8], 0, 32) + bytes(128),
        head(2, 0) + tensor(b"t", [8], 0, 0) + tensor(b"u", [8], 0, 0) + bytes(128),
        head(400, 0) + b"".join(tensor(b"%d" % number, [4096]) for number in range(400)) + bytes(20_000),
        head(0, 2) + (text(b"key") + struct.pack("<II", 4, 1)) * 2,
        head(1, 1) + align + tensor(b"t", [8], 0, 0) + bytes(64),
        head(0, 1) + text(b"\xff\xfe") + struct.pack("<II", 4, 1),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    ]
    return chooser.choice(variants)


def hostile_safetensors(chooser: random.Random, _: bytes) -> bytes:
    huge = chooser.choice(HOSTILE_U64[2:])
    depth = chooser.choice((100, 5_000, 200_000))
    variants = [
        safetensors_bytes(b"{}", b"", length=huge),
        safetensors_bytes({"t": described(shape=[huge, huge])}, bytes(8)),
        safetensors_bytes({"t": described(shape=[0, huge], data_offsets=[0, 0])}, bytes(8)),
        safetensors_bytes({"t": described(shape=[1] * 100_000, data_offsets=[0, 4])}, bytes(8)),
        safetensors_bytes({"t": described(shape=[-2])}, bytes(8)),
        safetensors_bytes({"t": described(shape=[True, 2.0])}, bytes(8)),
        safetensors_bytes({"t": described(data_offsets=[huge, huge + 8])}, bytes(8)),
        safetensors_bytes({"t": described(data_offsets=[8, 0])}, bytes(8)),
        safetensors_bytes({"t": described(), "u": described(data_offsets=[4, 12])}, bytes(12)),
        safetensors_bytes(
            {str(number): described(shape=[4096], data_offsets=[0, 16384]) for number in range(400)}, bytes(16384)
        ),
        safetensors_bytes({"t": described(dtype=chooser.choice(["F99", 7, None, "Q4_0"]))}, bytes(8)),
        safetensors_bytes(b'{"t": {}, "t": {}}', bytes(8)),
        safetensors_bytes(b"[" * depth + b"]" * depth, b""),
        safetensors_bytes(b'{"t":' + b'{"a":' * depth + b"1" + b"}" * (depth + 1), b""),
        safetensors_bytes(b'{"t": 1' + b"0" * 10_000 + b"}", b""),
        safetensors_bytes(b'{"t": [1, 2]}', b""),
        safetensors_bytes(b"\xff\xfe{}", b""),
        safetensors_bytes({"t": described(), "__metadata__": [1]}, bytes(8)),
    ]
    return chooser.choice(variants)


Damage = Callable[[random.Random, bytes], bytes]
_SHARED: list[Damage] = [flip_bits, flip_bits, truncate, put_integers, put_integers, move_pieces]
_GGUF_DAMAGE: list[Damage] = [*_SHARED, damage_vocabulary, change_words, hostile_gguf, hostile_gguf]
_SAFETENSORS_DAMAGE: list[Damage] = [*_SHARED, hostile_safetensors, hostile_safetensors]
