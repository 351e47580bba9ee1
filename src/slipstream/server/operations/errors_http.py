"""Errors as responses: this module decides their status, and each API gets the error shape its clients expect."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from slipstream.errors import BusyError, ConfigError, EngineFailedError, RequestError, SlipstreamError, StaleEpochError
from slipstream.server.serving.jobs import DeadlineError
from slipstream.server.serving.model_entries import (
    ModelFailedError,
    NoMemoryNowError,
    NoResidentModelError,
    RouterClosedError,
    UnknownModelError,
)

log = logging.getLogger("slipstream.server")

MAX_MESSAGE = 600
_READ_ERRORS = 64  # errors of one body that are looked at; more would cost time, fewer might miss the deepest
_ANTHROPIC_PATH = "/v1/messages"
_OPENAI_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# The status and the code that clients see for each error class; the first class that fits counts. Any other error is
# the server's fault and becomes a 500.
_KNOWN: tuple[tuple[type[SlipstreamError], int, str | None], ...] = (
    (UnknownModelError, 404, "model_not_found"),
    (NoResidentModelError, 400, "no_resident_model"),
    (ModelFailedError, 503, "model_failed"),
    (NoMemoryNowError, 503, "no_memory_now"),
    (RouterClosedError, 503, "draining"),
    (BusyError, 429, "queue_full"),
    (StaleEpochError, 409, "stale_epoch"),
    (EngineFailedError, 503, "engine_failed"),
    (DeadlineError, 504, "deadline"),
    (ConfigError, 400, None),
    (RequestError, 400, None),
    (SlipstreamError, 500, None),
)


class ApiError(Exception):
    """The error that a client gets instead of an answer; `param` names the field that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        hint: str = "",
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        text = _clean(f"{message} ({hint})" if hint else message)
        super().__init__(text)
        self.status = status
        self.message = text
        self.param = param
        self.kind = kind
        self.headers = dict(headers or {})
        self.code = code


class ClientGone(Exception):
    """The client has disconnected, so that nothing can read the answer."""


def refuse(field: str, why: str = "is not supported", hint: str = "leave it out") -> ApiError:
    """A 400 error that names a field which this server does not accept."""
    return ApiError(400, f"'{field}' {why}", hint, param=field, code="unsupported_parameter")


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as the error that the client gets; the details of an unexpected one only go to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors(), error.body)
    if isinstance(error, HTTPException):
        kind = _openai_kind(error.status_code)
        return ApiError(error.status_code, str(error.detail), headers=error.headers, kind=kind)
    if isinstance(error, SlipstreamError):
        return _from_ours(error)
    log.error("a request failed with an unexpected error", exc_info=error)
    return ApiError(500, "the server failed on this request", "its log says why", kind="server_error")


def _from_ours(error: SlipstreamError) -> ApiError:
    status, code = next((status, code) for kind, status, code in _KNOWN if isinstance(error, kind))
    if isinstance(error, RequestError) and "the context holds" in error.message:
        code = "context_length_exceeded"
    headers = {}
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if status >= 500:
        log.warning("%s", _clean(str(error)))
    about_the_model = isinstance(error, UnknownModelError | NoResidentModelError | ModelFailedError)
    return ApiError(
        status,
        error.message,
        error.hint,
        param="model" if about_the_model else None,
        kind=_openai_kind(status),
        headers=headers,
        code=code,
    )


def _openai_kind(status: int) -> str:
    return _OPENAI_KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _from_validation(errors: Sequence[Any], body: Any) -> ApiError:
    """The deepest validation error of the first wrong field.

    A union has errors for each of its branches; the deepest is taken to be about the branch that the client meant.
    """
    if not errors:
        return ApiError(400, "the request is not valid")
    found = [(_field_path(error, body), error) for error in errors[:_READ_ERRORS]]
    field = _top_field(found[0][0])
    path, error = max(
        ((path, error) for path, error in found if _top_field(path) == field),
        # Of errors at the same place, one about a wrong type comes from a branch that the client did not mean.
        key=lambda pair: (pair[0].count(".") + pair[0].count("["), not str(pair[1].get("type")).endswith("_type")),
    )
    message = str(error.get("msg", "is not valid")).removeprefix("Value error, ")
    if error.get("type") == "extra_forbidden":
        return ApiError(400, f"'{path}' is not supported", "leave it out", param=path, code="unsupported_parameter")
    if error.get("type") == "missing":
        return ApiError(400, f"'{path}' is missing", param=path or None, code="missing_required_parameter")
    return ApiError(400, f"'{path}': {message}" if path else message, param=path or None, code="invalid_value")


def _top_field(path: str) -> str:
    return path.split(".")[0].split("[")[0]


def _field_path(error: Mapping[str, Any], body: Any) -> str:
    """The path of the wrong field in the client's body; names of union branches are not part of that path."""
    path, here = "", body
    where = list(error.get("loc", ()))
    if where and where[0] in ("body", "query", "path", "header"):
        here = body if where[0] == "body" else dict.fromkeys(where[1:])
        where = where[1:]
    for index, piece in enumerate(where):
        last = index == len(where) - 1
        if isinstance(piece, int):
            if isinstance(here, list) and piece < len(here):
                path, here = f"{path}[{piece}]", here[piece]
        elif isinstance(here, Mapping) and (piece in here or (last and error.get("type") == "missing")):
            path, here = f"{path}.{piece}" if path else str(piece), here.get(piece)
    return path[:100]


def _clean(text: str) -> str:
    """One line of bounded length that every encoding can carry, even if the text came from a client."""
    line = " ".join(text[: 2 * MAX_MESSAGE].encode("utf-8", "replace").decode().split())
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 1]}…"


def openai_body(error: ApiError) -> dict[str, object]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError) -> dict[str, object]:
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def body_for(path: str, error: ApiError) -> dict[str, object]:
    anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    return anthropic_body(error) if anthropic else openai_body(error)


def error_response(path: str, error: ApiError) -> JSONResponse:
    return JSONResponse(body_for(path, error), error.status, headers=error.headers)


def install(app: FastAPI, refused: Callable[[str], None]) -> None:
    """Installs the handler for every error of this app; `refused` counts errors by reason."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        known = as_api_error(error)
        refused(known.code or known.kind)
        return error_response(request.url.path, known)

    async def no_reader(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(None, 499)

    for kind in (ApiError, SlipstreamError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientGone, no_reader)
