"""Feeds damaged and hostile adapters: each must merge or be refused with our error, quickly and in little memory."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.formats.adapters import PEFT_CONFIG, PEFT_WEIGHTS, AdapterSource, read_adapter
from slipstream.formats.weight_files import WeightFile, open_weights
from slipstream.models.lora import fit_adapter, merged_weights
from tests.adapters import factors, gguf_tensors, peft_tensors, write_drafter, write_gguf_adapter, write_peft
from tests.fuzz_formats import (
    FuzzReport,
    flip_bits,
    hostile_gguf,
    hostile_safetensors,
    move_pieces,
    put_integers,
    truncate,
    watched,
)
from tests.tiny import HIDDEN

# Bytes beyond the file's size: Python objects for the header, and one part of the numbers that is examined.
MAX_OVERHEAD = 4 << 20
MAX_EXPANSION = 4  # float32 bytes per byte of a factor; Q8_0 needs 3.8, and more would be a false claim
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    4,
    5,
    2**70,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "none",
    "all",
    "q_proj",
    [],
    ["fc"],
    ["nothing"],
    {},
    {"fc": 2},
    {"(a+)+$": 3},
    {"fc": None},
    [[]],
    {"fc": {}},
)
CONFIG_KEYS = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "fan_in_fan_out",
    "target_modules",
    "bias",
    "modules_to_save",
    "use_dora",
    "peft_type",
    "init_lora_weights",
    "layer_replication",
)
Damage = Callable[[random.Random, bytes], bytes]


def run(count: int, seed: int) -> FuzzReport:
    """Tries `count` damaged adapters on one drafter; the same seed gives the same files."""
    chooser, report = random.Random(seed), FuzzReport()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with open_weights(write_drafter(folder / "drafter")) as drafter:
            seeds = _seeds(folder)
            for path in seeds:
                _use(path, drafter)  # the file is not damaged yet; the first use pays for imports
            for number in range(count):
                path = chooser.choice(seeds)
                case, what = _damaged(chooser, path, folder / "case")
                size = sum(file.stat().st_size for file in ([case] if case.is_file() else case.iterdir()))
                name, limit = f"case {number} of seed {seed} ({what})", size * MAX_EXPANSION + MAX_OVERHEAD
                watched(partial(_use, case, drafter), name, report, limit)
                shutil.rmtree(folder / "case")
    return report


def _seeds(folder: Path) -> list[Path]:
    pairs = {"fc": factors((HIDDEN, 2 * HIDDEN)), "layers.1.self_attn.k_proj": factors((16, HIDDEN), seed=3)}
    halves = {module: (a.to(torch.bfloat16), b.half()) for module, (a, b) in pairs.items()}
    wide = {"layers.0.mlp.gate_up_proj": factors((96, HIDDEN), rank=32)}
    return [
        write_peft(folder / "full", peft_tensors(pairs)),
        write_peft(folder / "half", peft_tensors(halves), use_rslora=True, rank_pattern={"k_proj": 4}),
        write_gguf_adapter(folder / "full.gguf", gguf_tensors(pairs)),
        write_gguf_adapter(folder / "brain.gguf", gguf_tensors(pairs, -1), alpha=None, kind="BF16"),
        write_peft(folder / "fused", peft_tensors(wide), r=32),
        write_gguf_adapter(folder / "coarse.gguf", gguf_tensors({"fc": factors((32, 64), rank=32)}), kind="Q8_0"),
    ]


def _damaged(chooser: random.Random, path: Path, folder: Path) -> tuple[Path, str]:
    folder.mkdir()
    if path.is_file():
        damage = chooser.choice(_GGUF_DAMAGE)
        (folder / path.name).write_bytes(damage(chooser, path.read_bytes()))
        return folder / path.name, f"{damage.__name__} {path.name}"
    for name in (PEFT_CONFIG, PEFT_WEIGHTS):
        shutil.copyfile(path / name, folder / name)
    name = chooser.choice((PEFT_CONFIG, PEFT_WEIGHTS, PEFT_WEIGHTS))
    damage = chooser.choice(_CONFIG_DAMAGE if name == PEFT_CONFIG else _WEIGHTS_DAMAGE)
    (folder / name).write_bytes(damage(chooser, (folder / name).read_bytes()))
    return folder, f"{damage.__name__} {path.name}/{name}"


def _use(path: Path, drafter: WeightFile) -> None:
    """Does everything a user of the adapter would do; the merged result must be finite and bounded by the files."""
    adapter = read_adapter(AdapterSource("case", path))
    tensors = {id(factor.tensor): factor.tensor for pair in adapter.pairs for factor in (pair.down, pair.up)}.values()
    # torch's memory is not traced, so the declared shapes are checked before anything is loaded.
    for tensor in tensors:
        declared = 4 * int(torch.Size(tensor.shape).numel())
        if declared > MAX_EXPANSION * tensor.nbytes:
            raise AssertionError(f"{tensor.name} declares {declared} bytes in {tensor.nbytes}")
    merged = merged_weights(drafter, fit_adapter(adapter, drafter))
    for name in merged.names():
        tensor = merged.tensor(name)
        if tensor.shape != drafter.tensor(name).shape or not bool(tensor.dense().isfinite().all()):
            raise AssertionError(f"{name} became {tensor}")


def change_names(chooser: random.Random, data: bytes) -> bytes:
    """Changes letters of tensor names or metadata keys: every length still fits, but the names are wrong."""
    words = [b"lora_a", b"lora_b", b"lora_A", b"lora_B", b"blk.", b"layers.", b"fc", b"adapter", b"general.type"]
    places = [place for word in words if (place := data.find(word)) >= 0]
    if not places:
        return flip_bits(chooser, data)
    damaged = bytearray(data)
    place = chooser.choice(places) + chooser.randrange(6)
    damaged[place] = chooser.choice(b"abAB012.x")
    return bytes(damaged)


def spoil_numbers(chooser: random.Random, data: bytes) -> bytes:
    """Puts NaN, infinity or values too large for any sum into the tensors' data."""
    damaged = bytearray(data)
    place = len(data) - 4 * chooser.randint(1, 40)
    spoiled = (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\xff\xff\xff\xff")
    damaged[place : place + 4] = chooser.choice(spoiled)
    return bytes(damaged)


def change_config(chooser: random.Random, data: bytes) -> bytes:
    config = json.loads(data)
    for _ in range(chooser.randint(1, 2)):
        config[chooser.choice(CONFIG_KEYS)] = chooser.choice(VALUES)
    return json.dumps(config).encode()


def drop_setting(chooser: random.Random, data: bytes) -> bytes:
    config = json.loads(data)
    del config[chooser.choice(sorted(config))]
    return json.dumps(config).encode()


_SHARED: list[Damage] = [flip_bits, flip_bits, truncate, put_integers, move_pieces, change_names, spoil_numbers]
_GGUF_DAMAGE: list[Damage] = [*_SHARED, hostile_gguf]
_WEIGHTS_DAMAGE: list[Damage] = [*_SHARED, hostile_safetensors]
_CONFIG_DAMAGE: list[Damage] = [flip_bits, truncate, move_pieces, change_config, change_config, drop_setting]
