"""`slipstream inspect`: shows what a model file holds, checks that it is complete and sane, and whether it fits.

`slipstream inspect smollm2 --no-tensors`
`slipstream inspect smollm2 --check --check-instruct --fit --memory 2GB`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui, size
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.tools.checks import Check
    from slipstream.tools.fit import FitReport
    from slipstream.tools.instruct import InstructReport

INCOMPLETE = 1  # exit code of an incomplete file, and of a check that found a problem
_check = partial(typer.Option, rich_help_panel="Checks")

CheckFlag = Annotated[
    bool, _check("--check", help="Check data, metadata, tensors and values; the exit code is 1 if something is wrong.")
]
InstructFlag = Annotated[
    bool,
    _check(
        "--check-instruct",
        help="Refuse a base model under a drafter that was trained on the instruct model, with exit code 1.",
    ),
]
FitFlag = Annotated[
    bool,
    _check("--fit", help="Say whether this target with --draft fits into --memory; the exit code is 1 if it does not."),
]
DrafterName = Annotated[
    str, _check(help="The target's drafter; 'auto' is the pair's own, 'suffix' and 'none' are without.")
]
ContextTokens = Annotated[int, _check(min=0, help="Tokens of a sequence; 0 is all that the target allows.")]
MemorySize = Annotated[
    str | None, _check(metavar="SIZE", show_default="what is free", help="Memory for --fit, such as 8GB or 512MiB.")
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
    from slipstream.formats.sources import NO_DRAFT, SUFFIX, drafter_source, resolve

    with ui.loading() as progress:
        path = resolve(file, progress=progress).path
    if not (check or check_instruct or fit):
        _show(ui, path, tensors)
        return
    shown: dict[str, object] = {"path": str(path)}
    passed, drafter = True, None
    if check_instruct or fit:
        drafter = drafter_source(file, draft)
        shown["draft"] = drafter or (None if draft == NO_DRAFT else SUFFIX)
    if check:
        from slipstream.tools.checks import check_file

        with ui.loading() as progress:
            checks = check_file(path, progress)
        shown["check"] = [found.to_json() for found in checks]
        passed &= all(found.passed for found in checks)
        if not json_output:
            draw_checks(ui, str(path), checks)
    if check_instruct:
        from slipstream.tools.instruct import check_instruct as check_pair

        with ui.loading() as progress:
            report = check_pair(path, None if drafter is None else resolve(drafter, progress=progress).path)
        shown["instruct"] = report.to_json()
        passed &= not report.refused
        if not json_output:
            draw_instruct(ui, report)
    if fit:
        from slipstream.tools.fit import fit as fit_pair
        from slipstream.tools.fit import parse_size

        limit = None if memory is None else parse_size(memory)
        with ui.loading() as progress:
            needs = fit_pair(file, draft, context=context, memory=limit, weight_format=dtype, progress=progress)
        shown["fit"] = needs.to_json()
        passed &= needs.fits
        if not json_output:
            draw_fit(ui, needs)
    if json_output:
        ui.print_json(shown | {"passed": passed})
    if not passed:
        raise typer.Exit(INCOMPLETE)


def _show(ui: Ui, path: Path, tensors: bool) -> None:
    from slipstream.tools.file_report import inspect_file

    report = inspect_file(path)
    if ui.json_output:
        ui.print_json({key: value for key, value in report.items() if tensors or key != "tensors"})
    else:
        draw(ui, report, tensors)
    if not report["complete"]:
        # The exit code tells a script whether a download is complete, so that it need not read the report.
        raise typer.Exit(INCOMPLETE)


def draw(ui: Ui, report: Mapping[str, Any], tensors: bool) -> None:
    summary = {
        "format": report["format"],
        "architecture": report["architecture"],
        "size": size(report["size"]),
        "parameters": f"{report['parameters']:,}",
        "tensors": len(report["tensors"]),
        "complete": "yes" if report["complete"] else "no",
    }
    facts = (str(report["path"]), summary), ("Drafter", report.get("drafter")), ("Metadata", report["metadata"])
    for title, shown in facts:
        if shown is not None:
            ui.facts(title, shown)
            ui.line()
    if tensors:
        rows = [
            [str(t["name"]), str(t["type"]), " x ".join(map(str, t["shape"])), size(t["bytes"])]
            for t in report["tensors"]
        ]
        ui.table("Tensors", ["name", "type", "shape", "size"], rows)
    totals = report["totals"].items()
    rows = [[kind, str(t["count"]), f"{t['parameters']:,}", size(t["bytes"])] for kind, t in totals]
    ui.table("By type", ["type", "tensors", "parameters", "size"], rows)
    if report["problem"]:
        ui.warn(f"The file is not complete: {report['problem']}; fetch it again.")


def draw_checks(ui: Ui, title: str, checks: Sequence[Check]) -> None:
    """Draws one line per check, then one line per problem."""
    rows = [[check.name, "pass" if check.passed else "FAIL", check.seen] for check in checks]
    ui.table(title, ["check", "result", "details"], rows, numbers=False)
    ui.lines(f"{check.name}: {problem}" for check in checks for problem in check.problems)
    ui.line()


def draw_instruct(ui: Ui, report: InstructReport) -> None:
    rows = [[witness.name, witness.says, witness.seen] for witness in report.witnesses]
    ui.table(f"{report.target}: {report.verdict} model", ["source", "result", "details"], rows, numbers=False)
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
    ui.facts("Memory", rows)
    if needs.quants:
        quants = [[q.type, size(q.weight_bytes), size(q.total_bytes), "yes" if q.fits else "no"] for q in needs.quants]
        ui.table("With the target quantised", ["type", "weights", "in all", "fits"], quants)
    ui.lines(needs.advice())
