"""A test that does not run must not look like one that passed: the rule of tests/conftest.py, tried on small suites."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run_suite(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n    sampled(n): every n-th case\n")
    (folder / "test_sample.py").write_text("import pytest\n" + body)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        # the installed plugins take seconds to import and play no part in the rule
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def test_a(): pytest.skip('too lazy')", "too lazy"),
        ("@pytest.mark.skip(reason='broken today')\ndef test_a(): pass", "broken today"),
        ("pytest.importorskip('no_such_module_at_all')\ndef test_a(): pass\n", "no_such_module_at_all"),
        ("@pytest.mark.xfail(reason='known')\ndef test_a(): assert False", "marked xfail (known)"),
        ("@pytest.mark.xfail\ndef test_a(): pass", "marked xfail"),
    ],
)
def test_an_unlisted_skip_fails_the_run(tmp_path: Path, body: str, said: str) -> None:
    done = run_suite(tmp_path, body + "\ndef test_b(): pass\n")
    assert done.returncode in (1, 5), done.stdout
    assert said in done.stdout.split("may not be left out")[1]


@pytest.mark.parametrize(
    "body",
    ["def test_a(): pass", "def test_a(): pytest.skip('no GPU')", "@pytest.mark.gpu\ndef test_a(): assert False"],
)
def test_a_listed_skip_passes(tmp_path: Path, body: str) -> None:
    done = run_suite(tmp_path, body)
    assert done.returncode == 0, done.stdout
    assert "may not be left out" not in done.stdout


def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    assert run_suite(tmp_path, "def test_a(): assert False").returncode == 1


def test_a_sample_of_a_marked_test_runs_unless_all_of_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "@pytest.mark.sampled(2)\n@pytest.mark.parametrize('number', range(5))\ndef test_a(number): pass"
    for whole, count in (("", 3), ("1", 5)):
        monkeypatch.setenv("SLIPSTREAM_TEST_WHOLE", whole)
        assert f"{count} passed" in run_suite(tmp_path, body).stdout
