"""Work that may crash, hang or swallow memory, in a child process that may be ended at any time.

A `Helper` keeps one child. It makes a function there, once, and calls it with JSON values, one call after the other.
The child is a fresh interpreter, never a fork; it starts with the first call and ends with its helper.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream import errors
from slipstream.errors import BusyError, RequestError, SlipstreamError

MIB = 2**20
_LENGTH = struct.Struct("!Q")
_WALL_PER_CPU = 5  # on a busy machine a second of processor time takes several on the clock
_START_S = 60.0  # a fresh interpreter needs 0.2 s; a machine that swaps needs longer
_END_S = 5.0  # the kernel needs milliseconds to take a process down
_PIECE_BYTES = MIB
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from slipstream import isolation; isolation.child()"
# What the interpreter and its libraries need to start, and the time zone; no key goes to the child.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ")
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}  # each further heap would take 64 MiB of the address space that is limited

_NO_MEMORY = "MemoryError"

Work = Callable[..., Any]


class OverrunError(Exception):
    """A call passed a limit or took its process with it; the message says which, and goes on from "it"."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may take."""

    cpu_s: int
    memory_bytes: int  # beyond what the child has after its start
    answer_bytes: int
    growth_bytes: int = 0  # a child that keeps more than this between calls is replaced; 0: half of `memory_bytes`
    wait_s: float = 5.0  # for other calls to end
    rest: float = 0.0  # of the time of a call must pass before the next begins: 1 leaves half of a core to others


