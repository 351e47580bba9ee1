"""Structured logs: one line per HTTP request with its numbers, as JSON or key=value, without prompts and answers.

Any code that works for a request adds fields with `note`; the middleware writes the line when the response is over,
however it ended.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.serving.jobs import Answer, Job

LogFormat = Literal["json", "text"]

requests_log = logging.getLogger("slipstream.server.requests")
_line: ContextVar[dict[str, object] | None] = ContextVar("slipstream_request_line", default=None)
# Monitoring asks for these paths all the time, so their lines are written at a lower level.
_QUIET = ("/health", "/metrics", "/slots", "/favicon.ico")
_SHOWN_PATH = 200  # characters of a path in the log; a client could otherwise fill the disk with long paths
_KEPT_MESSAGES = 100  # different messages that `Rarely` remembers; a library has fewer; at more, it forgets all of them


def log_config(style: LogFormat) -> dict[str, Any]:
    """Settings for `logging.config.dictConfig` and uvicorn: lines go to stderr, and uvicorn's access log is off."""
    quiet = {"handlers": [], "level": "CRITICAL", "propagate": False}
    ours = {"handlers": ["stderr"], "level": "INFO", "propagate": False}
    libraries = {**ours, "handlers": ["libraries"]}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": f"{__name__}.{'JsonLines' if style == 'json' else 'TextLines'}"}},
        "filters": {"rarely": {"()": f"{__name__}.Rarely"}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "lines"},
            "libraries": {"class": "logging.StreamHandler", "formatter": "lines", "filters": ["rarely"]},
        },
        "loggers": {"slipstream": ours, "uvicorn": libraries, "asyncio": libraries, "uvicorn.access": quiet},
    }


class Rarely(logging.Filter):
    """Lets the same message of a library pass once per interval, with the number of times it was left out before.

    Clients can make connections fail as often as they want, and must not be able to fill the disk that way.
    """

    def __init__(self, interval_s: float = 10.0) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._seen: dict[str, tuple[float, int]] = {}  # when each message last passed, and how many were left out since

    def filter(self, record: logging.LogRecord) -> bool:
        message = str(record.msg).partition("\n")[0]
        shown, left_out = self._seen.get(message, (-math.inf, 0))
        if record.created - shown < self._interval_s:
            self._seen[message] = shown, left_out + 1
            return False
        if len(self._seen) >= _KEPT_MESSAGES:
            self._seen.clear()
        self._seen[message] = record.created, 0
        if left_out:
            record.fields = {**_fields(record), "left_out": left_out}
        return True


class JsonLines(logging.Formatter):
    """Writes one JSON object per line: time, level, logger, message, then the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Only ASCII is written, so that no character from a client can break a line.
        return json.dumps({key: _finite(value) for key, value in line.items()}, default=str)


class TextLines(logging.Formatter):
    """Writes `time level message key=value ...` for people; values with spaces or control characters are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        shown = {key: value for key, value in _fields(record).items() if value is not None}
        if shown.get("event") == message:
            del shown["event"]
        fields = [f"{key}={_quoted(value)}" for key, value in shown.items()]
        text = " ".join([_time(record), record.levelname.lower(), message, *fields])
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _finite(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _quoted(value: object) -> str:
    if isinstance(value, str):
        safe = value.isascii() and value.isprintable() and not any(mark in value for mark in ' "=')
        return value if value and safe else json.dumps(value)
    return json.dumps(value, default=str)


def note(**fields: object) -> None:
    """Adds fields to the log line of the request that this task works for; without a request it does nothing."""
    line = _line.get()
    if line is not None:
        line.update(fields)


def note_answer(job: Job, answer: Answer, with_text: bool = False) -> None:
    """Adds a generation's numbers to the log line; those of several choices (n > 1) are added up.

    `with_text` also adds the prompt and the answer.
    """
    line = _line.get()
    if line is None:
        return
    stats = answer.stats
    for name, count in (
        ("prompt_tokens", stats.prompt_tokens),
        ("cached_tokens", stats.cached_tokens),
        ("tokens", stats.completion_tokens),
        ("steps", stats.steps),
        ("committed", stats.committed),
        ("drafted", stats.drafted),
        ("accepted", stats.accepted),
    ):
        before = line.get(name)
        line[name] = (before if isinstance(before, int) else 0) + count
    line.update(
        model=answer.model,
        mode=answer.mode,
        draft_lora=stats.draft_lora,
        outcome=answer.finish_reason or "unfinished",
        ttft_ms=round(stats.ttft_ms, 1),
        error=answer.error or line.get("error"),
    )
    if with_text:
        asked = job.written_messages if job.messages is not None else job.prompt
        line.update(prompt=asked, answer=answer.content)


@contextmanager
def request_line(line: dict[str, object]) -> Iterator[None]:
    """The log line of one request: fields noted inside the block go into it, and the end of the block writes it."""
    began, token = time.perf_counter(), _line.set(line)
    try:
        yield
    except BaseException as error:
        line.setdefault("outcome", type(error).__name__)
        raise
    finally:
        _line.reset(token)
        _write(line, 1e3 * (time.perf_counter() - began))


class RequestLogMiddleware:
    """Gives every request an id and writes its line at the end; as plain ASGI, it passes streams on unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        line = _start_line(scope)
        request_id = str(line["id"]).encode("ascii")

        async def send_and_watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        with request_line(line):
            try:
                await self.app(scope, receive, send_and_watch)
            except BaseException as error:
                line.setdefault("status", 500 if isinstance(error, Exception) else 499)
                raise


def _start_line(scope: Scope) -> dict[str, object]:
    client = scope.get("client")
    path = str(scope.get("path", ""))
    return {
        "event": "request",
        "id": f"req-{uuid4().hex[:16]}",
        "method": scope.get("method", ""),
        "path": path if len(path) <= _SHOWN_PATH else f"{path[:_SHOWN_PATH]}...",
        "client": f"{client[0]}:{client[1]}" if client else "",
    }


def _write(line: dict[str, object], milliseconds: float) -> None:
    line["ms"] = round(milliseconds, 1)
    steps, committed = line.get("steps"), line.pop("committed", None)
    if isinstance(steps, int) and steps and isinstance(committed, int):
        line["tau"] = round(committed / steps, 3)
    level = logging.DEBUG if line.get("path") in _QUIET and line.get("status") in (200, 503) else logging.INFO
    requests_log.log(level, "request", extra={"fields": {k: v for k, v in line.items() if v is not None}})
