"""Rules for every test run: a skipped or expected-to-fail test fails the run unless its reason is listed here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

# For each allowed reason of a skip: why it is allowed.
ALLOWED_SKIPS = {
    "no GPU": "tests of CUDA kernels need a CUDA device",
    "no compiled kernels": "without a compiler torch's kernels are used; with one, a test requires compiled ones",
    "no AVX-512": "tests of its kernels need a processor that has it",
    "chromium is not installed": "the web page is tested in a real browser if there is one",
    "xllamacpp is not installed": "it is optional, because only the comparison with llama.cpp needs it",
}

# Set before torch is imported. The tests' models are tiny, so more threads would only compete with each other.
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, len(os.sched_getaffinity(0)))))

# Runs only every n-th case of each test, for slow surroundings in which a sample must suffice.
SHARE_VARIABLE = "SLIPSTREAM_TEST_SHARE"
# Runs all cases of tests that are marked `sampled(n)`, of which a run otherwise has every n-th: `make verify` sets it.
WHOLE_VARIABLE = "SLIPSTREAM_TEST_WHOLE"

_NOT_ALLOWED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NOT_ALLOWED] = []
    config.pluginmanager.register(_SkipWatch(config.stash[_NOT_ALLOWED]), "skip-watch")


class _SkipWatch:
    """Collects every outcome that hides a test: skips while running or collecting, xfail and xpass."""

    def __init__(self, found: list[str]) -> None:
        self.found = found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "wasxfail"):
            self.found.append(f"{report.nodeid}: marked xfail ({report.wasxfail or 'no reason'})")
        else:
            self._check(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._check(report)

    def _check(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped:
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason not in ALLOWED_SKIPS:
            self.found.append(f"{report.nodeid}: skipped ({reason})")


def _share(item: pytest.Item) -> int:
    marker = None if os.environ.get(WHOLE_VARIABLE) else item.get_closest_marker("sampled")
    own = int(marker.args[0]) if marker is not None else 1
    return max(int(os.environ.get(SHARE_VARIABLE, "1")), own) if own else 0


def _sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """The first and every n-th case of each test (none if n is 0), counted for each library of kernels by itself."""
    cases: Counter[tuple[str, int]] = Counter()
    kept = []
    for item in items:
        chosen = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        test = item.nodeid.partition("[")[0], id(chosen.get("library"))
        share = _share(item)
        if share and cases[test] % share == 0:
            kept.append(item)
        cases[test] += 1
    return kept


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = _sample(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    if session.config.stash[_NOT_ALLOWED] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if found := config.stash[_NOT_ALLOWED]:
        terminalreporter.section("tests that did not run and may not be left out", red=True)
        for line in found:
            terminalreporter.write_line(line)
