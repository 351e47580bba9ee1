"""The checks that a request must pass before any API sees it: its key, its origin, and a body that is valid JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.server.operations.bodies import hand_on
from slipstream.server.operations.errors_http import ApiError, error_response
from slipstream.server.operations.server_state import LOOPBACK, RETRY_AFTER_S, ServerState

# These paths need no key: the page must load before a key can be typed into it, and monitoring must work without one.
OPEN_PATHS = frozenset({"/", "/favicon.ico", "/health", "/docs", "/openapi.json"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
# How much of a refused body is still read, and for how long. A client that is cut off while it sends may never read why
# it was refused; reading without a limit would let a client occupy the connection.
_DISCARD_BYTES, _DISCARD_S = 16 << 20, 5.0
# Bodies up to this size are never refused because of other bodies. uvicorn buffers as much for any connection, so that
# such a body takes no more memory than its connection may take anyway.
_SMALL_BYTES = 64 << 10
# Bytes of larger bodies that may arrive together: 16 bodies of the default limit. A parsed body takes up to 20 times
# its size, so that a larger value could exhaust the memory.
HELD_BYTES = 64 << 20


class Gatekeeper:
    """Refuses requests that must not reach any API; all other requests pass unchanged."""

    def __init__(self, app: ASGIApp, state: ServerState, held_bytes: int = HELD_BYTES) -> None:
        """`held_bytes` bounds the large bodies that arrive together; two bodies of the largest size always fit."""
        self._app = app
        self._state = state
        self._keys = [key.encode() for key in state.settings.api_keys]
        named = (state.settings.host, socket.gethostname(), *state.settings.allowed_hosts)
        self._hosts = {name.lower() for name in named}
        self._turn = asyncio.Lock()  # held while a large body is parsed
        self.stall_s = state.settings.stall_s
        self.held_limit = max(held_bytes, 2 * state.settings.max_body_bytes)
        self.held = 0  # bytes of large bodies that are arriving or being parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arriving = _Arriving(receive, self)
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            _check_framing(headers)
            self._check_key(scope["method"], scope["path"], headers)
            self._check_host(headers)
            self._check_origin(scope["method"], headers)
            if scope["method"] in _WITH_BODY:
                self._check_phase()
                body = await self._read(headers, arriving)
                if body:
                    _check_content_type(headers)
                receive = await hand_on(scope, receive, body, self._turn)
                del body  # the bytes would otherwise stay in memory as long as the response takes
        except ApiError as error:
            self._state.metrics.refused(error.code or error.kind)
            await arriving.discard_rest()
            await error_response(scope["path"], error)(scope, receive, send)
            return
        finally:
            arriving.let_go()
        await self._app(scope, receive, send)

    def _check_key(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or (path in OPEN_PATHS and method in _READING):
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # Every key is compared in full, so that the time taken reveals nothing about any of them.
        if sum(hmac.compare_digest(given, key) for key in self._keys) == 0:
            raise ApiError(
                401,
                "the API key is missing" if not given else "the API key is wrong",
                "send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                kind="authentication_error",
                headers={"WWW-Authenticate": "Bearer"},
                code="invalid_api_key",
            )

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuses web pages of other sites whose host name was made to resolve to this machine; CORS cannot see these.

        This server's own names always pass. A server that listens beyond this machine also accepts addresses and names
        without a dot, because a name that another site can make resolve to it has a dot.
        """
        settings = self._state.settings
        if not settings.checks_pages or "*" in settings.allowed_hosts:
            return
        given = headers.get(b"host", b"").decode("ascii", "replace").lower()
        name = _host_of(f"//{given}") or ""
        if name in LOOPBACK or {name, given} & self._hosts:
            return
        if settings.is_local or not (_is_address(name) or (name and "." not in name)):
            raise ApiError(
                403,
                f"this server is not called {name[:100]!r}",
                "allow that name with --allow-host NAME",
                kind="permission_error",
                code="host_not_allowed",
            )

    def _check_origin(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Refuses requests that pages of other sites can send without a preflight.

        Such a request takes effect even if the page cannot read the answer.
        """
        settings = self._state.settings
        origin = headers.get(b"origin", b"").decode("ascii", "replace").lower()
        if not settings.checks_pages or {origin, "*"} & {known.lower() for known in settings.cors_origins}:
            return
        if origin:
            local = settings.is_local and _host_of(origin) in LOOPBACK
            allowed = local or origin.partition("://")[2].encode() == headers.get(b"host", b"").lower()
        else:  # programs send neither header; a browser that omits Origin still sends Sec-Fetch-Site
            allowed = method in _READING or headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")
        if not allowed:
            raise ApiError(
                403,
                f"pages of {origin[:100] or 'other sites'} may not ask this server",
                "allow it with --cors ORIGIN",
                kind="permission_error",
                code="origin_not_allowed",
            )

    def _check_phase(self) -> None:
        if self._state.phase == "draining":
            raise ApiError(
                503,
                "the server is shutting down",
                "ask another one, or this one once it is back",
                kind="server_error",
                headers={"Retry-After": str(RETRY_AFTER_S)},
                code="draining",
            )

    async def _read(self, headers: dict[bytes, bytes], arriving: _Arriving) -> bytes:
        limit = self._state.settings.max_body_bytes
        announced = headers.get(b"content-length", b"0")
        too_large = announced.isdigit() and int(announced[:20]) > limit
        body = bytearray()
        try:
            async with asyncio.timeout(self._state.settings.body_s):
                while not (too_large or arriving.complete):
                    body += await arriving.next()
                    too_large = len(body) > limit
        except TimeoutError:
            arriving.complete = True
            raise ApiError(
                408,
                f"the body did not come within {self._state.settings.body_s:g} seconds",
                headers={"Connection": "close"},
            ) from None
        if too_large:
            raise ApiError(
                413,
                f"the body is larger than {limit} bytes",
                "send less, or allow more with --max-body",
                code="body_too_large",
                headers={"Connection": "close"},
            )
        return bytes(body)


class _Arriving:
    """A body while it arrives; the bytes of a large body count as held until `let_go`."""

    def __init__(self, receive: Receive, gate: Gatekeeper) -> None:
        self._receive = receive
        self._gate = gate
        self._size = 0
        self._counted = 0
        self.complete = False

    async def next(self) -> bytes:
        piece = await self._take()
        self._count(len(piece))
        return piece

    async def _take(self) -> bytes:
        try:
            async with asyncio.timeout(self._gate.stall_s):
                message = await self._receive()
        except TimeoutError:
            self.complete = True
            raise ApiError(
                408, f"nothing of the body came for {self._gate.stall_s:g} seconds", headers={"Connection": "close"}
            ) from None
        if message["type"] == "http.disconnect":
            self.complete = True
            raise ApiError(400, "the body ended before it was complete")
        self.complete = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    def _count(self, more: int) -> None:
        self._size += more
        counted = self._size if self._size > _SMALL_BYTES else 0
        if self._gate.held + counted - self._counted > self._gate.held_limit:
            raise ApiError(
                503,
                "too many large bodies arrive at the same time",
                "send it again a little later",
                kind="server_error",
                code="bodies_busy",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        self._gate.held += counted - self._counted
        self._counted = counted

    def let_go(self) -> None:
        self._gate.held -= self._counted
        self._counted = 0

    async def discard_rest(self) -> None:
        """Reads the rest of a refused body within limits, because a client that is cut off never reads the error."""
        self.let_go()
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                size = 0
                while not self.complete and size < _DISCARD_BYTES:
                    size += len(await self._take())


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_framing(headers: dict[bytes, bytes]) -> None:
    """Refuses two statements about a body's end.

    A proxy that follows the other statement could take a second request for a part of the body and pass it on unseen.
    """
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise ApiError(
            400,
            "the request has a Content-Length beside a Transfer-Encoding",
            "send one of them",
            code="ambiguous_length",
            headers={"Connection": "close"},
        )


def _check_content_type(headers: dict[bytes, bytes]) -> None:
    # Without a preflight, web pages of other origins can only send other content types, so this check refuses them too.
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise ApiError(
            415, "the body must be JSON", "send it with 'Content-Type: application/json'", code="unsupported_media_type"
        )
