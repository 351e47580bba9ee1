"""The stored results: every row says where it was measured, and the generated pages show what the files hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import verify_pages, verify_results
from tests.verify_report import Origin, Report
from tests.verify_results import PAGES, RESULTS, Row, read_rows, write_rows
from tests.verify_tables import SECTIONS, TABLES, Line

STORED = sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("section", STORED)
def test_every_row_names_its_machine_and_commit(section: str) -> None:
    rows = read_rows(section)
    assert rows
    for row in rows:
        assert row["machine"] and re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?|unknown", row["commit"]), row
        assert row["promise"] and isinstance(row["seen"], str) and isinstance(row["ok"], bool)


def test_rows_that_ran_on_a_gpu_name_that_gpu() -> None:
    machines = {row["machine"] for section in STORED if section.startswith("gpu_") for row in read_rows(section)}
    assert machines and all(machine.startswith(("NVIDIA", "unknown")) for machine in machines)


def test_the_pages_are_generated_from_the_files() -> None:
    expected = verify_pages.pages()
    for path, text in expected.items():
        assert path.read_text() == text, f"run python -m tests.verify_pages; {path.name} is out of date"
    assert set(PAGES.iterdir()) == set(expected) - {verify_results.PAGE}, "a page without results"


@pytest.mark.parametrize("section", STORED)
def test_every_row_stands_behind_one_line_of_the_tables(section: str) -> None:
    lines = [line for table in TABLES for line in table.lines if line.section == section]
    for row in read_rows(section):
        found = [line.promise for line in lines if re.search(line.rows, row["promise"])]
        assert len(found) == 1 or row["promise"] == "the section runs to its end", (row["promise"], found)


def test_every_line_shows_numbers() -> None:
    for line in (line for table in TABLES for line in table.lines):
        rows = verify_pages.rows_of(line)
        if rows and all(row["ok"] for row in rows):  # a row that could not be measured has no numbers, and fails
            assert verify_pages.shown(line, rows) != "see the rows", line


def test_every_section_has_its_place_in_the_tables() -> None:
    from tests import verify

    assert set(SECTIONS) == {section.__name__ for section in verify.SECTIONS}


def test_a_row_keeps_the_machine_that_measured_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_results, "RESULTS", tmp_path)
    monkeypatch.setattr(verify_results, "here", lambda: Origin("a desk", "abc1234"))
    report = Report(tokens=1)
    report.add("measured here", "3 ms", True, ms=3)
    report.measured = Origin("NVIDIA H200", "eb223ea")
    report.add("measured there", "4 ms", False, ms=4)
    write_rows("steps", report.outcomes)
    here, there = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert (here["machine"], here["commit"], here["values"], "judged" in here) == (
        "a desk",
        "abc1234",
        {"ms": 3},
        False,
    )
    assert (there["machine"], there["commit"], there["judged"]) == ("NVIDIA H200", "eb223ea", "abc1234, a desk")


def test_the_origin_of_gpu_numbers_is_read_from_the_file_beside_them(tmp_path: Path) -> None:
    from tests.verify_gpu import read_origin

    path = tmp_path / "origin.txt"
    assert read_origin(path).machine.startswith("unknown")
    path.write_text("one NVIDIA H200 (torch 2.11, triton 3.6), the tree of commit eb223ea\n")
    assert read_origin(path) == Origin("NVIDIA H200 (torch 2.11, triton 3.6)", "eb223ea")
    path.write_text("two machines")
    assert read_origin(path) == Origin("two machines", "unknown")


def test_a_line_shows_sums_ranges_and_failures() -> None:
    rows: list[Row] = [
        {"ok": True, "values": {"same": 1500, "tau": 1.5}},
        {"ok": False, "values": {"same": 500, "tau": 2.25}},
    ]
    line = Line("texts", "none", "{same:sum} texts, tau {tau:.2f}, at most {tau:max.1f}; {good} of {rows}")
    assert verify_pages.shown(line, rows) == "2,000 texts, tau 1.50 to 2.25, at most 2.2; 1 of 2"
    assert verify_pages.verdict(rows) == "**1 of 2 fail**"
    assert verify_pages.table_row("a|b", "two\nlines") == r"| a\|b | two lines |"
    assert verify_pages.shown(line, [{"ok": False, "values": {}}]) == "see the rows"
