"""Recorded conversations: what a line holds, rotation, rights, and a disk that is full or slow."""

from __future__ import annotations

import io
import json
import logging
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.server.operations.recording import Recorder
from slipstream.server.serving.jobs import Answer, Job, Tool, ToolCall
from slipstream.stats import RequestStats
from slipstream.types import Mode, TokenOut


def job(text: str = "hello") -> Job:
    return Job("m", messages=[{"role": "user", "content": text}], settings={"temperature": 0.7, "mode": Mode("auto")})


def answer(text: str = "hi there", reason: Any = "stop") -> Answer:
    stats = RequestStats(prompt_tokens=5, completion_tokens=4)
    stats.record_step(4, 4, 3, 4)
    return Answer("m", "auto", "drafter", content=text, finish_reason=reason, stats=stats)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_bytes().splitlines()]


def recorded(folder: Path, *answers: tuple[Job, Answer], **settings: int) -> Recorder:
    recorder = Recorder(folder, **settings)
    recorder.start()
    for number, (asked, said) in enumerate(answers):
        recorder.record(asked, said, f"r{number}")
    recorder.close()
    return recorder


def test_a_line_holds_the_conversation_and_its_acceptance(tmp_path: Path) -> None:
    said = answer("grüße 😀 \ud800")
    said.reasoning, said.calls = "hm", [ToolCall("c1", "look", '{"a": 1}')]
    said.tokens = [TokenOut(7), TokenOut(9, drafted=True)]
    asked = Job("m", messages=[{"role": "user", "content": "q"}], tools=[Tool("look")], prompt_class="code")
    recorded(tmp_path / "new" / "folder", (asked, said))
    (line,) = lines(tmp_path / "new" / "folder")
    assert line["messages"] == [{"role": "user", "content": "q"}]
    assert line["answer"] == {
        "role": "assistant",
        "content": "grüße 😀 ?",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "name": "look", "arguments": '{"a": 1}'}],
    }
    assert (line["id"], line["model"], line["draft"], line["mode"]) == ("r0", "m", "drafter", "auto")
    assert (line["token_ids"], line["prompt_class"], line["finish_reason"]) == ([7, 9], "code", "stop")
    assert line["acceptance"]["tau"] == 4 and line["acceptance"]["accepted_at"] == [1, 1, 1, 0]
    assert line["tools"][0]["name"] == "look"


def test_arguments_of_earlier_calls_are_text_in_every_line(tmp_path: Path) -> None:
    """The APIs hand them over as text or as an object; readers of recordings meet one type."""
    arguments: list[Any] = [{"ü": [1]}, '{"b": 2}']
    calls: list[dict[str, Any]] = [{"id": "c", "function": {"name": "f", "arguments": given}} for given in arguments]
    conversation: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "user", "content": "q"},
    ]
    recorded(tmp_path, (Job("m", messages=conversation), answer()))
    (line,) = lines(tmp_path)
    assert [call["function"]["arguments"] for call in line["messages"][0]["tool_calls"]] == ['{"ü": [1]}', '{"b": 2}']
    assert calls[0]["function"]["arguments"] == {"ü": [1]}, "the template still reads the object"


def test_prompts_and_settings_are_written_as_json_knows_them(tmp_path: Path) -> None:
    recorded(tmp_path, (Job("m", prompt=(1, 2, 3)), answer()), (Job("m", prompt="raw"), answer()), (job(), answer()))
    ids, text, chat = lines(tmp_path)
    assert ids["prompt"] == [1, 2, 3] and text["prompt"] == "raw" and "messages" not in text
    assert chat["settings"] == {"temperature": 0.7, "mode": "auto"}


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    recorder = recorded(folder, (job(), answer()))
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    recorder.path.chmod(0o644)
    recorded(folder, (job(), answer()))
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600, "an older file that is open to others is closed"


def test_it_says_where_it_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream.server.recording")
    recorded(tmp_path)
    assert str(tmp_path / "conversations-000001.jsonl") in caplog.text


def test_files_rotate_and_a_new_start_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    long = [(job("x" * 300), answer()) for _ in range(10)]
    recorded(tmp_path, *long, rotate_bytes=2000)
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) > 2 and all(file.stat().st_size <= 2000 for file in files)
    recorded(tmp_path, *long, rotate_bytes=2000)
    assert len(lines(tmp_path)) == 20
    assert sorted(tmp_path.glob("*.jsonl"))[: len(files) - 1] == files[:-1], "full files are left alone"
    recorded(tmp_path / "one", (job("y" * 5000), answer()), (job("z" * 5000), answer()), rotate_bytes=100)
    assert len(list((tmp_path / "one").iterdir())) == 2, "a line larger than a file has one of its own"


def test_a_line_cut_off_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "conversations-000001.jsonl").write_bytes(b'{"half": ')
    recorded(tmp_path, (job(), answer()))
    cut, whole = (tmp_path / "conversations-000001.jsonl").read_bytes().splitlines()
    assert cut == b'{"half": ' and json.loads(whole)["model"] == "m"


def test_failed_and_unfinished_answers_are_left_out(tmp_path: Path) -> None:
    recorded(tmp_path, *((job(), answer(reason=reason)) for reason in ("error", None, "cancelled")))
    assert [line["finish_reason"] for line in lines(tmp_path)] == ["cancelled"]


def test_a_full_disk_warns_once_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = io.FileIO("/dev/full", "r+")

    class Full(io.FileIO):
        """A file whose writes go to a real device that has no space left."""

        def write(self, data: Any) -> int:
            return real.write(data)

    recorder = Recorder(tmp_path)
    monkeypatch.setattr(io, "FileIO", Full)
    recorder.start()
    for _ in range(5):
        recorder.record(job(), answer())
    recorder.close()
    assert (recorder.written, recorder.dropped) == (0, 5)
    complaints = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
    assert len(complaints) == 1 and "No space left on device" in complaints[0]
    real.close()


def test_a_slow_disk_loses_lines_instead_of_making_anybody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(io.FileIO):
        """A file whose writes take as long as the gate is closed."""

        def write(self, data: Any) -> int:
            gate.wait(20)
            return super().write(data)

    recorder, gate = Recorder(tmp_path, queue_length=2), threading.Event()
    monkeypatch.setattr(io, "FileIO", Slow)
    recorder.start()
    for _ in range(10):
        recorder.record(job(), answer())
    assert 7 <= recorder.dropped <= 8
    gate.set()
    recorder.close()
    assert recorder.written == 10 - recorder.dropped == len(lines(tmp_path))


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be recorded"):
        Recorder(tmp_path / "file").start()
    (tmp_path / "conversations-000001.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be recorded"):
        Recorder(tmp_path).start()
    assert not (tmp_path / "elsewhere").exists()
