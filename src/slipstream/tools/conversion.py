"""Converts drafters and targets between Hugging Face folders and GGUF files; a failed conversion leaves no file."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slipstream.errors import RequestError, SourceError
from slipstream.formats.atomic import atomic_folder
from slipstream.formats.gguf_write import write_gguf
from slipstream.formats.safetensors import write_safetensors
from slipstream.formats.weight_files import SINGLE, open_weights, read_config
from slipstream.tools import convert_drafter, convert_target
from slipstream.tools.convert_drafter import NAMINGS
from slipstream.tools.convert_plans import FLOATS
from slipstream.tools.convert_vocab import write_folder
from slipstream.tools.model_file import kind_of
from slipstream.types import Progress

_LLAMA_CPP = "llama.cpp"  # the usual naming
TYPES = {name.lower(): name for name in FLOATS}


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Describes what was written, for people and for JSON."""

    source: str
    out: str
    kind: str  # target or drafter
    format: str  # GGUF or safetensors
    tensors: int
    parameters: int
    bytes: int
    types: dict[str, int] = field(default_factory=dict)  # how many tensors have each type
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def convert(
    source: Path,
    out: Path,
    *,
    target: Path | None = None,
    naming: str = _LLAMA_CPP,
    type_name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes the model at `source` in the other format: a folder becomes a GGUF file, a GGUF file becomes a folder."""
    if naming not in NAMINGS:
        raise RequestError(f"there is no naming '{naming}'", f"use one of {', '.join(NAMINGS)}")
    if type_name is not None and type_name not in TYPES:
        raise RequestError(f"there is no type '{type_name}' to convert to", f"use one of {', '.join(TYPES)}")
    asked = None if type_name is None else TYPES[type_name]
    if not out.parent.is_dir():
        raise SourceError(f"there is no folder {out.parent}", "make it first")
    with open_weights(source) as file:
        config, metadata = read_config(source), file.metadata
        drafter = kind_of(metadata, config, file.names()) == "drafter"
    if config is not None:
        _refuse_to_write_gguf(out, force)
        if not drafter and (target is not None or naming != _LLAMA_CPP):
            raise RequestError(f"{source.name} is not a drafter", "--target and --naming are for drafters")
        made = (
            convert_drafter.to_gguf(source, asked, naming, target, progress)
            if drafter
            else convert_target.to_gguf(source, asked, progress)
        )
        write_gguf(out, made.metadata, made.tensors, progress)
    else:
        if "general.architecture" not in metadata:
            raise SourceError(f"{source} has no config.json", "a folder of safetensors needs one")
        if naming != _LLAMA_CPP:
            raise RequestError("a folder has one naming of tensors", "--naming is for GGUF files")
        _refuse_to_write_folder(out)
        if target is not None and not drafter:
            raise RequestError(f"{source.name} is not a drafter", "--target is for drafters")
        made = convert_drafter.to_folder(source, asked, target) if drafter else convert_target.to_folder(source, asked)
        with atomic_folder(out) as partial:
            (partial / "config.json").write_text(json.dumps(made.config, indent=2), "utf-8")
            if not drafter and (reason := write_folder(metadata, partial)):
                made.notes.append(f"no tokenizer was written: {reason}")
            write_safetensors(partial / SINGLE, made.tensors, progress)
    return ConversionReport(
        source=str(source),
        out=str(out),
        kind="drafter" if drafter else "target",
        format="safetensors" if config is None else "GGUF",
        tensors=len(made.tensors),
        parameters=sum(math.prod(plan.shape) for plan in made.tensors),
        bytes=sum(plan.nbytes for plan in made.tensors),
        types=dict(Counter(plan.type_name for plan in made.tensors)),
        notes=made.notes,
    )


def _refuse_to_write_gguf(out: Path, force: bool) -> None:
    if out.suffix != ".gguf":
        raise RequestError(f"a folder is converted to GGUF, but {out.name} does not end in .gguf", "rename the output")
    if out.exists() and not (force and out.is_file()):
        raise RequestError(f"{out} already exists", "use --force to replace a file")


def _refuse_to_write_folder(out: Path) -> None:
    if out.suffix in (".gguf", ".safetensors"):
        raise RequestError(
            f"a GGUF file is converted to a folder, but {out.name} names a file",
            "name a folder, or use slipstream quantize to write another GGUF",
        )
    if out.exists():
        raise RequestError(f"{out} already exists", "remove it or choose another name")
