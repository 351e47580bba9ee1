"""The sections of the verification about drafts from the text, and about `auto` on a disturbed machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.bench.intervals import ratio, ratio_interval
from slipstream.bench.workloads import Conversation, read_prompts
from slipstream.config import EngineConfig
from slipstream.engine.llm import LLM
from tests.verify_report import Report

Section = Callable[[Report], None]
Samples = list[tuple[int, float]]  # tokens and seconds of decoding, by conversation
PROMPTS, TOKENS = 16, 192
DISTURBED_PROMPTS, DISTURBED_TOKENS = 8, 96
DISTURBED_MODES = "plain,chain:4,tree:6,tree:8,auto"
LOAD_S = 8.0  # for how long a process is busy where only the load is disturbed
SPELL_S = 3.0  # for how long it is busy, and then idle, where it comes and goes


def text_drafts(report: Report) -> None:
    """Compares `auto` with and without drafts from the text, and the text alone with plain decoding."""
    ways = {
        "plain": (LLM(), "plain"),
        "without": (LLM(config=EngineConfig(text_drafts=False)), "auto"),
        "with": (LLM(), "auto"),
        "suffix": (LLM(draft="suffix"), "auto"),
    }
    for name, more, alone in (("editing", 1.4, 1.8), ("prose", 0.99, 0.98)):
        for temperature in (0.0, 0.8):
            samples, same = _samples(ways, read_prompts(name, PROMPTS), temperature)
            for promise, new, old, least in (
                ("auto with drafts from the text over auto without", "with", "without", more),
                ("drafts from the text alone over plain", "suffix", "plain", alone),
            ):
                value, interval = ratio(samples[new], samples[old]), ratio_interval(samples[new], samples[old])
                assert value is not None and interval is not None
                asked = least if temperature == 0.0 else min(least, 0.98)
                report.add(
                    f"{name}, T {temperature:g}: {promise} (at least {asked})",
                    f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}] over {len(samples[new])} conversations",
                    value >= asked and same,
                    ratio=round(value, 3),
                    low=round(interval[0], 3),
                    high=round(interval[1], 3),
                )


def _samples(
    ways: dict[str, tuple[LLM, str]], conversations: list[Conversation], temperature: float
) -> tuple[dict[str, Samples], bool]:
    """What each way took for each conversation, the ways taking turns, and whether all of them wrote the same."""
    samples: dict[str, Samples] = {way: [] for way in ways}
    same, order = True, list(ways)
    for conversation in conversations:
        texts: set[tuple[str, ...]] = set()
        for way in order:
            (llm, mode), messages, tokens, seconds = ways[way], list[dict[str, object]](), 0, 0.0
            for question in conversation:
                messages.append({"role": "user", "content": question})
                answer = llm.chat(messages, mode=mode, max_tokens=TOKENS, temperature=temperature, seed=1)
                messages.append({"role": "assistant", "content": answer.text})
                tokens, seconds = tokens + len(answer.token_ids), seconds + answer.stats.decode_ms / 1e3
            samples[way].append((tokens, seconds))
            texts.add(tuple(str(message["content"]) for message in messages))
        same = same and len(texts) == 1
        order = [*order[1:], order[0]]
    return samples, same


def disturbed_auto(report: Report) -> None:
    """Compares `auto` with the best fixed mode beside a process that is busy on one core from time to time."""
    for what, busy_s, idle_s in (
        ("busy while the model loads", LOAD_S, None),
        ("busy and idle in turns of a few seconds", SPELL_S, SPELL_S),
    ):
        for name in ("gsm8k", "mt-bench"):
            command = ["slipstream", "bench", "--prompts", name, "--limit", str(DISTURBED_PROMPTS), "--max-tokens"]
            command += [str(DISTURBED_TOKENS), "--modes", DISTURBED_MODES, "--seed", "1", "--json"]
            with _disturbance(busy_s, idle_s):
                program = str(Path(sys.executable).parent / command[0])
                done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=True)
            best = json.loads(done.stdout)["modes"]["auto"]["vs_best"]
            report.add(
                f"{name}, another process {what}: `{' '.join(command)}`",
                f"auto is {best['ratio']:.3f} of {best['mode']} (at least 0.93)",
                best["ratio"] >= 0.93,
                ratio=round(best["ratio"], 3),
            )


@contextlib.contextmanager
def _disturbance(busy_s: float, idle_s: float | None) -> Iterator[None]:
    """Keeps one core busy for a time and, with `idle_s`, again and again after so many idle seconds."""
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
                over.wait(busy_s)
                busy.kill()
            if idle_s is None:
                return
            over.wait(idle_s)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


TIMED: tuple[Section, ...] = (text_drafts, disturbed_auto)
