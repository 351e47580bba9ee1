"""How a server begins and ends: it listens while it loads, reports what cannot be loaded, and leaves nothing after."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.serving import MODEL, serve

pytestmark = pytest.mark.e2e

ENDLESS = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4000,
    "ignore_eos": True,
    "stream": True,
}


def test_what_a_server_leaves_behind_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    """The first server is told twice to end while it loads, and ends at once; the second's grace time cuts a stream."""
    socket = tmp_path / "slipstream.sock"
    options = ("--stream-socket", str(socket), "--record", str(tmp_path / "records"), "--grace", "0.5")
    with serve(*options, ready=False) as first:
        assert first.ask("/health")[0] == 503 and first.health()["phase"] == "loading"
        first.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while first.health()["phase"] != "draining" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert first.stop(signal.SIGTERM) == 128 + signal.SIGTERM, "it ended in order and did not break off"
    assert socket.exists()
    with serve(*options) as second:
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(second.ask("/v1/chat/completions", ENDLESS)[2]))
        reader.start()
        while not second.busy():
            time.sleep(0.02)
        assert second.stop(signal.SIGTERM) == 0
        reader.join(20)
        events = [line for line in got[0].decode().splitlines() if line.startswith("data: ")]
        assert "ended this request" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        assert len(events) > 1
    assert not socket.exists()
    assert [line["event"] for line in second.lines] == ["listening", "ready"]


def test_a_model_that_is_not_there_ends_the_server_with_the_reason() -> None:
    command = [sys.executable, "-m", "slipstream.cli.main", "serve", "./no-such-model.gguf", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("slipstream: ") and "no-such-model" in last
    assert "Traceback" not in done.stderr
