"""The promises a GPU must keep, judged from what the scripts in scripts/gpu measured on one.

On a machine with a GPU the sections run the scripts; elsewhere they judge the numbers that lie in build/verify/gpu, and
say so where there are none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.verify_report import Report

ROOT = Path(__file__).parent.parent
SCRIPTS, NUMBERS = ROOT / "scripts" / "gpu", ROOT / "build" / "verify" / "gpu"
STEPS = {
    "steps_bf16": ["--reference"],
    "steps_Q8_0": ["--format", "Q8_0"],
    "steps_Q4_K": ["--format", "Q4_K"],
    "steps_contexts": ["--contexts", "1024,8192,32768", "--widths", "16"],
    "steps_batches": ["--batches", "1,4,16,64"],
}
MOST_MS = {"bf16": (5.2, 6.5), "Q8_0": (3.6, None), "Q4_K": (3.2, None)}  # a plain step, one with draft and 16 rows
NARROW = "draft + verify 16"
MOST_WIDE = 1.1  # times the verify of 16 rows, for a tree of 64
MOST_RATIO = 1.5  # of the floor, for targets whose layers are not all alike
Line = dict[str, Any]


def gpu_steps(report: Report) -> None:
    _origin(report)
    for name, arguments in STEPS.items():
        lines = measured(name, ["step_times.py", *arguments])
        command = f"`python scripts/gpu/step_times.py {' '.join(arguments)}`"
        if not lines:
            report.add(command, "no GPU here, and no numbers of one in build/verify/gpu", False)
        elif name in ("steps_contexts", "steps_batches"):
            _table(report, command, lines)
        else:
            _steps(report, command, lines)


def _origin(report: Report) -> None:
    """Numbers that were brought here say where they come from: build/verify/gpu/origin.txt."""
    path = NUMBERS / "origin.txt"
    if path.is_file() and not torch.cuda.is_available():
        report.add("the numbers below were measured elsewhere", path.read_text().strip(), True)


def _steps(report: Report, command: str, lines: list[Line]) -> None:
    kind = lines[0]["format"]
    found = {line["step"]: line for line in lines}
    for step, most in zip(("plain", NARROW), MOST_MS[kind], strict=True):
        line = found[step]
        bound = f"at most {most} ms" if most else "no bound"
        text = f"{line['ms']} ms ({bound}), floor {line['floor_ms']} ms, {line['ratio']} of it"
        report.add(f"{kind}, 1K context, {step}: {command}", text, most is None or line["ms"] <= most)
    wide, narrow = found["verify 64 alone"]["ms"], found["verify 16 alone"]["ms"]
    text = f"{wide / narrow:.3f} times the verify of 16 rows ({wide} and {narrow} ms)"
    judged = f" (at most {MOST_WIDE})" if kind == "bf16" else ""
    report.add(f"{kind}: verify of a tree of 64 rows", text + judged, wide <= MOST_WIDE * narrow or not judged)
    for theirs, ours in (("authors' draft + verify", NARROW), ("transformers plain", "plain")):
        if theirs in found:
            times = found[theirs]["ms"] / found[ours]["ms"]
            text = f"{found[theirs]['ms']} ms, {times:.1f} times ours (at least 7), in the same run"
            report.add(f"{theirs}, random weights of the same shape", text, times >= 7 or ours != NARROW)


def _table(report: Report, command: str, lines: list[Line]) -> None:
    for line in lines:
        text = f"{line['ms']} ms, floor {line['floor_ms']} ms, {line['ratio']} of it"
        report.add(f"{line['step']}, batch {line['batch']}, context {line['context']}: {command}", text, True)


def gpu_families(report: Report) -> None:
    """Hybrid and mixture targets with random weights; of a mixture only the experts that rows touch count."""
    _origin(report)
    command = "`python scripts/gpu/family_steps.py`"
    lines = measured("families", ["family_steps.py"])
    if not lines:
        report.add(command, "no GPU here, and no numbers of one in build/verify/gpu", False)
    for line in lines:
        judged = line["format"] == "bf16" and line["step"] in ("plain", "verify chain 16")
        bound = f"at most {MOST_RATIO}" if judged else "no bound"
        text = f"{line['ms']:.2f} ms, floor {line['floor_ms']:.2f} ms, {line['ratio']:.2f} of it ({bound})"
        if line["experts"]:
            text += f", {line['experts']:.0f} experts a layer"
        name = f"{line['shape']}, {line['format']}, {line['context']} tokens of context, {line['step']}: {command}"
        report.add(name, text, not judged or line["ratio"] <= MOST_RATIO)


def gpu_pair(report: Report) -> None:
    """The shipped pair: needs the target's file, which the scripts take as an argument."""
    path = NUMBERS / "real_pair.json"
    command = "`python scripts/gpu/real_pair.py TARGET DRAFTER --out build/verify/gpu/real_pair.json`"
    if not path.is_file():
        report.add(command, "no numbers in build/verify/gpu", False)
        return
    _origin(report)
    found: dict[str, list[Line]] = json.loads(path.read_text())
    for line in [*found.get("modes", ()), *found.get("native", ())]:
        same, of = map(int, line["same_texts"].split("/"))
        text = (
            f"{line['tokens_per_s']} tok/s, {line['over_plain']} of our plain, tau {line['tau']}, "
            f"{line['ms_per_step']} ms a step, {same}/{of} texts as plain, {line['tokens']} tokens"
        )
        report.add(f"{line['weights']}, {line['set']}, {line['mode']}: {command}", text, same == of)
    for line in found.get("theirs", ()):
        text = f"{line['tokens_per_s']} tok/s, {line['ms_per_step']} ms a step, tau {line['tau']}"
        report.add(f"the same weights, {line['set']}, {line['who']}", text, True)
    for line in found.get("batches", ()):
        text = f"plain {line['plain']} tok/s, auto {line['auto']}: {line['auto_over_plain']} (at least 0.98)"
        report.add(f"throughput of {line['batch']} sequences at once", text, line["auto_over_plain"] >= 0.98)
    for line in found.get("syncs", ()):
        waits, others, steps = line["events_waited_for"], line["other_syncs"], line["steps"]
        text = f"{waits} waits for results and {others} others in {steps} steps"
        report.add(f"waits of the host, {line['mode']}", text, waits + others <= steps)


def measured(name: str, command: list[str]) -> list[Line]:
    """A script's numbers: fresh ones where there is a GPU, else those that were brought from one."""
    path = NUMBERS / f"{name}.json"
    if torch.cuda.is_available():
        NUMBERS.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, *command, "--out", str(path)], cwd=SCRIPTS, check=True)
    lines: list[Line] = json.loads(path.read_text()) if path.is_file() else []
    return lines


TIMED = (gpu_steps, gpu_families, gpu_pair)
