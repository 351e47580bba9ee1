"""`slipstream inspect`: shows what a model file holds, checks that it is complete and sane, and whether it fits.

`slipstream inspect smollm2 --no-tensors`
`slipstream inspect smollm2 --check --check-instruct --fit --memory 2GB`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui, columns_table, key_value_table, size
from slipstream.config import WeightFormat
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.tools.checks import Check
    from slipstream.tools.fit import FitReport
    from slipstream.tools.instruct import InstructReport

INCOMPLETE = 1  # exit code of an incomplete file, and of a check that found a problem
_CHECKS = "Checks"

CheckFlag = Annotated[
    bool,
    typer.Option(
        "--check",
        rich_help_panel=_CHECKS,
        help="Check data, metadata, tensors and values; the exit code is 1 if something is wrong.",
    ),
]
InstructFlag = Annotated[
    bool,
    typer.Option(
        "--check-instruct",
        rich_help_panel=_CHECKS,
        help="Refuse a base model under a drafter that was trained on the instruct model, with exit code 1.",
    ),
]
FitFlag = Annotated[
    bool,
    typer.Option(
        "--fit",
        rich_help_panel=_CHECKS,
        help="Say whether this target with --draft fits into --memory; the exit code is 1 if it does not.",
    ),
]
DrafterName = Annotated[
    str,
    typer.Option(
        rich_help_panel=_CHECKS, help="The target's drafter; 'auto' is the pair's own, 'suffix' and 'none' are without."
    ),
]
ContextTokens = Annotated[
    int, typer.Option(min=0, rich_help_panel=_CHECKS, help="Tokens of a sequence; 0 is all that the target allows.")
]
MemorySize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_CHECKS,
        show_default="what is free",
        help="Memory for --fit, such as 8GB or 512MiB.",
    ),
]


def command(
    file: Annotated[str, typer.Argument(help="A model file or folder, a short name or a hub id.")],
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List every tensor.")] = True,
    check: CheckFlag = False,
    check_instruct: InstructFlag = False,
    fit: FitFlag = False,
    draft: DrafterName = "auto",
    context: ContextTokens = 0,
    memory: MemorySize = None,
    dtype: o.Dtype = "auto",
    json_output: o.JsonOutput = False,
) -> None:
    """Show a model file's metadata, tensors and sizes, or check it."""
    ui = Ui(json_output)
    if not fit and (context or memory is not None):
        raise RequestError("--context and --memory are for --fit", "add --fit, or leave them out")
    with ui.loading() as progress:
        from slipstream.formats.sources import resolve

        path = resolve(file, progress=progress).path
    if check or check_instruct or fit:
        passed = _run_checks(ui, file, path, (check, check_instruct, fit), draft, context, memory, dtype)
        if not passed:
            raise typer.Exit(INCOMPLETE)
        return
    from slipstream.tools.file_report import inspect_file

    report = inspect_file(path)
    if json_output:
        ui.print_json({key: value for key, value in report.items() if tensors or key != "tensors"})
    else:
        draw(ui, report, tensors)
    if not report["complete"]:
        # The exit code tells a script whether a download is complete, so that it need not read the report.
        raise typer.Exit(INCOMPLETE)


def _run_checks(
    ui: Ui,
    name: str,
    path: Path,
    wanted: tuple[bool, bool, bool],
    draft: str,
    context: int,
    memory: str | None,
    dtype: WeightFormat,
) -> bool:
    """Runs and shows the wanted checks (check, instruct, fit); returns whether all of them passed."""
    from slipstream.formats.sources import NO_DRAFT, SUFFIX, drafter_source

    shown: dict[str, object] = {"path": str(path)}
    passed = True
    check, instruct, fit = wanted
    if instruct or fit:
        shown["draft"] = drafter_source(name, draft) or (None if draft == NO_DRAFT else SUFFIX)
    if check:
        from slipstream.tools.checks import check_file

        with ui.loading() as progress:
            checks = check_file(path, progress)
        shown["check"] = [found.to_json() for found in checks]
        passed &= all(found.passed for found in checks)
        if not ui.json_output:
            draw_checks(ui, str(path), checks)
    if instruct:
        from slipstream.tools.instruct import check_instruct

        drafter = _drafter_path(ui, name, draft)
        report = check_instruct(path, drafter)
        shown["instruct"] = report.to_json()
        passed &= not report.refused
        if not ui.json_output:
            draw_instruct(ui, report)
    if fit:
        from slipstream.tools.fit import fit as fit_pair
        from slipstream.tools.fit import parse_size

        limit = None if memory is None else parse_size(memory)
        with ui.loading() as progress:
            needs = fit_pair(name, draft, context=context, memory=limit, weight_format=dtype, progress=progress)
        shown["fit"] = needs.to_json()
        passed &= needs.fits
        if not ui.json_output:
            draw_fit(ui, needs)
    if ui.json_output:
        ui.print_json(shown | {"passed": passed})
    return passed


def _drafter_path(ui: Ui, target: str, draft: str) -> Path | None:
    from slipstream.formats.sources import drafter_source, resolve

    wanted = drafter_source(target, draft)
    if wanted is None:
        return None
    with ui.loading() as progress:
        return resolve(wanted, progress=progress).path


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
        ui.warn(f"The file is not complete: {report['problem']}; fetch it again.")


def draw_checks(ui: Ui, title: str, checks: Sequence[Check]) -> None:
    """Draws one line per check, then one line per problem."""
    rows = [[check.name, "pass" if check.passed else "FAIL", check.seen] for check in checks]
    ui.table(title, _words_table(["check", "result", "details"], rows))
    for check in checks:
        for problem in check.problems:
            ui.line(f"{check.name}: {problem}")
    ui.line()


def draw_instruct(ui: Ui, report: InstructReport) -> None:
    rows = [[witness.name, witness.says, witness.seen] for witness in report.witnesses]
    ui.table(f"{report.target}: {report.verdict} model", _words_table(["source", "result", "details"], rows))
    ui.line(f"Refused: {report.refused}." if report.refused else f"The drafter wants the {report.wanted} model.")
    ui.line()


def draw_fit(ui: Ui, needs: FitReport) -> None:
    rows: dict[str, object] = {
        "memory": size(needs.memory_bytes),
        "target weights": size(needs.target_bytes),
        "drafter weights": size(needs.draft_bytes),
        "Python, torch, work space": size(needs.runtime_bytes),
        "cache for a token": size(needs.token_bytes),
        f"cache for {needs.context} tokens": size(needs.cache_bytes),
        "in all": size(needs.total_bytes),
        "largest context": f"{needs.largest_context} of {needs.trained_context} tokens",
        f"sequences of {needs.context} tokens": needs.sequences,
    }
    ui.table("Memory", key_value_table(rows))
    if needs.quants:
        quants = [[q.type, size(q.weight_bytes), size(q.total_bytes), "yes" if q.fits else "no"] for q in needs.quants]
        ui.table("With the target quantised", columns_table(["type", "weights", "in all", "fits"], quants))
    for line in needs.advice():
        ui.line(line)


def _words_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of sentences, whose columns are aligned left."""
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*[escape(cell) for cell in row])
    return table


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
    rows = [[str(t["name"]), str(t["type"]), " x ".join(map(str, t["shape"])), size(t["bytes"])] for t in tensors]
    return columns_table(["name", "type", "shape", "size"], rows)


def _totals_table(totals: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [[kind, str(t["count"]), f"{t['parameters']:,}", size(t["bytes"])] for kind, t in totals.items()]
    return columns_table(["type", "tensors", "parameters", "size"], rows)
