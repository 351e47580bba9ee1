"""Lets every file operation fail once while foreign sockets take each freed descriptor: no byte may reach them.

Code that writes files runs again and again. In each run one call of one kind (open, write, close, ...) fails with one
error. Whenever a descriptor is closed, a socket pair is opened at once, which gets the freed number.
"""

# mypy: disable-error-code="attr-defined, list-item, unused-ignore"

from __future__ import annotations

import builtins
import contextlib
import errno
import gc
import io
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.bench import rival
from slipstream.cli.trace import Trace
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.formats.atomic import atomic_file
from slipstream.formats.gguf import parse_header
from slipstream.formats.gguf_write import TensorPlan, write_gguf
from slipstream.server.operations.recording import Recorder
from slipstream.stats import Decision
from slipstream.types import GenEvent, Proposal, StepRecord, Verdict
from tests.unit.test_recording import answer, job, lines

ERRORS = (errno.EMFILE, errno.ENOSPC, errno.ENOENT, errno.EIO, errno.EACCES)
KINDS = ("open", "write", "read", "close", "fsync", "truncate", "stat", "chmod")
ANY = "any"


Fault = tuple[str, int, int, int]  # the kind of call, the first call that fails, how many fail, and their error
NO_FAULT: Fault = ("", 0, 0, 0)


