"""What a request must pass before any API sees it: the key, the phase of the server, and a body that is sane JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from slipstream.server.errors_http import ApiError, error_response
from slipstream.server.settings import LOOPBACK, MAX_JSON_DEPTH
from slipstream.server.state import ServerState

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# The page must load before a key can be typed into it, and whoever watches a server needs no key to see it live.
OPEN_PATHS = frozenset({"/", "/favicon.ico", "/health", "/docs", "/openapi.json"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_DISCARD_BYTES, _DISCARD_S = 16 << 20, 5.0
_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


class Gatekeeper:
    """Refuses what no API should have to think about; everything else passes through unchanged."""

    def __init__(self, app: AsgiApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [key.encode() for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arriving = _Arriving(receive, self._state.settings.stall_s)
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            self._check_key(scope["path"], headers)
            self._check_origin(headers)
            if scope["method"] in _WITH_BODY:
                self._check_phase()
                body = await self._read(headers, arriving)
                if body:
                    _check_content_type(headers)
                    check_json(body)
                receive = _replay(body, receive)
        except ApiError as error:
            self._state.metrics.refused(error.code or error.kind)
            await arriving.discard_rest()
            await error_response(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # every key is compared in full, so that the time taken tells nothing about any of them
        if sum(hmac.compare_digest(given, key) for key in self._keys) == 0:
            raise ApiError(
                401, "the API key is missing" if not given else "the API key is wrong",
                "send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'", kind="authentication_error",
                headers={"WWW-Authenticate": "Bearer"}, code="invalid_api_key",
            )

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Keeps out pages of other sites that gave this machine's address a name of theirs, which CORS cannot see."""
        settings = self._state.settings
        origin = headers.get(b"origin", b"").decode("ascii", "replace")
        if not origin or settings.host not in LOOPBACK or {origin, "*"} & set(settings.cors_origins):
            return
        if _host_of(origin) not in LOOPBACK:
            raise ApiError(
                403, f"pages of the origin {origin[:100]} may not ask this server", "allow it with --cors ORIGIN",
                kind="permission_error", code="origin_not_allowed",
            )

    def _check_phase(self) -> None:
        if self._state.phase == "draining":
            wait = max(1, math.ceil(self._state.settings.retry_after_s))
            raise ApiError(
                503, "the server is shutting down", "ask another one, or this one once it is back", kind="server_error",
                headers={"Retry-After": str(wait)}, code="draining",
            )

    async def _read(self, headers: dict[bytes, bytes], arriving: _Arriving) -> bytes:
        limit = self._state.settings.max_body_bytes
        announced = headers.get(b"content-length", b"0")
        too_large = announced.isdigit() and int(announced[:20]) > limit
        pieces, size = [], 0
        while not (too_large or arriving.complete):
            pieces.append(await arriving.next())
            size += len(pieces[-1])
            too_large = size > limit
        if too_large:
            raise ApiError(
                413, f"the body is larger than {limit} bytes", "send less, or allow more with --max-body",
                code="body_too_large", headers={"Connection": "close"},
            )
        return b"".join(pieces)


class _Arriving:
    """A body as it comes in."""

    def __init__(self, receive: Receive, stall_s: float) -> None:
        self._receive = receive
        self._stall_s = stall_s
        self.complete = False

    async def next(self) -> bytes:
        try:
            async with asyncio.timeout(self._stall_s):
                message = await self._receive()
        except TimeoutError:
            self.complete = True
            raise ApiError(
                408, f"nothing of the body came for {self._stall_s:g} seconds", headers={"Connection": "close"}
            ) from None
        if message["type"] == "http.disconnect":
            self.complete = True
            raise ApiError(400, "the body ended before it was complete")
        self.complete = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def discard_rest(self) -> None:
        """Takes in what is left, within reason: who is cut off while it sends never gets to read why."""
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                size = 0
                while not self.complete and size < _DISCARD_BYTES:
                    size += len(await self.next())


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def _check_content_type(headers: dict[bytes, bytes]) -> None:
    # Web pages of other origins can only send other types without asking first, so this keeps them out as well.
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise ApiError(
            415, "the body must be JSON", "send it with 'Content-Type: application/json'", code="unsupported_media_type"
        )


def check_json(body: bytes) -> None:
    """Refuses bodies that are no JSON, or only Python's idea of it: NaN, infinite numbers, half characters."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_utf8") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    _check_depth(value)
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ApiError(
                400, "the body has half of a surrogate pair in a string", "escape characters beyond U+FFFF as pairs",
                code="invalid_unicode",
            ) from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _too_deep() -> ApiError:
    return ApiError(
        400, f"the body is nested deeper than {MAX_JSON_DEPTH} levels", "flatten it", code="nested_too_deep"
    )


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            child
            for item in level if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hands the body out once more; what comes after it (the client leaving) is the connection's own word."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
