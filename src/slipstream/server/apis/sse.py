"""Server-sent events: chunks as they come, comments during silence, and an end as soon as the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.server.operations.errors_http import ApiError, ClientGone, as_api_error, body_for
from slipstream.server.operations.server_state import ServerSettings

Chunks = AsyncGenerator[bytes, None]
Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def event(value: Mapping[str, object]) -> bytes:
    """One event with a JSON body, named by its type if it has one.

    The JSON has no line breaks, so that one data line carries it.
    """
    line = f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
    return (f"event: {value['type']}\n{line}" if "type" in value else line).encode("utf-8", "replace")


async def respond(
    request: Request, chunks: Chunks, settings: ServerSettings, on_error: Callable[[ApiError], bytes] | None = None
) -> Response:
    """A response that streams `chunks`; the generator is closed whatever happens.

    The function waits for the first chunk, so that a request that fails at once gets an error status. If that takes
    longer than the keep-alive time (a model may be loading), the stream begins, and a failure becomes its last event.
    """
    first = asyncio.ensure_future(anext(chunks, None))
    try:
        await unless_gone(request.receive, asyncio.wait({first}, timeout=settings.keep_alive_s))
        if first.done():
            first.result()
    except BaseException:
        await _abandon(first, chunks)
        raise
    return _EventStream(first, chunks, settings, on_error or (lambda error: event(body_for(request.url.path, error))))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task)
        await _end(gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits until it is over; its result or error is ignored."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def _abandon(pending: asyncio.Future[Any], chunks: Chunks) -> None:
    await _end(pending)
    await chunks.aclose()


class _Stalled(Exception):
    """The client has not read a chunk within `stall_s` seconds."""


class _EventStream(Response):
    """A response that sends chunks until they end or the client disconnects."""

    def __init__(
        self,
        first: asyncio.Future[bytes | None],
        chunks: Chunks,
        settings: ServerSettings,
        on_error: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(None, 200, _HEADERS)
        del self.headers["content-length"]
        self._next = first
        self._chunks = chunks
        self._settings = settings
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._send_all(send))
        finally:
            await _abandon(self._next, self._chunks)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            while True:
                chunk = await self._following(send)
                if chunk is None:
                    break
                await self._write(send, chunk)
                self._next = asyncio.ensure_future(anext(self._chunks, None))
        except _Stalled:
            # The stream ends here, because it would otherwise hold its memory as long as a client that does not read
            # stays connected.
            return
        except Exception as error:
            await self._write(send, self._on_error(as_api_error(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _following(self, send: Send) -> bytes | None:
        while True:
            await asyncio.wait({self._next}, timeout=self._settings.keep_alive_s)
            if self._next.done():
                return self._next.result()
            await self._write(send, KEEP_ALIVE)

    async def _write(self, send: Send, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._settings.stall_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise _Stalled from None
