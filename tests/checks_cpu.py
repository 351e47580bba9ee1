"""Checks of the promises about speed against llama.cpp and about the quality of weight formats, at any size."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from slipstream.bench.comparison_report import QUIET_CORES
from slipstream.bench.floors import ROWS, RowCost, row_costs
from slipstream.bench.measure import BenchPlan
from slipstream.bench.rival import NAME, Rival
from slipstream.bench.rival_race import Race, Watch, prose_ids, race
from slipstream.bench.workloads import read_prompts
from slipstream.config import EngineConfig, WeightFormat
from slipstream.engine.llm import LLM
from tests.quality import Prediction, Quality, compare_predictions, predictions, row_times, windows

WINDOW = 1024  # tokens that are read as one text, because the whole text is longer than the target's context


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for a figure, and the measured figure."""

    promise: str
    value: float
    bar: float
    about: str
    at_most: bool = False

    @property
    def ok(self) -> bool:
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def seen(self) -> str:
        return f"{self.value:.3f} ({'at most' if self.at_most else 'at least'} {self.bar:g}); {self.about}"


# Greedy, per prompt set: a mode, the side it is compared with, and the least ratio that is required.
FAST_SETS, SLOW_SET = ("humaneval", "gsm8k"), "mt-bench"
PLAIN_OVER_RIVAL, AUTO_OVER_RIVAL, AUTO_OVER_PLAIN, AUTO_NEVER_SLOWER, PREFILL = 1.0, 2.0, 1.5, 0.97, 0.8
ROWS_WITH_AMX, ROWS_WITHOUT = 2.0, 3.0


def bars_of(name: str, temperature: float) -> list[tuple[str, str, float]]:
    """The limits for one race: (mode, compared side, least ratio)."""
    if temperature > 0:
        return [("auto", "plain", AUTO_NEVER_SLOWER)]
    plain = ("plain", NAME, PLAIN_OVER_RIVAL)
    if name in FAST_SETS:
        return [plain, ("auto", "plain", AUTO_OVER_PLAIN), ("auto", NAME, AUTO_OVER_RIVAL)]
    return [plain, ("auto", "plain", AUTO_NEVER_SLOWER)]


def judge(result: Race, name: str, temperature: float, tokens: int) -> list[Bar]:
    """The limits of one race with the measured ratios."""
    how = f"T {temperature:g}" if temperature else "greedy"
    speeds = ", ".join(f"{side} {result.median_speed(side):.0f}" for side in result.modes)
    found = []
    for mode, over, bar in bars_of(name, temperature):
        ratio = result.speedup(mode, over)
        value = 0.0 if ratio is None else ratio.value
        low, high = (ratio.interval if ratio else None) or (value, value)
        about = (
            f"95 % {low:.3f} to {high:.3f}; median tok/s: {speeds}; auto's tau {result.tau('auto') or 0:.2f}, "
            f"{result.same}/{result.answers} texts same, up to {tokens} tokens each"
        )
        found.append(Bar(f"{name}, {how}: {mode} over {over}", value, bar, about))
    return found


def run_race(llm: LLM, rival: Rival, name: str, prompts: int, tokens: int, temperature: float) -> Race:
    plan = BenchPlan(max_tokens=tokens, temperature=temperature, seed=1)
    return race(llm, rival, read_prompts(name, prompts), plan)


def measured_rows(llm: LLM, peak: float | None) -> list[RowCost]:
    """The times of our steps by their rows, with both floors."""
    about, target = llm.describe(), llm.engine.executor.target
    times = row_times(target, ROWS)
    bandwidth = 1e9 * float(str(about["bandwidth_gbs"]))
    return row_costs(times, float(str(about["weight_bytes"])), bandwidth, float(str(about["row_products"])), peak)


def judge_rows(costs: Sequence[RowCost], amx: bool) -> Bar:
    by_rows = {cost.rows: cost for cost in costs}
    table = ", ".join(f"{cost.rows}: {cost.ms:.2f}{_product_floor(cost)}" for cost in costs)
    about = f"ms by rows: {table}; byte floor {costs[0].byte_floor_ms:.2f} ms"
    bar = ROWS_WITH_AMX if amx else ROWS_WITHOUT
    kind = "with AMX" if amx else "without AMX"
    return Bar(f"16 rows over one row, {kind}", by_rows[16].of_one, bar, about, at_most=True)


def _product_floor(cost: RowCost) -> str:
    return "" if cost.product_floor_ms is None else f" (products alone {cost.product_floor_ms:.2f})"


def judge_watch(watch: Watch) -> tuple[str, bool]:
    """Whether the engine that waits and all other processes were idle, and how much of a core each kept busy."""
    shares = {"slipstream": watch.share("ours"), NAME: watch.share(NAME), "other processes": watch.others()}
    text = ", ".join(f"{side} {'unknown' if math.isnan(share) else f'{share:.2%}'}" for side, share in shares.items())
    ok = not any(share > (QUIET_CORES if side == "other processes" else 0.02) for side, share in shares.items())
    return f"share of a core that was busy outside the engine's own turns: {text}", ok


@cache
def alone(weight_format: WeightFormat, threads: int) -> LLM:
    """The default target without a drafter."""
    return LLM("smollm2", None, config=EngineConfig(weight_format=weight_format, threads=threads, max_context=WINDOW))


@cache
def predict(weight_format: WeightFormat, tokens: int, threads: int = 1) -> list[Prediction]:
    """The predictions of the target in one format for the first tokens of the included prompts."""
    llm = alone(weight_format, threads)
    ids = prose_ids(llm, tokens)
    seen: list[Prediction] = []
    for number, window in enumerate(windows(ids, WINDOW)):
        seen += predictions(llm.engine.executor.target, window)
        if number % 4 == 3:
            print(f"{weight_format}: {len(seen)} of {tokens} tokens", file=sys.stderr, flush=True)
    return seen


def quality(formats: Sequence[WeightFormat], tokens: int, threads: int = 1) -> dict[str, Quality]:
    """Compares every format with the same file decoded to fp32."""
    reference = predict("fp32", tokens, threads)
    return {name: compare_predictions(predict(name, tokens, threads), reference) for name in formats}
