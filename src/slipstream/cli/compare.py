"""`slipstream compare`: measures how far two files of one model are apart, per tensor and in their logits.

`slipstream compare drafter/ drafter.Q4_0.gguf --logits --target smollm2`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slipstream.bench.workloads import read_prompts
from slipstream.cli import options as o
from slipstream.cli.ui import Ui
from slipstream.config import EngineConfig
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.tools.logits import LogitComparison
    from slipstream.tools.tensor_compare import FileComparison, TensorDifference

TOO_FAR = 1  # exit code when an error is above --max-error
DEFAULT_PROMPTS = "humaneval,gsm8k,mt-bench"
_SHOWN_TENSORS = 12  # Without --all the table shows this many, so that it fits on a screen; it shows every outlier.
_logits = partial(typer.Option, rich_help_panel="Logits")


def command(
    first: Annotated[str, typer.Argument(metavar="A", help="The reference: a file, folder, short name or hub id.")],
    second: Annotated[str | None, typer.Argument(metavar="B", help="The model that is compared with it.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every tensor, not only those furthest apart.")] = False,
    max_error: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="Exit with 1 if a tensor is missing or its relative RMS is above this."),
    ] = None,
    logits: Annotated[bool, _logits("--logits", help="Also run both models on the same inputs.")] = False,
    reference: Annotated[
        Literal["dflash"] | None, _logits(help="Also compare drafters with the authors' package.")
    ] = None,
    target: Annotated[str, _logits(help="The target of two drafters.")] = "smollm2",
    draft: Annotated[str, _logits(help="The drafter that measures two targets' tau; 'none' skips it.")] = "auto",
    prompts: Annotated[
        str, _logits(metavar="NAME,...", help="Built-in prompt sets or .jsonl files.")
    ] = DEFAULT_PROMPTS,
    limit: Annotated[int, _logits(min=0, help="Prompts of each set; 0 uses all.")] = 2,
    max_tokens: Annotated[int, _logits(min=2, help="Tokens of an answer.")] = 64,
    dtype: o.Dtype = "auto",
    threads: o.Threads = 0,
    json_output: o.JsonOutput = False,
) -> None:
    """Compare two files of one model: errors per tensor, outliers, and with --logits what they compute."""
    _refuse_contradictions(second, logits, reference, max_error)
    ui = Ui(json_output)
    sets = [read_prompts(name.strip(), limit) for name in prompts.split(",")] if logits else []
    texts = [turns[0] for conversations in sets for turns in conversations]
    with ui.loading() as progress:
        from slipstream.formats.sources import resolve
        from slipstream.tools.tensor_compare import compare_files

        names = [first] if second is None else [first, second]
        paths = [resolve(name, progress=progress).path for name in names]
        found = compare_files(paths[0], paths[1], progress) if len(paths) == 2 else None
    if found is not None and not json_output:
        draw_tensors(ui, found, every)
    runs: list[LogitComparison] = []
    if logits:
        from slipstream.tools.model_file import open_model

        config = EngineConfig(weight_format=dtype, threads=threads)
        with open_model(paths[0]) as model:
            kind = model.kind
        if kind == "drafter":
            runs = _run_drafters(ui, names, paths, target, reference is not None, texts, config, max_tokens)
        elif reference is not None:
            raise RequestError(
                "the authors' package holds a drafter, not a target", "leave --reference out for targets"
            )
        else:
            runs = [_run_targets(ui, names, paths, draft, texts, config, max_tokens)]
        if not json_output:
            draw_logits(ui, runs)
    if json_output:
        ui.print_json(
            {"tensors": None if found is None else found.to_json(), "logits": [run.to_json() for run in runs]}
        )
    if found is not None and max_error is not None and found.largest_error > max_error:
        if not json_output:
            ui.warn(f"The largest relative RMS is {found.largest_error:.4g}, which is above {max_error:g}.")
        raise typer.Exit(TOO_FAR)


def _refuse_contradictions(second: str | None, logits: bool, reference: str | None, max_error: float | None) -> None:
    if reference is not None and not logits:
        raise RequestError("--reference compares logits", "add --logits")
    if second is None and reference is None:
        raise RequestError("there is nothing to compare with", "give a second file, or --logits --reference dflash")
    if second is None and max_error is not None:
        raise RequestError("--max-error compares two files", "give a second one")


def _run_drafters(
    ui: Ui,
    names: list[str],
    paths: list[Path],
    target: str,
    with_authors: bool,
    texts: Sequence[str],
    config: EngineConfig,
    max_tokens: int,
) -> list[LogitComparison]:
    from slipstream.formats.sources import resolve
    from slipstream.tools.logits import compare_drafters, load_blocks, write_passages

    runs: list[LogitComparison] = []
    with ui.loading() as progress:
        passages, _ = write_passages(target, None, texts, config, max_tokens, progress)
        path = resolve(target, progress=progress).path
        blocks = load_blocks(path, list(zip(_labels(names), paths, strict=True)), config.weight_format)
        weight_format = blocks[0].target.weight_format
        if len(blocks) == 2:
            runs.append(compare_drafters(blocks[0], blocks[1], passages, weight_format, progress))
        if with_authors:
            from slipstream.tools.authors_drafter import AuthorBlocks

            for ours, file in zip(blocks, paths, strict=True):
                theirs = AuthorBlocks(ours, file)
                run = compare_drafters(theirs, ours, passages, weight_format, progress)
                if theirs.left_out:
                    run.notes.append(f"the authors' package has no place for {theirs.left_out}")
                runs.append(run)
    return runs


def _run_targets(
    ui: Ui, names: list[str], paths: list[Path], draft: str, texts: Sequence[str], config: EngineConfig, max_tokens: int
) -> LogitComparison:
    from slipstream.formats.sources import drafter_source
    from slipstream.tools.logits import compare_targets, write_passages

    drafter = next(filter(None, (drafter_source(name, draft) for name in names)), None)
    with ui.loading() as progress:
        passages, tau = write_passages(str(paths[0]), drafter, texts, config, max_tokens, progress)
        other = (
            None if drafter is None else write_passages(str(paths[1]), drafter, texts, config, max_tokens, progress)[1]
        )
        one, two = _labels(names)
        run = compare_targets(paths[0], paths[1], (one, two), passages, config.weight_format, progress)
    run.taus = tau, other
    if drafter is None:
        run.notes.append("there is no drafter, so tau was not measured: name one with --draft")
    return run


def _labels(names: Sequence[str]) -> list[str]:
    """The files' own names, or the names that were typed if the files' names are equal."""
    short = [Path(name).name or name for name in names]
    return short if len(set(short)) == len(short) else list(names)


def draw_tensors(ui: Ui, found: FileComparison, every: bool) -> None:
    """Draws outliers and the tensors that are furthest apart, then names what could not be compared."""
    ordered = sorted(found.tensors, key=lambda tensor: (not tensor.outlier, -tensor.relative_rms))
    outliers = len(found.outliers)
    shown = ordered if every else ordered[: max(_SHOWN_TENSORS, outliers)]
    title = f"{found.first} (reference) and {found.second}: {len(found.tensors)} tensors of a {found.kind}"
    heads = ["tensor", "types", "relative RMS", "max error", "worst row", "outlier"]
    ui.table(title, heads, map(_row, shown))
    if len(shown) < len(ordered):
        ui.line(f"{len(ordered) - len(shown)} tensors are no further apart than these; --all shows them.")
    for label, names in (("Missing in the second", found.missing), ("Only in the second", found.extra)):
        if names:
            ui.line(f"{label}: {', '.join(names)}")
    for name, mine, theirs in found.shapes:
        ui.line(f"Different shape: {name} is {list(mine)} and {list(theirs)}")
    for name, one, two in found.settings:
        ui.line(f"Different setting: {name} is {one} and {two}")
    ui.lines(f"Note: {note}" for note in found.notes)
    ui.line(
        f"Relative RMS over all: {found.mean_error:.4g}, largest {found.largest_error:.4g}, "
        f"{outliers} outlier{'' if outliers == 1 else 's'}."
    )


def _row(tensor: TensorDifference) -> list[str]:
    first, second = tensor.types
    remark = " · ".join(filter(None, (tensor.outlier, tensor.explanation)))
    return [
        tensor.name,
        first if first == second else f"{first} / {second}",
        f"{tensor.relative_rms:.4g}",
        f"{tensor.max_error:.4g}",
        f"{tensor.worst_row} ({tensor.row_error:.3g})",
        remark,
    ]


def draw_logits(ui: Ui, runs: Sequence[LogitComparison]) -> None:
    for run in runs:
        rows = [
            ["largest difference", f"{run.max_difference:.4g}"],
            ["mean difference", f"{run.mean_difference:.4g}"],
            ["mean KL, nats", f"{run.mean_divergence:.4g}"],
            ["largest KL", f"{run.max_divergence:.4g}"],
            ["same first choice", f"{run.agreement:.2%}"],
        ]
        named = zip((run.first, run.second), run.taus, strict=True)
        rows += [[f"tau of {name}", f"{tau:.3f}"] for name, tau in named if tau is not None]
        title = f"Logits of {run.first} and {run.second}: {run.rows} rows, weights {run.weight_format}"
        ui.table(title, ["", "value"], rows)
        if run.non_finite:
            ui.warn(f"{run.non_finite} rows are left out, because their logits are not finite.")
        ui.lines(f"Note: {note}" for note in run.notes)
