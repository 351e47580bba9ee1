"""Writes safetensors files completely or not at all; each tensor's bytes are made when it is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import FormatError
from slipstream.formats.atomic import atomic_file
from slipstream.formats.gguf_write import Progress, TensorPlan, refuse_repeats, write_pieces
from slipstream.formats.safetensors import TYPE_BYTES

_HEADER_ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Sequence[TensorPlan], progress: Progress | None = None) -> None:
    """Writes tensors of plain (not block-quantised) types in the given order."""
    refuse_repeats([plan.name for plan in tensors], "tensor", path)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in tensors:
        if plan.type_name not in TYPE_BYTES:
            raise FormatError(f"tensor '{plan.name}' cannot be stored as {plan.type_name}", "use f32, f16 or bf16")
        end = offset + plan.nbytes
        header[plan.name] = {"dtype": plan.type_name, "shape": list(plan.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        write_pieces(file, tensors, 1, progress, path.name)
