"""The sections of the verification about a GPU, judged from the numbers that the scripts in scripts/gpu measured.

On a machine with a GPU the sections run these scripts. Elsewhere they judge the numbers that lie in build/verify/gpu,
which were brought from a GPU; `origin.txt` beside them says which GPU and commit measured them, and the rows carry
these. Without any numbers a section reports nothing, and its rows in results/ stay as they are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.verify_report import Origin, Report

RUN_ALL = Path(__file__).parents[1] / "scripts" / "gpu" / "run_all.py"
sys.path.insert(0, str(RUN_ALL.parent))
from run_all import NUMBERS, command_of  # noqa: E402  (scripts/gpu is on the path only from here on)

# The most milliseconds that a plain step may take, and a step with a draft and 16 verified rows; None is not judged.
MOST_MS = {"bf16": (5.2, 6.5), "Q8_0": (3.6, None), "Q4_K": (3.2, None)}
NARROW = "draft + verify 16"
MOST_WIDE = 1.1  # the most that the verify of a tree of 64 rows may take, in times the verify of 16 rows
LEAST_OF_BEST = 0.98  # the least speed of `auto`, in times that of the best fixed mode
MOST_RATIO = 1.5  # the most that a step of a hybrid or mixture target may take, in times its floor
Line = dict[str, Any]


def gpu_checks(report: Report) -> None:
    """Compares every kernel at real sizes with torch, and checks that a row's bits depend on that row alone."""
    for line in measured(report, "checks") or ():
        report.add(f"`python scripts/gpu/{line['check']}.py --only checks`", line["said"], line["ok"])


def gpu_steps(report: Report) -> None:
    _steps(report, "steps_bf16")


def gpu_q8_0(report: Report) -> None:
    _steps(report, "steps_Q8_0")


def gpu_q4_k(report: Report) -> None:
    _steps(report, "steps_Q4_K")


def gpu_contexts(report: Report) -> None:
    _table(report, "steps_contexts")


def gpu_batches(report: Report) -> None:
    _table(report, "steps_batches")


def _steps(report: Report, name: str) -> None:
    lines: list[Line] | None = measured(report, name)
    if not lines:
        return
    command, kind = f"`{command_of(name)}`", lines[0]["format"]
    found = {line["step"]: line for line in lines}
    for step, most in zip(("plain", NARROW), MOST_MS[kind], strict=True):
        line = found[step]
        bound = f"at most {most} ms" if most else "no bound"
        text = f"{line['ms']} ms ({bound}), floor {line['floor_ms']} ms, {line['ratio']} of it"
        values = {key: line[key] for key in ("ms", "floor_ms", "ratio")}
        report.add(f"{kind}, 1K context, {step}: {command}", text, most is None or line["ms"] <= most, **values)
    wide, narrow = found["verify 64 alone"]["ms"], found["verify 16 alone"]["ms"]
    text = f"{wide / narrow:.3f} times the verify of 16 rows ({wide} and {narrow} ms)"
    judged = f" (at most {MOST_WIDE})" if kind == "bf16" else ""
    good = wide <= MOST_WIDE * narrow or not judged
    report.add(f"{kind}: verify of a tree of 64 rows", text + judged, good, times=round(wide / narrow, 3))
    for theirs, ours in (("authors' draft + verify", NARROW), ("transformers plain", "plain")):
        if theirs in found:
            times = found[theirs]["ms"] / found[ours]["ms"]
            bound, rounds = " (at least 7)" if ours == NARROW else "", found[theirs]["rounds"]
            text = (
                f"{found[theirs]['ms']} ms, {times:.1f} times ours{bound}, in the same run; median of {len(rounds)} "
                f"rounds of {min(rounds)} to {max(rounds)} ms"
            )
            values = {"ms": found[theirs]["ms"], "times": round(times, 1)}
            report.add(f"{theirs}, random weights of the same shape", text, times >= 7 or not bound, **values)


def _table(report: Report, name: str) -> None:
    command = f"`{command_of(name)}`"
    for line in measured(report, name) or ():
        text = f"{line['ms']} ms, floor {line['floor_ms']} ms, {line['ratio']} of it"
        promise = f"{line['step']}, batch {line['batch']}, context {line['context']}: {command}"
        report.add(promise, text, True, **{key: line[key] for key in ("ms", "floor_ms", "ratio")})


