"""`slipstream convert`: turns a model folder into a GGUF file, or a GGUF file into a folder of safetensors.

`slipstream convert path/to/drafter --out drafter.gguf --target smollm2`
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui, size


def command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A model folder, a GGUF file, a short name or a hub id.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The GGUF file or the folder to write.")],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="T", help="The drafter's target: it is checked, and its tokenizer is copied."),
    ] = None,
    naming: Annotated[
        str,
        typer.Option("--naming", metavar="NAME", help="Tensor names of a drafter's GGUF file: llama.cpp or lucebox."),
    ] = "llama.cpp",
    type_name: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="The type of all matrices: f32, f16 or bf16.",
            show_default="as stored; f32 if quantised",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    json_output: o.JsonOutput = False,
) -> None:
    """Convert a drafter or a target between a Hugging Face folder and GGUF."""
    from slipstream.formats.sources import resolve
    from slipstream.tools.conversion import convert

    ui = Ui(json_output)
    with ui.loading() as progress:
        path = resolve(source, progress=progress).path
        target_path = None if target is None else resolve(target, progress=progress).path
        report = convert(
            path, out, target=target_path, naming=naming, type_name=type_name, force=force, progress=progress
        )
    if json_output:
        ui.print_json(report.to_json())
        return
    types = ", ".join(f"{count} {name}" for name, count in report.types.items())
    ui.facts(
        report.out,
        {
            "from": report.source,
            "kind": report.kind,
            "format": report.format,
            "size": size(report.bytes),
            "parameters": f"{report.parameters:,}",
            "tensors": f"{report.tensors} ({types})",
        },
    )
    for note in report.notes:
        ui.warn(note)
