"""`slipstream smoke` against a small server that misbehaves in one way at a time: each fault must be seen and named."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import typer

from slipstream.cli.smoke import command
from slipstream.errors import RequestError
from slipstream.tools.server_checks import CHECKS, ServerReport, smoke
from slipstream.tools.smoke_http import Broken, Client, Run

WORDS = ["one,", "two,", "three,", "four,", "five,", "six,", "seven,", "eight,", "nine,", "ten"]


@dataclass
class Behaviour:
    """What the server does; the defaults are a good server's."""

    timings: bool = True
    drafts: bool = True
    lists_draft: bool = True
    accepts: Callable[[int], int] = lambda call: 8  # accepted tokens of the n-th generation
    cached_accepts: int = 8
    stream_text: str = ""  # appended when streaming
    done: bool = True
    usage: bool = True
    reasoning: bool = False
    slots: bool = True
    frees_slots: bool = True
    completions: bool = True
    chat: bool = True
    lists: bool = True
    uses: bool = True
    plain_text: str = ""  # appended when plain decoding is asked for
    knows_mode: bool = True
    key: str = ""
    loading_for: int = 0  # health requests answered with 503
    fails: bool = False
    calls: int = 0
    last_used: int = 0
    seen: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, message: str) -> None:
        self.reply({"error": {"message": message}}, status)

    def do_GET(self) -> None:
        be = self.behaviour
        if self.path == "/health":
            be.loading_for -= 1
            return self.reply({"phase": "ready"}) if be.loading_for < 0 else self.refuse(503, "loading")
        if be.key and self.headers.get("Authorization") != f"Bearer {be.key}":
            return self.refuse(401, "no key")
        if self.path == "/slots" and be.slots:
            return self.reply([{"request_id": name} for name in be.stuck])
        if self.path == "/v1/models" and be.lists:
            entry = {"id": "m", "state": "ready", "draft": "d" if be.lists_draft else None, "mode": "auto"}
            return self.reply({"data": [entry | ({"last_used_ms": be.last_used} if be.timings else {})]})
        return self.refuse(404, "no such page")

    def do_POST(self) -> None:
        be = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not (be.completions if self.path == "/v1/completions" else be.chat):
            return self.refuse(404, "no such page")
        if be.fails:
            return self.refuse(500, "the engine is dead")
        plain = body.get("speculative") == {"mode": "plain"}
        if plain and not be.knows_mode:
            return self.refuse(400, "speculative is unknown")
        if body["max_tokens"] > 100:
            return self.endless()
        self.answer(body, plain)
        return None

    def answer(self, body: dict[str, Any], plain: bool) -> None:
        be = self.behaviour
        be.calls += 1
        be.last_used += be.uses
        prompt = json.dumps(body.get("messages", body.get("prompt")))
        cached = len(prompt) // 5 if prompt in be.seen else 0
        be.seen.append(prompt)
        accepted = min(be.accepts(be.calls), be.cached_accepts if cached else 99)
        timings = {"predicted_n": 12, "cached_n": cached, "draft_n": 20, "draft_n_accepted": accepted}
        if plain or not be.drafts:
            timings |= {"draft_n": 0, "draft_n_accepted": 0}
        extra = {"timings": timings} if be.timings else {}
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 12}
        pieces = [f"{word} " for word in WORDS] + ([be.plain_text] if plain and be.plain_text else [])
        if body.get("stream"):
            pieces += [be.stream_text] if be.stream_text else []
            self.stream(pieces, extra | ({"usage": usage} if be.usage else {}))
        elif self.path == "/v1/completions":
            self.reply({"choices": [{"text": "".join(pieces), "finish_reason": "stop"}], "usage": usage, **extra})
        else:
            message = {("reasoning_content" if be.reasoning else "content"): "".join(pieces)}
            self.reply({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage, **extra})

    def stream(self, pieces: list[str], last: dict[str, Any]) -> None:
        be = self.behaviour
        self.begin_stream()
        for piece in pieces:
            delta = {("reasoning_content" if be.reasoning else "content"): piece}
            self.event({"choices": [{"delta": delta, "finish_reason": None}]})
        self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self.event({"choices": [], **last})
        self.wfile.write(b": a comment\n\n" + (b"data: [DONE]\n\n" if be.done else b""))

    def begin_stream(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def event(self, body: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def endless(self) -> None:
        be = self.behaviour
        be.stuck.append("r1")
        self.begin_stream()
        try:
            while True:
                self.event({"choices": [{"delta": {"content": "river "}}]})
                time.sleep(0.005)
        except OSError:
            if be.frees_slots:
                be.stuck.remove("r1")


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    handler = type("Handler", (Handler,), {"behaviour": behaviour})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def look(behaviour: Behaviour, **options: Any) -> ServerReport:
    with serving(behaviour) as url:
        return smoke([url], **{"timeout_s": 10.0, **options})[0]


def verdicts(report: ServerReport) -> dict[str, str]:
    return {check.name: check.verdict for check in report.checks}


def failures(report: ServerReport) -> dict[str, str]:
    return {check.name: check.sentence for check in report.checks if check.verdict == "fail"}


def test_a_good_server_passes_everything() -> None:
    report = look(Behaviour())
    assert report.unreachable is None and report.model == "m"
    assert verdicts(report) == {name: "pass" for name, _ in CHECKS}, failures(report)


FAULTS: list[tuple[Behaviour, str, str]] = [
    (Behaviour(accepts=lambda call: 0), "acceptance in every answer", "0 accepted of 20 drafted"),
    (Behaviour(accepts=lambda call: 0 if call == 7 else 8), "acceptance in every answer", "0 accepted of 20 drafted"),
    (Behaviour(drafts=False), "drafter engaged", "nothing was drafted in"),
    (Behaviour(stream_text="and"), "streaming equals not streaming", "content differs"),
    (Behaviour(done=False), "streaming equals not streaming", "[DONE]"),
    (Behaviour(usage=False), "long prompt streams", "usage"),
    (Behaviour(cached_accepts=1), "acceptance after a cache hit", "8% with"),
    (Behaviour(accepts=lambda call: max(1, 17 - call)), "five identical prompts", "acceptance falls"),
    (Behaviour(uses=False), "last_used_ms advances", "0 before a request and 0 after"),
    (Behaviour(frees_slots=False), "disconnect", "still taken"),
    (Behaviour(plain_text="eleven"), "same text without speculation", "'eleven'"),
    (Behaviour(fails=True), "chat", "HTTP 500: the engine is dead"),
    (Behaviour(key="secret"), "models listed", "HTTP 401"),
    (Behaviour(lists=False), "models listed", "HTTP 404"),
    (Behaviour(chat=False), "chat", "HTTP 404"),
]


@pytest.mark.parametrize(("behaviour", "check", "said"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_fault_is_seen(behaviour: Behaviour, check: str, said: str) -> None:
    assert said in failures(look(behaviour))[check]


def test_what_is_not_offered_is_skipped() -> None:
    report = look(Behaviour(timings=False, slots=False, completions=False, knows_mode=False))
    seen = verdicts(report)
    assert not failures(report)
    assert [name for name, verdict in seen.items() if verdict == "skip"] == [
        "completions",
        "same text without speculation",
        "acceptance after a cache hit",
        "last_used_ms advances",
        "drafter engaged",
        "acceptance in every answer",
    ]
    assert "no slot of it" in next(check.sentence for check in report.checks if check.name == "disconnect")


def test_a_model_without_a_drafter_is_not_blamed() -> None:
    report = look(Behaviour(drafts=False, lists_draft=False))
    assert not failures(report)
    assert verdicts(report)["drafter engaged"] == "skip"


def test_reasoning_counts_as_output() -> None:
    report = look(Behaviour(reasoning=True))
    assert not failures(report)
    assert "reasoning" in next(check.sentence for check in report.checks if check.name == "chat")


def test_a_server_that_is_loading_is_waited_for() -> None:
    behaviour = Behaviour(loading_for=2)
    assert not failures(look(behaviour))
    assert behaviour.loading_for < 0


def test_the_key_is_sent() -> None:
    assert not failures(look(Behaviour(key="secret"), api_key="secret"))


def test_an_unknown_model_fails_and_names_the_known_ones() -> None:
    assert failures(look(Behaviour(), model="other"))["models listed"] == "other is not among m"


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_server_that_accepts_and_says_nothing_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        report = smoke([f"127.0.0.1:{silent.getsockname()[1]}"], timeout_s=0.2)[0]
    assert "sent nothing" in str(report.unreachable) and not report.checks


def run(capsys: pytest.CaptureFixture[str], *urls: str, json_output: bool = False) -> tuple[int, str, str]:
    code = 0
    try:
        command(list(urls), api_key=None, model=None, timeout=10.0, json_output=json_output)
    except typer.Exit as exit_:
        code = exit_.exit_code
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_the_command_says_what_it_saw_and_exits_accordingly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    dead = closed_port()
    with serving(Behaviour()) as good, serving(Behaviour(stream_text="and")) as bad:
        code, out, err = run(capsys, good, dead)
        assert code == 0 and "13 passed, 0 failed" in out and f"no server answers at {dead}" in " ".join(err.split())
        code, out, _ = run(capsys, good, bad)
        assert code == 1 and good in out and f"{bad}: streaming equals not streaming: fail, content differs" in out
        code, out, _ = run(capsys, bad, dead, json_output=True)
        result = json.loads(out)
        assert code == 1 and result["passed"] is False
        assert [bool(server["unreachable"]) for server in result["servers"]] == [False, True]
        assert {check["verdict"] for check in result["servers"][0]["checks"]} == {"pass", "fail"}
    code, out, err = run(capsys, dead)
    assert code == 2 and "no server answers" in err and not out


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="not the address of a server"):
        smoke([url])


@pytest.mark.parametrize(
    "body",
    [
        [],
        "text",
        {},
        {"choices": {}},
        {"choices": ["text"]},
        {"choices": [{"message": "text"}]},
        {"choices": [{"delta": {"content": ["text"]}}]},
        {"choices": [{"text": 3}]},
        {"error": {"message": "dead"}},
    ],
)
def test_an_answer_of_another_shape_is_a_failure_and_no_crash(body: object) -> None:
    with pytest.raises(Broken):
        Run("odd").add(body)


def test_servers_are_checked_at_the_same_time() -> None:
    """Each server is silent until all of them have been asked; one after the other, the second never would be."""
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    asked: list[socket.socket] = []

    def hang_up_on_all() -> None:
        with contextlib.suppress(TimeoutError):
            asked.extend(server.accept()[0] for server in silent)
        for one in (*asked, *silent):
            one.close()

    for server in silent:
        server.settimeout(20)
    hanging_up = threading.Thread(target=hang_up_on_all)
    hanging_up.start()
    reports = smoke([f"127.0.0.1:{server.getsockname()[1]}" for server in silent], timeout_s=60.0)
    hanging_up.join()
    assert all(report.unreachable for report in reports) and len(asked) == 3


def test_an_address_may_end_in_v1() -> None:
    with serving(Behaviour()) as url:
        assert Client(f"{url}/v1/").ask("/v1/models")["data"][0]["id"] == "m"
