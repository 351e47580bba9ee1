"""`slipstream convert`: a model folder as a GGUF file, or a GGUF file as a folder of safetensors.

`slipstream convert path/to/drafter --out drafter.gguf --target smollm2`
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui, key_value_table, size


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model folder or GGUF file, a short name, a hub id.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The GGUF file, or the folder, to write.")],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="T", help="A drafter's target: checked, and its tokenizer goes along."),
    ] = None,
    naming: Annotated[
        str, typer.Option("--naming", metavar="NAME", help="Whose names a drafter's GGUF uses: llama.cpp or lucebox.")
    ] = "llama.cpp",
    type_name: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="f32, f16 or bf16 for all matrices.",
            show_default="as stored; f32 for what is quantised",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it is there already.")] = False,
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
    ui.table(
        report.out,
        key_value_table(
            {
                "from": report.source,
                "kind": report.kind,
                "format": report.format,
                "size": size(report.bytes),
                "parameters": f"{report.parameters:,}",
                "tensors": f"{report.tensors} ({types})",
            }
        ),
    )
    for note in report.notes:
        ui.warn(note)
