"""The files that guide contributors: the workflow, the hooks and CONTRIBUTING.md name only what exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
GUIDES = ("CONTRIBUTING.md", "CHANGELOG.md", "docs/style.md", "examples/README.md")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_FILE = re.compile(r"[\w./-]+\.(?:py|md|toml|txt|lock|yaml)\b")
_CLASS = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)(?:\.\w+)?(?:\(.*?\))?`")


def workflow(path: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(path.read_text()))


def commands(path: Path) -> list[str]:
    return [step["run"] for job in workflow(path)["jobs"].values() for step in job["steps"] if "run" in step]


@cache
def guide(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def exists(target: str) -> bool:
    return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, timeout=30).returncode == 0


def test_every_workflow_is_complete() -> None:
    assert WORKFLOWS
    for path in WORKFLOWS:
        said = workflow(path)
        assert said["name"] and said[True], "YAML reads the key `on` as true"
        assert said["permissions"] == {"contents": "read"}
        for job in said["jobs"].values():
            assert job["runs-on"] and job["timeout-minutes"]
            assert all(("uses" in step) != ("run" in step) for step in job["steps"])


def test_ci_runs_both_lanes_on_every_supported_python() -> None:
    jobs = workflow(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    pythons = jobs["check"]["strategy"]["matrix"]["python"]
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert pythons[0] == least and all(isinstance(version, str) for version in pythons)
    assert [step.get("run") for step in jobs["check"]["steps"]][-1] == "make check"
    assert [step.get("run") for step in jobs["test"]["steps"]][-1] == "make test"


def test_make_targets_of_workflows_exist() -> None:
    named = {name for path in WORKFLOWS for line in commands(path) for name in re.findall(r"\bmake (\w+)", line)}
    assert named >= {"setup", "check", "test"}
    assert not {name for name in named if not exists(name)}


def test_hooks_run_installed_tools_and_fetch_nothing() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    hooks = {hook["id"]: hook for hook in repos[0]["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "mypy"}
    for hook in hooks.values():
        assert hook["language"] == "system"
        program, *options = hook["entry"].split()
        assert program.startswith(".venv/bin/")
        tool = Path(sys.executable).parent / Path(program).name
        done = subprocess.run([tool, *options, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", GUIDES)
def test_guides_name_only_what_exists(name: str) -> None:
    text, folder = guide(name), (ROOT / name).parent
    assert not [link for link in _LINK.findall(text) if not (folder / link).exists()]
    known = {path.name for part in ("src", "tests", "scripts", "docs") for path in (ROOT / part).rglob("*.*")}
    files = _FILE.findall(" ".join(_CODE.findall(text)))
    assert not [file for file in files if not (ROOT / file).exists() and ("/" in file or file not in known)]
    assert not [target for target in re.findall(r"`make (\w+)", text) if not exists(target)]


def test_contributing_names_classes_that_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(_CLASS.findall(guide("CONTRIBUTING.md")))
    assert {"SamplingParams", "GpuKernels"} <= named
    assert not {each for each in named if not re.search(rf"^class {each}\b", sources, re.MULTILINE)}
