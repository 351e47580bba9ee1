"""Every program of examples/ as it stands, on the default pair, with one loaded model and one server for all."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from slipstream import LLM
from tests.checks_speculation import pair_with
from tests.e2e.serving import Server

pytestmark = pytest.mark.e2e
EXAMPLES = Path(__file__).parents[2] / "examples"
# What each program must print. Numbers of acceptance are patterns, because drafts follow the machine's kernels.
PRINTS = {
    "generate": [
        r"def \w+\(",
        r"the same text as plain decoding: True",
        r"target passes: \d+ instead of \d+, tau [2-9]",
    ],
    "stream": [
        r"def ",
        r"\[.+\]",
        r"[1-9]\d* of \d+ drafted tokens were accepted \(\d+%\)",
        r"tokens, tau \d\.\d\d, finish reason (stop|length)",
    ],
    "batch": [
        r"--- Name three colours\. \(plain, tau 1\.00, ",
        r"\(tree:16, tau [1-9]",
        r"\(auto, tau [1-9]",
        r"\(chain:4, tau [1-9]",
    ],
    "json_schema": [r".+ \(\d{4}\), a (novel|poem|play)\n", r"finish reason stop, \d+ drafted tokens accepted"],
    "acceptance": [r"place  verified  accepted\n", r"\n +1 +\d+ +[1-9]\d*% +#+\n", r"\n +7 +\d+ "],
    "openai_client": [r"(?i)page|table", r"\d+ tokens, mode tree:16, tau [1-9]"],
    "anthropic_client": [
        r"\d+ tokens, stop reason \w+\n",
        r"get_weather\(\{'city': '.*', 'unit': '(celsius|fahrenheit)'\}\)",
    ],
}
CLIENTS = {"openai_client", "anthropic_client"}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Runs a program as `python examples/NAME.py ARGUMENTS` would."""
    monkeypatch.setattr("sys.argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def check(name: str, printed: str) -> None:
    missing = [pattern for pattern in PRINTS[name] if not re.search(pattern, printed)]
    assert not missing, f"{name} printed no {missing}:\n{printed}"


def test_every_example_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTS)


@pytest.mark.parametrize("name", sorted(set(PRINTS) - CLIENTS))
def test_programs_that_load_a_model(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(target: str) -> LLM:
        assert target == "smollm2"
        return pair_with("smollm2-dspark")  # the default drafter of that target, loaded once for many tests

    monkeypatch.setattr("slipstream.LLM", loaded)
    run(name, monkeypatch)
    check(name, capsys.readouterr().out)


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_programs_that_ask_a_server(
    name: str, default_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, monkeypatch, default_server.url)
    check(name, capsys.readouterr().out)
