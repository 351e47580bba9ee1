"""Draws a comparison: the speed-up of every mode with its interval, and tau beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.bench.measure import PLAIN, Comparison
from slipstream.errors import RequestError, SourceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_COLOUR, _REFERENCE_COLOUR = "#2a78b5", "#9a9a9a"


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
    # matplotlib is imported here, because only plots need it. Figure without pyplot needs no window system.
    from matplotlib.figure import Figure

    names = list(result.modes)
    figure = Figure(figsize=(9.0, 1.6 + 0.45 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _speedups(left, result, names)
    _taus(right, result, names)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SourceError(f"cannot write {path}: {error.strerror}") from error


def _speedups(axes: Axes, result: Comparison, names: list[str]) -> None:
    for place, name in enumerate(names):
        speedup = result.speedup(name)
        if speedup is None:
            continue
        axes.barh(place, speedup.value, color=_REFERENCE_COLOUR if name == PLAIN else _COLOUR)
        end = speedup.value
        if speedup.interval and name != PLAIN:
            low, high = speedup.interval
            # A ratio of sums can lie just outside its resampled interval, and matplotlib refuses negative lengths.
            below, above = max(0.0, speedup.value - low), max(0.0, high - speedup.value)
            axes.errorbar(speedup.value, place, xerr=[[below], [above]], color="black", capsize=3, linewidth=1)
            end = max(end, high)
        axes.annotate(
            f"{speedup.value:.2f}x", (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.axvline(1.0, color=_REFERENCE_COLOUR, linewidth=1, linestyle="--")
    axes.set_xlabel("speed-up over plain decoding, 95 % interval")
    axes.margins(x=0.15)


def _taus(axes: Axes, result: Comparison, names: list[str]) -> None:
    taus = [result.modes[name].stats.tau for name in names]
    axes.barh(range(len(names)), taus, color=[_REFERENCE_COLOUR if name == PLAIN else _COLOUR for name in names])
    for place, tau in enumerate(taus):
        axes.annotate(f"{tau:.2f}", (tau, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlabel("tokens per verify step (tau)")
    axes.margins(x=0.15)
