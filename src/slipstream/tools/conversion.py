"""Converts drafters and targets between Hugging Face folders and GGUF files; a failed conversion leaves no file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slipstream.errors import RequestError, SourceError
from slipstream.formats.atomic import atomic_folder
from slipstream.formats.gguf_write import write_gguf
from slipstream.formats.safetensors import write_safetensors
from slipstream.formats.weight_files import SINGLE, open_weights, read_config
from slipstream.tools import convert_drafter, convert_target
from slipstream.tools.convert_drafter import NAMINGS, Naming
from slipstream.tools.convert_plans import FLOATS, Conversion
from slipstream.tools.convert_vocab import write_folder
from slipstream.types import Progress

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
    naming: str = NAMINGS[0],
    type_name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes the model at `source` in the other format: a folder becomes a GGUF file, a GGUF file becomes a folder."""
    chosen = _naming(naming)
    if type_name is not None and type_name not in TYPES:
        raise RequestError(f"there is no type '{type_name}' to convert to", f"use one of {', '.join(TYPES)}")
    asked = None if type_name is None else TYPES[type_name]
    if not out.parent.is_dir():
        raise SourceError(f"there is no folder {out.parent}", "make it first")
    if read_config(source) is None:
        with open_weights(source) as file:
            is_gguf = "general.architecture" in file.metadata
        if not is_gguf:
            raise SourceError(f"{source} has no config.json", "a folder of safetensors needs one")
        if chosen != NAMINGS[0]:
            raise RequestError("a folder has one naming of tensors", "--naming is for GGUF files")
        return _to_folder(source, out, asked, target, progress)
    return _to_gguf(source, out, asked, chosen, target, force, progress)


def _naming(naming: str) -> Naming:
    for known in NAMINGS:
        if naming == known:
            return known
    raise RequestError(f"there is no naming '{naming}'", f"use one of {', '.join(NAMINGS)}")


def _to_gguf(
    source: Path,
    out: Path,
    asked: str | None,
    naming: Naming,
    target: Path | None,
    force: bool,
    progress: Progress | None,
) -> ConversionReport:
    if out.suffix != ".gguf":
        raise RequestError(f"a folder is converted to GGUF, but {out.name} does not end in .gguf", "rename the output")
    if out.exists() and not (force and out.is_file()):
        raise RequestError(f"{out} already exists", "use --force to replace a file")
    if convert_drafter.is_drafter(source):
        made = convert_drafter.to_gguf(source, asked, naming, target, progress)
    elif target is not None or naming != NAMINGS[0]:
        raise RequestError(f"{source.name} is not a drafter", "--target and --naming are for drafters")
    else:
        made = convert_target.to_gguf(source, asked, progress)
    write_gguf(out, made.metadata, made.tensors, progress)
    return _report(source, out, made, "GGUF", made.notes)


def _to_folder(
    source: Path, out: Path, asked: str | None, target: Path | None, progress: Progress | None
) -> ConversionReport:
    if out.suffix in (".gguf", ".safetensors"):
        raise RequestError(
            f"a GGUF file is converted to a folder, but {out.name} names a file",
            "name a folder, or use slipstream quantize to write another GGUF",
        )
    if out.exists():
        raise RequestError(f"{out} already exists", "remove it or choose another name")
    drafter = convert_drafter.is_drafter(source)
    if target is not None and not drafter:
        raise RequestError(f"{source.name} is not a drafter", "--target is for drafters")
    made, config = (
        convert_drafter.to_folder(source, asked, target) if drafter else convert_target.to_folder(source, asked)
    )
    notes = list(made.notes)
    with atomic_folder(out) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
        if not drafter:
            with open_weights(source) as file:
                reason = write_folder(file.metadata, partial)
            notes += [f"no tokenizer was written: {reason}"] if reason else []
        write_safetensors(partial / SINGLE, made.tensors, progress)
    return _report(source, out, made, "safetensors", notes)


def _report(source: Path, out: Path, made: Conversion, file_format: str, notes: list[str]) -> ConversionReport:
    parameters = 0
    for plan in made.tensors:
        elements = 1
        for size in plan.shape:
            elements *= size
        parameters += elements
    return ConversionReport(
        source=str(source),
        out=str(out),
        kind=made.kind,
        format=file_format,
        tensors=len(made.tensors),
        parameters=parameters,
        bytes=sum(plan.nbytes for plan in made.tensors),
        types=dict(Counter(plan.type_name for plan in made.tensors)),
        notes=notes,
    )
