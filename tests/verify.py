"""Every promise at full size: runs the sections below and writes docs/results.md.

    python -m tests.verify               everything
    python -m tests.verify --only NAME   some sections (repeatable); the others keep their last results
    python -m tests.verify --tokens 64   shorter answers; the rows say how many tokens they stand for

Sections that measure no time run side by side, one thread each; the timed ones run alone afterwards.
"""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream.kernels.machine import cpu_name, usable_cores
from tests import checks
from tests import verify_cpu as cpu
from tests import verify_families as families
from tests import verify_files as files
from tests import verify_gpu as gpu
from tests import verify_hostile as hostile
from tests import verify_server as serving
from tests import verify_speculation as speculation
from tests.verify_report import Outcome, Report

PROMPTS, TOKENS = 104, 256
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results.md"
STORE = ROOT / "build" / "verify"


def pair(prefill_chunk: int = 256) -> checks.LLM:
    return checks.real_pair(prefill_chunk=prefill_chunk, threads=1)


def greedy_alone(report: Report) -> None:
    seen = checks.identity(pair(), checks.eval_prompts(PROMPTS), report.tokens, checks.GREEDY)
    report.add("greedy text, one request at a time", seen.row(), seen.ok)


def sampled_alone(report: Report) -> None:
    seen = checks.identity(pair(), checks.eval_prompts(PROMPTS), report.tokens, checks.EVERYTHING)
    report.add("T 0.8, seed, penalties, top-k, top-p, min-p, logprobs, one request at a time", seen.row(), seen.ok)


def mixed_batches(report: Report) -> None:
    seen = checks.mixed_batches(pair(), checks.eval_prompts(PROMPTS), report.tokens)
    report.add("eight different requests in one batch, each against itself alone and plain", seen.row(), seen.ok)


def chunked_prefill(report: Report) -> None:
    seen = checks.identity(pair(64), checks.eval_prompts(PROMPTS), report.tokens, checks.GREEDY, batch=8)
    report.add("prefill in chunks of 64 tokens", seen.row(), seen.ok)


def prefix_hits(report: Report) -> None:
    seen = checks.prefix_hits(pair(), checks.eval_prompts(PROMPTS), report.tokens, checks.GREEDY, batch=8)
    hit = f"{seen.texts.row()}; {seen.cached_share:.0%} of prompt tokens cached, tau {seen.tau_ratio:.4f} of cold"
    ok = seen.texts.ok and seen.cached_share > 0.5 and abs(seen.tau_ratio - 1) <= 0.02 and not seen.cold.cached_tokens
    report.add("text and acceptance after a prefix hit", hit, ok)


def edges(report: Report) -> None:
    llm = pair()
    prompts = checks.page_edge_prompts(llm, checks.eval_prompts(PROMPTS))
    settings = {"max_tokens": report.tokens, "ignore_eos": True}
    seen = checks.ids_identity(llm, prompts, settings, batch=8)
    report.add("prompts that end on a page, one before and one after", seen.row(), seen.ok)
    for name, changes in (("greedy", checks.GREEDY), ("T 0.8", checks.SAMPLED)):
        seen = checks.ids_identity(llm, [llm.prompt_ids("")], {**settings, **changes})
        report.add(f"the empty prompt, {name}", seen.row(), seen.ok)


def oracles(report: Report) -> None:
    import torch

    from tests.oracles import compare_greedy, compare_loop

    torch.set_num_threads(1)
    for promise, seen in (
        ("SmolLM2 in fp32 writes what transformers writes from the same file", compare_greedy(20, 64)),
        ("the whole loop commits what the authors' loop commits, step by step", compare_loop(12, 64)),
    ):
        gaps = ", ".join(f"prompt {d.prompt} at {d.position}: logits {d.gap:.1e} apart" for d in seen.differences)
        text = f"{seen.same}/{seen.of} same, {seen.tokens} tokens" + (f"; {gaps}" if gaps else "")
        report.add(promise, text, seen.same == seen.of)


def operations(report: Report) -> None:
    from tests.tiny import random_operations

    for seed in range(3):
        seen = random_operations(1000, seed)
        text = f"seed {seed}: {seen.free} of {seen.total} pages free at the end, {seen.accepted} drafts accepted"
        report.add("1,000 random add/cancel/finish/fork operations leak no page", text, seen.free == seen.total)


