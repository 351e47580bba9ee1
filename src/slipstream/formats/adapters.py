"""Reads LoRA adapters from PEFT folders and llama.cpp's GGUF files: pairs of thin matrices that change large ones.

Everything that can be wrong with a file on its own is refused here, from its header where possible. Whether its pairs
fit the matrices of a model is checked by the model.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from slipstream.errors import ConfigError, FormatError, SourceError
from slipstream.formats.file_bytes import read_json_object
from slipstream.formats.quants import decode_rows
from slipstream.formats.weight_files import CHUNK_ELEMENTS, WeightFile, WeightTensor, find_gguf, open_weights
from slipstream.types import BASE_VARIANT

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR_TYPES = ("F32", "F16", "BF16", "Q8_0")  # the types that the known writers store
MAX_RANK = 2**16  # far above any real rank; a larger number in a file is a mistake

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FORMS = "give PATH or NAME=PATH, with @SCALE after it if the adapter is to count more or less"
_PLAIN_PATTERN = re.compile(r"\^?[\w.-]+\$?")
_PEFT_PREFIX = "base_model.model."
# how a factor's name ends -> which factor it is, and whether the matrix is an embedding
_PEFT_ENDINGS = {
    ".lora_A.weight": ("A", False),
    ".lora_B.weight": ("B", False),
    ".lora_embedding_A": ("A", True),
    ".lora_embedding_B": ("B", True),
}
_GGUF_ENDINGS = {".lora_a": ("A", False), ".lora_b": ("B", False)}
# These PEFT settings change what the pairs mean, or announce weights beside them.
_OTHER_METHODS = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "arrow_config",
    "monteclora_config",
    "alora_invocation_tokens",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
)
# Other initialisations (pissa, olora, corda, ...) also change the base weights, which the adapter does not contain.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
_GGUF_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter as the user named it."""

    name: str
    path: Path
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Factor:
    """One matrix of a pair; nothing is read before `dense` is called."""

    tensor: WeightTensor
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        # ggml's tools drop a last dimension of size one, which is the first dimension in torch's order
        rows, columns = (1, *self.tensor.shape) if len(self.tensor.shape) == 1 else self.tensor.shape
        return (columns, rows) if self.transposed else (rows, columns)

    def dense(self) -> torch.Tensor:
        """Reads the matrix as float32."""
        stored = self.tensor.dense()
        stored = stored[None] if stored.dim() == 1 else stored
        return stored.t().contiguous() if self.transposed else stored

    def rows(self, start: int, stop: int) -> Factor:
        """Returns some rows of the matrix, still unread."""
        if self.transposed or len(self.tensor.shape) == 1:
            raise FormatError(f"the adapter's tensor '{self.tensor.name}' cannot be split", "adapt each part by itself")
        return Factor(self.tensor.rows(torch.arange(start, stop)))


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """The change to one matrix: `factor * up @ down`, with `up` [out, rank] and `down` [rank, in]."""

    name: str  # the name of the matrix, as the adapter spells it
    down: Factor
    up: Factor
    factor: float


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter on disk that is consistent in itself; its numbers are still in the file."""

    source: AdapterSource
    fingerprint: str  # a hash of all bytes of the adapter
    architecture: str | None  # the model for which it was made, if the file says so
    pairs: tuple[AdapterPair, ...]


def parse_source(text: str) -> AdapterSource:
    """Reads PATH, NAME=PATH, PATH@SCALE or NAME=PATH@SCALE; a text that is an existing path is taken as that path."""
    name, rest = "", text
    if not _exists(text):
        head, mark, tail = text.partition("=")
        if mark and _NAME.fullmatch(head):
            name, rest = head, tail
    path_text, scale = rest, 1.0
    if not _exists(rest) and "@" in rest:
        path_text, _, number = rest.rpartition("@")
        try:
            scale = float(number)
        except ValueError:
            path_text = rest
        if not math.isfinite(scale):
            raise SourceError(f"the scale of the adapter '{text}' is {number}", "give a finite number")
    if not path_text:
        raise SourceError(f"'{text}' names no adapter", _FORMS)
    path = Path(path_text)
    with suppress(RuntimeError):  # there is no such user; reading will report that there is no such file
        path = path.expanduser()
    name = name or (path.stem if path.suffix in (".gguf", ".safetensors") else path.resolve().name)
    if not _NAME.fullmatch(name):
        raise SourceError(f"'{name}' cannot be the name of an adapter", "name it with letters and digits: NAME=PATH")
    if name == BASE_VARIANT:
        raise SourceError(
            f"an adapter cannot be called '{BASE_VARIANT}'", "the drafter without an adapter has it: use NAME=PATH"
        )
    return AdapterSource(name, path, scale)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError):  # the text is too long for a path, or names a user that does not exist
        return False


def read_adapter(source: AdapterSource) -> AdapterFile:
    """Reads a PEFT folder (or its safetensors file) or a GGUF adapter; its numbers are checked and not kept."""
    path = source.path
    if not _exists(str(path)):
        raise SourceError(f"there is no adapter at {path}", _FORMS)
    if path.suffix == ".safetensors" or (path.is_dir() and (path / PEFT_CONFIG).is_file()):
        adapter = _read_peft(source, path / PEFT_WEIGHTS if path.is_dir() else path)
    elif path.is_dir() and not any(path.glob("*.gguf")):
        raise SourceError(f"{path} holds no adapter", f"expected {PEFT_CONFIG} with {PEFT_WEIGHTS}, or one .gguf file")
    else:
        adapter = _read_gguf(source, find_gguf(path) if path.is_dir() else path)
    for pair in adapter.pairs:
        for factor in (pair.down, pair.up):
            _refuse_non_finite(factor.tensor)
    return adapter


# ---- PEFT


def _read_peft(source: AdapterSource, path: Path) -> AdapterFile:
    config_path = path.parent / PEFT_CONFIG
    if not config_path.is_file():
        raise SourceError(f"there is no {PEFT_CONFIG} beside {path.name}", "it holds the adapter's rank and scale")
    if not path.is_file():
        raise SourceError(f"{path.parent} holds no {PEFT_WEIGHTS}", "save the adapter as safetensors")
    rules = _PeftRules(read_json_object(config_path), path.parent.name)
    pairs = []
    for module, (a, b, embedding) in _paired_factors(open_weights(path), _PEFT_ENDINGS, _PEFT_PREFIX).items():
        # the pair of an embedding gives the transpose of the embedding table
        down, up = (Factor(b, True), Factor(a, True)) if embedding else (Factor(a), Factor(b))
        rank = _common_rank(down, up)
        if rank != rules.rank(module):
            raise FormatError(
                f"the adapter's tensor '{a.name}' has rank {rank} where {PEFT_CONFIG} says {rules.rank(module)}",
                "the config does not belong to these weights",
            )
        pairs.append(AdapterPair(f"{module}.weight", down, up, source.scale * rules.strength(module)))
    rules.check_targets([pair.name.removesuffix(".weight") for pair in pairs])
    return AdapterFile(source, _fingerprint(config_path, path), None, tuple(pairs))


class _PeftRules:
    """The ranks and scales of an adapter_config.json; a config that is not plain LoRA is refused, naming its key."""

    def __init__(self, config: Mapping[str, object], label: str) -> None:
        self._config = config
        self._label = label
        kind = config.get("peft_type")
        if kind != "LORA":
            raise ConfigError(f"the adapter {label} is of PEFT's type {kind!r}", "only LORA adapters can be merged")
        for key in _OTHER_METHODS:
            if config.get(key):
                raise ConfigError(f"the adapter {label} uses '{key}'", "only plain LoRA adapters can be merged")
        if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
            raise ConfigError(
                f"the adapter {label} has init_lora_weights {start!r}, which changes the base too",
                "save it converted to a plain LoRA",
            )
        if saved := config.get("modules_to_save"):
            named = ", ".join(map(str, saved)) if isinstance(saved, list) else str(saved)
            raise ConfigError(f"the adapter {label} has modules_to_save ({named})", "only LoRA pairs can be merged")
        if config.get("bias", "none") != "none":
            raise ConfigError(f"the adapter {label} trained biases ({config['bias']!r})", "train it with bias none")
        # `fan_in_fan_out` only says how the base model stores its weights; a drafter's weights are always [out, in]
        for key in ("use_rslora", "fan_in_fan_out"):
            if not isinstance(config.get(key), bool | None):
                raise ConfigError(f"the adapter {label} has {key} {config[key]!r}", "it must be true or false")
        self._root = config.get("use_rslora") is True
        self._rank = self._whole("r", config.get("r"))
        self._alpha = _finite(f"the adapter {label}", "lora_alpha", config.get("lora_alpha"))
        self._ranks = {key: self._whole(f"rank_pattern.{key}", v) for key, v in self._patterns("rank_pattern").items()}
        self._alphas = {
            key: _finite(f"the adapter {label}", f"alpha_pattern.{key}", value)
            for key, value in self._patterns("alpha_pattern").items()
        }

    def rank(self, module: str) -> int:
        return next((rank for key, rank in self._ranks.items() if _matches_module(key, module)), self._rank)

    def strength(self, module: str) -> float:
        """Returns the factor by which the product of a module's pair is multiplied."""
        alpha = next((alpha for key, alpha in self._alphas.items() if _matches_module(key, module)), self._alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._root else rank)

    def check_targets(self, modules: Sequence[str]) -> None:
        """Checks that the listed target modules and the modules with pairs are the same.

        A config may give an expression instead of a list; an expression is not checked.
        """
        targets = self._config.get("target_modules")
        if not isinstance(targets, list):
            return
        for target in map(str, targets):
            if not any(_matches_module(target, module) for module in modules):
                raise FormatError(
                    f"the adapter {self._label} has no tensors for '{target}', one of its target_modules",
                    "the file is incomplete: save or fetch it again",
                )
        for module in modules:
            if not any(_matches_module(str(target), module) for target in targets):
                raise FormatError(
                    f"the adapter's tensors of '{module}' are not among its target_modules",
                    "the config belongs to another adapter",
                )

    def _patterns(self, key: str) -> dict[str, object]:
        patterns = self._config.get(key) or {}
        if not isinstance(patterns, dict):
            raise ConfigError(
                f"the adapter {self._label} has a '{key}' that is not an object", "map modules to numbers"
            )
        for pattern in patterns:
            # any other expression could take forever to match
            if not _PLAIN_PATTERN.fullmatch(pattern):
                raise ConfigError(
                    f"the adapter {self._label} has the expression '{pattern}' in its {key}", "write module names out"
                )
        return patterns

    def _whole(self, key: str, value: object) -> int:
        if type(value) is not int or not 0 < value <= MAX_RANK:
            raise ConfigError(f"the adapter {self._label} has {key} {value!r}", f"a rank is 1 to {MAX_RANK}")
        return value


