"""`slipstream quantize`: writes a GGUF file with its matrices in another type, and reports the rounding errors.

`slipstream quantize drafter.gguf drafter.q4-mix.gguf --type q4-mix`
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui, size
from slipstream.tools.quantize_recipes import RecipeName

if TYPE_CHECKING:
    from slipstream.tools.requantize import QuantizeReport, TensorResult


def command(
    source: Annotated[str, typer.Argument(metavar="IN", help="A GGUF file, a short name or a hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The GGUF file to write.")],
    recipe: Annotated[RecipeName, typer.Option("--type", help="The type of the matrices, or a mix of types.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List every tensor.")] = True,
    json_output: o.JsonOutput = False,
) -> None:
    """Store the matrices of a GGUF file in another type; norms and vectors stay F32.

    q4_k_m is llama.cpp's mix of Q4_K and Q6_K. q4-mix uses Q4_0 in the layers and Q8_0 in heads, projections and token
    tables. A matrix whose rows do not divide by 256 gets q5_0 instead of q4_k, q5_1 instead of q5_k and q8_0 instead of
    q6_k; if they do not divide by 32 either, it gets f16 or bf16. A tensor that already has its type is copied.
    """
    from slipstream.formats.sources import resolve
    from slipstream.tools.requantize import quantize_file

    ui = Ui(json_output)
    with ui.loading() as progress:
        path = resolve(source, progress=progress).path
        report = quantize_file(path, out, recipe, force=force, progress=progress)
    if json_output:
        ui.print_json({key: value for key, value in report.to_json().items() if tensors or key != "tensors"})
    else:
        draw(ui, report, tensors)


def draw(ui: Ui, report: QuantizeReport, tensors: bool) -> None:
    if tensors:
        heads = ["name", "shape", "type", "size", "RMS error", "largest"]
        ui.table("Tensors", heads, map(_row, report.tensors))
    before, after = report.source.stat().st_size, report.out.stat().st_size
    ui.line(f"{report.out}: {size(after)}, was {size(before)} ({after / before:.0%})")
    ui.line(f"{report.share:.1%} of the weights in matrices have the type {report.recipe} asks for")
    fallbacks = Counter((t.wanted, t.after, t.reason) for t in report.matrices if t.reason)
    for (wanted, got, reason), count in fallbacks.items():
        ui.line(f"{count} {'matrix is' if count == 1 else 'matrices are'} {got} instead of {wanted}: {reason}")


def _row(tensor: TensorResult) -> list[str]:
    name, shape = tensor.name, " x ".join(map(str, tensor.shape))
    if tensor.before == tensor.after:
        return [name, shape, tensor.after, size(tensor.bytes_after), "same", ""]
    return [
        name,
        shape,
        f"{tensor.before} → {tensor.after}",
        f"{size(tensor.bytes_before)} → {size(tensor.bytes_after)}",
        f"{tensor.relative_rms:.3%}",
        f"{tensor.max_error:.3g}",
    ]
