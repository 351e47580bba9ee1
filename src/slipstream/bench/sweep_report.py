"""Shows a sweep as tables and as Markdown, and keeps it in a folder that grows while it is measured."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.bench.comparison_report import ratio_text
from slipstream.bench.measure import Ratio, Turn
from slipstream.bench.pair_sweep import Sweep
from slipstream.bench.workloads import BUILT_IN
from slipstream.errors import RequestError, SourceError

Rows = list[tuple[str, ...]]
_TAU_HEADS = ("prompts", "column", "tau", "difference, 95 %", "verdict")
_SPEED_HEADS = ("prompts", "column", "speed-up, 95 %", "difference, 95 %", "verdict", "same or near-tie")
_FILE_HEADS = ("file", "size", "weights", "made")
_REFERENCE = "reference"


def tables(sweep: Sweep, title: str) -> list[tuple[str, Sequence[str], Rows]]:
    """The title, heads and rows of each table that has rows: tau, speed-ups over plain decoding, and types of files."""
    taus, speeds = Rows(), Rows()
    for name, column, cell in sweep.cells():
        head, is_reference = (set_name(name), column.name), column is sweep.columns[0]
        taus.append((*head, f"{cell.tau:.3f}", *_difference(cell.tau_against, is_reference)))
        difference = _difference(cell.speedup_against, is_reference)
        speeds.append((*head, ratio_text(cell.speedup), *difference, f"{cell.same_or_near}/{cell.answers}"))
    found = ((title, _TAU_HEADS, taus), ("Speed", _SPEED_HEADS, speeds), ("Files", _FILE_HEADS, _file_rows(sweep)))
    return [table for table in found if table[-1]]


def _difference(against: Ratio | None, is_reference: bool) -> tuple[str, str]:
    if against is None:
        return _REFERENCE if is_reference else "-", ""
    low, high = against.interval or (0.0, 0.0)
    interval = f" [{low - 1:+.1%}, {high - 1:+.1%}]" if against.interval else ""
    return f"{against.value - 1:+.1%}{interval}", against.verdict


def _file_rows(sweep: Sweep) -> Rows:
    """The types in every file, each file once; empty if adapters are compared."""
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
            f"difference compares a column with {sweep.columns[0].name}, prompt by prompt; it is "
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
    for _, heads, rows in tables(sweep, title):
        lines += [_line(heads), _line(["---"] * len(heads)), *map(_line, rows), ""]
    return "\n".join([*lines, *sentences(sweep), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


class SweepFolder:
    """The folder of a sweep.

    It gets sweep.json and sweep.md after each set of prompts, a log per column, set and run, and at the end or at an
    interruption the picture.
    """

    def __init__(self, path: Path, title: str, about: Mapping[str, object]) -> None:
        self.path = path
        self._title, self._about = title, about
        self._columns: dict[str, int] = {}
        self._written: Sweep | None = None
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
                line = {
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
                lines.write(json.dumps(line) + "\n")

    def write(self, sweep: Sweep) -> None:
        self._written = sweep
        table = json.dumps({**self._about, **sweep.to_json()}, indent=1) + "\n"
        for name, text in (("sweep.json", table), ("sweep.md", markdown(sweep, self._title))):
            # A reader always finds a complete file, even if the sweep is interrupted while this one is written.
            (self.path / f"{name}.new").write_text(text, encoding="utf-8")
            os.replace(self.path / f"{name}.new", self.path / name)

    def draw(self) -> None:
        """Draws the sweep as it was last written, if it was."""
        if self._written is None:
            return
        # The drawing is imported here, because it needs matplotlib.
        from slipstream.bench.plot import write_sweep_plot

        write_sweep_plot(self._written, self.path / "sweep.png", self._title)
