"""Helpers: whatever a child process does becomes an ordinary answer, and no child outlives its helper."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream import isolation
from slipstream.errors import BusyError, RequestError
from slipstream.isolation import MIB, Helper, Limits, OverrunError

ROOT = Path(__file__).parents[2]
WORK = "tests.isolated_work:worker"
LIMITS = Limits(cpu_s=1, memory_bytes=128 * MIB, answer_bytes=MIB)


def gone(pid: int, seconds: float = 30.0) -> bool:
    """Whether a process ends, or is a zombie whose parent has not read its status yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
        except OSError:
            return True
        if state.startswith(("Z", "X")):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    found = Helper(WORK, LIMITS)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("task", "value", "said"),
    [
        ("signal", int(signal.SIGSEGV), "overflowed its stack"),
        ("signal", int(signal.SIGKILL), "was killed by signal 9"),
        ("abort", None, "needed more than 128 MiB of memory"),
        ("repeat", 10**9, "needed more than 128 MiB of memory"),
        ("power", 9, "took more than 1 s of processor time"),
        ("long", MIB, "gave more than 1 MiB"),
        ("exit", 3, "ended with status 3"),
        ("raise", "foreign", "failed with KeyError: 'foreign'"),
    ],
)
def test_an_end_is_an_answer_and_the_next_call_works(helper: Helper, task: str, value: Any, said: str) -> None:
    with pytest.raises(OverrunError, match=said):
        helper(task, value)
    assert helper("echo", "fine") == "fine"


@pytest.mark.slow
def test_a_call_that_sleeps_is_ended(helper: Helper) -> None:
    with pytest.raises(OverrunError, match="slept for more than 5 s"):
        helper("sleep", 100)
    assert helper("echo", "fine") == "fine"


@pytest.mark.slow
@pytest.mark.sampled(0)  # 14 s of a core: `make verify` runs it
def test_a_busy_machine_does_not_count_as_sleep(helper: Helper) -> None:
    """Seven processes share a core, so a second of processor time takes longer than the call might sleep."""
    assert helper("echo", "fine") == "fine" and helper.pid is not None
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(helper.pid, {core})
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) for _ in range(6)]
    began = time.monotonic()
    try:
        with pytest.raises(OverrunError, match="took more than 1 s of processor time"):
            helper("power", 9)
        assert time.monotonic() - began > 5, "the machine was not busy"
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_values_and_our_errors_come_as_they_are(helper: Helper) -> None:
    value = {"a": [1, 2.5, None, True, "é\ud800🙂\n"], "empty": {}}
    assert helper("echo", value) == value
    pid = helper.pid
    with pytest.raises(RequestError, match=r"^too long \(a hint\)$"):
        helper("raise", "too long")
    with pytest.raises(RequestError, match="is not JSON"):
        helper("echo", object())
    assert helper("greet", None) == "hello" and helper.pid == pid, "an error of ours costs no process"


