"""Shows a sweep as rows, as Markdown and as a picture, and keeps it in a folder that grows while it is measured."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.bench.comparison_report import speedup_text
from slipstream.bench.measure import Ratio, Turn
from slipstream.bench.pair_sweep import ColumnResult, Sweep
from slipstream.bench.workloads import BUILT_IN
from slipstream.errors import RequestError, SourceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TAU_HEADS = ("prompts", "column", "tau", "difference, 95 %", "verdict")
SPEED_HEADS = ("prompts", "column", "speed-up, 95 %", "difference, 95 %", "verdict", "same or near-tie")
FILE_HEADS = ("file", "size", "weights", "made")
_COLOURS = ("#2a78b5", "#d9822b", "#4f9d69", "#8a5aa8", "#9a9a9a")
_REFERENCE = "reference"


def tau_rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """The rows under TAU_HEADS: tau of every column on every set."""
    rows: list[tuple[str, ...]] = []
    for name in sweep.shown_sets:
        for column in sweep.columns:
            cell = sweep.cell(column, name)
            if cell is not None:
                against = sweep.tau_against(column, name)
                rows.append((set_name(name), column.name, f"{cell.tau:.3f}", *_difference(sweep, column, against)))
    return rows


def speed_rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """The rows under SPEED_HEADS: every column's speed-up over plain decoding on every set."""
    rows: list[tuple[str, ...]] = []
    for name in sweep.shown_sets:
        for column in sweep.columns:
            cell = sweep.cell(column, name)
            if cell is not None:
                speedup, against = cell.speedup(), sweep.speedup_against(column, name)
                rows.append(
                    (
                        set_name(name),
                        column.name,
                        "-" if speedup is None else speedup_text(speedup),
                        *_difference(sweep, column, against),
                        f"{cell.same_or_near}/{cell.answers}",
                    )
                )
    return rows


def _difference(sweep: Sweep, column: ColumnResult, against: Ratio | None) -> tuple[str, str]:
    if column is sweep.reference:
        return _REFERENCE, ""
    if against is None:
        return "-", ""
    low, high = against.interval or (0.0, 0.0)
    interval = f" [{low - 1:+.1%}, {high - 1:+.1%}]" if against.interval else ""
    return f"{against.value - 1:+.1%}{interval}", against.verdict


def file_rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """The rows under FILE_HEADS: the types in every file, each file once; empty if adapters are compared."""
    rows: dict[object, tuple[str, ...]] = {}
    for column in sweep.columns:
        for side, about in column.about.items():
            if isinstance(about, Mapping):
                made = f"{about['how']} from {_shares(about['source'])}" if "source" in about else ""
                size = f"{about['bytes'] / 1e6:.1f} MB"
                rows[about["path"]] = (f"{side}={about['type']}", size, _shares(about["weights"]), made)
    return list(rows.values())


