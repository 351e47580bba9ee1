"""Hostile clients: broken, huge and fuzzed bodies, wrong keys, other origins; and how a server ends."""

# mypy: disable-error-code="union-attr, unused-ignore"

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.e2e.serving import MODEL, Server, serve

pytestmark = pytest.mark.e2e

KEY = "correct-horse"
AUTH = {"Authorization": f"Bearer {KEY}"}
MAX_BODY = 3 << 20
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # A short context keeps the answers to hostile requests short.
    options = ("--max-context", "256", "--max-body", str(MAX_BODY), "--cors", "https://good.example", "--grace", "20")
    with serve(*options, environment={"SLIPSTREAM_API_KEY": KEY}) as running:
        yield running


def refusal(server: Server, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
    """The error of a request that must be refused, in the shape that clients of its API read."""
    status, sent, answer = server.ask(path, body, headers={**AUTH, **headers})
    assert 400 <= status < 500, f"{status}: {answer[:300]!r}"
    error = json.loads(answer)["error"]
    assert error["message"] and error["type"] and len(error["message"]) <= 600
    assert sent["content-type"] == "application/json"
    return status, error


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "missing"),
        (b"{", "not JSON"),
        (b"[1, 2]", "dictionary"),
        (b'"text"', "dictionary"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"model": "\xc3\x28"}', "UTF-8"),
        (b'{"model": NaN}', "NaN"),
        (b'{"model": Infinity}', "Infinity"),
        (b'{"model": 1e999}', "too large"),
        (b'{"model": "\\ud800"}', "surrogate"),
        (b'{"model": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 200 + b"]" * 200, "deeper"),
        (b'{"a":' * 30_000 + b"1" + b"}" * 30_000, "deeper"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "more than 65536"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_json_is_a_clear_400(server: Server, path: str, body: bytes, said: str) -> None:
    status, error = refusal(server, path, body)
    assert status == 400
    assert said in error["message"]


def test_a_prompt_of_a_megabyte_is_refused_for_its_length(server: Server) -> None:
    prompt = ("many words " * 100_000)[: 1 << 20]
    before = server.cpu_seconds()
    for path, body in (
        (CHAT, {**ASK, "messages": [{"role": "user", "content": prompt}]}),
        ("/v1/completions", {"model": MODEL, "prompt": prompt}),
        ("/v1/messages", {**MESSAGES, "messages": [{"role": "user", "content": prompt}]}),
    ):
        status, error = refusal(server, path, body)
        assert status == 400 and "the context holds 256" in error["message"], path
    assert server.cpu_seconds() - before < 30


def test_a_body_over_the_limit_is_refused_while_it_is_read(server: Server) -> None:
    status, error = refusal(server, CHAT, b" " * (MAX_BODY + 1))
    assert status == 413 and str(MAX_BODY) in error["message"]
    # The limit also holds if no length is announced, and the server stops reading there.
    raw = socket.create_connection(server.address, timeout=30)
    raw.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n".encode()
    )
    sent, answer = 0, b""
    try:
        while sent < 20 * MAX_BODY:
            raw.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            sent += 0x10000
    except OSError:
        pass
    with contextlib.suppress(OSError):
        answer = raw.recv(4096)
    raw.close()
    assert MAX_BODY < sent < 20 * MAX_BODY
    assert answer.startswith(b"HTTP/1.1 413") or not answer  # a reset may arrive before the answer


def test_bodies_must_say_that_they_are_json(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, _ = refusal(server, CHAT, json.dumps(ASK).encode(), **{"Content-Type": kind})
        assert status == 415


NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    -0.0,
    2**63,
    -(2**70),
    1e308,
    "",
    "x",
    "\x00",
    "\U0001f600",
    "9" * 400,
    [],
    [None],
    [[]],
    {},
    {"": None},
    [{"type": "text"}],
    {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
]


def test_fuzzed_bodies_never_break_the_server(server: Server) -> None:
    from slipstream.server.apis.openai_schemas import ChatRequest, CompletionRequest

    rng = random.Random(5)
    seen: dict[int, int] = {}

    def ask(path: str, body: dict[str, Any]) -> None:
        status, _, answer = server.ask(path, body, headers=AUTH)
        seen[status] = seen.get(status, 0) + 1
        assert status in (200, 400, 404, 429, 504), f"{path} {json.dumps(body)[:300]}: {status} {answer[:300]!r}"

    # Every field gets a few of the values.
    for path, schema, base in (
        (CHAT, ChatRequest, ASK),
        ("/v1/completions", CompletionRequest, {"model": MODEL, "prompt": "a", "max_tokens": 2}),
    ):
        for name in schema.model_fields:
            for value in rng.sample(NASTY, 4):
                ask(path, {**base, name: value})
    # Some bodies have several faults at once, deep inside.
    rich: dict[str, Any] = {
        **ASK,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": True},
        "speculative": {"mode": "chain"},
        "metadata": {"a": "b"},
        "logprobs": True,
        "top_logprobs": 2,
    }
    for _ in range(60):
        body = copy.deepcopy(rich)
        for _ in range(rng.randint(1, 3)):
            _spoil(body, rng)
        ask(CHAT, body)
    assert seen[200] > 5 and seen[400] > 80
    assert server.process.poll() is None
    assert json.loads(server.ask(CHAT, ASK, headers=AUTH)[2])["usage"]["completion_tokens"] == 2


def _spoil(value: Any, rng: random.Random) -> None:
    """Replaces, removes or adds a value at a random place."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
            value = value[key]
            continue
        if rng.random() < 0.2:
            del value[key]
        else:
            value[key] = rng.choice(NASTY)
        return


SMALL = settings(
    max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def test_what_the_documentation_allows_never_breaks_the_server(server: Server) -> None:
    schema = schemathesis.openapi.from_dict(json.loads(server.ask("/openapi.json")[2]))
    schema.config.base_url = server.url
    asked: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(SMALL)
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call(headers=AUTH, timeout=120)
            asked.setdefault(case.operation.path, set()).add(answer.status_code)
            # 503 (a model that cannot be loaded) and 504 (a time limit) are proper answers.
            assert answer.status_code < 500 or answer.status_code in (503, 504), f"{case.body!r}: {answer.text[:500]}"

        ask()
    assert 200 in asked["/v1/models"] and CHAT in asked and len(asked) > 12


def test_documentation_needs_no_other_host(server: Server) -> None:
    page = server.get("/docs")
    document = server.get("/openapi.json")
    assert "://" not in page
    for path in (
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/props",
        "/slots",
        "/metrics",
    ):
        assert path in document["paths"], path
    assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
    assert "422" not in json.dumps(document) and "400" in document["paths"][CHAT]["post"]["responses"]


def test_only_who_has_the_key_is_answered(server: Server) -> None:
    for path, body in (
        (CHAT, ASK),
        ("/v1/models", None),
        ("/slots", None),
        ("/metrics", None),
        ("/props", None),
        ("/models/reload", {}),
        ("/v1/messages", MESSAGES),
        ("/tokenize", {"content": "x"}),
    ):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Bearer {KEY}x"},
            {"Authorization": f"Basic {KEY}"},
            {"x-api-key": "wrong"},
            {"Authorization": "Bearer \xe9"},
        ):
            status, sent, answer = server.ask(path, body, headers=headers)
            assert status == 401, (path, headers)
            assert "error" in json.loads(answer) and sent["www-authenticate"] == "Bearer"
    for path in ("/health", "/", "/docs", "/openapi.json"):
        assert server.ask(path)[0] == 200, path
    assert server.ask("/v1/models", headers={"x-api-key": KEY})[0] == 200
    assert server.ask("/v1/models", headers=AUTH)[0] == 200
    assert KEY not in server.log.read_text()


def test_pages_of_other_origins_are_kept_out(server: Server) -> None:
    def preflight(origin: str, path: str = CHAT, method: str = "POST") -> tuple[int, dict[str, str], bytes]:
        return server.ask(
            path,
            method="OPTIONS",
            headers={
                "Origin": origin,
                "Access-Control-Request-Method": method,
                "Access-Control-Request-Headers": "authorization, content-type",
            },
        )

    status, headers, _ = preflight("https://good.example")
    assert status == 200 and headers["access-control-allow-origin"] == "https://good.example"
    assert preflight("https://good.example", "/v1/draft-lora/some", "DELETE")[0] == 200
    status, headers, _ = preflight("https://evil.example")
    assert status == 400 and "access-control-allow-origin" not in headers


def test_logs_have_numbers_and_no_text(server: Server) -> None:
    secret = "zebra-crossing-at-midnight"
    body = {**ASK, "messages": [{"role": "user", "content": secret}], "user": "somebody"}
    answer = json.loads(server.ask(CHAT, body, headers=AUTH)[2])["choices"][0]["message"]["content"]
    server.ask(CHAT, {**body, "model": secret}, headers=AUTH)
    server.ask(CHAT, {**body, "stop": {secret: 1}}, headers=AUTH)
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    mine = [line for line in lines if line.get("user") == "somebody"]
    assert mine and mine[0]["tokens"] == 2 and mine[0]["status"] == 200
    assert secret not in server.log.read_text() and answer not in [str(value) for value in mine[0].values()]


def test_a_slow_reader_stalls_nobody(server: Server) -> None:
    body = {**ASK, "max_tokens": 150, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}
    data = json.dumps(body).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(server.address)
    raw.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    # The client reads nothing; others are still answered, and its own answer comes to its end.
    for _ in range(3):
        assert server.ask(CHAT, ASK, headers=AUTH)[0] == 200
    deadline = time.monotonic() + 60
    while _slots(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _slots(server)
    raw.close()


def _slots(server: Server) -> list[Any]:
    models = json.loads(server.ask("/slots", headers=AUTH)[2])["models"]
    return [slot for model in models for slot in model["slots"]]


def test_draining_finishes_what_runs_and_refuses_the_rest(server: Server) -> None:
    """This must be the last test here, because it ends the server."""
    outcome: dict[str, bytes] = {}
    body = {**ASK, "max_tokens": 80, "ignore_eos": True, "stream": True}
    reader = threading.Thread(target=lambda: outcome.update(text=server.ask(CHAT, body, headers=AUTH)[2]))
    reader.start()
    deadline = time.monotonic() + 20
    while not _slots(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    statuses: list[tuple[int, str | None]] = []
    phases = set()
    try:
        while reader.is_alive():
            status, headers, _ = server.ask(CHAT, ASK, headers=AUTH)
            statuses.append((status, headers.get("retry-after")))
            phases.add(server.health()["phase"])
            time.sleep(0.02)
    except (OSError, http.client.HTTPException):
        pass  # the server has ended
    reader.join(30)
    assert (503, "5") in statuses and "draining" in phases
    assert outcome["text"].rstrip().endswith(b"data: [DONE]")
    assert server.process.wait(30) == 0
    # No request of this module has caused an unexpected error in the server.
    assert "Traceback" not in server.log.read_text()
