"""Runs work that may crash, hang or use too much memory in a child process that can be ended at any time.

A `Helper` keeps one child process. The child builds one function at its start, and the helper then calls that function
with JSON values, one call after the other. The child is a fresh interpreter and never a fork; it starts with the
helper's first call and ends with the helper.
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
# A call may sleep for this many seconds per second of processor time that it may use. A call sleeps only if it hangs or
# if the machine swaps; a smaller value would end correct calls on a machine that swaps.
_SLEEP_PER_CPU = 5
_START_S = 60.0  # a fresh interpreter starts in 0.2 s; a machine that swaps needs far longer
_END_S = 5.0  # the kernel removes a process in milliseconds; after this time the parent kills it
_PIECE_BYTES = MIB  # the most that one read of the connection asks for
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from slipstream import isolation; isolation.child()"
# The child gets the variables that the interpreter and its libraries need to start, and the time zone. It gets no
# others, because they may hold keys.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ")
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}  # each further heap would take 64 MiB of the limited address space

_NO_MEMORY = "MemoryError"  # the child's word for an allocation that failed

Work = Callable[..., Any]
TimeLeft = Callable[[], float]  # in seconds; it raises TimeoutError when there is none left


class OverrunError(Exception):
    """A call exceeded a limit, or its process ended during the call.

    The message says which, as a phrase without a subject: callers put "it", "the chat template" and so on before it.
    """


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call."""

    cpu_s: int
    memory_bytes: int  # address space beyond what the child uses after its start
    answer_bytes: int
    growth_bytes: int = 0  # a child that keeps more than this between calls is replaced; 0 means half of `memory_bytes`
    wait_s: float = 5.0  # how long a call waits for earlier calls to end before it is refused
    rest: float = 0.0  # pause after a call, as a share of its duration: 1 leaves half of a core to other work


