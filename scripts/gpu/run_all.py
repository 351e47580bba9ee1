"""Runs everything that is checked and measured on a GPU, and stores the numbers for `python -m tests.verify` to judge.

    python scripts/gpu/run_all.py                                    everything, with the default pair
    python scripts/gpu/run_all.py --target T.gguf --draft D.gguf     where nothing can be fetched
    python scripts/gpu/run_all.py --only checks,steps_bf16           some of it, by name
    python scripts/gpu/run_all.py --tiny --out FOLDER                on a CPU: whether all of it runs

Checks run side by side, because compiling takes longest; timed jobs have the GPU to themselves. OUT/logs holds the
output of each job.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPTS = Path(__file__).parent
NUMBERS = SCRIPTS.parents[1] / "build" / "verify" / "gpu"
CHECKS = {
    f"checks_{part}": [f"checks_{part}.py", "--only", "checks"]
    for part in ("attention", "growth", "matmul", "elementwise", "sampling", "delta", "experts")
}
STEPS = {
    "steps_bf16": ["step_times.py", "--reference"],
    "steps_Q8_0": ["step_times.py", "--format", "Q8_0"],
    "steps_Q4_K": ["step_times.py", "--format", "Q4_K"],
    "steps_contexts": ["step_times.py", "--contexts", "1024,8192,32768", "--widths", "16"],
    "steps_batches": ["step_times.py", "--batches", "1,4,16,64"],
}
PAIR = {"real_pair": ["real_pair.py", "TARGET", "DRAFTER", "--parts", "batches,modes,text,syncs,peers"]}
TIMED = {**PAIR, **STEPS, "families": ["family_steps.py"]}  # the most important jobs come first
TINY_PAIR = ["--device", "cpu", "--limit", "1", "--tokens", "8", "--batches", "2", "--parts", "modes,text,batches"]
SIDE_BY_SIDE = 4  # checks that run at the same time; some of them start several processes themselves
LIMIT_S = 420.0


def command_of(name: str) -> str:
    """The command line of a job, as a user would type it."""
    return f"python scripts/gpu/{' '.join(TIMED[name])}"


def default_pair() -> tuple[str, str]:
    from slipstream.formats.sources import resolve

    return str(resolve("smollm2").path), str(resolve("smollm2-dflash").path)


class Jobs:
    """Runs scripts in their own processes; one that fails or hangs does not keep the others from running."""

    def __init__(self, out: Path, target: str, draft: str, tiny: bool) -> None:
        self._out = out
        self._tiny = tiny
        self._files = {"TARGET": target, "DRAFTER": draft}
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self.failed: list[str] = []

    def check(self, names: Sequence[str]) -> None:
        """Runs all of these checks at once, and keeps the output of each together."""
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(lambda name: self.run(name, CHECKS[name], False), names))
        said = [{"check": name, "ok": name not in self.failed, "said": _last_line(self._log(name))} for name in names]
        (self._out / "checks.json").write_text(json.dumps(said, indent=1))

    def run(self, name: str, arguments: Iterable[str], writes: bool) -> None:
        if self._tiny:
            small = TINY_PAIR if name in PAIR else ["--tiny"]
            arguments = [*(argument for argument in arguments if argument != "--reference"), *small]
        command = [sys.executable, *(self._files.get(argument, argument) for argument in arguments)]
        if writes:
            command += ["--out", str((self._out / f"{name}.json").resolve())]
        log = self._log(name)
        began = time.monotonic()
        with log.open("w") as words:
            try:
                code = subprocess.run(
                    command, cwd=SCRIPTS, stdout=words, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
                ).returncode
                verdict = "ok" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                verdict = f"stopped after {LIMIT_S:.0f} s"
        if verdict != "ok":
            self.failed.append(name)
            verdict += f", see {log}"
        print(f"{name:18} {time.monotonic() - began:6.0f} s  {verdict}", flush=True)

    def _log(self, name: str) -> Path:
        return self._out / "logs" / f"{name}.txt"


def _last_line(log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    return lines[-1] if lines else "nothing"


def write_origin(out: Path) -> None:
    """Writes where the numbers come from, because they are judged on other machines too."""
    import torch
    import triton

    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False).stdout.strip()
    (out / "origin.txt").write_text(
        f"one {torch.cuda.get_device_name()} (torch {torch.__version__}, triton {triton.__version__}), "
        f"the tree of commit {commit or 'unknown'}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"checks, {', '.join((*CHECKS, *TIMED))}; separated by commas")
    parser.add_argument("--target", help="the target's file (default: smollm2, fetched if need be)")
    parser.add_argument("--draft", help="the drafter's file (default: smollm2-dflash)")
    parser.add_argument("--out", type=Path, default=NUMBERS, help="folder for the numbers and logs")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, with torch or the interpreter")
    options = parser.parse_args()
    wanted = set(options.only.split(",")) if options.only else {"checks", *TIMED}
    unknown = wanted - {"checks", *CHECKS, *TIMED}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if "checks" in wanted:
        wanted |= set(CHECKS)
    target, draft = options.target, options.draft
    if "real_pair" in wanted and not (target and draft):
        named = default_pair()
        target, draft = target or named[0], draft or named[1]
    files = [str(Path(file).resolve()) if file else "" for file in (target, draft)]
    jobs = Jobs(options.out, files[0], files[1], options.tiny)
    if not options.tiny:
        write_origin(options.out)
    if checks := [name for name in CHECKS if name in wanted]:
        jobs.check(checks)
    for name, arguments in TIMED.items():
        if name in wanted:
            jobs.run(name, arguments, True)
    print(f"failed: {', '.join(jobs.failed) or 'none'}")
    return 1 if jobs.failed else 0


if __name__ == "__main__":
    sys.exit(main())