Section = Callable[[Report], None]
SIDE_BY_SIDE: tuple[Section, ...] = (
    sampled_alone,
    greedy_alone,
    *speculation.SIDE_BY_SIDE,
    mixed_batches,
    edges,
    prefix_hits,
    chunked_prefill,
    oracles,
    operations,
    *files.SIDE_BY_SIDE,
    *cpu.SIDE_BY_SIDE,
    *families.SIDE_BY_SIDE,
)
TIMED: tuple[Section, ...] = (*speculation.TIMED, *cpu.TIMED, *serving.TIMED, *hostile.TIMED, *gpu.TIMED)
SECTIONS = (*SIDE_BY_SIDE, *TIMED)


def run_section(section: Section, tokens: int) -> bool:
    """Runs one section in a process of its own, so that none inherits another's threads or caches."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.verify", "--child", section.__name__, "--tokens", str(tokens)]
    code = subprocess.run(command, check=False).returncode
    seconds = time.monotonic() - began
    if code:
        store(section, [Outcome(section.__name__, f"the section broke off with exit code {code}", False)])
    if not stored(section).is_file():
        print(f"{section.__name__}: cannot run here, the page keeps what it says", flush=True)
        return True
    good = all(row["ok"] for row in json.loads(stored(section).read_text())["rows"])
    print(f"{section.__name__}: {'ok' if good else 'FAILED'} in {seconds:.0f} s", flush=True)
    return good


def stored(section: Section) -> Path:
    return STORE / f"{section.__name__}.json"


def store(section: Section, outcomes: list[Outcome]) -> None:
    """Keeps a section's rows with the commit and machine they belong to: sections can be run one at a time."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    STORE.mkdir(parents=True, exist_ok=True)
    rows = [{"promise": o.promise, "seen": o.seen, "ok": o.ok} for o in outcomes]
    origin = f"{commit or 'unknown'}, {cpu_name()}, {usable_cores()} cores"
    stored(section).write_text(json.dumps({"origin": origin, "rows": rows}))


def child(name: str, tokens: int) -> None:
    section = next(section for section in SECTIONS if section.__name__ == name)
    report = Report(tokens)
    section(report)
    if report.outcomes:
        store(section, report.outcomes)


def page() -> str:
    lines = [
        "# Results",
        "",
        "Written by `make verify` (104 prompts, answers of up to 256 tokens) or, section by section, by",
        "`python -m tests.verify --only NAME [--tokens N]` with shorter answers: every row says how many tokens it",
        "stands for, at which commit and where. A failed check says so. Absolute speeds are those of a machine and",
        "mean little elsewhere: read the ratios, which come from interleaved runs.",
        "",
        "| section | check | seen | | commit and machine |",
        "| --- | --- | --- | --- | --- |",
    ]
    before = RESULTS.read_text().splitlines() if RESULTS.is_file() else []
    for section in SECTIONS:
        lines += _rows(section, before)
    return "\n".join([*lines, ""])


def _rows(section: Section, before: list[str]) -> list[str]:
    """A section's last results: those stored here, or else those the page has had."""
    name = section.__name__
    if stored(section).is_file():
        result = json.loads(stored(section).read_text())
        verdicts = {True: "ok", False: "**failed**"}
        return [
            f"| {name} | {row['promise']} | {row['seen']} | {verdicts[row['ok']]} | {result['origin']} |"
            for row in result["rows"]
        ]
    return [line for line in before if line.startswith(f"| {name} | ")] or [f"| {name} | | | **not run** | |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=[s.__name__ for s in SECTIONS])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.tokens)
        return
    wanted = [section for section in SECTIONS if not options.only or section.__name__ in options.only]
    for section in wanted:
        stored(section).unlink(missing_ok=True)
    with ThreadPoolExecutor(usable_cores()) as pool:
        untimed = [section for section in wanted if section not in TIMED]
        good = all(list(pool.map(run_section, untimed, [options.tokens] * len(untimed))))
    for section in wanted:
        if section in TIMED:
            good &= run_section(section, options.tokens)
    RESULTS.write_text(page())
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
