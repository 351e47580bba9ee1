"""The sections of the verification about files: acceptance by weight type, llama.cpp on our files, damaged files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from slipstream.bench.sweep_columns import Side
from slipstream.bench.workloads import PUBLIC
from slipstream.formats.sources import NAMED_DRAFTS
from tests import checks_files as promises
from tests import fuzz_adapters, fuzz_formats
from tests.helpers_models import smollm2_path
from tests.verify_report import Report

TYPE_PROMPTS = 16  # prompts of each set
# The first type is the reference. The shipped drafter has Q8_0 and the shipped target Q4_1.
DRAFT_TYPES = ("as-is", "bf16", "q6_k", "q5_0", "q4_k", "q4_k_m", "q4-mix", "q4_0")
TARGET_TYPES = ("as-is", "f16", "q8_0", "q6_k", "q4_k", "q4_0")
LEAST_TAU = 0.9  # times the reference's tau
# q4_0 rounds to 16 levels without an offset what had 16 levels with one. That makes another model of it, so its tau is
# shown as a warning and not judged.
UNBOUNDED = "q4_0"
RIVAL_PROMPTS, RIVAL_TOKENS, RIVAL_BOUND = 40, 64, 0.03
DSPARK = "smollm2-dspark"
DAMAGED = 2000
Section = Callable[[Report], None]


def files_tau(report: Report) -> None:
    """Measures the acceptance of the shipped pair by the drafter's weight type and by the target's."""
    sides: tuple[tuple[Side, tuple[str, ...]], ...] = (("draft", DRAFT_TYPES), ("target", TARGET_TYPES))
    for side, types in sides:
        with tempfile.TemporaryDirectory() as folder:
            taus = promises.taus_by_type(side, types, PUBLIC, TYPE_PROMPTS, report.tokens, Path(folder), threads=1)
        for name, found in taus.items():
            kept = [one.against.value for one in found if one.against is not None and one.name != UNBOUNDED]
            # A target of another type writes other texts. Its tau is shown, and nothing is promised about it.
            bound = f"; all but {UNBOUNDED} keep {LEAST_TAU:.0%}" if side == "draft" else ""
            report.add(
                f"{name}: tau by the {side}'s type{bound}",
                f"{'; '.join(map(str, found))} ({TYPE_PROMPTS} prompts of up to {report.tokens} tokens)",
                side == "target" or min(kept) >= LEAST_TAU,
                least_ratio=round(min(kept), 3),
                **{f"tau_{one.name}": round(one.tau, 3) for one in found},
            )


def llama_cpp_tau(report: Report) -> None:
    """Compares tau with llama.cpp's: in F32 both must agree; in the shipped types each side rounds in its own way."""
    sizes = RIVAL_PROMPTS, min(RIVAL_TOKENS, report.tokens)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        exact_target = promises.write_exact_target(folder)
        for name in NAMED_DRAFTS:
            drafter, heads = promises.write_real_drafter(name, folder), name == DSPARK
            exact = promises.both_taus(exact_target, drafter, *sizes, "fp32", threads=1, heads=heads)
            close = abs(exact.against.value - 1) <= RIVAL_BOUND
            promise = f"smollm2 and {name} in F32: tau as in llama.cpp within {RIVAL_BOUND:.0%}"
            report.add(promise, exact.row(), close, **_taus(exact))
        drafter = folder / f"{DSPARK}.gguf"
        shipped = promises.both_taus(smollm2_path(), drafter, *sizes, threads=1, heads=True)
    difference = shipped.against
    fair = abs(difference.value - 1) <= RIVAL_BOUND or difference.verdict == "within noise"
    report.add(
        f"smollm2 as shipped and {DSPARK}: within {RIVAL_BOUND:.0%}, or no real difference on texts that part",
        shipped.row(),
        fair,
        **_taus(shipped),
    )


def _taus(seen: promises.BothTaus) -> dict[str, float]:
    ours, theirs = seen.taus
    values = {"tau": round(ours, 3), "rival_tau": round(theirs, 3)}
    return values | {"same": seen.same_texts, "of": len(seen.ours)}


def fuzz_files(report: Report) -> None:
    for what, seen in (("models", fuzz_formats.run(DAMAGED, seed=2)), ("adapters", fuzz_adapters.run(DAMAGED, seed=2))):
        text = (
            f"{seen.cases} files: {seen.loaded} loaded, {seen.refused} refused, {len(seen.failures)} failed, slowest "
            f"{seen.slowest:.2f} s, largest allocation {seen.largest_allocation / 1e6:.1f} MB"
        )
        promise = f"damaged {what} give a clear error and take no more memory than their files allow"
        largest_mb = round(seen.largest_allocation / 1e6, 1)
        counts = {"files": seen.cases, "refused": seen.refused, "failed": len(seen.failures)}
        report.add(promise, text, not seen.failures, **counts, largest_mb=largest_mb)


SIDE_BY_SIDE: tuple[Section, ...] = (files_tau, llama_cpp_tau, fuzz_files)
