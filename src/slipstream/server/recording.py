"""Opt-in recording of conversations as JSON lines, meant for training drafters; off unless a folder is named.

A thread of its own writes, so that nobody waits for the disk: what cannot be written is counted and dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.server.jobs import Answer, Job

log = logging.getLogger("slipstream.server.recording")

FORMAT_VERSION = 1
ROTATE_BYTES = 64 * 2**20
QUEUE_LENGTH = 1000
_FILE_NAME = re.compile(r"conversations-(\d{6})\.jsonl")


@dataclass(frozen=True, slots=True)
class _Item:
    time: datetime
    job: Job
    answer: Answer
    request_id: str


class Recorder:
    """Appends every finished conversation to `conversations-NNNNNN.jsonl` in a folder; without one it does nothing."""

    def __init__(self, folder: Path | None, rotate_bytes: int = ROTATE_BYTES, queue_length: int = QUEUE_LENGTH) -> None:
        self.folder = folder
        self.written = 0
        self.dropped = 0
        self._rotate_bytes = rotate_bytes
        self._queue: queue.Queue[_Item | None] = queue.Queue(queue_length)
        self._thread: threading.Thread | None = None
        self._file = -1
        self._number = 0
        self._complained = False

    @property
    def active(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Opens the folder (a mistake is told now, not at the first request) and says where it writes."""
        if self.folder is None or self._thread is not None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._number = max((int(match[1]) for match in map(_FILE_NAME.fullmatch, os.listdir(self.folder)) if match),
                               default=1)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"conversations cannot be recorded in {self.folder}: {error.strerror}", "name a folder to write to"
            ) from error
        log.warning(
            "recording every conversation, prompts and answers included, in %s", self.path,
            extra={"fields": {"event": "recording", "path": str(self.path)}},
        )
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path | None:
        """The file written to now."""
        return None if self.folder is None else self.folder / f"conversations-{self._number:06d}.jsonl"

    def record(self, job: Job, answer: Answer, request_id: str = "") -> None:
        """Queues a finished answer; never waits. Failed ones teach nothing and are left out."""
        if self._thread is None or answer.finish_reason in (None, "error"):
            return
        try:
            self._queue.put_nowait(_Item(datetime.now(UTC), job, answer, request_id))
        except queue.Full:
            self._lose("the disk is too slow for recording")

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes what is queued and closes the file; gives up on a disk that hangs."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        thread.join(timeout_s)
        if not thread.is_alive():
            os.close(self._file)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                line = json.dumps(entry(item.job, item.answer, item.request_id, item.time), ensure_ascii=False,
                                  default=str)
                self._write(line.encode("utf-8", "replace") + b"\n")
                self.written += 1
            except OSError as error:
                self._lose(f"recording to {self.path} failed: {error.strerror}")
            except (TypeError, ValueError, RecursionError) as error:
                self._lose(f"a conversation cannot be recorded: {type(error).__name__}")

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        if size and size + len(line) > self._rotate_bytes:
            os.close(self._file)
            self._number += 1
            self._open()
            size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            # half a line would spoil the next one as well
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise

    def _open(self) -> None:
        """Opens the current file for appending, readable by its owner only; a line cut off by a crash is ended."""
        assert self.path is not None
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o600)
        os.fchmod(self._file, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def _lose(self, reason: str) -> None:
        self.dropped += 1
        if not self._complained:
            self._complained = True
            log.warning("%s; conversations are lost, serving goes on", reason,
                        extra={"fields": {"event": "recording_lost", "reason": reason}})


def entry(job: Job, answer: Answer, request_id: str, time: datetime) -> dict[str, object]:
    """One line: what was asked, what was answered and how well it was drafted."""
    stats = answer.stats
    asked: dict[str, object] = {"messages": [dict(message) for message in job.messages]} if job.messages is not None \
        else {"prompt": job.prompt if isinstance(job.prompt, str) or job.prompt is None else list(job.prompt)}
    said: dict[str, object] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        said["reasoning_content"] = answer.reasoning
    if answer.calls:
        said["tool_calls"] = [asdict(call) for call in answer.calls]
    line: dict[str, object] = {
        "version": FORMAT_VERSION, "time": time.isoformat(timespec="milliseconds"), "id": request_id,
        "model": answer.model, "draft": answer.draft, "draft_lora": stats.draft_lora, "mode": answer.mode,
        **asked, "answer": said,
        "finish_reason": answer.finish_reason, "settings": _plain(job.settings),
        "acceptance": {
            "prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.completion_tokens, "steps": stats.steps,
            "drafted": stats.drafted, "accepted": stats.accepted, "tau": round(stats.tau, 4),
            "verified_at": list(stats.verified_at), "accepted_at": list(stats.accepted_at),
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
    """Settings as JSON has them; what it does not know is written as text."""
    known = (str, int, float, bool, list, tuple, dict, type(None))
    return {key: value if isinstance(value, known) else str(value) for key, value in values.items()}
