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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.errors import ConfigError, StaleEpochError
from slipstream.server.apis import stream_frames as frames
from slipstream.server.operations.errors_http import ApiError, as_api_error
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.answering import answering
from slipstream.server.serving.generation import Generation
from slipstream.server.serving.jobs import AnswerDelta, Job

if TYPE_CHECKING:
    from slipstream.server.serving.worker import EngineWorker, SlotInfo

API = "socket"
MAX_FRAMES = 256  # frames that wait for one reader before its requests are held; more would cost memory
# Open requests on all connections together, paused ones included. Each keeps its prompt and its answer in memory.
MAX_REQUESTS = 1024
_LARGE_LINE_BYTES = 1 << 14  # longer lines are read in a thread, because a line of 4 MiB takes up to a second
_LISTED_PER_FRAME = 4  # requests in an answer to `list` that weigh as much as an ordinary frame
_BUFFER_BYTES = 1 << 16  # bytes that the transport buffers; beyond them, `drain` waits for the reader
_FLUSH_S = 1.0  # seconds for the last frames of all connections when the server ends
# How long tokens that an engine wrote before a pause may take to arrive here. With less, the frame of the pause could
# overtake them.
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
        tasks = list(self._connections.values())
        flushing = [asyncio.ensure_future(connection.flush()) for connection in self._connections]
        if flushing:
            _, late = await asyncio.wait(flushing, timeout=_FLUSH_S)
            tasks += late
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            if self._inode is not None and self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def drain(self) -> None:
        """Cancels paused requests, because a server that drains would wait for them in vain."""
        for connection in self._connections:
            connection.cancel_paused()

    def _open_requests(self) -> int:
        return sum(connection.open_requests for connection in self._connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self._state, reader, writer, self._max_frames, self._open_requests)
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
    """A listening socket that only its owner can reach; it replaces a socket file without a server."""
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)  # set before the file exists, so that others can never open it
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


class _Pause(NamedTuple):
    epoch: int
    generated: int
    reason: str


@dataclass(slots=True, eq=False)
class _Run:
    """One request of a connection, from its start frame to its last one."""

    id: str
    quantum: int
    logprobs: bool
    caller: dict[str, object]  # what the client says about itself, for the log
    task: asyncio.Task[None] | None = None
    running: Generation | None = None
    worker: EngineWorker | None = None
    cancelled: bool = False
    granted: int = 0  # with a quantum: tokens that the request may have written before it is paused
    pause: asyncio.Future[_Pause] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
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
        """Asks for a pause once `tokens` are written; afterwards the future `pause` gets the epoch of the pause."""
        loop = asyncio.get_running_loop()

        def tell(epoch: int, generated: int) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and the connection with it
                loop.call_soon_threadsafe(self._note_pause, _Pause(epoch, generated, reason))

        self.begun().pause_at(self.generation.request_id, tokens, tell)

    def _note_pause(self, pause: _Pause) -> None:
        if not self.pause.done():
            self.pause.set_result(pause)

    def take_pause(self) -> _Pause:
        pause, self.pause = self.pause.result(), asyncio.get_running_loop().create_future()
        self.paused, self.granted = True, pause.generated
        return pause