class Helper:
    """Owns one child process and sends it calls. Any thread may call it; one call runs at a time."""

    def __init__(
        self, factory: str, limits: Limits, arguments: Callable[[], Sequence[Any]] = tuple, called: str = "helper"
    ) -> None:
        """`factory` is `module:function`; the child calls it with `arguments()` and gets the function that does the
        work.

        `called` is the helper's name in error messages.
        """
        self._factory = factory
        self._arguments = arguments
        self.limits = limits
        self._called = called
        self._child: _Child | None = None
        self._opening_message: bytes | None = None  # the first message to a new child: what to build, and its limits
        self.lock = threading.Lock()
        self._next_call_at = 0.0  # when the next call may begin
        _helpers.add(self)

    def __call__(self, *values: Any) -> Any:
        """Returns the function's result.

        If the function raised a `SlipstreamError`, the same error is raised here. `OverrunError` says that the call
        exceeded a limit; `BusyError` that earlier calls did not end in time.
        """
        try:
            message = json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            said = f"what the {self._called} is given is not JSON: {error}"
            raise RequestError(said, "use objects, lists, strings and numbers") from None
        if not self.lock.acquire(timeout=self.limits.wait_s):
            raise BusyError(f"the {self._called} has been busy for {self.limits.wait_s:g} s")
        try:
            time.sleep(max(0.0, self._next_call_at - time.monotonic()))
            answer = self._exchange(message)
            if answer["grown_bytes"] > (self.limits.growth_bytes or self.limits.memory_bytes // 2):
                self._end()  # memory that earlier calls left behind must not count against a later call's limit
            return _result(answer, self.limits)
        except BaseException as error:
            if not isinstance(error, SlipstreamError):
                self._end()  # half of an answer may still arrive, and the next call must not read it
            raise
        finally:
            self.lock.release()

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is a child."""
        return self._child.process.pid if self._child is not None else None

    def close(self) -> None:
        """Ends the child; a later call starts another one."""
        with self.lock:
            self._end()

    def forget(self) -> None:
        """Drops the child and the lock in a forked process.

        The child belongs to the process that forked, and a thread that held the lock exists only there.
        """
        self.lock = threading.Lock()
        child, self._child = self._child, None
        if child is not None:
            child.disown()

    def _exchange(self, message: bytes) -> Mapping[str, Any]:
        if self._child is not None and self._child.process.poll() is not None:
            self._end()
        child = self._child or self._start()
        sleep_s, began = self.limits.cpu_s * _SLEEP_PER_CPU, time.monotonic()
        try:
            return child.exchange(message, sleep_s, self.limits.answer_bytes)
        except TimeoutError:
            raise OverrunError(f"slept for more than {sleep_s} s") from None
        except (OSError, EOFError):
            raise OverrunError(_exit_reason(child.status(), self.limits)) from None
        finally:
            now = time.monotonic()
            self._next_call_at = now + self.limits.rest * (now - began)

    def _start(self) -> _Child:
        limits = self.limits
        # kept for later children, because writing a large vocabulary takes a quarter of a second
        if self._opening_message is None:
            arguments = self._arguments()
            self._opening_message = json.dumps([self._factory, arguments, limits.cpu_s, limits.memory_bytes]).encode()
        try:
            self._child = _Child(self)
            _result(self._child.exchange(self._opening_message, _START_S, limits.answer_bytes), limits)
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
    """A child process and the parent's end of its only connection."""

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
        # the finalizer also runs when the interpreter exits
        self.end = weakref.finalize(owner, _end, self.process, self.socket)

    def exchange(self, message: bytes, sleep_s: float, answer_bytes: int) -> Mapping[str, Any]:
        """Returns the answer to a message; raises TimeoutError once the child has slept for `sleep_s` meanwhile."""
        left_s = _patience(self.process.pid, sleep_s)
        self.socket.settimeout(sleep_s)
        _send(self.socket, message)
        answer: Mapping[str, Any] = _receive(self.socket, answer_bytes, left_s)
        return answer

    def status(self) -> int:
        """Returns the exit status of a process that has closed its connection, so that it is gone or about to end."""
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def disown(self) -> None:
        self.end.detach()
        self.socket.close()
        self.process.returncode = 0  # no wait here: only the process that forked can wait for this child


def _patience(pid: int, sleep_s: float) -> TimeLeft:
    """Returns a function that says how long a process may still sleep, and raises TimeoutError if it may not.

    Time in which the process computes does not count, because the kernel limits that time. Time in which it waits for a
    processor does not count either, because it depends on how busy the machine is. The deadline first assumes that the
    process only sleeps. When it is reached, it is put off by the time that did not count.
    """
    deadline = time.monotonic() + sleep_s
    sleeps_until = deadline - _awake_s(pid)

    def left_s() -> float:
        nonlocal deadline
        now = time.monotonic()
        if now >= deadline:
            deadline = sleeps_until + _awake_s(pid)
        if now >= deadline:
            raise TimeoutError
        return deadline - now

    return left_s


def _awake_s(pid: int) -> float:
    """Seconds in which a process has run or waited for a processor; 0 if the kernel does not count them."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            running_ns, queued_ns, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0.0
    return (running_ns + queued_ns) / 1e9


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


def _exit_reason(status: int, limits: Limits) -> str:
    """Says why a process ended, from its exit status."""
    known: dict[int, str] = {
        signal.SIGXCPU: f"took more than {limits.cpu_s} s of processor time",
        signal.SIGSEGV: "was nested too deeply and overflowed its stack",
        signal.SIGABRT: _needs_memory(limits),  # compiled code aborts when an allocation fails
    }
    return known.get(-status, f"was killed by signal {-status}" if status < 0 else f"ended with status {status}")


def _needs_memory(limits: Limits) -> str:
    return f"needed more than {limits.memory_bytes // MIB} MiB of memory"


_helpers: weakref.WeakSet[Helper] = weakref.WeakSet()


def _after_fork() -> None:
    for helper in list(_helpers):
        helper.forget()


os.register_at_fork(after_in_child=_after_fork)


# A message on the connection is the length of its JSON text in 8 bytes, and the text.


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)))
    connection.sendall(message)


def _receive(connection: socket.socket, most_bytes: int | None = None, left_s: TimeLeft | None = None) -> Any:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, left_s))
    if most_bytes is not None and length > most_bytes:
        raise OverrunError(f"gave more than {most_bytes // MIB} MiB")
    return json.loads(_receive_exactly(connection, length, left_s).decode("utf-8", "surrogatepass"))


def _receive_exactly(connection: socket.socket, count: int, left_s: TimeLeft | None) -> bytearray:
    found = bytearray()
    while len(found) < count:
        if left_s is not None:
            connection.settimeout(left_s())
        try:
            piece = connection.recv(min(count - len(found), _PIECE_BYTES))
        except TimeoutError:
            continue
        if not piece:
            raise EOFError
        found += piece
    return found


# The functions below run in the child.


def child() -> None:
    """Runs the child: it builds its function and then answers calls until the parent closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # these signals are meant for the parent; when the parent ends, the connection closes and the child ends too
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection, contextlib.suppress(EOFError, OSError):
        factory, arguments, cpu_s, memory_bytes = _receive(connection)
        work = _answer(connection, 0, _build_work, factory, arguments)
        del arguments
        start_bytes = _address_space_bytes()
        while work is not None:
            values = _receive(connection)
            _limit_next(cpu_s, memory_bytes)
            _answer(connection, start_bytes, work, *values)
            del values


def _build_work(factory: str, arguments: Sequence[Any]) -> Work:
    module, _, name = factory.partition(":")
    work: Work = getattr(importlib.import_module(module), name)(*arguments)
    return work


def _answer(connection: socket.socket, start_bytes: int, work: Work, *values: Any) -> Any:
    """Calls `work` and sends its outcome to the parent; returns the result. A callable result is sent as None."""
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
    except BaseException as error:  # a panic in compiled code is not an Exception
        message = say(failed=f"failed with {type(error).__name__}: {str(error)[:300]}")
    _send(connection, message)
    return result


def _limit_next(cpu_s: int, memory_bytes: int) -> None:
    """Makes the kernel end the next call at its limits of processor time and memory.

    The kernel does so even if compiled code holds the interpreter's lock.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    until_s = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
    until_bytes = _address_space_bytes() + memory_bytes
    for kind, value in ((resource.RLIMIT_CPU, until_s), (resource.RLIMIT_AS, until_bytes)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
