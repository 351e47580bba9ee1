"""`slipstream smoke`: checks running servers from the outside, without knowing anything about them.

`slipstream smoke http://localhost:8080`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from slipstream.cli.options import JsonOutput
from slipstream.cli.ui import Ui
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.tools.server_checks import ServerReport

FAILED = 1  # exit code when a check failed
NOTHING_REACHABLE = 2  # exit code when no server answered
_MARKS = {"pass": Text("pass", "green"), "fail": Text("FAIL", "bold red"), "skip": Text("skip", "dim")}


def command(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Servers, such as http://localhost:8080.")],
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SLIPSTREAM_API_KEY", help="The key that the servers require.", show_default="none"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model to ask for.", show_default="the first ready one")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds one request may take.")] = 60.0,
    json_output: JsonOutput = False,
) -> None:
    """Check running servers from the outside: chat, streams, drafts, caches, disconnects.

    Any server with OpenAI's API will do; checks of what it does not offer are skipped. Exit code 0: every check of
    every server that answers passed; 1: a check failed; 2: no server answers.
    """
    if not timeout > 0:
        raise RequestError(f"--timeout is {timeout:g}", "it must be above 0")
    # The HTTP client is imported here, because --help must not wait for it.
    from slipstream.tools.server_checks import CHECKS, smoke

    ui = Ui(json_output)
    with ui.counting("checks", len(urls) * len(CHECKS)) as done:
        reports = smoke(urls, api_key, model, timeout, done)
    failed = any(report.failed for report in reports)
    if json_output:
        ui.print_json({"passed": not failed, "servers": [report.to_json() for report in reports]})
    else:
        draw(ui, reports)
    if all(report.unreachable for report in reports):
        raise typer.Exit(NOTHING_REACHABLE)
    if failed:
        raise typer.Exit(FAILED)


def draw(ui: Ui, reports: Sequence[ServerReport]) -> None:
    """Draws a table of the checks.

    With one server, each check has a sentence. With several servers, each server is a column of results, and a line
    below the table describes each check that did not pass.
    """
    reached = [report for report in reports if not report.unreachable]
    titles = [f"{report.url}, {report.model}" if report.model else report.url for report in reached]
    if len(reached) == 1:
        rows = [(check.name, _MARKS[check.verdict], check.sentence) for check in reached[0].checks]
        ui.table(titles[0], ("check", "", "seen"), rows, numbers=False)
    elif reached:
        by_check = zip(*[report.checks for report in reached], strict=True)
        marks = [(row[0].name, *[_MARKS[check.verdict] for check in row]) for row in by_check]
        ui.table("Checks", ("check", *titles), marks, numbers=False)
        for report in reached:
            for check in report.checks:
                if check.verdict != "pass":
                    ui.line(f"{report.url}: {check.name}: {check.verdict}, {check.sentence}")
    for report in reports:
        if report.unreachable:
            ui.warn(f"Skipped: {report.unreachable}.")
    if reached:
        counts = Counter(check.verdict for report in reached for check in report.checks)
        ui.line(f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped")
