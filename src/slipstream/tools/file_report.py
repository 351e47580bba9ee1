"""Describes what a model file holds as plain data; of a truncated file it describes what is there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from slipstream.errors import SlipstreamError, SourceError
from slipstream.formats import gguf, safetensors
from slipstream.formats.file_bytes import FileBytes, MemoryBytes, TensorEntry, missing_bytes, read_json_object
from slipstream.formats.weight_files import INDEX, SINGLE, WeightFile, find_gguf, read_config
from slipstream.models.dflash import read_drafter_config
from slipstream.models.dflash_config import DFlashConfig
from slipstream.tools.model_file import describes_drafter, refuse_impossible_layers

SHOWN_ELEMENTS = 16  # longer arrays are replaced by their length
SHOWN_CHARACTERS = 4096  # longer texts, such as chat templates, are cut

_PLURALS = {str: "strings", int: "integers", float: "numbers", bool: "flags", list: "arrays"}


def inspect_file(path: Path) -> dict[str, object]:
    """Describes a GGUF file, a safetensors file or a model folder; the result is JSON-serialisable."""
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise SourceError(f"there is no file {path}", "check the path")
    return _safetensors([path], path) if path.suffix == ".safetensors" else _gguf(path)


def _gguf(path: Path) -> dict[str, object]:
    try:
        with closing(FileBytes(path)) as data:
            header = gguf.parse_header(data, path.name)
        missing = missing_bytes(header.tensors, header.file_size)
        problem = f"the file ends {missing} bytes early: truncated" if missing else ""
    except gguf.TruncatedHeader as error:
        # The count of missing bytes is a lower bound, because the missing part of the header lists further data.
        header, missing, problem = error.header, error.missing, error.message
    report = _report(f"GGUF v{header.version}", path, header.file_size, header.tensors, header.metadata)
    return report | _completeness(missing, problem)


def _safetensors(files: Sequence[Path], shown: Path) -> dict[str, object]:
    entries: list[TensorEntry] = []
    size = missing = 0
    for file in files:
        with closing(FileBytes(file)) as data:
            found, length = safetensors.parse_header(data, file.name), len(data)
        entries += found
        size += length
        missing += missing_bytes(found, length)
    report = _report("safetensors", shown, size, entries, read_config(shown) or {})
    problem = f"the data ends {missing} bytes early: truncated" if missing else ""
    return report | _completeness(missing, problem)


def _folder(folder: Path) -> dict[str, object]:
    if (folder / SINGLE).is_file():
        return _safetensors([folder / SINGLE], folder)
    if not (folder / INDEX).is_file():
        return _gguf(find_gguf(folder))
    shards = sorted(set(safetensors.read_index(folder / INDEX).values()))
    present = [folder / shard for shard in shards if (folder / shard).is_file()]
    report = _safetensors(present, folder) | {"files": shards}
    if len(present) < len(shards):
        absent = ", ".join(shard for shard in shards if not (folder / shard).is_file())
        declared = read_json_object(folder / INDEX).get("metadata")
        total = declared.get("total_size") if isinstance(declared, dict) else None
        found = sum(file.stat().st_size for file in present)
        missing = max(0, total - found) if isinstance(total, int) else 0
        report |= _completeness(missing, f"missing shards: {absent}")
    return report


def _drafter(path: Path, entries: Sequence[TensorEntry], values: Mapping[str, object]) -> dict[str, object]:
    """How a drafter proposes tokens, or why it cannot be used; only the shapes of its tensors are needed."""
    nothing = MemoryBytes(np.zeros(0, np.uint8))
    metadata = dict(values) if "general.architecture" in values else {}
    file = WeightFile(path, {entry.name: (entry, nothing) for entry in entries}, metadata)
    try:
        refuse_impossible_layers(values, len(entries), path.name)
        read = read_drafter_config(path, file)
    except SlipstreamError as error:
        return {"problem": str(error)}
    return {
        "block_size": read.block_size,
        "sample_from_anchor": read.sample_from_anchor,
        "proposals": read.proposals,
        "target_layer_ids": list(read.target_layer_ids),
        "mask_token_id": read.mask_token_id,
    } | _parts(read)


def _parts(config: DFlashConfig) -> dict[str, object]:
    parts, shown = config.parts, {}
    if parts.markov_rank:
        shown["markov_head"] = f"{parts.markov_head_type}, rank {parts.markov_rank}"
    if parts.enable_confidence_head:
        also = " and previous token" if parts.confidence_head_with_markov else ""
        shown["confidence_head"] = f"hidden state{also}"
    if parts.conv_kernel_size:
        shown["convolution"] = f"{parts.conv_kernel_size} taps, groups of {parts.conv_group_size}"
    if parts.selector_rank:
        shown["candidate_selector"] = f"rank {parts.selector_rank}, {parts.selector_top_k} candidates"
    return dict(shown)


def _completeness(missing: int, problem: str) -> dict[str, object]:
    return {"complete": not problem, "missing_bytes": missing, "problem": problem}


def _report(
    kind: str, path: Path, size: int, entries: Sequence[TensorEntry], values: Mapping[str, object]
) -> dict[str, object]:
    """What both formats have; `values` is the metadata of a GGUF file, or a config.json."""
    totals: dict[str, dict[str, int]] = {}
    for entry in entries:
        total = totals.setdefault(entry.type_name, {"count": 0, "parameters": 0, "bytes": 0})
        total["count"] += 1
        total["parameters"] += entry.elements
        total["bytes"] += entry.nbytes
    tensors = [
        {"name": entry.name, "type": entry.type_name, "shape": list(entry.shape), "bytes": entry.nbytes}
        for entry in entries
    ]
    named, is_gguf = values.get("architectures"), kind != "safetensors"
    plain = values.get("general.architecture" if is_gguf else "model_type")
    report: dict[str, object] = {
        "path": str(path),
        "format": kind,
        "size": size,
        "parameters": sum(entry.elements for entry in entries),
        "totals": totals,
        "tensors": tensors,
        "architecture": named[0] if not is_gguf and isinstance(named, list) and named else plain,
        "metadata": {key: _summary(value) for key, value in values.items()},
    }
    return report | ({"drafter": _drafter(path, entries, values)} if describes_drafter(values) else {})


def _summary(value: object) -> object:
    if isinstance(value, list):
        if len(value) <= SHOWN_ELEMENTS:
            return [_summary(item) for item in value]
        kinds = {type(item) for item in value}
        return f"[{len(value)} {_PLURALS.get(kinds.pop(), 'values') if len(kinds) == 1 else 'values'}]"
    if isinstance(value, dict):
        return {key: _summary(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        return f"{value[:SHOWN_CHARACTERS]}... ({len(value)} characters)"
    # JSON cannot express infinity and NaN, so they become text.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
