"""The server's front without a model: limits, keys, error shapes, event streams, and the options of `serve`."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request

from slipstream.cli import serve
from slipstream.errors import BusyError, ConfigError, RequestError
from slipstream.server.apis import sse
from slipstream.server.apis.common_schemas import Speculative
from slipstream.server.apis.openai_schemas import with_seeds
from slipstream.server.apis.openai_shared import DraftMarks, timings, usage
from slipstream.server.operations.bodies import ParsedRequest, check_json
from slipstream.server.operations.errors_http import (
    ApiError,
    ClientGone,
    anthropic_body,
    as_api_error,
    install,
    openai_body,
)
from slipstream.server.operations.limits import Gatekeeper
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.server_state import (
    MAX_JSON_DEPTH,
    ServerSettings,
    ServerState,
    parse_binary_size,
    read_api_keys,
)
from slipstream.server.serving.jobs import Answer, AnswerDelta, Job
from slipstream.server.serving.router import ModelRouter
from slipstream.stats import RequestStats
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import TokenOut
from tests.unit.test_tokenizer import metadata

Messages = list[dict[str, Any]]


def state(**settings: Any) -> ServerState:
    return ServerState(ServerSettings(**settings), ModelRouter([]), Metrics(), phase="ready")


async def exchange(app: Any, incoming: Messages, path: str = "/x", headers: dict[str, str] | None = None) -> Messages:
    """What an ASGI app sends in answer to a POST whose body comes in these pieces."""
    sent: Messages = []
    queue = iter(incoming)

    async def receive() -> dict[str, Any]:
        message = next(queue, None)
        if message is None:
            await asyncio.Event().wait()
        return message  # type: ignore[return-value]

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"content-type": "application/json", "host": "localhost:8080", **(headers or {})}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("x", 80),
        "client": ("x", 1),
        "asgi": {"version": "3.0"},
    }
    await app(scope, receive, send)
    return sent


def body(*pieces: bytes) -> Messages:
    return [
        {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
        for index, piece in enumerate(pieces)
    ]


class Inner:
    """Remembers the body it was given."""

    def __init__(self) -> None:
        self.got: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.got = await ParsedRequest(scope, receive).json() if (await receive())["body"] else None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def status_of(sent: Messages) -> int:
    return int(sent[0]["status"])


def test_a_body_passes_whole_and_is_bounded_piece_by_piece() -> None:
    inner = Inner()
    gate = Gatekeeper(inner, state(max_body_bytes=10))
    assert status_of(asyncio.run(exchange(gate, body(b'{"a"', b": 1}")))) == 200
    assert inner.got == {"a": 1}
    inner.got = None
    assert status_of(asyncio.run(exchange(gate, body(b'{"a":  ', b"     1}")))) == 413
    announced = exchange(gate, body(b'{"a":  ', b"     1}"), headers={"content-length": "12"})
    assert status_of(asyncio.run(announced)) == 413
    assert inner.got is None


def test_a_body_that_breaks_off_is_refused() -> None:
    inner = Inner()
    cut = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    assert status_of(asyncio.run(exchange(Gatekeeper(inner, state()), cut))) == 400
    assert inner.got is None


def test_a_draining_server_says_when_to_come_back() -> None:
    full = state()
    full.phase = "draining"
    sent = asyncio.run(exchange(Gatekeeper(Inner(), full), body(b"{}")))
    assert status_of(sent) == 503 and (b"retry-after", b"5") in sent[0]["headers"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer  two"}, 200),
        ({"x-api-key": "two"}, 200),
        ({"authorization": "Bearer on"}, 401),
        ({"authorization": "one"}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_keys(headers: dict[str, str], status: int) -> None:
    gate = Gatekeeper(Inner(), state(api_keys=("one", "two")))
    assert status_of(asyncio.run(exchange(gate, body(b"{}"), headers=headers))) == status


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", 200),
        ("http://localhost:8080", "127.0.0.1", 200),
        ("http://evil.example:8080", "127.0.0.1", 403),
        ("null", "127.0.0.1", 403),
        ("http://[bad", "127.0.0.1", 403),
        ("https://good.example", "127.0.0.1", 200),
        ("http://evil.example:8080", "0.0.0.0", 403),
        ("http://localhost:8080", "0.0.0.0", 200),
        ("http://localhost:9090", "0.0.0.0", 403),
        ("null", "0.0.0.0", 403),
        ("https://good.example", "0.0.0.0", 200),
    ],
)
def test_pages_of_other_origins_are_refused(origin: str, host: str, status: int) -> None:
    gate = Gatekeeper(Inner(), state(host=host, cors_origins=("https://good.example",)))
    assert status_of(asyncio.run(exchange(gate, body(b"{}"), headers={"origin": origin}))) == status


def test_a_body_that_stops_coming_is_given_up() -> None:
    begun = [{"type": "http.request", "body": b"{", "more_body": True}]
    assert status_of(asyncio.run(exchange(Gatekeeper(Inner(), state(stall_s=0.05)), begun))) == 408


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_json_that_is_only_pythons_is_refused() -> None:
    for good in (b"{}", b"1e300", b'"\\ud83d\\ude00"', b'"\\\\ud800"', nested(MAX_JSON_DEPTH)):
        check_json(good)
    for bad in (
        b"NaN",
        b"-Infinity",
        b"1e400",
        b'"\\ud83d"',
        b"\xff",
        b"{",
        nested(MAX_JSON_DEPTH + 2),
        nested(100_000),
        b"9" * 5000,
    ):
        with pytest.raises(ApiError) as caught:
            check_json(bad)
        assert caught.value.status == 400, bad[:20]


def test_errors_have_each_apis_shape() -> None:
    busy = as_api_error(BusyError("full", "wait", retry_after_s=2.2))
    assert (busy.status, busy.headers) == (429, {"Retry-After": "3"})
    assert openai_body(busy) == {
        "error": {"message": "full (wait)", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    }
    assert anthropic_body(busy) == {"type": "error", "error": {"type": "rate_limit_error", "message": "full (wait)"}}
    assert as_api_error(RequestError("no")).status == 400
    unforeseen = as_api_error(ZeroDivisionError("secret"))
    assert unforeseen.status == 500 and "secret" not in unforeseen.message
    long = ApiError(400, "x" * 10_000 + "\ud800\n")
    assert len(long.message) <= 600 and long.message.encode()


def test_an_app_answers_every_failure_in_shape() -> None:
    app, reasons = FastAPI(), list[str]()
    install(app, reasons.append)

    @app.post("/{kind}")
    async def fail(kind: str, request: Request) -> None:
        raise {"gone": ClientGone(), "bug": ValueError("secret"), "ours": RequestError("no", "try")}[kind]

    sent = asyncio.run(exchange(app, body(b"{}"), "/ours"))
    assert json.loads(sent[1]["body"])["error"]["message"] == "no (try)" and status_of(sent) == 400
    assert status_of(asyncio.run(exchange(app, body(b"{}"), "/gone"))) == 499
    assert status_of(asyncio.run(exchange(app, body(b"{}"), "/a/b"))) == 404
    assert reasons == ["invalid_request_error", "not_found_error"]


class Stream:
    """A stream under test: what is sent, with a reader that may leave or stop reading."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], **settings: float) -> None:
        self.settings = ServerSettings(**{"keep_alive_s": 0.05, **settings})  # type: ignore[arg-type]
        self.chunks = chunks
        self.sent: list[bytes] = []
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message.get("body", b""))

    async def run(self) -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        response = await sse.respond(Request(scope, self.receive), self.chunks, self.settings)
        await response(scope, self.receive, self.send)


