"""The stream socket of a real server: multiplexed conversations, pauses under speculation, SIGTERM and SIGKILL."""

# mypy: disable-error-code="index, unused-ignore, var-annotated"

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import MODEL, Server, serve
from tests.tiny import write_pair

pytestmark = pytest.mark.e2e
QUESTIONS = {
    "colour": "Name three colours.",
    "sum": "What is 17 plus 25?",
    "story": "Tell me a short story about a fox.",
    "poem": "Write two lines about the sea.",
}


class Client:
    """One connection that is read frame by frame."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")

    def send(self, **operation: Any) -> None:
        self._socket.sendall(json.dumps(operation).encode() + b"\n")

    def ask(self, name: str, **settings: Any) -> None:
        self.send(
            op="start",
            id=name,
            model=MODEL,
            max_tokens=32,
            messages=[{"role": "user", "content": QUESTIONS[name.split(":")[0]]}],
            **settings,
        )

    def frame(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, "the server closed the connection"
        return dict(json.loads(line))

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("socket") / "stream.sock"


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    with serve("--stream-socket", str(path), "--max-sequences", "3") as running:
        yield running


@pytest.fixture
def client(server: Server, path: Path) -> Iterator[Client]:
    made = Client(path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(server: Server) -> dict[str, str]:
    """The answer to each question over HTTP, alone and without speculation."""
    answers = {}
    for name, question in QUESTIONS.items():
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 32,
            "speculative": {"mode": "plain"},
        }
        answers[name] = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return answers


def test_conversations_in_every_mode_share_a_connection(client: Client, plain: dict[str, str]) -> None:
    modes = [{"mode": "plain"}, {"mode": "chain"}, {"mode": "tree", "budget": 24}, {"mode": "auto"}]
    names = [f"{name}:{mode['mode']}" for name in QUESTIONS for mode in modes]
    for name, mode in zip(names, modes * len(QUESTIONS), strict=True):
        client.ask(name, speculative=mode)
    texts, ends = dict.fromkeys(names, ""), {}
    order = []
    while len(ends) < len(names):
        frame = client.frame()
        assert frame["type"] in ("token", "done"), frame
        if frame["type"] == "done":
            ends[frame["id"]] = frame
        else:
            texts[frame["id"]] += frame["text"]
            order.append(frame["id"])
    for name in names:
        assert texts[name] == plain[name.split(":")[0]], name
        timings = ends[name]["timings"]
        assert timings["mode"].split(":")[0] == name.split(":")[1]
        assert timings["draft_n"] > 0 or name.endswith((":plain", ":auto"))
        assert ends[name]["usage"]["completion_tokens"] == timings["predicted_n"] > 0
    turns = sum(a != b for a, b in zip(order, order[1:], strict=False))
    assert turns > len(names), "requests do not take turns on the connection"


def test_pauses_do_not_change_a_text_under_speculation(client: Client, server: Server, plain: dict[str, str]) -> None:
    client.ask("story", speculative={"mode": "chain"}, quantum=7)
    text, epochs, counts = "", [], []
    while (frame := client.frame())["type"] != "done":
        if frame["type"] == "token":
            text += frame["text"]
            continue
        assert frame["type"] == "continue", frame
        epochs.append(frame["epoch"])
        counts.append(frame["generated"])
        (slot,) = server.busy()
        assert slot["paused"] and slot["generated"] == counts[-1]
        client.send(op="continue", id="story", epoch=frame["epoch"])
    assert text == plain["story"]
    assert len(epochs) >= 2 and epochs == list(range(1, len(epochs) + 1))
    assert all(later - earlier >= 7 for earlier, later in zip(counts, counts[1:], strict=False))


def test_leaving_frees_the_slots(server: Server, path: Path) -> None:
    leaving = Client(path)
    for name in QUESTIONS:
        leaving.ask(name, ignore_eos=True, speculative={"mode": "plain"})
    assert leaving.frame()["type"] == "token"
    assert server.busy()
    leaving.close()
    server.wait_idle(10)


def test_what_a_server_leaves_behind_is_no_obstacle(tmp_path: Path) -> None:
    """A server killed in mid-stream leaves its socket file; the next server replaces it and ends properly."""
    target, _ = write_pair(tmp_path / "pair")
    path = tmp_path / "s.sock"
    options = ("--stream-socket", str(path), "--draft", "none")
    start: dict[str, Any] = {
        "op": "start",
        "id": "r",
        "model": "target",
        "prompt": "hello",
        "max_tokens": 500,
        "ignore_eos": True,
    }
    with serve(*options, model=str(target)) as first:
        start["model"] = first.get("/v1/models")["data"][0]["id"]
        client = Client(path)
        client.send(**start)
        assert client.frame()["type"] == "token"
        first.process.kill()
        first.process.wait()
        client.close()
    assert path.exists()
    with serve(*options, "--grace", "60", model=str(target)) as second:
        client = Client(path)
        client.send(**start, quantum=5)
        while client.frame()["type"] != "continue":
            pass
        second.process.send_signal(signal.SIGTERM)
        last = client.frame()
        assert (last["type"], last["finish_reason"]) == ("done", "cancelled"), (
            "a paused request, which no client can resume now, was not cancelled"
        )
        assert second.process.wait(30) == 0, "the server waited out its grace time"
        client.close()
    assert not path.exists()