class _Connection:
    """One client: it reads operations, runs requests, and writes frames only as fast as the client reads them."""

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
        self._runs: dict[str, _Run] = {}
        self._operations: dict[str, Callable[[frames.Asked], None]] = {
            "start": self._start,
            "continue": self._continue,
            "pause": self._pause,
            "cancel": self._cancel,
            "list": self._list,
        }
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    async def serve(self) -> None:
        """Serves until the client has gone; requests that are still open are cancelled."""
        sides = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work = [*sides, *(run.task for run in self._runs.values() if run.task is not None)]
            for task in work:
                task.cancel()
            if self._outbox.full:
                self._writer.transport.abort()  # the client does not read, so closing would wait in vain
            else:
                self._writer.close()
            await asyncio.gather(*work, return_exceptions=True)

    @property
    def open_requests(self) -> int:
        return len(self._runs)

    def cancel_paused(self) -> None:
        for run in self._runs.values():
            if run.paused:
                self._end(run)

    async def flush(self) -> None:
        """Waits until all requests are over and all their frames are written."""
        while self._runs or not self._outbox.empty:
            await asyncio.sleep(_SETTLE_S)

    async def _read(self) -> None:
        limit = self._state.settings.max_body_bytes
        async for line in frames.lines(self._reader, limit):
            await self._outbox.room()  # operations of a client that does not read have to wait
            try:
                if line is None:
                    raise frames.BadLine(ApiError(413, f"a line is longer than {limit} bytes", code="line_too_long"))
                asked = await self._understood(line)
            except frames.BadLine as bad:
                self._refuse(bad.request_id, bad.error)
                continue
            try:
                self._operations[asked.operation.op](asked)
            except Exception as error:
                self._refuse(asked.operation.id, error)

    async def _understood(self, line: bytes) -> frames.Asked:
        if len(line) > _LARGE_LINE_BYTES:
            return await asyncio.to_thread(frames.read, line, self._state)
        return frames.read(line, self._state)

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

    def _start(self, asked: frames.Asked) -> None:
        operation = asked.operation
        assert isinstance(operation, frames.Start)
        if operation.id in self._runs:
            raise ApiError(409, f"a request '{operation.id}' is open already", "give every request its own id", "id")
        try:
            if self._state.phase == "draining":
                raise ApiError(503, "the server is shutting down", kind="server_error", code="draining")
            if self._open_everywhere() >= MAX_REQUESTS:
                raise ApiError(429, f"{MAX_REQUESTS} requests are open on this socket", "wait for some to end")
            assert asked.job is not None, "a start was read with its job"
            if isinstance(asked.job, Exception):
                raise asked.job
            job, body = asked.job
        except Exception as error:
            self._refuse(operation.id, error, over=True)
            return
        caller = {"user": body.user, "metadata": getattr(body, "metadata", None)}
        logprobs = getattr(body, "logprobs", None) not in (None, False)
        run = _Run(operation.id, operation.quantum, logprobs, {key: value for key, value in caller.items() if value})
        self._runs[run.id] = run
        run.task = asyncio.ensure_future(self._answer(run, job))

    async def _answer(self, run: _Run, job: Job) -> None:
        began = time.monotonic()
        try:
            async with answering(self._state, job, API) as running:
                run.running, run.worker = running, self._worker_of(running)
                self._grant(run)
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
            del self._runs[run.id]
            _note_end(run, time.monotonic() - began)
        self._outbox.put(last)

    def _worker_of(self, generation: Generation) -> EngineWorker | None:
        workers = (resident.worker for resident in self._state.router.residents())
        return next((worker for worker in workers if worker.knows(generation.request_id)), None)

    @staticmethod
    def _grant(run: _Run) -> None:
        """Lets a request with a quantum write its next quantum of tokens."""
        if run.quantum and run.worker is not None:
            run.granted += run.quantum
            with contextlib.suppress(StaleEpochError):  # the request may be over by now
                run.pause_after(run.granted, "quantum")

    async def _pump(self, run: _Run, running: Generation) -> None:
        """Passes an answer on while it grows; the frame of a pause follows all tokens written before the pause."""
        step: asyncio.Task[AnswerDelta | None] | None = None
        try:
            while True:
                step = step or asyncio.ensure_future(_next(running))
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
                    await self._send(run, frames.continue_frame(run.id, *run.take_pause()))
                    if self._state.phase == "draining":
                        self._end(run)
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
        run = self._runs.get(request_id)
        if run is None:
            raise ApiError(404, f"no request '{request_id}' is open on this connection", param="id", code="unknown_id")
        return run

    def _continue(self, asked: frames.Asked) -> None:
        operation = asked.operation
        assert isinstance(operation, frames.Continue)
        run = self._open(operation.id)
        worker = run.begun()
        if operation.quantum is not None:
            run.quantum = operation.quantum
        worker.resume(run.generation.request_id, operation.epoch)
        run.paused = False
        self._grant(run)

    def _pause(self, asked: frames.Asked) -> None:
        self._open(asked.operation.id).pause_after(0, "paused")

    def _cancel(self, asked: frames.Asked) -> None:
        operation = asked.operation
        assert isinstance(operation, frames.Cancel)
        self._end(self._open(operation.id), operation.epoch)

    @staticmethod
    def _end(run: _Run, epoch: int | None = None) -> None:
        """Cancels a request in any state; its last frame tells the client."""
        if run.worker is not None:
            run.worker.cancel(run.generation.request_id, epoch)
        elif run.task is not None:
            run.task.cancel()
        run.cancelled = True

    def _list(self, asked: frames.Asked) -> None:
        workers = {run.worker for run in self._runs.values() if run.worker is not None}
        slots = {slot.request_id: slot for worker in workers for slot in worker.snapshot().slots}
        listed = [_described(run, slots) for run in self._runs.values()]
        frame = {"id": asked.operation.id, "type": "done", "requests": listed}
        self._outbox.put(frame, 1 + len(listed) // _LISTED_PER_FRAME)


async def _next(generation: Generation) -> AnswerDelta | None:
    return await anext(generation, None)


def _described(run: _Run, slots: Mapping[str, SlotInfo]) -> dict[str, object]:
    if run.worker is None:
        return {"id": run.id, "phase": "starting"}
    mine = slots.get(run.generation.request_id)
    known: dict[str, object] = {"id": run.id, "model": run.generation.answer.model}
    if mine is None:
        return known | {"phase": "waiting"}
    return known | {
        "phase": mine.phase,
        "epoch": mine.epoch,
        "paused": mine.paused,
        "prompt_tokens": mine.prompt_tokens,
        "cached_tokens": mine.cached_tokens,
        "generated": mine.generated,
        "max_tokens": mine.max_tokens,
        "mode": mine.mode,
        "tau": round(mine.tau, 4),
        "priority": mine.priority,
        "seconds": round(mine.seconds, 3),
    }


def _note_end(run: _Run, seconds: float) -> None:
    """Writes the log line of a request, without its text."""
    fields: dict[str, object] = {
        "event": "request",
        "path": "stream-socket",
        "ms": round(1e3 * seconds, 1),
    } | run.caller
    if run.running is not None:
        answer = run.running.answer
        fields |= {
            "model": answer.model,
            "mode": answer.mode,
            "outcome": answer.finish_reason or "unfinished",
            "prompt_tokens": answer.stats.prompt_tokens,
            "tokens": answer.stats.completion_tokens,
            "tau": round(answer.stats.tau, 3),
        }
    _log.info("request", extra={"fields": fields})
