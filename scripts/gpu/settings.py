"""Times a target's steps under other kernel settings in one process, and says whether the bits stay the same.

    python scripts/gpu/settings.py --try paged_attention.PROGRAMS=132
    python scripts/gpu/settings.py --try "paged_attention.AT_ONCE=8 elementwise._GATE_BLOCK=512"
    python scripts/gpu/settings.py --shape Laguna-XS.2 --format Q4_K --try "paged_attention.TILINGS[128].last_warps=2"
    python scripts/gpu/settings.py --tiny --try paged_attention.PROGRAMS=8      the same code on a CPU, kernels in torch

A setting is a module of slipstream.kernels.gpu, a name in it (or a field of a table's entry) and a value. Weights are
random. The usual settings are timed first and last; a difference smaller than that between those two is noise.
"""

# mypy: disable-error-code="call-arg, unused-ignore"

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import family_steps
import step_times
import torch
from shapes import FAMILIES, QWEN3_8B, TINY, tiny_family
from torch import Tensor
from triton.runtime.errors import OutOfResources

_SETTING = re.compile(r"(\w+)\.(\w+)(?:\[(\w+)\]\.(\w+))?=(.+)")
Times = dict[str, float]


@contextmanager
def changed(settings: str) -> Iterator[None]:
    """Applies the settings, separated by spaces, for as long as the context lasts."""
    before: list[tuple[Any, str, Any]] = []
    for setting in settings.split():
        found = _SETTING.fullmatch(setting)
        if found is None:
            raise SystemExit(f"{setting} is no setting; write module.NAME=value or module.TABLE[key].field=value")
        where, name, key, member, text = found.groups()
        module, value = import_module(f"slipstream.kernels.gpu.{where}"), ast.literal_eval(text)
        if not hasattr(module, name):
            raise SystemExit(f"{where} has no {name}")
        usual = getattr(module, name)
        before.append((module, name, usual))
        if key is not None:
            entry = ast.literal_eval(key)
            value = {**usual, entry: replace(usual[entry], **{member: value})}
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, usual in reversed(before):
            setattr(module, name, usual)


class Dense:
    """The Qwen3-8B shape with its drafter."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        own = argparse.Namespace(
            contexts=[options.context], batches=[1], tiny=options.tiny, no_graphs=False, format=options.format
        )
        self._bench = step_times.Bench(own, TINY if options.tiny else QWEN3_8B, device)
        self._context, self._rounds = options.context, options.rounds

    def measure(self) -> tuple[Times, list[Tensor]]:
        bench, context, rounds = self._bench, self._context, self._rounds
        bench.executor.device_steps.steps.clear()
        forget_graphs(bench.device_side)
        times, taps = {"plain": bench.step_ms(1, context, 0, False, rounds)}, []
        for rows in (16, 64):
            times[f"verify {rows}"] = bench.verify_ms(1, context, rows - 1, rounds)
            step, _ = bench.executor.device_steps.step(1, rows, bench.gpu_drafter, True)
            assert step.taps is not None
            taps.append(step.taps.clone())
        times["draft + verify 16"] = bench.step_ms(1, context, 15, True, rounds)
        return times, taps


class Family:
    """A hybrid or a mixture of experts; its experts may differ from step to step, so bits are not compared."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        shape = tiny_family(options.shape) if options.tiny else FAMILIES[options.shape]
        self._bench = family_steps.Bench(shape, options.format, options.context, device, options.tiny)
        self._rounds = options.rounds

    def measure(self) -> tuple[Times, list[Tensor]]:
        forget_graphs(self._bench.device_side)
        steps = family_steps.STEPS
        return {label: float(self._bench.measure(label, *step, self._rounds)["ms"]) for label, *step in steps}, []  # type: ignore[arg-type]


def forget_graphs(device: Any) -> None:
    """Captured graphs hold the kernels of the settings before."""
    device.graphs.forget(lambda key: True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-8B", choices=("Qwen3-8B", *FAMILIES))
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--try", dest="tried", action="append", default=[], help="settings, separated by spaces")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    for settings in options.tried:
        with changed(settings):  # reports an unknown name before anything is built
            pass
    device = torch.device("cpu" if options.tiny else "cuda")
    work = (Dense if options.shape == "Qwen3-8B" else Family)(options, device)
    usual: tuple[Times, list[Tensor]] | None = None
    for settings in ("", *options.tried, ""):
        try:
            with changed(settings):
                times, taps = work.measure()
        except (RuntimeError, OutOfResources) as problem:
            # A launch that needs more than a multiprocessor has must not end the other settings.
            print(f"{settings}: {str(problem)[:150]}", flush=True)
            continue
        usual = usual or (times, taps)
        cells = "  ".join(f"{label} {ms:.3f} ({1e3 * (ms - usual[0][label]):+.0f} us)" for label, ms in times.items())
        alike = all(torch.equal(one, other) for one, other in zip(taps, usual[1], strict=True))
        print(f"{settings or 'as usual'}: {cells}{'' if alike else '  OTHER BITS'}", flush=True)


if __name__ == "__main__":
    main()