def _shares(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {share:.0%}" for kind, share in weights.items())


def set_name(source: str) -> str:
    """The name of a set in a table; a file has its name without folder and ending."""
    return source if source in BUILT_IN else Path(source).stem


def sentences(sweep: Sweep) -> list[str]:
    """Explains how to read the tables, and says what is missing from them."""
    tau, speed = sweep.modes[0], sweep.modes[-1]
    found = (
        [
            f"Tau is that of mode {tau}, and the speed-up is mode {speed} over plain decoding in the same column. Each "
            f"difference compares a column with {sweep.reference.name}, prompt by prompt; it is "
            '"real" if its 95 % interval does not contain 0.'
        ]
        if sweep.columns
        else []
    )
    found += [f"{column.name} was not measured: {column.skipped}." for column in sweep.columns if column.skipped]
    if not sweep.complete:
        found.append("The sweep is not complete.")
    return found


def markdown(sweep: Sweep, title: str) -> str:
    """The whole sweep as a Markdown page."""
    lines = [f"# {title}", ""]
    tables = ((TAU_HEADS, tau_rows(sweep)), (SPEED_HEADS, speed_rows(sweep)), (FILE_HEADS, file_rows(sweep)))
    for heads, rows in tables:
        if rows:
            lines += [_line(heads), _line(["---"] * len(heads)), *map(_line, rows), ""]
    return "\n".join([*lines, *sentences(sweep), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def write_picture(sweep: Sweep, path: Path, title: str) -> None:
    """Draws tau, its difference from the reference and the speed-up of every column, with one colour per set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 1.8 + 0.4 * len(sweep.columns)), layout="constrained")
    taus, differences, speeds = figure.subplots(1, 3, sharey=True)
    for number, name in enumerate(sweep.sets):
        style = {"color": _COLOURS[number % len(_COLOURS)], "label": set_name(name)}
        shift = 0.6 * ((number + 0.5) / len(sweep.sets) - 0.5)
        for place, column in enumerate(sweep.columns):
            cell = sweep.cell(column, name)
            if cell is not None:
                taus.plot(cell.tau, place + shift, "o", **style)
                against = sweep.tau_against(column, name)
                _point(differences, None if against is None else _percent(against), place + shift, style["color"])
                _point(speeds, cell.speedup(), place + shift, style["color"])
    taus.set_yticks(range(len(sweep.columns)), [column.name for column in sweep.columns])
    taus.invert_yaxis()
    for axes, label in (
        (taus, f"tau, mode {sweep.modes[0]}"),
        (differences, f"tau against {sweep.columns[0].name}, %"),
        (speeds, f"speed-up, mode {sweep.modes[-1]}"),
    ):
        axes.set_xlabel(label)
        axes.grid(axis="x", linewidth=0.3)
    differences.axvline(0, color="#9a9a9a", linewidth=1, linestyle="--")
    known = dict(zip(*reversed(taus.get_legend_handles_labels()), strict=True))
    if known:
        figure.legend(known.values(), known.keys(), loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _percent(found: Ratio) -> Ratio:
    """Returns the difference from 1 in percent, for `_point` only: the result's verdict has no meaning."""
    low, high = found.interval or (found.value, found.value)
    return Ratio(found.over, 100 * (found.value - 1), (100 * (low - 1), 100 * (high - 1)))


def _point(axes: Axes, found: Ratio | None, place: float, colour: str) -> None:
    if found is None:
        return
    low, high = found.interval or (found.value, found.value)
    reach = [[max(0.0, found.value - low)], [max(0.0, high - found.value)]]
    axes.errorbar(found.value, place, xerr=reach, fmt="o", color=colour, capsize=3, linewidth=1)


class SweepFolder:
    """The folder of a sweep.

    It gets sweep.json and sweep.md after each set of prompts, a log per column, set and run, and at the end or at an
    interruption the picture.
    """

    def __init__(self, path: Path, title: str, about: Mapping[str, object]) -> None:
        self.path = path
        self._title, self._about = title, about
        self._columns: dict[str, int] = {}
        if (path / "sweep.json").exists():
            raise RequestError(f"{path} already holds a sweep", "name another folder with --out")
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SourceError(f"cannot write to {path}: {error.strerror}", "name another folder with --out") from error

    def log(self, column: str, name: str, run: int, turn: Turn) -> None:
        """Appends one line per mode of an answer."""
        number = self._columns.setdefault(column, len(self._columns))
        parts = (f"{number + 1:02}", column, set_name(name), f"run{run + 1}")
        file = self.path / "logs" / f"{'-'.join(re.sub(r'[^A-Za-z0-9._=]+', '-', part) for part in parts)}.jsonl"
        with file.open("a", encoding="utf-8") as lines:
            for mode, answer in turn.answers.items():
                stats = answer.stats
                lines.write(
                    json.dumps(
                        {
                            "prompt": turn.prompt,
                            "question": turn.question,
                            "mode": mode,
                            "tokens": len(answer.token_ids),
                            "steps": stats.steps,
                            "committed": stats.committed,
                            "tau": round(stats.tau, 4),
                            "decode_ms": round(stats.decode_ms, 3),
                            "draft_lora": stats.draft_lora,
                            "same": turn.same(mode),
                            "text": answer.text,
                        }
                    )
                    + "\n"
                )

    def write(self, sweep: Sweep) -> None:
        self._replace("sweep.json", json.dumps({**self._about, **sweep.to_json()}, indent=1) + "\n")
        self._replace("sweep.md", markdown(sweep, self._title))

    def draw(self, sweep: Sweep) -> None:
        write_picture(sweep, self.path / "sweep.png", self._title)

    def _replace(self, name: str, text: str) -> None:
        # A reader always finds a complete file, even if the sweep is interrupted while this one is written.
        (self.path / f"{name}.new").write_text(text, encoding="utf-8")
        os.replace(self.path / f"{name}.new", self.path / name)
