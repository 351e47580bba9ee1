"""The sections of the verification about trees, draft heads, the policy and long contexts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from slipstream.bench.measure import Comparison
from slipstream.bench.workloads import BUILT_IN, PUBLIC
from tests import checks
from tests import checks_speculation as promises
from tests.verify_report import Report

SET_PROMPTS = 6
CONTEXT_QUESTIONS = 12
TIMED_PROMPTS, TIMED_TOKENS = 16, 192
BENCH_MODES = "plain,chain:4,tree:6,tree:8,auto"
WIDER = ("chain", "tree:32", "tree:64")
Section = Callable[[Report], None]


def add_texts(report: Report, promise: str, seen: checks.Identity, more: str = "", **values: float) -> None:
    """Adds a row about texts that were compared with and without speculation."""
    stats = seen.speculative
    values |= {"same": seen.same, "of": seen.of, "tokens": seen.tokens, "near_ties": seen.near_ties}
    values |= {"drafted": stats.drafted, "accepted": stats.accepted, "tau": round(stats.tau, 2)}
    report.add(promise, seen.row() + more, seen.ok, **values)


def modes(report: Report, draft: str, settings: dict[str, object]) -> None:
    """Compares the texts of every mode on every prompt set with plain decoding, and reports the acceptance."""
    llm = promises.pair_with(draft, threads=1)
    how = "T 0.8" if settings else "greedy"
    for name in PUBLIC:
        prompts = promises.set_prompts(name, SET_PROMPTS)
        reports = promises.identity_by_mode(llm, prompts, report.tokens, settings, promises.MODES)
        for mode, seen in reports.items():
            novel = seen.speculative.tau_novel
            promise = f"{draft}, {name}, {how}, {mode}: text as plain"
            add_texts(report, promise, seen, f", novel {novel:.2f}", tau_novel=round(novel, 2))
        taus = [reports[mode].speculative.tau for mode in WIDER]
        text = " < ".join(f"{tau:.2f} ({mode})" for tau, mode in zip(taus, WIDER, strict=True))
        wider = {f"tau_{mode}": round(tau, 2) for tau, mode in zip(taus, WIDER, strict=True)}
        report.add(f"{draft}, {name}, {how}: wider trees accept more", text, taus[0] < taus[1] < taus[2], **wider)
        if settings:
            greedy_drafts = promises.tau_by_mode(
                llm, name, SET_PROMPTS, report.tokens, ("chain",), share_noise=False, **settings
            )["chain"].tau
            text = f"chain: tau {taus[0]:.2f} with shared noise, {greedy_drafts:.2f} with greedy drafts"
            noise = {"tau_shared_noise": round(taus[0], 2), "tau_greedy_drafts": round(greedy_drafts, 2)}
            report.add(f"{draft}, {name}, {how}: shared noise accepts more", text, taus[0] > greedy_drafts, **noise)


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
        worst=round(worst, 2),
        **{f"tau_{length}": round(tau, 2) for length, tau in taus.items()},
    )


def conversation(report: Report) -> None:
    llm = promises.pair_with("smollm2-dspark", threads=1)
    for mode in ("chain", "tree:32"):
        seen = promises.long_conversation(llm, 3000, report.tokens, mode)
        same = seen.texts[0] == seen.texts[1] and seen.steps[0] == seen.steps[1]
        found = "the same" if same else "different"
        text = f"{found} texts and steps, {seen.cached_tokens} tokens taken from the cache"
        ok = same and seen.cached_tokens > 6000
        promise = f"three turns over 3,000 tokens with and without the prefix cache, {mode}"
        report.add(promise, text, ok, cached_tokens=seen.cached_tokens)


def auto_speed(report: Report) -> None:
    """Compares `auto` with the fastest fixed mode, in one interleaved run on all cores for each prompt set."""
    ratios: list[float] = []
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
            ratios.append(best["ratio"])
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
            speeds_by_mode = {f"tok_s_{mode}": round(run["tokens_per_second"]) for mode, run in seen["modes"].items()}
            report.add(
                f"{name}, T {temperature}, auto beside the best fixed mode: `{' '.join(command)}`",
                text,
                best["ratio"] >= 0.95 and high >= 1.0 and same,
                ratio=round(best["ratio"], 3),
                low=round(low, 3),
                high=round(high, 3),
                auto_over_plain=round(auto["speedup"], 2),
                **speeds_by_mode,
            )
    mean = fmean(ratios)
    text = f"{mean:.3f} in the mean of {len(ratios)} sets and temperatures, {min(ratios):.3f} in the worst"
    report.add("auto beside the best fixed mode, all sets (at least 0.98)", text, mean >= 0.98, ratio=round(mean, 3))


def adversarial(report: Report) -> None:
    words = promises.random_word_prompts(TIMED_PROMPTS)
    usual = [(prompt,) for prompt in promises.set_prompts("humaneval", TIMED_PROMPTS)]
    normal, shuffled = promises.pair_with("smollm2-dspark"), promises.shuffled_pair()
    steps = promises.speculative_tokens(promises.shuffled_pair(), usual[0][0], 512)
    later = [nodes > 0 for written, nodes in steps if written >= 64]
    seen_share = f"behind 64 tokens {sum(later)} of {len(later)} steps still draft, in order to learn"
    report.add("a shuffled drafter is given up", seen_share, fmean(later) <= 0.04, share=round(fmean(later), 4))
    for what, llm, conversations, temperature in (
        ("random words at T 1.2", normal, words, 1.2),
        ("a shuffled drafter, greedy", shuffled, usual, 0.0),
    ):
        seen = promises.auto_against_plain(llm, conversations, 2 * TIMED_TOKENS, temperature)
        _add_against_plain(report, f"{what}: auto against plain, interleaved", seen)


def _add_against_plain(report: Report, promise: str, seen: Comparison) -> None:
    ratio, auto = seen.speedup("auto"), seen.modes["auto"]
    assert ratio is not None and ratio.interval is not None
    low, high = ratio.interval
    text = (
        f"{ratio.value:.3f} [{low:.3f}, {high:.3f}] of plain's speed over {seen.answers} answers, "
        f"tau {auto.stats.tau:.2f}, {auto.same}/{seen.answers} texts same"
    )
    report.add(
        promise,
        text,
        ratio.value >= 0.98 and auto.same + auto.near_ties == seen.answers,
        ratio=round(ratio.value, 3),
        low=round(low, 3),
        high=round(high, 3),
    )


SIDE_BY_SIDE: tuple[Section, ...] = (
    dspark_sampled,
    dflash_sampled,
    dspark_greedy,
    dflash_greedy,
    contexts,
    conversation,
)
TIMED: tuple[Section, ...] = (auto_speed, adversarial)
