"""The life of a server process: it listens before its models are loaded, and finishes requests before it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.server.apis.stream_socket import StreamSocket
from slipstream.server.app import create_app
from slipstream.server.operations.connections import (
    ACCEPTED_AT_ONCE,
    MAX_CONNECTIONS,
    Door,
    GuardedProtocol,
    raise_file_limit,
)
from slipstream.server.operations.logs import LogFormat, log_config
from slipstream.server.operations.server_state import ServerState

log = logging.getLogger("slipstream.server")

# Seconds that unread responses get when everything else has ended. With more, a client that does not read would
# delay the end of the server.
_UNREAD_RESPONSES_S = 5
_IDLE_CONNECTION_S = 75  # seconds until an idle connection is closed; with fewer, clients reconnect more often
_BACKLOG = 1024  # connections that the kernel keeps until they are accepted; more are refused by the kernel


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", "choose another --host or --port") from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Service(uvicorn.Server):
    """One server, from listening to its end.

    The first SIGTERM or SIGINT lets running requests finish within the grace time while new ones are refused; the
    second ends the process at once. SIGHUP reads the models file again.
    """

    def __init__(
        self,
        state: ServerState,
        *,
        stream_socket: Path | None = None,
        must_load: bool = False,
        log_style: LogFormat = "text",
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """With `must_load`, the server ends if a model with `preload` cannot be loaded; `failure` then says why."""
        self._door = Door(MAX_CONNECTIONS)
        super().__init__(
            uvicorn.Config(
                create_app(state, self._begin, self._end),
                http=cast(Any, partial(GuardedProtocol, door=self._door)),
                ws="none",
                lifespan="on",
                server_header=False,
                access_log=False,
                log_config=log_config(log_style),
                log_level="warning",
                backlog=ACCEPTED_AT_ONCE,
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_UNREAD_RESPONSES_S,
            )
        )
        self.failure: SlipstreamError | None = None
        self._state = state
        self._socket = None if stream_socket is None else StreamSocket(state, stream_socket)
        self._must_load = must_load
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._door.limit = raise_file_limit()
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio has set it to the number it accepts in one turn

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._state.phase == "draining":
            # A second signal means that the user does not want to wait. No file is left that a new start cannot handle.
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Refuses new requests, and ends the server once the running ones are over or the grace time has passed.

        Only the event loop's thread may call it.
        """
        if self._state.phase == "draining":
            return
        self._state.phase = "draining"
        if self._socket is not None:
            self._socket.drain()
        self._keep(self._finish_requests())

    async def _finish_requests(self) -> None:
        log.info("draining", extra={"fields": {"grace_s": self._state.settings.grace_s}})
        try:
            await self._state.router.close(self._state.settings.grace_s)
        finally:
            self.should_exit = True

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, lambda: self._keep(self._reload()))
        try:
            if self._socket is not None:
                await self._socket.start()
        except SlipstreamError as error:
            self.failure, self.should_exit = error, True
            return
        self._keep(self._load())

    async def _load(self) -> None:
        """Loads the models with `preload` while the server already answers."""
        await self._state.router.start()
        failed = [model for model in self._state.router.describe() if model.state == "failed"]
        if failed and self._must_load:
            self.failure = ConfigError(f"model '{failed[0].name}' {failed[0].reason}")
            self.drain()
        elif self._state.phase == "loading":
            self._state.phase = "ready"
            if self._on_ready is not None:
                self._on_ready()

    async def _reload(self) -> None:
        try:
            await self._state.router.reload()
        except SlipstreamError as error:
            log.error("the models file was not read again: %s", error)

    async def _end(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        await self._state.router.close(0.0)
        if self._state.recorder is not None:
            await asyncio.to_thread(self._state.recorder.close)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
