"""Reads and writes results/SECTION.json: the rows that a section of the verification measured last.

A row keeps the machine and the commit that measured it. If a row was judged on another machine than the one that
measured it, `judged` names that other machine and its commit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.verify_report import Origin, Outcome

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
PAGES = ROOT / "docs" / "results"
Row = dict[str, Any]  # promise, seen, ok, values, machine, commit, and judged where it was judged elsewhere


def here() -> Origin:
    """This machine and the commit that is checked out.

    `-dirty` says that tracked files differ from the commit. The results and their pages do not count, because the
    verification itself rewrites them.
    """
    from slipstream.kernels.machine import cpu_name, usable_cores

    written = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE, PAGES)]
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    dirty = "-dirty" if _git("diff", "--name-only", "HEAD", "--", ".", *written) else ""
    return Origin(f"{cpu_name()}, {usable_cores()} cores", commit + dirty)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def write_rows(section: str, outcomes: Sequence[Outcome]) -> None:
    """Replaces the rows of one section."""
    rows, judge = [], here()
    for outcome in outcomes:
        origin = outcome.measured or judge
        row: Row = {"promise": outcome.promise, "seen": outcome.seen, "ok": outcome.ok, "values": outcome.values}
        row |= {"machine": origin.machine, "commit": origin.commit}
        if origin != judge:
            row["judged"] = f"{judge.commit}, {judge.machine}"
        rows.append(row)
    RESULTS.mkdir(exist_ok=True)
    path_of(section).write_text(json.dumps({"section": section, "rows": rows}, indent=1, ensure_ascii=False) + "\n")


def read_rows(section: str) -> list[Row]:
    """The rows of one section; none if it was never run."""
    path = path_of(section)
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.is_file() else []
    return rows


def path_of(section: str) -> Path:
    return RESULTS / f"{section}.json"
