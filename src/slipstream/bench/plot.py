"""Draws a comparison (the speed-up and tau of every mode) or a sweep (both for every column) as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.bench.measure import PLAIN, Comparison, Ratio
from slipstream.bench.pair_sweep import ALL_SETS, Sweep
from slipstream.bench.sweep_report import set_name
from slipstream.errors import RequestError, SourceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_COLOURS = ("#2a78b5", "#d9822b", "#4f9d69", "#8a5aa8", "#9a9a9a")
_REFERENCE_COLOUR = "#9a9a9a"


def check_plot_path(name: str) -> Path:
    """Refuses a file that could not be written, before the measurement, which may take an hour."""
    path = Path(name).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(f"cannot plot to {name}", f"its name must end in {' or '.join(SUFFIXES)}")
    place = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise SourceError(f"cannot write {name}", "name a file in an existing folder in which you may write")
    return path


def write_plot(result: Comparison, path: Path, title: str) -> None:
    """Draws the speed-up of every mode with its interval, and tau beside it."""
    # matplotlib is imported here, because only plots need it. Figure without pyplot needs no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.6 + 0.45 * len(result.modes)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, (name, run) in enumerate(result.modes.items()):
        colour = _REFERENCE_COLOUR if name == PLAIN else _COLOURS[0]
        speedup, tau = result.speedup(name), run.stats.tau
        _bar(right, place, tau, colour, f"{tau:.2f}", tau)
        if speedup is not None:
            whiskers = speedup.interval and name != PLAIN
            end = _whiskers(left, place, speedup, color="black") if whiskers else speedup.value
            _bar(left, place, speedup.value, colour, f"{speedup.value:.2f}x", end)
    for axes, label in ((left, "speed-up over plain decoding, 95 % interval"), (right, "tokens per verify step (tau)")):
        axes.set_xlabel(label)
        axes.margins(x=0.15)
    left.axvline(1.0, color=_REFERENCE_COLOUR, linewidth=1, linestyle="--")
    _save(figure, left, list(result.modes), path, title)


def write_sweep_plot(sweep: Sweep, path: Path, title: str) -> None:
    """Draws tau, its difference from the reference and the speed-up of every column, with one colour per set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 1.8 + 0.4 * len(sweep.columns)), layout="constrained")
    taus, differences, speeds = figure.subplots(1, 3, sharey=True)
    for name, column, cell in sweep.cells():
        if name == ALL_SETS:
            continue
        number = sweep.sets.index(name)
        colour = _COLOURS[number % len(_COLOURS)]
        place = sweep.columns.index(column) + 0.6 * ((number + 0.5) / len(sweep.sets) - 0.5)
        taus.plot(cell.tau, place, "o", color=colour, label=set_name(name))
        for axes, found in ((differences, cell.tau_against and _percent(cell.tau_against)), (speeds, cell.speedup)):
            if found is not None:
                _whiskers(axes, place, found, fmt="o", color=colour)
    for axes, label in (
        (taus, f"tau, mode {sweep.modes[0]}"),
        (differences, f"tau against {sweep.columns[0].name}, %"),
        (speeds, f"speed-up, mode {sweep.modes[-1]}"),
    ):
        axes.set_xlabel(label)
        axes.grid(axis="x", linewidth=0.3)
    differences.axvline(0, color=_REFERENCE_COLOUR, linewidth=1, linestyle="--")
    known = dict(zip(*reversed(taus.get_legend_handles_labels()), strict=True))
    if known:
        figure.legend(known.values(), known.keys(), loc="outside right upper", fontsize=8)
    _save(figure, taus, [column.name for column in sweep.columns], path, title)


def _save(figure: Figure, left: Axes, names: Sequence[str], path: Path, title: str) -> None:
    """Writes a picture whose rows have these names, the first at the top."""
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SourceError(f"cannot write {path}: {error.strerror}") from error


def _bar(axes: Axes, place: int, value: float, colour: str, text: str, end: float) -> None:
    """Draws a horizontal bar, with a text beyond `end`."""
    axes.barh(place, value, color=colour)
    axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _whiskers(axes: Axes, place: float, found: Ratio, **style: str) -> float:
    """Draws a ratio's interval; returns its upper end."""
    low, high = found.interval or (found.value, found.value)
    # A ratio of sums can lie just outside its resampled interval, and matplotlib refuses negative lengths.
    reach = [[max(0.0, found.value - low)], [max(0.0, high - found.value)]]
    axes.errorbar(found.value, place, xerr=reach, capsize=3, linewidth=1, **style)  # type: ignore[arg-type]
    return max(found.value, high)


def _percent(found: Ratio) -> Ratio:
    """Returns the difference from 1 in percent, for `_whiskers` only: the result's verdict has no meaning."""
    low, high = found.interval or (found.value, found.value)
    return Ratio(found.over, 100 * (found.value - 1), (100 * (low - 1), 100 * (high - 1)))