class Disk:
    """Counts the calls of each kind, lets some of them fail, and opens a decoy when a descriptor becomes free."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failing = NO_FAULT
        self.decoys: list[tuple[socket.socket, socket.socket]] = []

    def comes(self, kind: str) -> None:
        """Counts one call of a kind, and raises if this call has to fail."""
        name, first, times, error = self.failing
        self.calls.update((kind, ANY))
        if name in (kind, ANY) and first < self.calls[name] <= first + times:
            raise OSError(error, os.strerror(error))

    def freed(self) -> None:
        """Opens a decoy on a freed number, as the next client that connects to a server would do."""
        self.decoys.append(socket.socketpair())

    def check(self) -> None:
        """Checks that nothing was written to a decoy, and that none was closed."""
        for pair in self.decoys:
            for end in pair:
                with contextlib.suppress(BlockingIOError):
                    seen = end.recv(200, socket.MSG_DONTWAIT)
                    raise AssertionError(f"a foreign socket received {seen!r}")
        self.drop_decoys()

    def drop_decoys(self) -> None:
        for pair in self.decoys:
            for end in pair:
                end.detach() if _is_gone(end) else end.close()
        self.decoys.clear()


def _is_gone(end: socket.socket) -> bool:
    try:
        os.fstat(end.fileno())
    except OSError:
        return True
    return False


def _failing_class(disk: Disk) -> type[io.FileIO]:
    real = io.FileIO

    class FailingFile(real):  # type: ignore[misc,valid-type]
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            disk.comes("open")
            super().__init__(file, mode, closefd, opener)

        def write(self, data: Any) -> int:
            try:
                disk.comes("write")
            except OSError:
                super().write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])  # half of it is written
                raise
            return super().write(data)

        def read(self, size: int = -1) -> bytes:
            disk.comes("read")
            return super().read(size)

        def truncate(self, size: int | None = None) -> int:
            disk.comes("truncate")
            return super().truncate(size)

        def close(self) -> None:
            if self.closed:
                return
            super().close()
            disk.freed()
            disk.comes("close")  # a close that fails has nevertheless freed its number

    return FailingFile


def _failing_open(raw: type[io.FileIO]) -> Callable[..., Any]:
    """A replacement of `open` for files that fail."""

    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        found = raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return found
        buffered = io.BufferedReader(found) if mode[0] == "r" else io.BufferedWriter(found)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return opened


@contextmanager
def failing_disk() -> Iterator[Disk]:
    """Routes all file operations of this process through a disk that fails when it is told to."""
    disk, patch = Disk(), pytest.MonkeyPatch()
    system = {
        "open": ("open",),
        "write": ("write", "pwrite"),
        "read": ("read", "pread"),
        "close": ("close",),
        "fsync": ("fsync", "fdatasync"),
        "truncate": ("ftruncate",),
        "stat": ("fstat",),
        "chmod": ("fchmod",),
    }

    def failing(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:
            if kind == "close":
                call(*arguments)
                disk.freed()
                return disk.comes(kind)
            disk.comes(kind)
            return call(*arguments, **named)

        return changed

    for kind, names in system.items():
        for name in names:
            patch.setattr(os, name, failing(kind, getattr(os, name)))
    raw = _failing_class(disk)
    patch.setattr(io, "FileIO", raw)
    for module in (io, builtins):
        patch.setattr(module, "open", _failing_open(raw))
    try:
        yield disk
    finally:
        patch.undo()
        disk.drop_decoys()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def every_fault(calls: Counter[str]) -> Iterator[Fault]:
    """Each call alone, with all calls after it, and with others of its kind, each with every error."""
    for error in ERRORS:
        for first in range(calls[ANY]):
            yield ANY, first, 1, error
            yield ANY, first, 4, error
        for kind in KINDS:
            for first in range(calls[kind]):
                yield kind, first, 4, error


def with_every_fault(run: Callable[[Path, Fault, Disk], None], tmp_path: Path) -> Counter[str]:
    """Runs something without a fault, to count its calls, and then once for every fault; returns the calls."""
    gc.collect()  # what earlier tests have left closes its descriptors now and not in the middle of a count
    with failing_disk() as disk:
        faults: list[Fault] = [NO_FAULT]
        calls: Counter[str] = Counter()
        for number, fault in enumerate(faults):
            folder, before = tmp_path / str(number), descriptors()
            folder.mkdir()
            disk.calls.clear()
            disk.failing = fault
            try:
                run(folder, fault, disk)
                disk.failing = NO_FAULT
                disk.check()
                assert descriptors() == before, "a descriptor stayed open"
            except AssertionError as error:
                raise AssertionError(f"with the fault {fault}: {error}") from error
            if fault is NO_FAULT:
                calls = disk.calls.copy()
                faults += every_fault(calls)
        return calls


ASKED = ["a" * 300, "b" * 300, "c" * 900, "d", "e" * 300]  # with files of 1,000 bytes they cause several rotations
HALF_A_LINE = b'{"cut'


def record_and_recover(folder: Path, fault: Fault, disk: Disk) -> None:
    """Starts on a file whose last line is incomplete, rotates, and writes again as soon as the faults are over."""
    recorder = Recorder(folder, rotate_bytes=1000)
    first = folder / "conversations-000001.jsonl"
    disk.failing = NO_FAULT
    first.write_bytes(HALF_A_LINE)
    disk.calls.clear()
    disk.failing = fault
    try:
        recorder.start()
    except ConfigError:
        assert fault is not NO_FAULT
        return
    for text in ASKED:
        recorder.record(job(text), answer())
    patience = time.monotonic() + 60
    while recorder.written + recorder.dropped < len(ASKED):
        assert "recorder" in {thread.name for thread in threading.enumerate()}, "the recorder has died"
        assert time.monotonic() < patience, "the recorder hangs"
        time.sleep(0.0002)
    seen, disk.failing = disk.calls.copy(), NO_FAULT
    recorder.record(job("afterwards"), answer())
    recorder.close()
    disk.check()
    disk.calls = seen
    assert recorder.dropped <= fault[2] + (fault is not NO_FAULT), "more lines were lost than calls failed"
    whole = []
    for line in b"".join(file.read_bytes() for file in sorted(folder.iterdir())).splitlines():
        try:
            whole.append(json.loads(line)["messages"][0]["content"])
        except ValueError:
            in_vain = fault[0] == ANY and fault[2] > 1  # truncating may have failed as well, so half a line stays
            assert line == HALF_A_LINE or (in_vain and line.startswith(b'{"version"')), f"half a line: {line!r}"
    assert len(whole) == recorder.written and whole[-1] == "afterwards"
    assert whole == [text for text in [*ASKED, "afterwards"] if text in whole], "lines are incomplete or out of order"


def test_a_conversation_never_reaches_a_stranger_and_recording_recovers(tmp_path: Path) -> None:
    calls = with_every_fault(record_and_recover, tmp_path)
    assert calls["write"] > len(ASKED) and calls["open"] > 2 and calls["close"] > 1, "files were not rotated"


def test_recording_goes_on_in_a_full_file_and_after_its_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    with failing_disk() as disk:
        recorder = Recorder(folder, rotate_bytes=500)
        recorder.start()
        disk.failing = ("open", disk.calls["open"], 100, errno.EMFILE)
        for text in ASKED:
            recorder.record(job(text), answer())
        while recorder.written + recorder.dropped < len(ASKED):
            time.sleep(0.0002)
        assert recorder.dropped == 0 and len(list(folder.iterdir())) == 1
        disk.failing = NO_FAULT
        shutil.rmtree(folder)
        recorder.record(job("afterwards"), answer())
        recorder.close()
        disk.check()
    assert [line["messages"][0]["content"] for line in lines(folder)] == ["afterwards"]


def replace_a_file(folder: Path, fault: Fault, disk: Disk) -> None:
    with contextlib.suppress(SlipstreamError), atomic_file(folder / "file") as file:
        file.write(b"a" * 100_000)  # more than a buffer, so that a part is written before the end
        file.write(b"b" * 10)
    disk.failing = NO_FAULT
    found = [path.name for path in folder.iterdir()]
    assert found in ([], ["file"]), f"something else was left behind: {found}"
    assert not found or (folder / "file").read_bytes() == b"a" * 100_000 + b"b" * 10, "an incomplete file has its name"


def write_a_model(folder: Path, fault: Fault, disk: Disk) -> None:
    data = np.arange(4096, dtype=np.float32)
    plan = TensorPlan("t", "F32", data.shape, lambda: [data])
    with contextlib.suppress(SlipstreamError):
        write_gguf(folder / "model.gguf", {}, [plan])
    disk.failing = NO_FAULT
    for path in folder.iterdir():
        (tensor,) = parse_header(path.read_bytes(), path.name).tensors
        assert path.name == "model.gguf" and path.stat().st_size >= tensor.end


def write_a_trace(folder: Path, fault: Fault, disk: Disk) -> None:
    step = StepRecord(3, Proposal((1,), (-1,)), Verdict((0,), (2,)), Decision("plain"), 0.0, 1.0)
    with contextlib.suppress(SlipstreamError), Trace(str(folder / "trace")) as trace:
        for _ in range(3):
            trace.record("plain", GenEvent("r", [], "", step=step), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [replace_a_file, write_a_model, write_a_trace])
def test_what_writes_files_touches_no_foreign_descriptor(
    run: Callable[[Path, Fault, Disk], None], tmp_path: Path
) -> None:
    calls = with_every_fault(run, tmp_path)
    assert calls["open"] and calls["write"] and calls["close"]


def test_a_rival_that_died_leaves_neither_a_process_nor_a_pipe() -> None:
    class Mortal(rival.PackageRival):
        def __init__(self) -> None:
            rival.Rival.__init__(self, ["true"], subprocess.PIPE, subprocess.PIPE)

    before = descriptors()
    with pytest.raises(SlipstreamError, match="ended unexpectedly"), Mortal() as dead:
        dead.process.wait()
        dead.complete([1, 2], 4)
    assert dead.process.returncode == 0 and descriptors() == before
