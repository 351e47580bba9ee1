"""`slipstream smoke` on the real server, in separate processes: everything is offered, and every check passes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.serving import MODEL, Server

pytestmark = pytest.mark.e2e
SMOKE = [sys.executable, "-m", "slipstream.cli.main", "smoke"]
DEAD = "http://127.0.0.1:9"  # the discard port, on which no server listens


@pytest.fixture(scope="module")
def server(default_server: Server) -> Server:
    return default_server


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SMOKE, *arguments], capture_output=True, text=True, timeout=200)


def test_the_real_server_passes_and_a_dead_one_is_skipped(server: Server) -> None:
    done = smoke(server.url, DEAD, "--json")
    result = json.loads(done.stdout)
    ours, dead = result["servers"]
    seen = {check["name"]: (check["verdict"], check["sentence"]) for check in ours["checks"]}
    assert {verdict for verdict, _ in seen.values()} == {"pass"}, seen
    assert (done.returncode, ours["model"], result["passed"]) == (0, MODEL, True)
    assert "dspark" in seen["drafter and mode listed"][1] and "mode auto" in seen["drafter and mode listed"][1]
    assert "prompt tokens cached" in seen["acceptance after a cache hit"][1]
    assert "slot was free after" in seen["disconnect"][1]
    assert DEAD in dead["unreachable"] and not dead["checks"]
    server.wait_idle()


def test_a_model_that_is_not_there_fails(server: Server) -> None:
    done = smoke(server.url, "--model", "no-such-model")
    assert done.returncode == 1
    assert f"no-such-model is not among {MODEL}" in " ".join(done.stdout.split())


def test_nobody_there_is_another_exit_code() -> None:
    done = smoke(DEAD)
    assert done.returncode == 2 and not done.stdout
    assert "no server answers" in done.stderr