def test_the_child_gets_nothing_of_its_parent(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    helper.close()
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    with open(ROOT / "README.md") as file:
        os.set_inheritable(file.fileno(), True)
        seen = helper("surroundings", None)
    assert "secret" not in seen["environment"].values()
    links = set(seen["descriptors"].values())
    assert all(link == "/dev/null" or link.startswith("socket:") for link in links), links
    assert seen["session"] == seen["pid"] and seen["core"] == 0
    helper("ignored", [int(signal.SIGINT), int(signal.SIGTERM)])
    assert helper.pid == seen["pid"], "signals meant for the parent must not end it"


def test_a_child_that_died_while_idle_is_replaced(helper: Helper) -> None:
    helper("echo", 1)
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    assert gone(helper.pid) and helper("echo", 2) == 2


def test_memory_that_stays_taken_is_no_later_calls_limit() -> None:
    """Several calls each leave some memory behind, together more than the limit, and none of them fails."""
    helper = Helper("tests.unit.test_isolation:hoarder", Limits(cpu_s=5, memory_bytes=64 * MIB, answer_bytes=MIB))
    pids = set()
    for _ in range(8):
        assert helper(20) >= 1
        pids.add(helper.pid)
    assert len(pids) > 1, "the child that had grown was replaced"
    helper.close()


def hoarder() -> Any:
    kept: list[bytearray] = []

    def work(mib: int) -> int:
        kept.append(bytearray(mib * MIB))
        return len(kept)

    return work


def test_a_factory_that_fails_says_so() -> None:
    with pytest.raises(BusyError, match="cannot start: failed with RuntimeError: no such luck"):
        Helper("tests.isolated_work:refused", LIMITS)()


def test_waiting_has_an_end() -> None:
    helper = Helper(WORK, Limits(cpu_s=20, memory_bytes=64 * MIB, answer_bytes=MIB, wait_s=0.05), called="slow one")
    helper("echo", 1)
    running = threading.Thread(target=lambda: pytest.raises(OverrunError, helper, "sleep", 100), daemon=True)
    running.start()
    while not helper.lock.locked():
        time.sleep(0.001)
    with pytest.raises(BusyError, match="the slow one has been busy for 0.05 s"):
        helper("echo", 2)
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    running.join(30)
    assert not running.is_alive() and helper("echo", 3) == 3
    helper.close()


def test_an_interrupted_call_leaves_nothing_behind(helper: Helper) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        helper("echo", 1)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            helper("sleep", 0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert helper("echo", "mine") == "mine", "the interrupted call's answer must not be the next one's"


def test_a_dropped_or_closed_helper_leaves_no_process() -> None:
    helper = Helper(WORK, LIMITS)
    helper("echo", 1)
    pid = helper.pid
    assert pid is not None
    helper.close()
    assert gone(pid) and helper("echo", 2) == 2, "a closed one starts again where it is asked"
    pid = helper.pid
    del helper
    gc.collect()
    assert pid is not None and gone(pid)


def script(body: str) -> subprocess.Popen[str]:
    code = f"import os, sys, time, signal\nfrom tests.unit.test_isolation import *\n{textwrap.dedent(body)}"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)"])
def test_the_child_ends_with_its_parent(ending: str) -> None:
    with script(f"h = Helper(WORK, LIMITS)\nh('echo', 1)\nprint(h.pid, flush=True)\n{ending}") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    assert gone(pid)


def test_a_child_at_work_does_not_outlive_a_killed_parent() -> None:
    with script("""
        h = Helper(WORK, LIMITS)
        h('echo', 1)
        print(h.pid, flush=True)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        h('power', 9)
    """) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    assert gone(pid)


def test_a_forked_process_has_a_child_of_its_own() -> None:
    with script("""
        h = Helper(WORK, LIMITS)
        h('echo', 1)
        mine, lock = h.pid, h.lock
        lock.acquire()  # as if another thread were in the middle of a call
        if (forked := os.fork()) == 0:
            os._exit(0 if h('echo', 2) == 2 and h.pid != mine and h.close() is None else 1)
        status = os.waitpid(forked, 0)[1]
        lock.release()
        print(status, h('echo', 3), h.pid == mine)
    """) as process:
        assert process.stdout is not None
        assert process.stdout.read().split() == ["0", "3", "True"]


def test_a_call_rests_for_as_long_as_the_one_before_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    # a clock that begins after the real one's moments and is a quarter of a second later at each look
    looks, slept = itertools.count(time.monotonic() + 1000, 0.25), list[float]()
    resting, restless = (Helper(WORK, replace(LIMITS, rest=rest)) for rest in (1.0, 0.0))
    for helper in (resting, restless):
        helper("greet", None)  # starts the child
    monkeypatch.setattr(isolation, "time", SimpleNamespace(monotonic=lambda: next(looks), sleep=slept.append))
    for helper in (resting, resting, restless, restless):
        helper("greet", None)
    monkeypatch.undo()
    assert slept[1] > 0 and slept[2:] == [0, 0]
    resting.close()
    restless.close()