def _matches_module(pattern: str, module: str) -> bool:
    """Whether a pattern names a module by its full name or by the end of its name."""
    plain = pattern.removeprefix("^").removesuffix("$")
    return module == plain or (not pattern.startswith("^") and module.endswith(f".{plain}"))


# ---- GGUF


def _read_gguf(source: AdapterSource, path: Path) -> AdapterFile:
    weights = open_weights(path)
    keys = weights.metadata
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if keys.get(key) != wanted:
            raise ConfigError(f"{path.name} has {key} {keys.get(key)!r}", f"a LoRA adapter has '{wanted}'")
    if "adapter.alora.invocation_tokens" in keys:
        raise ConfigError(f"{path.name} only acts after certain tokens", "only plain LoRA adapters can be merged")
    alpha = _finite(path.name, "adapter.lora.alpha", keys.get("adapter.lora.alpha", 0.0))
    architecture = keys.get("general.architecture")
    pairs = []
    for name, (a, b, _) in _paired_factors(weights, _GGUF_ENDINGS).items():
        # llama.cpp looks up rows of an embedding's first factor, so the two factors change places
        flipped = name == _GGUF_EMBEDDING
        down, up = (Factor(b, True), Factor(a)) if flipped else (Factor(a), Factor(b))
        rank = _common_rank(down, up)
        # without an alpha llama.cpp does not scale the product
        strength = alpha / rank if alpha else 1.0
        pairs.append(AdapterPair(name, down, up, source.scale * strength))
    return AdapterFile(
        source, _fingerprint(path), architecture if isinstance(architecture, str) else None, tuple(pairs)
    )


