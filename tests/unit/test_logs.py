"""Log lines: one per request, in JSON or text, with numbers and without the words of prompts and answers."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.config
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from slipstream.server.operations.logs import (
    JsonLines,
    LogFormat,
    RequestLogMiddleware,
    TextLines,
    log_config,
    note,
    note_answer,
)
from slipstream.server.serving.jobs import Answer, Job
from slipstream.stats import RequestStats
from slipstream.types import FinishReason

SECRET = "the launch code is 0000"


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What our loggers write as JSON lines."""
    stream, logger = io.StringIO(), logging.getLogger("slipstream")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def answer(reason: FinishReason = "stop") -> Answer:
    stats = RequestStats(prompt_tokens=12, cached_tokens=4, completion_tokens=9, ttft_ms=30.25)
    stats.record_step(4, 4, 3, 4)
    stats.record_step(4, 4, 3, 4)
    return Answer("pair", "auto", "drafter", content=f"I repeat: {SECRET}", finish_reason=reason, stats=stats)


def app() -> FastAPI:
    made = FastAPI()
    made.add_middleware(RequestLogMiddleware)
    job = Job("any", messages=[{"role": "user", "content": SECRET}])

    @made.post("/chat")
    async def chat(count: int = 1, text: bool = False) -> dict[str, str]:
        note(api="chat")
        for _ in range(count):
            note_answer(job, answer(), with_text=text)
        return {}

    @made.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> Any:
            yield b"a"
            await asyncio.sleep(0.02)
            note_answer(job, answer("length"))
            yield b"b"

        return StreamingResponse(parts())

    @made.get("/broken")
    async def broken() -> None:
        raise RuntimeError("unforeseen")

    @made.get("/health")
    async def health() -> dict[str, str]:
        return {}

    return made


def ask(method: str, path: str, **settings: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app(), raise_app_exceptions=False, client=("10.0.0.7", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **settings)

    return asyncio.run(run())


def only_line(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_generation_is_one_line_with_its_numbers_and_no_text(written: io.StringIO) -> None:
    response = ask("POST", "/chat", json={"content": SECRET})
    line = only_line(written)
    expected = {
        "event": "request",
        "method": "POST",
        "path": "/chat",
        "status": 200,
        "client": "10.0.0.7:4711",
        "api": "chat",
        "model": "pair",
        "mode": "auto",
        "outcome": "stop",
        "prompt_tokens": 12,
        "cached_tokens": 4,
        "tokens": 9,
        "steps": 2,
        "tau": 4.0,
        "drafted": 8,
        "accepted": 6,
        "ttft_ms": 30.2,
    }
    assert {key: line[key] for key in expected} == expected
    assert line["ms"] > 0 and line["level"] == "info"
    assert line["id"] == response.headers["x-request-id"]
    assert "launch" not in written.getvalue() and "0000" not in written.getvalue()


def test_text_is_written_only_where_it_was_asked_for(written: io.StringIO) -> None:
    ask("POST", "/chat?text=true")
    line = only_line(written)
    assert line["prompt"] == [{"role": "user", "content": SECRET}]
    assert line["answer"] == f"I repeat: {SECRET}"


def test_several_answers_to_one_request_add_up(written: io.StringIO) -> None:
    ask("POST", "/chat?count=3")
    line = only_line(written)
    assert (line["tokens"], line["steps"], line["prompt_tokens"], line["tau"]) == (27, 6, 36, 4.0)


def test_a_stream_is_logged_when_it_is_over(written: io.StringIO) -> None:
    assert ask("GET", "/stream").content == b"ab"
    line = only_line(written)
    assert line["outcome"] == "length" and line["ms"] >= 20


def test_a_failure_has_its_line_too(written: io.StringIO) -> None:
    assert ask("GET", "/broken").status_code == 500
    line = only_line(written)
    assert (line["status"], line["outcome"]) == (500, "RuntimeError")


def test_what_machines_ask_all_the_time_is_quieter(written: io.StringIO) -> None:
    ask("GET", "/health")
    assert only_line(written)["level"] == "debug"


def test_noting_outside_of_a_request_does_nothing(written: io.StringIO) -> None:
    note(anything=1)
    note_answer(Job("m", prompt="p"), answer())
    assert written.getvalue() == ""


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_a_line_stays_a_line_whatever_a_client_sends(formatter: logging.Formatter) -> None:
    record = logging.makeLogRecord(
        {
            "msg": "request\r\n2026 forged",
            "levelname": "INFO",
            "name": "x",
            "fields": {"path": '/a\nb "c"\u2028', "count": 3, "share": float("nan"), "none": None},
        }
    )
    assert len(formatter.format(record).splitlines()) == 1


def test_text_lines_quote_only_what_needs_it() -> None:
    record = logging.makeLogRecord(
        {
            "msg": "request",
            "levelname": "INFO",
            "created": 0.0,
            "fields": {"event": "request", "model": "pair", "path": "/a b", "tokens": 3, "tau": 2.5, "gone": None},
        }
    )
    assert TextLines().format(record) == '1970-01-01T00:00:00.000Z info request model=pair path="/a b" tokens=3 tau=2.5'


@pytest.mark.parametrize("style", ["json", "text"])
def test_the_configuration_can_be_installed_and_silences_the_access_log(
    style: LogFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("slipstream", "uvicorn", "uvicorn.access")
    before = {
        name: (list(log.handlers), log.level, log.propagate) for name in names for log in (logging.getLogger(name),)
    }
    try:
        logging.config.dictConfig(log_config(style))
        logging.getLogger("slipstream.server").info("hello %s", "there", extra={"fields": {"event": "x"}})
        logging.getLogger("slipstream.server").debug("too quiet")
        logging.getLogger("uvicorn.error").warning("from uvicorn")
        logging.getLogger("uvicorn.access").info("GET /")
    finally:
        for name, (handlers, level, propagate) in before.items():
            log = logging.getLogger(name)
            log.handlers[:], log.propagate = handlers, propagate
            log.setLevel(level)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2 and "from uvicorn" in shown[1]
    assert json.loads(shown[0])["event"] == "x" if style == "json" else shown[0].endswith("info hello there event=x")
