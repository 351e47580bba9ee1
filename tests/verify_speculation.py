"""The sections of the verification about trees, heads, the policy and long contexts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.bench.measure import Comparison
from slipstream.bench.workloads import BUILT_IN
from tests import checks
from tests import checks_speculation as promises
from tests.verify_report import Report

SET_PROMPTS = 6
CONTEXT_QUESTIONS = 12
TIMED_PROMPTS, TIMED_TOKENS = 8, 96
BENCH_MODES = "plain,chain:4,chain:8,chain,tree:8,auto"
WIDER = ("chain", "tree:32", "tree:64")
Section = Callable[[Report], None]


def modes(report: Report, draft: str, settings: dict[str, object]) -> None:
    """Every mode on every set: the texts against plain decoding, and the acceptance."""
    llm = promises.pair_with(draft, threads=1)
    how = "T 0.8" if settings else "greedy"
    for name in BUILT_IN:
        prompts = promises.set_prompts(name, SET_PROMPTS)
        reports = promises.identity_by_mode(llm, prompts, report.tokens, settings, promises.MODES)
        for mode, seen in reports.items():
            text = f"{seen.row()}, novel {seen.speculative.tau_novel:.2f}"
            report.add(f"{draft}, {name}, {how}, {mode}: text as plain", text, seen.ok)
        taus = [reports[mode].speculative.tau for mode in WIDER]
        text = " < ".join(f"{tau:.2f} ({mode})" for tau, mode in zip(taus, WIDER, strict=True))
        report.add(f"{draft}, {name}, {how}: wider trees accept more", text, taus[0] < taus[1] < taus[2])
        if settings:
            greedy_drafts = promises.tau_by_mode(
                llm, name, SET_PROMPTS, report.tokens, ("chain",), share_noise=False, **settings
            )["chain"].tau
            text = f"chain: tau {taus[0]:.2f} with shared noise, {greedy_drafts:.2f} with greedy drafts"
            report.add(f"{draft}, {name}, {how}: shared noise accepts more", text, taus[0] > greedy_drafts)


def dflash_greedy(report: Report) -> None:
    modes(report, "smollm2-dflash", checks.GREEDY)


def dflash_sampled(report: Report) -> None:
    modes(report, "smollm2-dflash", checks.SAMPLED)


def dspark_greedy(report: Report) -> None:
    modes(report, "smollm2-dspark", checks.GREEDY)


def dspark_sampled(report: Report) -> None:
    modes(report, "smollm2-dspark", checks.SAMPLED)


def contexts(report: Report) -> None:
    llm = promises.pair_with("smollm2-dspark", threads=1)
    questions = checks.eval_prompts(CONTEXT_QUESTIONS)
    taus = promises.context_taus(llm, questions, promises.CONTEXTS, report.tokens)
    text = ", ".join(f"{tau:.2f} at {length}" for length, tau in taus.items())
    worst = min(tau / taus[promises.CONTEXTS[0]] for tau in taus.values())
    report.add(
        f"tau behind long documents is at least 0.9 of its value at {promises.CONTEXTS[0]} tokens",
        f"{text}; worst {worst:.2f} ({CONTEXT_QUESTIONS} questions, {report.tokens} tokens)",
        worst >= 0.9,
    )


def conversation(report: Report) -> None:
    llm = promises.pair_with("smollm2-dspark", threads=1)
    for mode in ("chain", "tree:32"):
        seen = promises.long_conversation(llm, 3000, report.tokens, mode)
        same = seen.texts[0] == seen.texts[1] and seen.steps[0] == seen.steps[1]
        found = "the same" if same else "different"
        text = f"{found} texts and steps, {seen.cached_tokens} tokens taken from the cache"
        ok = same and seen.cached_tokens > 6000
        report.add(f"three turns over 3,000 tokens with and without the prefix cache, {mode}", text, ok)


def auto_speed(report: Report) -> None:
    """Ratios of one interleaved run per prompt set, all cores."""
    for name in BUILT_IN:
        for temperature in ("0", "0.8"):
            command = [
                "slipstream",
                "bench",
                "--prompts",
                name,
                "--limit",
                str(TIMED_PROMPTS),
                "--max-tokens",
                str(TIMED_TOKENS),
                "--modes",
                BENCH_MODES,
                "--temperature",
                temperature,
                "--seed",
                "1",
                "--json",
            ]
            program = str(Path(sys.executable).parent / command[0])
            done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=True)
            seen = json.loads(done.stdout)
            auto = seen["modes"]["auto"]
            best, (low, high) = auto["vs_best"], auto["vs_best"]["interval"]
            speeds = ", ".join(
                f"{mode} {run['tokens_per_second']:.0f} ({run['speedup']:.2f}x, tau {run['tau']:.2f})"
                for mode, run in seen["modes"].items()
            )
            text = (
                f"auto is {best['ratio']:.3f} [{low:.3f}, {high:.3f}] of {best['mode']}; tok/s: {speeds}; "
                f"auto's novel tau {auto['tau_novel']:.2f}; floor {seen['describe']['floor_ms']:.1f} ms a plain token"
            )
            same = all(
                run["identical"]["same"] + run["identical"]["near_ties"] == run["identical"]["of"]
                for run in seen["modes"].values()
            )
            report.add(f"`{' '.join(command)}`", text, best["ratio"] >= 0.95 and high >= 1.0 and same)


def adversarial(report: Report) -> None:
    words = promises.random_word_prompts(TIMED_PROMPTS)
    usual = [(prompt,) for prompt in promises.set_prompts("humaneval", TIMED_PROMPTS)]
    normal, shuffled = promises.pair_with("smollm2-dspark"), promises.shuffled_pair()
    steps = promises.speculative_tokens(promises.shuffled_pair(), usual[0][0], 256)
    last = max((written for written, nodes in steps if nodes), default=0)
    report.add("a shuffled drafter is given up", f"the last drafted rows were verified after {last} tokens", last < 64)
    for what, llm, conversations, temperature in (
        ("random words at T 1.2", normal, words, 1.2),
        ("a shuffled drafter, greedy", shuffled, usual, 0.0),
    ):
        seen = promises.auto_against_plain(llm, conversations, 2 * TIMED_TOKENS, temperature)
        report.add(f"{what}: auto against plain, interleaved", *_against_plain(seen))


def _against_plain(seen: Comparison) -> tuple[str, bool]:
    ratio, auto = seen.speedup("auto"), seen.modes["auto"]
    assert ratio is not None and ratio.interval is not None
    low, high = ratio.interval
    text = (
        f"{ratio.value:.3f} [{low:.3f}, {high:.3f}] of plain's speed over {seen.answers} answers, "
        f"tau {auto.stats.tau:.2f}, {auto.same}/{seen.answers} texts same"
    )
    return text, ratio.value >= 0.97 and auto.same + auto.near_ties == seen.answers


SIDE_BY_SIDE: tuple[Section, ...] = (
    dspark_sampled,
    dflash_sampled,
    dspark_greedy,
    dflash_greedy,
    contexts,
    conversation,
)
TIMED: tuple[Section, ...] = (auto_speed, adversarial)
