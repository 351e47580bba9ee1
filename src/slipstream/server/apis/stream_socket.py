"""Many requests over one connection: JSON lines with ids on a Unix socket, as docs/stream-socket.md describes them.

Only the owner of the socket file can connect, so no key is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, StaleEpochError
from slipstream.server.apis import stream_frames as frames
from slipstream.server.apis.openai_shared import caller
from slipstream.server.operations.errors_http import ApiError, as_api_error
from slipstream.server.operations.logs import request_line
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.answering import answering
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import AnswerDelta, Job

if TYPE_CHECKING:
    from slipstream.server.serving.worker import EngineWorker, SlotInfo

API = "socket"
MAX_FRAMES = 256  # frames that wait for one client before its requests are held; a larger number would cost memory
# Open requests on all connections together, paused ones included. Each keeps its prompt and its answer in memory.
MAX_REQUESTS = 1024
_LARGE_LINE_BYTES = 1 << 14  # longer lines are read in a thread, because a line of 4 MiB takes up to a second
_LISTED_PER_FRAME = 4  # requests in an answer to `list` that count as one more frame in the outbox
_UNLISTED = ("request_id", "draft_lora", "drafted", "accepted")  # fields of a slot that an answer to `list` lacks
_BUFFER_BYTES = 1 << 16  # bytes that the transport buffers; beyond them, `drain` waits for the reader
_FLUSH_S = 1.0  # seconds for the last frames of all connections when the server ends
# Seconds that the tokens written before a pause get to arrive here. With fewer, the frame of the pause could be sent
# before them.
_SETTLE_S = 0.02
_log = logging.getLogger("slipstream.server.socket")


class StreamSocket:
    """Listens on a socket file of its own and serves every client that connects, until it is closed."""

    def __init__(self, state: ServerState, path: Path, max_frames: int = MAX_FRAMES) -> None:
        self._state = state
        self._path = path
        self._max_frames = max_frames
        self._server: asyncio.AbstractServer | None = None
        self._inode: int | None = None
        self._connections: dict[_Connection, asyncio.Task[None]] = {}

    async def start(self) -> None:
        listening = _listen(self._path)
        self._inode = self._path.stat().st_ino
        self._server = await asyncio.start_unix_server(self._connected, sock=listening)

    async def close(self) -> None:
        """Ends every connection and removes the socket file, unless another server has replaced it."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await asyncio.gather(*(connection.flush() for connection in self._connections))
        tasks = list(self._connections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            if self._inode is not None and self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def drain(self) -> None:
        """Cancels paused requests, because a server that drains would wait for them in vain."""
        for run in (run for connection in self._connections for run in connection.runs.values()):
            if run.paused:
                run.end()

    def open_requests(self) -> int:
        return sum(len(connection.runs) for connection in self._connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self._state, reader, writer, self._max_frames, self.open_requests)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await connection.serve()
        except asyncio.CancelledError:
            pass  # the server ends
        except Exception as error:
            _log.error("a connection failed", exc_info=error)
        finally:
            del self._connections[connection]


def _listen(path: Path) -> socket.socket:
    """A listening socket that only its owner can reach; it replaces a socket file on which no server listens."""
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)  # set before the file exists, so that other users can never open it
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(128)
    except OSError as error:
        listening.close()
        reason = f"the stream socket {path} cannot be made: {error}"
        raise ConfigError(reason, "give a short path in a folder of yours") from None
    return listening


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is there already and is no socket", "give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"the stream socket {path} is in the way: {error}", "give another path") from None
        else:
            raise ConfigError(f"another server listens on {path}", "stop it, or give another path")