# ---- both


def _paired_factors(
    weights: WeightFile, endings: Mapping[str, tuple[str, bool]], prefix: str = ""
) -> dict[str, tuple[WeightTensor, WeightTensor, bool]]:
    """Finds the factors A and B of every matrix, and whether the matrix is an embedding."""
    found: dict[str, tuple[bool, dict[str, WeightTensor]]] = {}
    for name in weights.names():
        ending = next((ending for ending in endings if name.endswith(ending)), None)
        if ending is None:
            raise _not_a_factor(name, weights.path.name)
        tensor, (side, embedding) = weights.tensor(name), endings[ending]
        if tensor.type_name not in FACTOR_TYPES:
            raise FormatError(
                f"the adapter's tensor '{name}' is of type {tensor.type_name}", f"use {', '.join(FACTOR_TYPES)}"
            )
        if len(tensor.shape) not in (1, 2) or 0 in tensor.shape:
            raise FormatError(f"the adapter's tensor '{name}' has shape {list(tensor.shape)}", "a factor is a matrix")
        known, factors = found.setdefault(name.removesuffix(ending).removeprefix(prefix), (embedding, {}))
        if side in factors or known != embedding:
            raise FormatError(f"the adapter's tensor '{name}' appears in two forms", "keep one pair per matrix")
        factors[side] = tensor
    if not found:
        raise FormatError(f"{weights.path.name} holds no LoRA tensors", "it is empty or not an adapter")
    for _, factors in found.values():
        if len(factors) < 2:
            ((side, only),) = factors.items()
            raise FormatError(
                f"the adapter's tensor '{only.name}' has no partner: its {'B' if side == 'A' else 'A'} is missing",
                "save the adapter again",
            )
    return {matrix: (factors["A"], factors["B"], embedding) for matrix, (embedding, factors) in found.items()}