def test_a_stream_keeps_its_connection_alive_while_nothing_comes() -> None:
    async def main() -> None:
        async def slow() -> AsyncGenerator[bytes, None]:
            for kept_alive, piece in ((1, b"one"), (3, b"two")):
                while stream.sent.count(sse.KEEP_ALIVE) < kept_alive:
                    await asyncio.sleep(0.01)
                yield piece

        stream = Stream(slow())
        await stream.run()
        assert [piece for piece in stream.sent if piece not in (b"", sse.KEEP_ALIVE)] == [b"one", b"two"]

    asyncio.run(main())


def test_a_failure_before_the_first_chunk_is_a_status_and_later_an_event() -> None:
    async def failing(delay: float, chunks: int) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(delay)
        for _ in range(chunks):
            yield b"chunk"
        raise BusyError("full")

    async def main() -> None:
        with pytest.raises(BusyError):
            await Stream(failing(0, 0)).run()
        for delay, chunks in ((0.2, 0), (0, 1)):
            stream = Stream(failing(delay, chunks))
            await stream.run()
            last = [piece for piece in stream.sent if piece][-1]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "queue_full"

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_reader_that_leaves_ends_the_work(when: str) -> None:
    async def main() -> None:
        closed = asyncio.Event()

        async def endless() -> AsyncGenerator[bytes, None]:
            try:
                if when == "before":
                    await asyncio.Event().wait()
                while True:
                    yield b"chunk"
                    await asyncio.sleep(0.01)
            finally:
                closed.set()

        stream = Stream(endless(), keep_alive_s=60.0)
        running = asyncio.ensure_future(stream.run())
        await asyncio.sleep(0.1)
        assert not closed.is_set()
        stream.left.set()
        if when == "before":
            with pytest.raises(ClientGone):
                await running
        else:
            await running
        assert closed.is_set()

    asyncio.run(main())