@dataclass(slots=True, eq=False)
class _Run:
    """One request of a connection, from its start frame to its last one."""

    id: str
    quantum: int
    logprobs: bool
    task: asyncio.Task[None] | None = None
    running: Generation | None = None
    worker: EngineWorker | None = None
    cancelled: bool = False
    granted: int = 0  # with a quantum: tokens that the request may have written before it is paused
    # The fields of the next pause's frame, once it has happened.
    pause: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    paused: bool = False  # whether it is paused and the client has been told

    @property
    def generation(self) -> Generation:
        assert self.running is not None
        return self.running

    def begun(self) -> EngineWorker:
        if self.worker is None:
            raise StaleEpochError(f"request '{self.id}' has not begun yet", "wait for its first token")
        return self.worker

    def pause_after(self, tokens: int, reason: str) -> None:
        """Asks for a pause once `tokens` are written; afterwards the future `pause` has the fields of its frame."""
        loop = asyncio.get_running_loop()

        def tell(epoch: int, generated: int) -> None:
            pause = {"epoch": epoch, "generated": generated, "reason": reason}
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and the connection with it
                loop.call_soon_threadsafe(self._note_pause, pause)

        self.begun().pause_at(self.generation.request_id, tokens, tell)

    def grant(self) -> None:
        """Lets a request with a quantum write its next quantum of tokens."""
        if self.quantum and self.worker is not None:
            self.granted += self.quantum
            with contextlib.suppress(StaleEpochError):  # the request may be over by now
                self.pause_after(self.granted, "quantum")

    def end(self, epoch: int | None = None) -> None:
        """Cancels the request in any state; its last frame tells the client."""
        if self.worker is not None:
            self.worker.cancel(self.generation.request_id, epoch)
        elif self.task is not None:
            self.task.cancel()
        self.cancelled = True

    def _note_pause(self, pause: dict[str, Any]) -> None:
        if not self.pause.done():
            self.pause.set_result(pause)

    def take_pause(self) -> frames.Frame:
        """The frame of the pause that has happened; from now on the request counts as paused."""
        pause, self.pause = self.pause.result(), asyncio.get_running_loop().create_future()
        self.paused, self.granted = True, pause["generated"]
        return {"id": self.id, "type": "continue", **pause}


