"""A process with a loaded model forks, runs another program and ends, also while a text is being written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.kernels.cpu.native_library import library

ROOT = Path(__file__).parents[2]
LIMIT_S = 150  # seconds after which a program counts as hanging; the programs take seconds
PROMPT = "The capital of France is"
START = f"""
import os, subprocess, sys, threading, time
from pathlib import Path
from slipstream.engine.llm import LLM

def text(llm):
    return llm.generate({PROMPT!r}, max_tokens=8, ignore_eos=True).text

def in_child(action):
    '''What a forked child's action returns as an exit code; a child that hangs ends by a signal.'''
    import signal
    child = os.fork()
    if child == 0:
        signal.alarm({LIMIT_S // 5})
        os._exit(action())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def write_in_background(llm):
    def forever():
        while True:
            for event in llm.stream({PROMPT!r}, max_tokens=200, ignore_eos=True):
                if event.tokens:
                    writing.set()
    writing = threading.Event()
    threading.Thread(target=forever, daemon=True).start()
    assert writing.wait({LIMIT_S})
"""
FORKS = (
    START
    + """
from slipstream.kernels.cpu.native_matrix import Arena
from tests.tiny import tiny_llm

llm = LLM("smollm2")
before = text(llm)
for _ in range(5):
    assert in_child(lambda: text(llm) != before) == 0, "a child's text"
    assert text(llm) == before, "the parent's text"
assert in_child(lambda: in_child(lambda: text(llm) != before)) == 0, "a grandchild's text"

arena, size = Arena(), 1 << 20
arena.take(size)  # the memory is mapped before the fork
assert in_child(lambda: arena.take(size).fill(1) is not None) == 0
assert not arena.take(size).any(), "a child's weights lie in the parent's memory"

idle = tiny_llm(Path(sys.argv[1]), weight_format="native", threads=2)
expected = text(idle)
write_in_background(llm)
for _ in range(20):
    assert in_child(lambda: text(idle) != expected) == 0, "a child of a busy process"
assert text(idle) == expected, "the parent of such children"

done = subprocess.run([sys.executable, "-c", "print('executed')"], capture_output=True, text=True, timeout=60)
assert done.stdout == "executed\\n"
print("forked")
sys.stdout.flush()
os.execv(sys.executable, [sys.executable, "-c", "print('replaced')"])
"""
)
ENDS = (
    START
    + """
llm = LLM("smollm2")
write_in_background(llm)
print("ending")
"""
)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)


@pytest.mark.skipif(library() is None, reason="no compiled kernels")
def test_forked_children_write_the_same_text(tmp_path: Path) -> None:
    done = run(FORKS, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "forked\nreplaced\n"), done.stderr


def test_a_process_ends_while_a_text_is_written() -> None:
    done = run(ENDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ending\n", "")
