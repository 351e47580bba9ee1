"""Checks every promise at full size, writes results/SECTION.json and generates docs/results.md from these files.

    python -m tests.verify               all sections
    python -m tests.verify --only NAME   some sections (repeatable); the others keep their last results
    python -m tests.verify --tokens 64   shorter answers; the rows say how many tokens they stand for

Sections that measure no time run side by side, one thread each. The timed ones run alone afterwards. A section that
cannot run on this machine keeps its last results.
"""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from slipstream.kernels.machine import usable_cores
from tests import checks
from tests import verify_cpu as cpu
from tests import verify_drafts as drafts
from tests import verify_families as families
from tests import verify_files as files
from tests import verify_gpu as gpu
from tests import verify_hostile as hostile
from tests import verify_lanes as lanes
from tests import verify_server as serving
from tests import verify_speculation as speculation
from tests.verify_pages import write_pages
from tests.verify_report import Outcome, Report
from tests.verify_results import read_rows, write_rows
from tests.verify_speculation import add_texts

PROMPTS, TOKENS = 104, 256
CANNOT_RUN = 3  # exit code of a section's process that has nothing to report on this machine


def pair(prefill_chunk: int = 256) -> checks.LLM:
    return checks.real_pair(prefill_chunk=prefill_chunk, threads=1)


def greedy_alone(report: Report) -> None:
    seen = checks.identity(pair(), checks.eval_prompts(PROMPTS), report.tokens, checks.GREEDY)
    add_texts(report, "greedy text, one request at a time", seen)


def sampled_alone(report: Report) -> None:
    seen = checks.identity(pair(), checks.eval_prompts(PROMPTS), report.tokens, checks.EVERYTHING)
    add_texts(report, "T 0.8, seed, penalties, top-k, top-p, min-p, logprobs, one request at a time", seen)


def mixed_batches(report: Report) -> None:
    seen = checks.mixed_batches(pair(), checks.eval_prompts(PROMPTS), report.tokens)
    add_texts(report, "eight different requests in one batch, each against itself alone and plain", seen)


def chunked_prefill(report: Report) -> None:
    seen = checks.identity(pair(64), checks.eval_prompts(PROMPTS), report.tokens, checks.GREEDY, batch=8)
    add_texts(report, "prefill in chunks of 64 tokens", seen)


def prefix_hits(report: Report) -> None:
    seen = checks.prefix_hits(pair(), checks.eval_prompts(PROMPTS), report.tokens, checks.GREEDY, batch=8)
    hit = f"{seen.texts.row()}; {seen.cached_share:.0%} of prompt tokens cached, tau {seen.tau_ratio:.4f} of cold"
    ok = seen.texts.ok and seen.cached_share > 0.5 and abs(seen.tau_ratio - 1) <= 0.02 and not seen.cold.cached_tokens
    counts = {"same": seen.texts.same, "of": seen.texts.of, "tokens": seen.texts.tokens}
    shares = {"cached_share": round(seen.cached_share, 2), "tau_ratio": round(seen.tau_ratio, 4)}
    report.add("text and acceptance after a prefix hit", hit, ok, **counts, **shares)


def edges(report: Report) -> None:
    llm = pair()
    prompts = checks.page_edge_prompts(llm, checks.eval_prompts(PROMPTS))
    settings: dict[str, object] = {"max_tokens": report.tokens, "ignore_eos": True}
    seen = checks.ids_identity(llm, prompts, settings, batch=8)
    add_texts(report, "prompts that end on a page, one before and one after", seen)
    for name, changes in (("greedy", checks.GREEDY), ("T 0.8", checks.SAMPLED)):
        seen = checks.ids_identity(llm, [llm.prompt_ids("")], {**settings, **changes})
        add_texts(report, f"the empty prompt, {name}", seen)


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
        report.add(promise, text, seen.same == seen.of, same=seen.same, of=seen.of, tokens=seen.tokens)


def operations(report: Report) -> None:
    from tests.tiny import random_operations

    for seed in range(3):
        seen = random_operations(1000, seed)
        text = f"seed {seed}: {seen.free} of {seen.total} pages free at the end, {seen.accepted} drafts accepted"
        promise = "1,000 random add/cancel/finish/fork operations leak no page"
        report.add(promise, text, seen.free == seen.total, lost_pages=seen.total - seen.free)


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
TIMED: tuple[Section, ...] = (
    *speculation.TIMED,
    *drafts.TIMED,
    *cpu.TIMED,
    *serving.TIMED,
    *hostile.TIMED,
    *lanes.TIMED,
    *gpu.TIMED,
)
SECTIONS = (*SIDE_BY_SIDE, *TIMED)


def run_section(section: Section, tokens: int) -> bool:
    """Runs one section in a process of its own, so that it inherits no threads or caches from another section."""
    name = section.__name__
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.verify", "--child", name, "--tokens", str(tokens)]
    code = subprocess.run(command, check=False).returncode
    seconds = time.monotonic() - began
    if code == CANNOT_RUN:
        print(f"{name}: cannot run on this machine and keeps its last results", flush=True)
        return True
    if code:
        write_rows(name, [Outcome("the section runs to its end", f"it broke off with exit code {code}", False)])
    good = all(row["ok"] for row in read_rows(name))
    print(f"{name}: {'ok' if good else 'FAILED'} in {seconds:.0f} s", flush=True)
    return good


def child(name: str, tokens: int) -> int:
    """Runs one section in this process and stores its rows; the exit code says whether there were any."""
    section = next(section for section in SECTIONS if section.__name__ == name)
    report = Report(tokens)
    section(report)
    if not report.outcomes:
        return CANNOT_RUN
    write_rows(name, report.outcomes)
    return 0


def run_sections(wanted: list[Section], tokens: int) -> bool:
    """Whether all rows hold, those of sections that could not run excepted."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        untimed = [section for section in wanted if section not in TIMED]
        good = all(list(pool.map(run_section, untimed, [tokens] * len(untimed))))
    for section in wanted:
        if section in TIMED:
            good &= run_section(section, tokens)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=[s.__name__ for s in SECTIONS])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.tokens)
    wanted = [section for section in SECTIONS if not options.only or section.__name__ in options.only]
    try:
        return 0 if run_sections(wanted, options.tokens) else 1
    finally:
        write_pages()  # also after an interruption, because the sections that ended have stored their rows


if __name__ == "__main__":
    sys.exit(main())