class Helper:
    """One child process and what it is asked to do; any thread may call, one call runs at a time."""

    def __init__(
        self, factory: str, limits: Limits, arguments: Callable[[], Sequence[Any]] = tuple, called: str = "helper"
    ) -> None:
        """`factory` is `module:function`; called with `arguments()` in the child it gives the function that works."""
        self._factory = factory
        self._arguments = arguments
        self.limits = limits
        self._called = called
        self._child: _Child | None = None
        self._first: bytes | None = None  # what a new child is told
        self.lock = threading.Lock()
        self._rested_at = 0.0  # when the next call may begin
        _helpers.add(self)

    def __call__(self, *values: Any) -> Any:
        """The function's result; what it raised if that is an error of ours; `OverrunError` if it passed a limit."""
        message = self._message(values)
        if not self.lock.acquire(timeout=self.limits.wait_s):
            raise BusyError(f"the {self._called} has been busy for {self.limits.wait_s:g} s")
        try:
            time.sleep(max(0.0, self._rested_at - time.monotonic()))
            answer = self._exchange(message)
            if answer["grown_bytes"] > (self.limits.growth_bytes or self.limits.memory_bytes // 2):
                self._end()  # what earlier calls left behind must not become a later call's limit
            return _result(answer, self.limits)
        except BaseException as error:
            if not isinstance(error, SlipstreamError):
                self._end()  # half an answer may still be on its way, and must not become the next call's
            raise
        finally:
            self.lock.release()

    def _message(self, values: Sequence[Any]) -> bytes:
        try:
            return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            message = f"what the {self._called} is given is not JSON: {error}"
            raise RequestError(message, "use objects, lists, strings and numbers") from None

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return self._child.process.pid if self._child is not None else None

    def close(self) -> None:
        """Ends the child; a later call starts another."""
        with self.lock:
            self._end()

    def forget(self) -> None:
        """In a forked process: the child is the other process's, and so is whatever holds the lock."""
        self.lock = threading.Lock()
        child, self._child = self._child, None
        if child is not None:
            child.disown()

    def _exchange(self, message: bytes) -> Mapping[str, Any]:
        if self._child is not None and self._child.process.poll() is not None:
            self._end()
        child = self._child or self._start()
        wall_s, began = self.limits.cpu_s * _WALL_PER_CPU, time.monotonic()
        try:
            return child.exchange(message, wall_s, self.limits.answer_bytes)
        except TimeoutError:
            raise OverrunError(f"took more than {wall_s} s") from None
        except (OSError, EOFError):
            raise OverrunError(_cause(child.status(), self.limits)) from None
        finally:
            now = time.monotonic()
            self._rested_at = now + self.limits.rest * (now - began)

    def _start(self) -> _Child:
        limits = self.limits
        if self._first is None:  # kept: a large vocabulary takes a quarter of a second to write
            arguments = self._arguments()
            self._first = json.dumps([self._factory, arguments, limits.cpu_s, limits.memory_bytes]).encode()
        try:
            self._child = _Child(self)
            _result(self._child.exchange(self._first, _START_S, limits.answer_bytes), limits)
        except (OSError, EOFError, OverrunError) as error:
            self._end()
            reason = str(error) or type(error).__name__
            raise BusyError(f"the {self._called} cannot start: {reason}", "the machine may lack memory") from None
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A process and our end of the only connection it has."""

    def __init__(self, owner: Helper) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self.socket, child_end = socket.socketpair()
        with child_end:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path)],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, **_ONE_HEAP},
                start_new_session=True,
            )
        # also runs when the interpreter exits
        self.end = weakref.finalize(owner, _end, self.process, self.socket)

    def exchange(self, message: bytes, seconds: float, answer_bytes: int) -> Mapping[str, Any]:
        deadline = time.monotonic() + seconds
        self.socket.settimeout(seconds)
        _send(self.socket, message)
        received = _received(self.socket, answer_bytes, deadline)
        answer: Mapping[str, Any] = json.loads(received.decode("utf-8", "surrogatepass"))
        return answer

    def status(self) -> int:
        """The exit status of a process that has closed its end, so that it is gone or about to be."""
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def disown(self) -> None:
        self.end.detach()
        self.socket.close()
        self.process.returncode = 0  # not ours to wait for


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()


def _result(answer: Mapping[str, Any], limits: Limits) -> Any:
    if "result" in answer:
        return answer["result"]
    if "raised" in answer:
        kind, message, hint = answer["raised"]
        raise getattr(errors, kind)(message, hint)
    raise OverrunError(_needs_memory(limits) if answer["failed"] == _NO_MEMORY else answer["failed"])


def _cause(status: int, limits: Limits) -> str:
    """Why a process is gone, from its exit status."""
    known: dict[int, str] = {
        signal.SIGXCPU: f"took more than {limits.cpu_s} s of processor time",
        signal.SIGSEGV: "was nested too deeply and overflowed its stack",
        signal.SIGABRT: _needs_memory(limits),  # compiled code ends itself where an allocation fails
    }
    return known.get(-status, f"was killed by signal {-status}" if status < 0 else f"ended with status {status}")


def _needs_memory(limits: Limits) -> str:
    return f"needed more than {limits.memory_bytes // MIB} MiB of memory"


_helpers: weakref.WeakSet[Helper] = weakref.WeakSet()


def _after_fork() -> None:
    for helper in list(_helpers):
        helper.forget()


os.register_at_fork(after_in_child=_after_fork)


# The messages: a length and JSON.


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)))
    connection.sendall(message)


def _received(connection: socket.socket, most_bytes: int | None = None, deadline: float = math.inf) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if most_bytes is not None and length > most_bytes:
        raise OverrunError(f"gave more than {most_bytes // MIB} MiB")
    return _exactly(connection, length, deadline)


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < count:
        if deadline != math.inf:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(min(count - len(found), _PIECE_BYTES))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


# The child's side.


def child() -> None:
    """The child's whole life: it makes its function, then answers until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the parent, whose end is the child's
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection, contextlib.suppress(EOFError, OSError):
        factory, arguments, cpu_s, memory_bytes = json.loads(_received(connection))
        work = _answer(connection, 0, _made, factory, arguments)
        del arguments
        start_bytes = _address_space_bytes()
        while work is not None:
            values = json.loads(_received(connection).decode("utf-8", "surrogatepass"))
            _limit_next(cpu_s, memory_bytes)
            _answer(connection, start_bytes, work, *values)
            del values


def _made(factory: str, arguments: Sequence[Any]) -> Work:
    module, _, name = factory.partition(":")
    work: Work = getattr(importlib.import_module(module), name)(*arguments)
    return work


def _answer(connection: socket.socket, start_bytes: int, work: Work, *values: Any) -> Any:
    """Calls and says what came of it; the result is returned too, and a function is only said to be there."""
    result = None

    def say(**answer: Any) -> bytes:
        answer["grown_bytes"] = _address_space_bytes() - start_bytes
        return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")

    try:
        result = work(*values)
        message = say(result=None if callable(result) else result)
    except SlipstreamError as error:
        message = say(raised=[type(error).__name__, error.message, error.hint])
    except MemoryError:
        message = say(failed=_NO_MEMORY)
    except BaseException as error:  # a panic of compiled code is no Exception
        message = say(failed=f"failed with {type(error).__name__}: {str(error)[:300]}")
    _send(connection, message)
    return result


def _limit_next(cpu_s: int, memory_bytes: int) -> None:
    """The kernel ends a call that takes longer, whatever holds the interpreter's lock, and gives it no more memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until_s = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
    _set_limit(resource.RLIMIT_CPU, until_s)
    _set_limit(resource.RLIMIT_AS, _address_space_bytes() + memory_bytes)


def _set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