def gpu_families(report: Report) -> None:
    """Times hybrid and mixture targets with random weights; a mixture's floor counts only the experts rows chose."""
    command = f"`{command_of('families')}`"
    for line in measured(report, "families") or ():
        judged = line["format"] == "bf16" and line["step"] in ("plain", "verify chain 16")
        bound = f"at most {MOST_RATIO}" if judged else "no bound"
        text = f"{line['ms']:.2f} ms, floor {line['floor_ms']:.2f} ms, {line['ratio']:.2f} of it ({bound})"
        if line["experts"]:
            text += f", {line['experts']:.0f} experts a layer"
        name = f"{line['shape']}, {line['format']}, {line['context']} tokens of context, {line['step']}: {command}"
        values = {key: round(line[key], 2) for key in ("ms", "floor_ms", "ratio")}
        report.add(name, text, not judged or line["ratio"] <= MOST_RATIO, **values)


def gpu_pair(report: Report) -> None:
    """Times the shipped target with one of its drafters."""
    command = f"`{command_of('real_pair')}`"
    found: dict[str, list[Line]] = measured(report, "real_pair") or {}
    lines = [*found.get("modes", ()), *found.get("native", ()), *found.get("text", ())]
    for line in lines:
        same, of = map(int, line["same_texts"].split("/"))
        text = (
            f"{line['tokens_per_s']} tok/s, {line['over_plain']} of our plain, tau {line['tau']}, "
            f"{line['ms_per_step']} ms a step, {same}/{of} texts as plain, {line['tokens']} tokens"
        )
        values = {"tok_s": line["tokens_per_s"], "over_plain": line["over_plain"], "tau": line["tau"]}
        drafts = "" if line["draft"] == "drafter" else "the text alone, "
        promise = f"{drafts}{line['weights']}, {line['set']}, T {line['temperature']:g}, {line['mode']}: {command}"
        report.add(promise, text, same == of, **values, same=same, of=of)
    _compare_auto(report, found.get("modes", ()))
    for line in found.get("peers", ()):
        text = f"{line['tokens_per_s']} tok/s, {line['ms_per_step']} ms a step, tau {line['tau']}"
        report.add(f"the same weights, {line['set']}, {line['who']}", text, True, tok_s=line["tokens_per_s"])
    for line in found.get("batches", ()):
        ratio, rounds = line["auto_over_plain"], line["of_rounds"]
        text = (
            f"plain {line['plain']} tok/s, auto {line['auto']}: {ratio} (at least 0.98), medians of {len(rounds)} "
            f"rounds, in single ones {min(rounds)} to {max(rounds)}"
        )
        speeds = {"tok_s_plain": line["plain"], "tok_s_auto": line["auto"]}
        report.add(f"throughput of {line['batch']} sequences at once", text, ratio >= 0.98, ratio=ratio, **speeds)
    for line in found.get("syncs", ()):
        waits, others, steps = line["events_waited_for"], line["other_syncs"], line["steps"]
        text = f"{waits} waits for results and {others} others in {steps} steps"
        report.add(f"waits of the host, {line['mode']}", text, waits + others <= steps, waits=waits, steps=steps)


def _compare_auto(report: Report, lines: Sequence[Line]) -> None:
    """Judges `auto` beside the best other mode of every set and temperature."""
    alike: dict[tuple[str, float], dict[str, float]] = {}
    for line in lines:
        alike.setdefault((line["set"], line["temperature"]), {})[line["mode"]] = line["tokens_per_s"]
    for (name, temperature), speeds in alike.items():
        best = max((mode for mode in speeds if mode != "auto"), key=speeds.__getitem__)
        ratio = speeds["auto"] / speeds[best]
        text = f"auto is {ratio:.3f} of {best} (at least {LEAST_OF_BEST})"
        promise = f"{name}, T {temperature:g}, one sequence, auto beside the best fixed mode"
        report.add(promise, text, ratio >= LEAST_OF_BEST, ratio=round(ratio, 3))


def measured(report: Report, name: str) -> Any:
    """A script's numbers: new ones if there is a GPU, else those that were brought from one, None without any.

    The rows that follow in the report carry the machine and commit of these numbers.
    """
    path = NUMBERS / f"{name}.json"
    if torch.cuda.is_available():
        path.unlink(missing_ok=True)  # if the script fails, old numbers must not pass for new ones
        subprocess.run([sys.executable, str(RUN_ALL), "--only", name], check=False)
    elif not path.is_file():
        return None
    report.measured = read_origin(NUMBERS / "origin.txt")
    return json.loads(path.read_text())


def read_origin(path: Path) -> Origin:
    """The GPU and commit in the sentence that run_all.py writes; another sentence stands for the machine as it is."""
    said = path.read_text().strip() if path.is_file() else "unknown, because the numbers came without an origin.txt"
    found = re.fullmatch(r"one (.+), the tree of commit (\S+)", said)
    return Origin(*found.groups()) if found else Origin(said, "unknown")


TIMED = (gpu_checks, gpu_steps, gpu_q8_0, gpu_q4_k, gpu_contexts, gpu_batches, gpu_families, gpu_pair)
