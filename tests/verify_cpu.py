"""The sections of the verification about speed beside llama.cpp and about the quality of the weight formats."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import cast

from slipstream.bench import rival
from slipstream.bench import rival_race as race
from slipstream.bench.comparison_report import built_for, prefill_sentence
from slipstream.bench.workloads import PUBLIC
from slipstream.config import WeightFormat
from slipstream.engine.llm import LLM
from slipstream.errors import SlipstreamError
from tests import checks_cpu as promises
from tests.quality import PERPLEXITY_BOUND as BOUND
from tests.verify_report import Report

RACE_PROMPTS, RACE_TOKENS, RACE_CONTEXT = 8, 128, 2048
TEMPERATURES = (0.0, 0.8)
QUALITY_TOKENS = 20_000
QUALITY_FORMATS: tuple[WeightFormat, ...] = ("int4", "int8")
SIDES = {rival.NAME: "rival"}  # the name of a side of the race in the values of a row
QUIET = "an engine that waits for its turn is idle, and so are all other processes"
# SLIPSTREAM_RIVAL names a llama-server that was built for this machine; it is then raced instead of the package.
PROGRAM = os.environ.get("SLIPSTREAM_RIVAL", rival.PACKAGE)
Section = Callable[[Report], None]


def cpu_speed(report: Report) -> None:
    """Measures all promises about speed on a CPU in one run on all cores."""
    with closing(LLM()) as llm:
        costs = promises.measured_rows(llm, peak_products())
        milliseconds = {f"ms_{cost.rows}": round(cost.ms, 2) for cost in costs}
        floor_ms = round(costs[0].byte_floor_ms, 2)
        _add(report, promises.judge_rows(costs, has_amx()), byte_floor_ms=floor_ms, **milliseconds)
        try:
            opponent = rival.start(llm.target_source.path, llm.threads, RACE_CONTEXT, PROGRAM)
        except SlipstreamError as error:
            report.add("decoding and prefill beside llama.cpp", str(error), False)
            return
        with opponent:
            _race(report, llm, opponent)


def _race(report: Report, llm: LLM, opponent: rival.Rival) -> None:
    about = opponent.describe()
    prefill = race.race_prefill(llm, opponent)
    _add(
        report,
        promises.Bar(
            f"prefill of {prefill.tokens} tokens over {rival.NAME}",
            prefill.against.value,
            promises.PREFILL,
            f"{prefill_sentence(prefill)} It is {about['version']}, {built_for(str(about['system']))}, "
            f"{llm.threads} threads each",
        ),
        tok_s_ours=round(prefill.ours_per_second),
        tok_s_rival=round(prefill.rival_per_second),
    )
    for temperature in TEMPERATURES:
        for name in PUBLIC:
            seen = promises.run_race(llm, opponent, name, RACE_PROMPTS, RACE_TOKENS, temperature)
            speeds = {f"tok_s_{SIDES.get(side, side)}": round(seen.median_speed(side)) for side in seen.modes}
            for bar in promises.judge(seen, name, temperature, RACE_TOKENS):
                _add(report, bar, **speeds)
            if seen.watch is not None:
                text, ok = promises.judge_watch(seen.watch)
                others = round(max(0.0, seen.watch.others()), 4)
                report.add(f"{name}, T {temperature:g}: {QUIET}", text, ok, others_share=others)


def _add(report: Report, bar: promises.Bar, **values: float) -> None:
    report.add(bar.promise, bar.seen(), bar.ok, ratio=round(bar.value, 3), **values)


def has_amx() -> bool:
    """Whether our kernels use AMX on this machine."""
    from slipstream.kernels.cpu.native_library import library

    native = library()
    return native is not None and native.amx


def peak_products() -> float | None:
    """The 8-bit products that all cores do in a second; None without compiled kernels."""
    from slipstream.kernels.machine import int8_peak

    return int8_peak()


def quality(report: Report) -> None:
    chosen = cast(WeightFormat, promises.alone("auto", 1).describe()["weight_format"])
    formats = (*(name for name in QUALITY_FORMATS if name != chosen), chosen)
    for name, seen in promises.quality(formats, QUALITY_TOKENS).items():
        text = (
            f"perplexity {seen.perplexity:.4f} against {seen.reference:.4f} in fp32, {seen.difference:+.3%} (at most "
            f"{BOUND:.1%} either way); the same greedy token at {seen.agreement:.2%} of {seen.tokens} positions; text: "
            f"the shipped prompt sets joined, in windows of {promises.WINDOW} tokens"
        )
        report.add(
            f"{name} predicts a text like the same file in fp32",
            text,
            seen.holds,
            difference=round(seen.difference, 5),
            agreement=round(seen.agreement, 4),
        )


SIDE_BY_SIDE: tuple[Section, ...] = (quality,)
TIMED: tuple[Section, ...] = (cpu_speed,)
