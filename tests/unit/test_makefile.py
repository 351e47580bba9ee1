"""The build files: pins that keep torch small, targets that exist, and a set-up that is not repeated."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if line and not line.startswith("#"))


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.split(r"[<>=~\[; ]", name)[0].lower().replace("_", "-") for name in wanted}
    assert names | {"dflash"} <= set(pins())
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins().values()), "a local version such as +cpu"


def test_nothing_is_installed_without_the_pins() -> None:
    makefile = (ROOT / "Makefile").read_text()
    installs = [line for line in makefile.splitlines() if re.search(r"pip.* install", line)]
    assert installs and all("-c constraints.txt" in line for line in installs)


@pytest.mark.parametrize("target", ["setup", "demo", "test", "lint", "verify", "clean"])
def test_targets_exist(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_setup_is_done_once(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    first = subprocess.run(["make", "-n", "setup"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert "-m venv .venv" in first.stdout and "pip install" in first.stdout
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    again = subprocess.run(["make", "-n", "setup"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert "install" not in again.stdout.replace(".installed", "")


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text() and "make test" in script.read_text()
