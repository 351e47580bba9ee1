"""Generates docs/results.md and docs/results/SECTION.md from results/SECTION.json.

python -m tests.verify_pages     writes all pages anew, for example after results/ was edited or merged
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.verify_results import PAGE, PAGES, Row, read_rows
from tests.verify_tables import SECTIONS, TABLES, Line, Table

INTRODUCTION = """\
# Results

`make verify` checks every promise at full size (104 prompts, answers of up to 256 tokens) and stores what it saw in
`results/SECTION.json`; `python -m tests.verify --only SECTION` does the same for one section. This page is generated
from these files. Every row keeps the machine and the commit that measured it, and `-dirty` marks a commit with changes
on top. Absolute speeds belong to their machine. Ratios come from interleaved runs, so they mean more elsewhere.
"""


class Column(list[float]):
    """One value of several rows; the format says what is shown of it, as tests/verify_tables.py explains."""

    def __format__(self, spec: str) -> str:
        if spec == "sum":
            return f"{sum(self):,}"
        if spec.startswith("max"):
            return format(max(self), spec.removeprefix("max"))
        low, high = format(min(self), spec), format(max(self), spec)
        return low if low == high else f"{low} to {high}"


def rows_of(line: Line) -> list[Row]:
    return [row for row in read_rows(line.section) if re.search(line.rows, row["promise"])]


def shown(line: Line, rows: list[Row]) -> str:
    """What a line shows of its rows; a section that broke off has no values to show."""
    columns: defaultdict[str, Column] = defaultdict(Column)
    for row in rows:
        for name, value in row["values"].items():
            columns[name].append(value)
    try:
        return line.shows.format(rows=len(rows), good=sum(row["ok"] for row in rows), **columns)
    except KeyError:
        return "see the rows"


def verdict(rows: list[Row]) -> str:
    failed = sum(not row["ok"] for row in rows)
    return f"**{failed} of {len(rows)} fail**" if failed else "ok"


def origins(rows: list[Row]) -> str:
    return "; ".join(dict.fromkeys(f"{row['commit']}, {row['machine']}" for row in rows))


def link(section: str) -> str:
    return f"[{section}](results/{section}.md)"


def table_row(*cells: str) -> str:
    escaped = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def table_lines(table: Table) -> list[str]:
    lines = [
        f"## {table.title}",
        "",
        "| promise | measured | | rows | commit and machine |",
        "| --- | --- | --- | --- | --- |",
    ]
    for line in table.lines:
        if rows := rows_of(line):
            cells = line.promise, shown(line, rows), verdict(rows), link(line.section), origins(rows)
            lines.append(table_row(*cells))
    return [*lines, ""]


def failures() -> list[str]:
    failed = [(section, row) for section in SECTIONS for row in read_rows(section) if not row["ok"]]
    lines = ["## What fails", ""]
    if not failed:
        return [*lines, "No row fails.", ""]
    lines += ["| promise | measured | rows | commit and machine |", "| --- | --- | --- | --- |"]
    for section, row in failed:
        promise, seen = row["promise"].split(": `")[0], row["seen"].split(";")[0]  # without commands and details
        lines.append(table_row(promise, seen, link(section), origins([row])))
    return [*lines, ""]


def not_run() -> list[str]:
    missing = [line for table in TABLES for line in table.lines if not read_rows(line.section)]
    lines = [f"- {line.promise}: `python -m tests.verify --only {line.section}`" for line in missing]
    return ["## What was not run", "", *(lines or ["All sections were run."]), ""]


def page() -> str:
    lines = [*failures(), *not_run()]
    for table in TABLES:
        lines += table_lines(table)
    return "\n".join([INTRODUCTION, *lines])


def section_page(section: str) -> str:
    """All rows of one section."""
    lines = [
        f"# Results: {section}",
        "",
        f"All rows of `python -m tests.verify --only {section}`, generated from `results/{section}.json`;",
        "the [overview](../results.md) has the short form.",
        "",
        "| promise | seen | | commit and machine |",
        "| --- | --- | --- | --- |",
    ]
    for row in read_rows(section):
        judged = f" (judged at {row['judged']})" if "judged" in row else ""
        holds = "ok" if row["ok"] else "**fails**"
        lines.append(table_row(row["promise"], row["seen"], holds, origins([row]) + judged))
    return "\n".join([*lines, ""])


def pages() -> dict[Path, str]:
    """The text of every generated page."""
    run = [section for section in SECTIONS if read_rows(section)]
    return {PAGE: page(), **{PAGES / f"{section}.md": section_page(section) for section in run}}


def write_pages() -> None:
    PAGES.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    write_pages()