def _common_rank(down: Factor, up: Factor) -> int:
    if down.shape[0] != up.shape[1]:
        raise FormatError(
            f"the adapter's tensors '{down.tensor.name}' {list(down.tensor.shape)} and '{up.tensor.name}' "
            f"{list(up.tensor.shape)} have no rank in common",
            "they do not belong together",
        )
    return down.shape[0]


def _not_a_factor(name: str, label: str) -> FormatError:
    if "lora_magnitude" in name:
        return FormatError(f"tensor '{name}' of {label} belongs to a DoRA adapter", "only plain LoRA can be merged")
    hint = "save it without embedding layers, norms and whole modules: only LoRA pairs can be merged"
    return FormatError(f"tensor '{name}' of {label} is not a factor of a LoRA pair", hint)


def _finite(holder: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        raise ConfigError(f"{holder} has {key} {value!r}", "it must be a finite number")
    return float(value)


def _refuse_non_finite(tensor: WeightTensor) -> None:
    # the tensor is decoded in pieces, so that the floats of a large one are never all in memory
    for stored in tensor.raw_pieces(CHUNK_ELEMENTS):
        with np.errstate(all="ignore"):
            values = decode_rows(stored, tensor.type_name)
        if not np.isfinite(values).all():
            raise FormatError(f"the adapter's tensor '{tensor.name}' holds NaN or infinity", "its training went wrong")


def _fingerprint(*paths: Path) -> str:
    """Hashes the files' bytes, so that draft context of one adapter is never taken for another adapter's."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]
