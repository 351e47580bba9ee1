"""The build files: pins that keep torch small, targets that exist, and a set-up that is not repeated."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
    ours = [line for line in installs if "$(TOOLS)" not in line]  # the audit's tools have pins of their own
    assert ours and all("-c constraints.txt" in line for line in ours)


def test_every_runtime_dependency_has_both_bounds_and_the_pins_lie_between() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, project["dependencies"]):
        assert {spec.operator for spec in wanted.specifier} == {">=", "<"}, wanted
        assert pins()[wanted.name.lower().replace("_", "-")] in wanted.specifier, wanted


def test_the_lock_has_the_pinned_versions_with_their_hashes() -> None:
    entries = re.split(r"\n(?=\w)", re.sub(r"^#.*\n", "", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE))
    locked = {}
    for entry in entries:
        name, version = re.match(r"([\w.-]+)==([\w.]+)", entry).groups()  # type: ignore[union-attr]
        locked[name.lower().replace("_", "-")] = version
        assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}(?= |\n|$)", entry)) >= 1, entry
    # torch's build depends on the machine; llama.cpp's package is only compared with
    left_out = {"torch", "xllamacpp"}
    assert locked == {name: version for name, version in pins().items() if name not in left_out}, "run make lock"


@pytest.mark.parametrize("target", ["setup", "demo", "check", "test", "lint", "verify", "audit", "lock", "clean"])
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
    said = script.read_text()
    assert "set -euo pipefail" in said and "make test" in said
    assert "make setup LOCKED=1" in said and "make audit" in said