def test_a_reader_that_stops_reading_is_given_up() -> None:
    async def main() -> None:
        closed = asyncio.Event()

        async def endless() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield b"chunk"
            finally:
                closed.set()

        stream = Stream(endless(), stall_s=0.1)
        running = asyncio.ensure_future(stream.run())
        await asyncio.sleep(0.05)
        stream.reads.clear()
        await asyncio.wait_for(running, 5)
        assert closed.is_set()

    asyncio.run(main())


def test_draft_marks_join_to_the_text_however_it_is_cut() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    text = "abcé!"
    ids = [index for byte in text.encode() for index in _tokens_of(tokenizer, byte)]
    drafted = [False, True, True, True, False, True]  # of a, b, c, the halves of é, and !
    tokens = [TokenOut(index, was) for index, was in zip(ids, drafted, strict=True)]
    for cut in range(len(text) + 1):
        marks = DraftMarks()
        # all tokens have come, but the end of their text is held back
        first = AnswerDelta("content", text[:cut], tokens, texts=["a", "b", "c", "", "é", "!"])
        parts = [marks.mark(first), marks.mark(AnswerDelta("content", text[cut:]))]
        pieces = [piece for part in parts for piece in part["tokens"]]  # type: ignore[attr-defined]
        assert "".join(piece["text"] for piece in pieces) == text
        # a character belongs to the token that completes it
        assert "".join(piece["text"] for piece in pieces if piece["drafted"]) == "bc!"


def _tokens_of(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [index for index in range(tokenizer.vocab_size) if tokenizer.token_bytes(index) == bytes([byte])][:1]


def test_choices_seeds_usage_and_timings_add_up() -> None:
    job = Job("m", prompt="x", settings={"seed": 5})
    seeds = [one.settings["seed"] for one in with_seeds(job, 3)]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    assert seeds == [one.settings["seed"] for one in with_seeds(job, 3)]
    answers = []
    for accepted in (1, 3):
        stats = RequestStats(prompt_tokens=10, cached_tokens=4, completion_tokens=5)
        stats.record_step(4, 4, accepted, accepted + 1)
        answers.append(Answer("m", "chain", "d", stats=stats))
    counted = usage(answers, 2)
    assert (counted["prompt_tokens"], counted["completion_tokens"], counted["total_tokens"]) == (10, 10, 20)
    assert counted["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 4,
    }
    assert timings(answers)["tau"] == 3.0 and timings(answers[:1])["tau"] == 2.0


def test_speculative_settings_become_modes() -> None:
    assert Speculative().mode_name() == "auto"
    assert Speculative(mode="chain").mode_name() == "chain"
    assert Speculative(mode="chain", width=4).mode_name() == "chain:4"
    assert Speculative(mode="tree").mode_name() == "tree:32"
    assert Speculative(mode="tree", budget=9).mode_name() == "tree:9"
    assert Speculative(mode="tree:16:seed").mode_name() == "tree:16:seed"


def test_sizes_and_keys_are_read(tmp_path: Path) -> None:
    assert [parse_binary_size(text) for text in ("7", "1k", "2M", "1.5GiB")] == [7, 1024, 2 << 20, 3 << 29]
    for bad in ("", "x", "4X", "-1", "0", "nan", "inf", "1e300"):
        with pytest.raises(ConfigError):
            parse_binary_size(bad)
    file = tmp_path / "keys"
    file.write_text("# mine\nthree\n\n  one \n")
    assert read_api_keys(["one"], file, {"SLIPSTREAM_API_KEY": "two,one"}) == ("one", "two", "three")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys([], file, {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": 70000}, "port"),
        ({"max_body": "much"}, "size"),
        ({"timeout": -1.0}, "timeout"),
        ({"grace": -1.0}, "grace"),
        ({"cors": ["good.example"]}, "origin"),
        ({"api_key": ["a b"]}, "key"),
        ({"memory": "x"}, "size"),
        ({"max_queue": 0}, "max_waiting"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"model": "any"}, "any"),
        ({"mode": "warp"}, "mode"),
        ({"models": Path("models.toml"), "draft": "none"}, "--draft"),
        ({"models": Path("models.toml"), "draft_lora": ["a.gguf"]}, "--draft-lora"),
        ({"draft_lora": ["a.gguf", "other/a"]}, "one name"),
        ({"draft_lora_folder": Path("nowhere")}, "nowhere"),
        ({"models": Path("models.toml"), "model": "smollm2"}, "MODEL"),
        ({"models": Path("nowhere.toml")}, "nowhere"),
        ({"host": "no.such.host.invalid"}, "listen"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_serve_refuses_bad_options_before_it_loads_anything(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=said):
        serve.command(**options)