class _Connection:
    """The connection of one client: it reads operations, runs requests, and writes frames as the client reads them."""

    def __init__(
        self,
        state: ServerState,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_frames: int,
        open_everywhere: Callable[[], int],
    ) -> None:
        self._state = state
        self._open_everywhere = open_everywhere
        self._reader = reader
        self._writer = writer
        self._outbox = frames.Outbox(max_frames)
        self.runs: dict[str, _Run] = {}
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    async def serve(self) -> None:
        """Serves until the client has gone; requests that are still open are cancelled."""
        sides = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work = [*sides, *(run.task for run in self.runs.values() if run.task is not None)]
            for task in work:
                task.cancel()
            if self._outbox.full:
                self._writer.transport.abort()  # the client does not read, so closing would wait in vain
            else:
                self._writer.close()
            await asyncio.gather(*work, return_exceptions=True)

    async def flush(self) -> None:
        """Waits until all requests are over and all their frames are written."""
        while self.runs or not self._outbox.empty:
            await asyncio.sleep(_SETTLE_S)

    async def _read(self) -> None:
        async for line in frames.lines(self._reader, self._state.settings.max_body_bytes):
            await self._outbox.room()  # operations of a client that does not read have to wait
            asked = await self._understood(line)
            try:
                self._do(asked)
            except Exception as error:
                self._refuse(asked.id, error)

    async def _understood(self, line: bytes | None) -> frames.Asked:
        settings = self._state.settings
        if line is None:
            said = f"a line is longer than {settings.max_body_bytes} bytes"
            return frames.Asked(None, ApiError(413, said, code="line_too_long"))
        if len(line) > _LARGE_LINE_BYTES:
            return await asyncio.to_thread(frames.read, line, settings)
        return frames.read(line, settings)

    def _do(self, asked: frames.Asked) -> None:
        match asked.operation:
            case Exception() as error:
                raise error
            case frames.Start() as operation:
                self._start(operation, asked.started)
            case frames.Continue() as operation:
                self._continue(operation)
            case frames.Pause() as operation:
                self._open(operation.id).pause_after(0, "paused")
            case frames.Cancel() as operation:
                self._open(operation.id).end(operation.epoch)
            case frames.List() as operation:
                self._list(operation.id)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                self._writer.write(await self._outbox.take())
                async with asyncio.timeout(self._state.settings.stall_s):
                    await self._writer.drain()

    def _refuse(self, request_id: str | None, error: Exception, over: bool = False) -> None:
        known = as_api_error(error)
        self._state.metrics.refused(known.code or known.kind)
        self._outbox.put(frames.error_frame(request_id, known, over))

    def _start(self, operation: frames.Start, started: frames.Started | None) -> None:
        if operation.id in self.runs:
            raise ApiError(409, f"a request '{operation.id}' is open already", "give every request its own id", "id")
        try:
            if self._state.phase == "draining":
                raise ApiError(503, "the server is shutting down", kind="server_error", code="draining")
            if self._open_everywhere() >= MAX_REQUESTS:
                raise ApiError(429, f"{MAX_REQUESTS} requests are open on this socket", "wait for some to end")
            assert started is not None, "a start was read with its job"
            if isinstance(started, Exception):
                raise started
            job, body = started
        except Exception as error:
            self._refuse(operation.id, error, over=True)
            return
        run = _Run(operation.id, operation.quantum, bool(getattr(body, "logprobs", None)))
        self.runs[run.id] = run
        run.task = asyncio.create_task(self._answer(run, job, caller(body)))

    async def _answer(self, run: _Run, job: Job, about: dict[str, object]) -> None:
        with request_line({"event": "request", "path": "stream-socket", **about}):
            try:
                async with answering(self._state, job, API) as running:
                    run.running, run.worker = running, self._worker_of(running)
                    run.grant()
                    await self._pump(run, running)
                    if not run.cancelled or running.answer.finish_reason != "cancelled":
                        running.raise_failure()
                last = frames.done_frame(run.id, running.answer)
            except asyncio.CancelledError:
                if not run.cancelled:
                    raise
                last = frames.done_frame(run.id, None)
            except Exception as error:
                self._refuse(run.id, error, over=True)
                return
            finally:
                del self.runs[run.id]
        self._outbox.put(last)

    def _worker_of(self, generation: Generation) -> EngineWorker | None:
        workers = (resident.worker for resident in self._state.router.residents())
        return next((worker for worker in workers if worker.knows(generation.request_id)), None)

    async def _pump(self, run: _Run, running: Generation) -> None:
        """Passes an answer on while it grows; the frame of a pause follows all tokens written before the pause."""
        step: asyncio.Future[AnswerDelta | None] | None = None
        try:
            while True:
                step = step or asyncio.ensure_future(anext(running, None))
                either: set[asyncio.Future[Any]] = {step, run.pause}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    await asyncio.wait({step}, timeout=_SETTLE_S)
                if step.done():
                    delta, step = step.result(), None
                    if delta is None:
                        return
                    await self._send(run, frames.token_frame(run.id, delta, running.tokenizer, run.logprobs))
                else:
                    await self._send(run, run.take_pause())
                    if self._state.phase == "draining":
                        run.end()
        finally:
            if step is not None:
                step.cancel()

    async def _send(self, run: _Run, frame: frames.Frame) -> None:
        """Queues a frame; while the outbox is full, the request is held out of its engine's steps."""
        if self._outbox.full and run.worker is not None:
            run.worker.hold(run.generation.request_id, True)
            try:
                await self._outbox.room()
            finally:
                run.worker.hold(run.generation.request_id, False)
        self._outbox.put(frame)

    def _open(self, request_id: str) -> _Run:
        run = self.runs.get(request_id)
        if run is None:
            raise ApiError(404, f"no request '{request_id}' is open on this connection", param="id", code="unknown_id")
        return run

    def _continue(self, operation: frames.Continue) -> None:
        run = self._open(operation.id)
        worker = run.begun()
        if operation.quantum is not None:
            run.quantum = operation.quantum
        worker.resume(run.generation.request_id, operation.epoch)
        run.paused = False
        run.grant()

    def _list(self, request_id: str) -> None:
        workers = {run.worker for run in self.runs.values() if run.worker is not None}
        slots = {slot.request_id: slot for worker in workers for slot in worker.snapshot().slots}
        listed = [_described(run, slots) for run in self.runs.values()]
        frame = {"id": request_id, "type": "done", "requests": listed}
        self._outbox.put(frame, 1 + len(listed) // _LISTED_PER_FRAME)


def _described(run: _Run, slots: Mapping[str, SlotInfo]) -> dict[str, object]:
    if run.worker is None:
        return {"id": run.id, "phase": "starting"}
    known: dict[str, object] = {"id": run.id, "model": run.generation.answer.model}
    mine = slots.get(run.generation.request_id)
    if mine is None:
        return known | {"phase": "waiting"}
    known |= {name: value for name, value in asdict(mine).items() if name not in _UNLISTED}
    return known | {"tau": round(mine.tau, 4), "seconds": round(mine.seconds, 3)}
