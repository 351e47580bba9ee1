"""Connections that send nothing, send slowly, or never read must not keep other clients out."""

# mypy: disable-error-code="call-arg, unused-ignore"

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import uvicorn

from slipstream.server.operations.connections import Door, GuardedProtocol
from tests.e2e.serving import Server
from tests.hostile.conftest import FILES
from tests.hostile.idle import beside_idle, idle_connections

pytestmark = pytest.mark.e2e

ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = 32 << 20  # bytes; more than the kernel buffers for a connection


async def small_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with a few bytes, at /large with many, and at /busy never."""
    if scope["path"] == "/busy":
        await asyncio.Event().wait()
    body = bytes(LARGE) if scope["path"] == "/large" else b"ok"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def small_server(limit: int, header_s: float, idle_s: int = 30) -> AsyncIterator[tuple[str, int]]:
    """A server in this process with shorter time limits than the real one."""
    door = Door(limit, header_s)
    protocol: Any = partial(GuardedProtocol, door=door)
    config = uvicorn.Config(
        small_app, http=protocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=idle_s
    )
    config.load()
    state: Any = uvicorn.Server(config).server_state
    loop = asyncio.get_running_loop()
    make = partial(config.http_protocol_class, config=config, server_state=state, app_state={}, _loop=loop)
    listening = await loop.create_server(make, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()
    finally:
        listening.close()
        for connection in list(state.connections):
            connection.transport.abort()


async def ended(reader: asyncio.StreamReader, seconds: float = 20.0) -> bytes:
    """The bytes that came until the server closed the connection."""
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), seconds)
    return b""


def test_a_header_must_come_in_time() -> None:
    async def run() -> None:
        async with small_server(10, header_s=0.5) as address:
            silent, kept = await asyncio.open_connection(*address)
            dripping, drip = await asyncio.open_connection(*address)
            answered, ask = await asyncio.open_connection(*address)

            async def trickle() -> None:
                while not drip.is_closing():
                    drip.write(b"A")
                    await asyncio.sleep(0.05)

            task = asyncio.ensure_future(trickle())
            ask.write(ASK)
            assert await answered.readuntil(b"ok")
            assert await ended(silent) == b"" and await ended(dripping) == b""
            # A connection that has sent a request may wait longer before the next one, but not in the middle of one.
            ask.write(ASK)
            assert await answered.readuntil(b"ok")
            await asyncio.sleep(1)
            ask.write(ASK)
            assert await answered.readuntil(b"ok")
            ask.write(ASK[:10])
            assert await ended(answered) == b""
            task.cancel()
            kept.close()

    asyncio.run(run())


def test_the_oldest_that_waits_makes_room() -> None:
    async def run() -> None:
        async with small_server(3, header_s=30) as address:
            first, ask_first = await asyncio.open_connection(*address)
            second, kept = await asyncio.open_connection(*address)
            third, ask_third = await asyncio.open_connection(*address)
            ask_first.write(ASK)
            assert await first.readuntil(b"ok")  # from now on it waits behind the others
            fourth, ask_fourth = await asyncio.open_connection(*address)
            assert await ended(second) == b""
            for reader, writer in ((first, ask_first), (third, ask_third), (fourth, ask_fourth)):
                writer.write(ASK)
                assert await reader.readuntil(b"ok")
            kept.close()

    asyncio.run(run())


def test_where_every_connection_is_at_work_a_newcomer_is_told() -> None:
    async def run() -> None:
        async with small_server(1, header_s=30) as address:
            _, busy = await asyncio.open_connection(*address)
            busy.write(b"GET /busy HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.2)
            newcomer, kept = await asyncio.open_connection(*address)
            answer = await ended(newcomer)
            kept.close()
            assert answer.startswith(b"HTTP/1.1 503") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]

    asyncio.run(run())


def test_a_client_that_never_reads_is_left() -> None:
    async def run() -> None:
        async with small_server(10, header_s=30, idle_s=1) as address:
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, address)
            raw.send(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            await asyncio.sleep(2)
            got = 0
            with contextlib.suppress(ConnectionResetError):
                while piece := await asyncio.get_running_loop().sock_recv(raw, 1 << 20):
                    got += len(piece)
            raw.close()
            assert got < LARGE

    asyncio.run(run())


@pytest.fixture
def server(door_server: Server) -> Server:
    return door_server


def test_more_idle_connections_than_files_keep_nobody_out(server: Server) -> None:
    seen = beside_idle(server, 2 * FILES, seconds=2.5, clock=server.cpu_seconds)
    assert seen.connections == 2 * FILES
    assert not seen.failed and seen.health_s, seen.row()  # without a limit on connections nothing is answered
    # in the server's processor time, which the other programs of a busy machine do not lengthen
    assert max(seen.health_s) < 5 and seen.silence_ms < 2500, seen.row()
    assert seen.log_bytes < 20_000, seen.row()


def test_files_can_still_be_opened(server: Server) -> None:
    """Connections that are accepted together are all counted before the oldest ones are closed, so that the number of
    open files rises above the limit of connections for a moment; it must not reach the limit of open files."""
    with idle_connections(server, 2 * FILES):
        counts = [len(_files(server))]
        deadline = time.monotonic() + 30
        while not FILES // 2 <= counts[-1] < FILES - 64 and time.monotonic() < deadline:
            time.sleep(0.05)
            counts.append(len(_files(server)))
        assert FILES // 2 <= counts[-1] < FILES - 64
        assert max(counts) < FILES


def _files(server: Server) -> list[str]:
    return os.listdir(f"/proc/{server.process.pid}/fd")


def test_two_lengths_end_the_connection(server: Server) -> None:
    with socket.create_connection(server.address, timeout=30) as raw:
        raw.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + ASK
        )
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := raw.recv(1 << 16):
                answer += piece
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_names_of_others_read_nothing(server: Server) -> None:
    for path in ("/props", "/slots", "/metrics", "/v1/models", "/"):
        status, _, answer = server.ask(path, headers={"Host": "evil.example"})
        assert status == 403 and "--allow-host" in answer.decode(), path
    status, _, answer = server.ask("/models/smollm2/unload", method="POST", headers={"Origin": "http://evil.example"})
    assert status == 403 and "--cors" in answer.decode()
    assert server.get("/v1/models")["data"][0]["state"] == "ready"


def test_priority_is_refused_with_the_option_that_allows_it(server: Server) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "max_tokens": 1, "priority": 100}
    turn = [{"role": "user", "content": "a"}]
    for path, more in (
        ("/v1/chat/completions", {"messages": turn}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": turn}),
    ):
        status, _, answer = server.ask(path, {**ask, **more})
        assert status == 400 and "--allow-priority" in answer.decode(), path
    response = {"model": "smollm2", "max_output_tokens": 1, "priority": 100, "input": "a"}
    assert server.ask("/v1/responses", response)[0] == 400
    assert server.ask("/v1/completions", {**ask, "prompt": "a", "priority": -5})[0] == 200
