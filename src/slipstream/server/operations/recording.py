"""Recording of conversations as JSON lines, for training drafters; it is off unless a folder is named.

A thread of its own writes, so that no request waits for the disk. Conversations that cannot be written are counted and
dropped, and recording goes on as soon as the disk accepts lines again.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.server.serving.jobs import Answer, Job

log = logging.getLogger("slipstream.server.recording")

FORMAT_VERSION = 1
ROTATE_BYTES = 64 * 2**20  # a file that would become larger is followed by the next one
QUEUE_LENGTH = 1000  # conversations that wait for the disk; further ones are dropped, so that memory stays bounded
_FILE_NAME = re.compile(r"conversations-(\d{6})\.jsonl")


class Recorder:
    """Appends every finished conversation to `conversations-NNNNNN.jsonl` in a folder.

    After `start`, only its thread touches the file. The file is kept as a file object and never as a descriptor number,
    because a number that outlives its file refers to whatever the process opens next, such as a client's connection.
    """

    def __init__(self, folder: Path, rotate_bytes: int = ROTATE_BYTES, queue_length: int = QUEUE_LENGTH) -> None:
        self.folder = folder
        self.written = 0
        self.dropped = 0
        self._rotate_bytes = rotate_bytes
        self._queue: queue.Queue[Callable[[], dict[str, object]] | None] = queue.Queue(queue_length)
        self._thread: threading.Thread | None = None
        self._file: io.FileIO | None = None  # None: the next line opens the file
        self._number = 0
        self._complaints: set[str] = set()

    def start(self) -> None:
        """Opens the folder now, so that a mistake is reported before the first request, and logs where it writes."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._number = max(
                (int(match[1]) for match in map(_FILE_NAME.fullmatch, os.listdir(self.folder)) if match), default=1
            )
            self._file = self._open(self._number)
        except OSError as error:
            raise ConfigError(
                f"conversations cannot be recorded in {self.folder}: {error.strerror}", "name a folder to write to"
            ) from error
        log.warning(
            "recording every conversation, prompts and answers included, in %s",
            self.path,
            extra={"fields": {"event": "recording", "path": str(self.path)}},
        )
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file that lines are written to now."""
        return self._path(self._number)

    def record(self, job: Job, answer: Answer, request_id: str = "") -> None:
        """Queues a finished answer and never waits; failed answers are left out, because training cannot use them."""
        if self._thread is None or answer.finish_reason in (None, "error"):
            return
        try:
            self._queue.put_nowait(partial(entry, job, answer, request_id, datetime.now(UTC)))
        except queue.Full:
            self._lose("the disk is too slow for recording")

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes all queued conversations and closes the file; it gives up on a disk that hangs."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        thread.join(timeout_s)

    def _write_all(self) -> None:
        while (conversation := self._queue.get()) is not None:
            try:
                line = json.dumps(conversation(), ensure_ascii=False, default=str)
                self._write(line.encode("utf-8", "replace") + b"\n")
                self.written += 1
            except OSError as error:
                self._lose(f"recording to {self.path} failed: {error.strerror}")
            except (TypeError, ValueError, RecursionError, MemoryError) as error:
                self._lose(f"a conversation cannot be recorded: {type(error).__name__}")
        self._let_go()

    def _write(self, line: bytes) -> None:
        """Appends a whole line or none; a file that takes only a part of a line is opened again for the next line."""
        file = self._file_for(line)
        size = os.fstat(file.fileno()).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            # Half a line would spoil the next line too. If truncating fails, opening the file again ends the half line.
            with contextlib.suppress(OSError):
                file.truncate(size)
            self._let_go()
            raise

    def _file_for(self, line: bytes) -> io.FileIO:
        """The file for a line: the open one, the next one if it is full, or a new one if the file was deleted."""
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            self._let_go()
        if self._file is None:
            self._file = self._open(self._number)
        size = os.fstat(self._file.fileno()).st_size
        if size and size + len(line) > self._rotate_bytes:
            try:
                following = self._open(self._number + 1)
            except OSError as error:
                self._complain(
                    "recording_overfull",
                    f"{self._path(self._number + 1)} cannot be opened: "
                    f"{error.strerror}; recording goes on in {self.path}",
                )
            else:
                self._let_go()
                self._file, self._number = following, self._number + 1
                return following
        return self._file

    def _let_go(self) -> None:
        """Closes the file. A close that fails has closed the descriptor too, so the reference is dropped first."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._complain("recording_lost", f"closing {self.path} failed: {error.strerror}; lines may be lost")

    def _path(self, number: int) -> Path:
        return self.folder / f"conversations-{number:06d}.jsonl"

    def _open(self, number: int) -> io.FileIO:
        """Opens a file for appending, readable by its owner only; a line that a crash cut off is ended first."""
        path = self._path(number)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = io.FileIO(path, "a+", opener=_open_private)
        try:
            os.fchmod(file.fileno(), 0o600)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        except OSError:
            with contextlib.suppress(OSError):
                file.close()
            raise
        return file

    def _lose(self, reason: str) -> None:
        self.dropped += 1
        self._complain("recording_lost", f"{reason}; conversations are lost, serving goes on")

    def _complain(self, event: str, message: str) -> None:
        """Warns once for each kind of event, because a full disk stays full for many lines."""
        if event not in self._complaints:
            self._complaints.add(event)
            log.warning("%s", message, extra={"fields": {"event": event, "reason": message}})


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def entry(job: Job, answer: Answer, request_id: str, time: datetime) -> dict[str, object]:
    """One line of a recording: the prompt, the answer, the settings, and how many drafted tokens were accepted."""
    stats = answer.stats
    asked: dict[str, object] = (
        {"messages": job.written_messages}
        if job.messages is not None
        else {"prompt": job.prompt if isinstance(job.prompt, str) or job.prompt is None else list(job.prompt)}
    )
    said: dict[str, object] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        said["reasoning_content"] = answer.reasoning
    if answer.calls:
        said["tool_calls"] = [asdict(call) for call in answer.calls]
    line: dict[str, object] = {
        "version": FORMAT_VERSION,
        "time": time.isoformat(timespec="milliseconds"),
        "id": request_id,
        "model": answer.model,
        "draft": answer.draft,
        "draft_lora": stats.draft_lora,
        "mode": answer.mode,
        **asked,
        "answer": said,
        "finish_reason": answer.finish_reason,
        "settings": _plain(job.settings),
        "acceptance": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.completion_tokens,
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "accepted_by_source": stats.accepted_by_source,
            "tau": round(stats.tau, 4),
            "verified_at": list(stats.verified_at),
            "accepted_at": list(stats.accepted_at),
        },
    }
    if answer.tokens:
        line["token_ids"] = [token.id for token in answer.tokens]
    if job.tools:
        line["tools"] = [asdict(tool) for tool in job.tools]
    if job.template_kwargs:
        line["template_kwargs"] = _plain(job.template_kwargs)
    if job.prompt_class:
        line["prompt_class"] = job.prompt_class
    return line


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """Settings as JSON values; a value that JSON does not know is written as text."""
    known = (str, int, float, bool, list, tuple, dict, type(None))
    return {key: value if isinstance(value, known) else str(value) for key, value in values.items()}
