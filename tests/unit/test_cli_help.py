"""Help, version and typos answer at once and without loading the engine; bad input is one sentence and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

VERBS = ("generate", "chat", "serve", "smoke", "bench", "inspect", "convert", "quantize", "compare", "demo")
MOST_MODULES = 700  # help imports up to 460 modules, the standard library's included; torch alone adds about 950
HEAVY = ("torch", "transformers", "numpy", "matplotlib", "slipstream.engine.llm")
PROBE = f"""
import sys
from slipstream.cli.main import run
try:
    run()
finally:
    print(len(sys.modules), *[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], *[[verb, "--help"] for verb in VERBS], ["--version"], []])
def test_help_is_instant(arguments: list[str]) -> None:
    """What makes help slow is what it imports, and that can be counted on a busy machine as well."""
    done = start(*arguments)
    assert done.returncode == 0, done.stderr
    modules, *heavy = done.stderr.split()
    assert not heavy and int(modules) < MOST_MODULES


def test_help_lists_every_verb() -> None:
    done = start("--help")
    assert all(f" {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["genrate"], "Did you mean 'generate'"),
        (["smoke"], "URL"),
        (["smoke", "ftp://x"], "not the address of a server"),
        (["smoke", "x", "--timeout", "0"], "--timeout"),
        (["generate", "--max-tokns", "3"], "--max-tokens"),
        (["generate", "--prompt", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "--prompt", "x", "--dtype", "fp7"], "--dtype"),
        (["generate"], "--prompt-file"),
        (["generate", "--prompt", "x", "--prompt-file", "y"], "exactly one"),
        (["generate", "--prompt-file", "/no/such/file"], "/no/such/file"),
        (["generate", "--prompt", "x", "--plain", "--mode", "chain"], "contradicts"),
        (["generate", "--prompt", "x", "--mode", "warp"], "warp"),
        (["generate", "--prompt", "x", "--mode", "tree"], "tree:ROWS"),
        (["generate", "--prompt", "x", "--gate", "moon"], "entropy"),
        (["generate", "--prompt", "x", "--gate", "ema:floor=1"], "margin"),
        (["generate", "--prompt", "x", "--mode", "auto", "--gate", "ema"], "contradicts"),
        (["generate", "--prompt", "x", "--plain", "--gate", "ema"], "nothing to gate"),
        (["generate", "--prompt", "x", "--confidence", "1.5"], "min_confidence"),
        (["generate", "--prompt", "x", "--trace", "/no/such/folder/t.jsonl"], "/no/such/folder/t.jsonl"),
        (["chat", "--gate", "moon"], "entropy"),
        (["chat", "--trace", "/no/such/folder/t.jsonl"], "cannot write the trace"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "--prompt", "x", "--logprobs", "2"], "--json"),
        (["generate", "--prompt", "x", "--threads", "-2", "--json"], "threads"),
        (["generate", "--prompt", "x", "--threads", "99999999999"], "at most 1024"),
        (["bench"], "--prompts"),
        (["bench", "--prompts", "no-such-set"], "humaneval"),
        (["bench", "--prompts", "gsm8k", "--modes", "plain"], "reference"),
        (["bench", "--prompts", "gsm8k", "--modes", "plain,warp"], "warp"),
        (["bench", "--prompts", "gsm8k", "--modes", "chain,"], "unknown mode ''"),
        (["bench", "--prompts", "gsm8k", "--gate", "ema"], "no mode takes the gate"),
        (["bench", "--prompts", "gsm8k", "--modes", "chain", "--gate", "moon"], "entropy"),
        (["bench", "--prompts", "gsm8k", "--confidence", "-1"], "min_confidence"),
        (["bench", "--prompts", "gsm8k", "--plot", "plot.jpeg"], ".svg"),
        (["bench", "--prompts", "gsm8k", "--plot", "/no/such/folder/plot.png"], "/no/such/folder"),
        (["bench", "--prompts", "gsm8k", "--trace", "/no/such/folder/t.jsonl"], "/no/such/folder"),
        (["bench", "--prompts", "gsm8k", "--max-tokens", "1"], "max_tokens"),
        (["bench", "--prompts", "gsm8k", "--turns", "some"], "--turns"),
        (["inspect"], "FILE"),
    ],
)
def test_bad_input_is_one_sentence(cli: Any, arguments: list[str], said: str) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert said.lower() in done.err.lower()
    assert done.err.startswith("slipstream: ") and done.err.count("\n") == 1
