"""Connections before they carry a request: how many may be open, and how long a client may take to send a header.

An open connection costs its client next to nothing, so that one client can open thousands and send nothing. The server
remembers the order in which connections began to wait for a request; if there are too many, it closes the oldest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.server.operations.errors_http import ApiError, openai_body

# Seconds for a request's header, from its first byte or from the beginning of the connection. With a longer time,
# clients that send nothing hold connections longer.
HEADER_S = 10.0
# Connections of one server. By default, 1024 requests can wait for each model; a connection takes about 20 KB.
MAX_CONNECTIONS = 4096
# File descriptors that are not for connections: models, recordings and sockets need them, and so do connections that
# are accepted before the oldest one is closed.
RESERVED_FILES = 256
# Connections that the event loop accepts in one turn, before any of them is counted. It must stay far below
# RESERVED_FILES, or one turn could use up all file descriptors.
ACCEPTED_AT_ONCE = 32
_FULL_BODY = json.dumps(
    openai_body(
        ApiError(503, "every connection of this server is in use", "try again a little later", kind="server_error")
    )
).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


def raise_file_limit() -> int:
    """Raises the limit of open files as far as needed and allowed; returns how many connections that permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than their hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft - RESERVED_FILES, soft // 2))


class Door:
    """The connections of one server that wait for a request, oldest first, and the limit for all connections."""

    def __init__(self, limit: int, header_s: float = HEADER_S) -> None:
        self.limit = limit
        self.header_s = header_s
        self.waiting: dict[GuardedProtocol, None] = {}

    def has_room(self, open_connections: int) -> bool:
        """Whether the newest connection may stay; if there are too many, the oldest waiting one is closed for it."""
        if open_connections <= self.limit:
            return True
        oldest = next(iter(self.waiting), None)
        if oldest is not None:
            oldest.drop()
        return oldest is not None


class GuardedProtocol(H11Protocol):
    """A connection of uvicorn that `Door` can close while it waits; it limits the time for headers and for reading."""

    def __init__(self, *args: Any, door: Door, **options: Any) -> None:
        super().__init__(*args, **options)
        self._door = door
        self._header_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._door.has_room(len(self.connections)):
            transport.write(_FULL)
            self.drop()
            return
        self._door.waiting[self] = None
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_waiting():
            self._expect_header()

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_waiting():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            # The connection closes once everything is sent, so that a client that reads nothing would keep it open.
            self._expect_reader()
        elif self._is_waiting():
            self._door.waiting[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self.resume_writing()
        self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Closes the connection without waiting for its client to read the response."""
        self._stop_waiting()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_reader(self) -> None:
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _expect_header(self) -> None:
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self._door.header_s, self.drop)

    def _stop_waiting(self) -> None:
        self._door.waiting.pop(self, None)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
