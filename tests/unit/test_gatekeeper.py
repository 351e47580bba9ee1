"""The checks of Host, Origin and framing; how long a body may take; and how many large ones may come at once."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.server.apis.openai_schemas import CompletionRequest
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.limits import Gatekeeper
from slipstream.server.operations.logs import Rarely
from slipstream.server.operations.server_state import KEY_VARIABLE, ServerSettings, read_api_keys
from tests.unit.test_server_http import Inner, body, exchange, state, status_of


def asked(headers: dict[str, str], method: str = "POST", **settings: Any) -> int:
    """The status of a request without a body."""
    gate = Gatekeeper(Inner(), state(**settings))

    async def with_method(scope: Any, receive: Any, send: Any) -> None:
        await gate({**scope, "method": method}, receive, send)

    return status_of(asyncio.run(exchange(with_method, body(b""), headers=headers)))


@pytest.mark.parametrize(
    ("host", "local", "public", "with_key"),
    [
        ("localhost:8080", 200, 200, 200),
        ("127.0.0.1", 200, 200, 200),
        ("[::1]:8080", 200, 200, 200),
        ("LOCALHOST:1", 200, 200, 200),
        ("evil.example:8080", 403, 403, 200),
        ("127.0.0.1.evil.example", 403, 403, 200),
        ("192.168.1.5:8080", 403, 200, 200),
        ("[fd00::5]:8080", 403, 200, 200),
        ("nas:8080", 403, 200, 200),
        ("models.example", 200, 200, 200),
        ("MODELS.example:443", 200, 200, 200),
        ("", 403, 403, 200),
        ("[bad", 403, 403, 200),
        ("localhost.", 403, 403, 200),
        ("a@localhost.evil.example", 403, 403, 200),
    ],
)
def test_only_names_of_this_server_are_answered(host: str, local: int, public: int, with_key: int) -> None:
    names = ("models.example",)
    key = {"authorization": "Bearer k"}
    for method in ("GET", "POST"):
        assert asked({"host": host}, method, allowed_hosts=names) == local
        assert asked({"host": host}, method, allowed_hosts=names, api_keys=("k",), host="127.0.0.1") in (local, 401)
        assert asked({"host": host, **key}, method, allowed_hosts=names, api_keys=("k",)) == local
        assert asked({"host": host}, method, allowed_hosts=names, host="0.0.0.0") == public
        assert asked({"host": host, **key}, method, host="0.0.0.0", api_keys=("k",)) == with_key
        assert asked({"host": host}, method, allowed_hosts=("*",)) == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_pages_of_other_sites_change_nothing_even_without_a_body(host: str, method: str) -> None:
    assert asked({}, method, host=host) == 200
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        assert asked(headers, method, host=host) == 403, headers
    assert asked({"sec-fetch-site": "same-origin"}, method, host=host) == 200
    assert asked({"origin": "http://localhost:8080", "sec-fetch-site": "same-origin"}, method, host=host) == 200
    assert asked({"sec-fetch-site": "cross-site"}, "GET", host=host) == 200  # a link is followed


def test_a_length_beside_an_encoding_is_refused_and_ends_the_connection() -> None:
    gate = Gatekeeper(Inner(), state())
    headers = {"content-length": "2", "transfer-encoding": "chunked"}
    sent = asyncio.run(exchange(gate, body(b"{}"), headers=headers))
    assert status_of(sent) == 400 and (b"connection", b"close") in sent[0]["headers"]


def test_a_body_that_trickles_in_is_given_up() -> None:
    async def trickle() -> int:
        sent: list[Any] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/x",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.05)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        # each piece comes in time; 1000 of them would be 50 seconds
        await Gatekeeper(Inner(), state(stall_s=0.3, max_body_bytes=1000))(scope, receive, send)
        return status_of(sent)

    assert asyncio.run(asyncio.wait_for(trickle(), 30)) == 408


def test_large_bodies_that_arrive_at_once_are_bounded() -> None:
    size = 100 << 10

    async def run() -> tuple[int, int, int]:
        gate = Gatekeeper(Inner(), state(max_body_bytes=size), held_bytes=1 << 10)  # room for two of them
        part = {"type": "http.request", "body": b" " * size, "more_body": True}
        slow = [asyncio.ensure_future(exchange(gate, [part])) for _ in range(2)]
        await asyncio.sleep(0.05)
        large, small = await exchange(gate, body(b" " * size)), await exchange(gate, body(b"{}"))
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        again = await exchange(gate, body(b"{}".ljust(size)))
        return status_of(large), status_of(small), status_of(again)

    assert asyncio.run(run()) == (503, 200, 200)


def test_a_key_that_is_empty_does_not_open_the_server() -> None:
    assert read_api_keys((), None, {}) == ()
    assert read_api_keys(("a",), None, {KEY_VARIABLE: "b,c,"}) == ("a", "b", "c")
    for given, environment in (
        ([""], {}),
        (["a", ""], {}),
        ([], {KEY_VARIABLE: ","}),
        ([], {KEY_VARIABLE: ""}),
        (["a"], {KEY_VARIABLE: ","}),
    ):
        with pytest.raises(ConfigError, match="empty|holds no key"):
            read_api_keys(given, None, environment)


def test_only_servers_that_allow_it_let_a_request_go_first() -> None:
    closed, opened = ServerSettings(), ServerSettings(allow_priority=True)

    def priority(asked: int | None, settings: ServerSettings) -> int:
        return CompletionRequest(model="m", prompt="a", priority=asked).jobs(settings)[0].priority

    assert [priority(asked, closed) for asked in (None, 0, -100)] == [0, 0, -100]
    assert priority(100, opened) == 100
    with pytest.raises(ApiError, match="--allow-priority") as caught:
        priority(1, closed)
    assert caught.value.status == 400 and caught.value.param == "priority"


def test_a_message_that_comes_again_and_again_is_written_once_in_a_while() -> None:
    rarely = Rarely(10.0)

    def record(text: str, at: float) -> logging.LogRecord:
        made = logging.LogRecord("asyncio", logging.ERROR, __file__, 1, text, None, None)
        made.created = at
        return made

    shown = [record(f"accept failed\nsocket {index}", 0.01 * index) for index in range(2500)]
    shown = [made for made in shown if rarely.filter(made)]
    assert [made.created for made in shown] == [0.0, 10.0, 20.0]
    assert [getattr(made, "fields", {}).get("left_out") for made in shown] == [None, 999, 999]
    assert rarely.filter(record("something else", 25.0))


def test_a_body_needs_the_key_on_open_paths_too() -> None:
    """What may be read without a key takes no bodies without one: they would hold memory and the parser."""
    gate = Gatekeeper(Inner(), state(api_keys=("key",)))
    for path in ("/health", "/", "/v1/models"):
        assert status_of(asyncio.run(exchange(gate, body(b"{}"), path))) == 401
