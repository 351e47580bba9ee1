"""`slipstream inspect`: what a model file holds, and whether all of it is there.

`slipstream inspect smollm2 --no-tensors`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui, columns_table, key_value_table, size

if TYPE_CHECKING:
    from rich.table import Table

INCOMPLETE = 1  # exit code


def command(
    file: Annotated[str, typer.Argument(help="A model file or folder, a short name or a hub id.")],
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List every tensor.")] = True,
    json_output: o.JsonOutput = False,
) -> None:
    """Show a model file's metadata, tensors and sizes, and check that it is complete."""
    from slipstream.formats.sources import resolve
    from slipstream.tools.inspect import inspect_file

    ui = Ui(json_output)
    with ui.loading() as progress:
        path = resolve(file, progress=progress).path
    report = inspect_file(path)
    if json_output:
        ui.print_json({key: value for key, value in report.items() if tensors or key != "tensors"})
    else:
        draw(ui, report, tensors)
    if not report["complete"]:
        # A script that asks whether a download is whole must not have to read the report.
        raise typer.Exit(INCOMPLETE)


def draw(ui: Ui, report: Mapping[str, Any], tensors: bool) -> None:
    ui.table(str(report["path"]), key_value_table(_summary(report)))
    ui.line()
    if "drafter" in report:
        ui.table("Drafter", key_value_table(report["drafter"]))
        ui.line()
    ui.table("Metadata", key_value_table(report["metadata"]))
    ui.line()
    if tensors:
        ui.table("Tensors", _tensor_table(report["tensors"]))
    ui.table("By type", _totals_table(report["totals"]))
    if report["problem"]:
        ui.warn(f"Not complete: {report['problem']}; fetch it again.")


def _summary(report: Mapping[str, Any]) -> dict[str, object]:
    return {
        "format": report["format"],
        "architecture": report["architecture"],
        "size": size(report["size"]),
        "parameters": f"{report['parameters']:,}",
        "tensors": len(report["tensors"]),
        "complete": "yes" if report["complete"] else "no",
    }


def _tensor_table(tensors: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [str(t["name"]), str(t["type"]), " x ".join(map(str, t["shape"])), size(t["bytes"])] for t in tensors
    ]
    return columns_table(["name", "type", "shape", "size"], rows)


def _totals_table(totals: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [[kind, str(t["count"]), f"{t['parameters']:,}", size(t["bytes"])] for kind, t in totals.items()]
    return columns_table(["type", "tensors", "parameters", "size"], rows)
