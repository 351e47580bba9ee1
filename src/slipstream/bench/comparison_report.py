"""Turns a comparison into table rows and sentences; the command line draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from slipstream.bench.floors import RowCost, number_in
from slipstream.bench.measure import AUTO, PLAIN, Comparison, Ratio
from slipstream.bench.rival import NAME
from slipstream.bench.rival_race import PrefillRace, Race
from slipstream.stats import RequestStats

# The heads are short, so that the table fits into 80 columns: "novel" is tau on new text, "accepted" is the share of
# drafted tokens that were accepted, and "same" counts the texts that equal plain decoding's.
HEADS = ("mode", "tok/s", "speed-up, 95 %", "tau", "novel", "accepted", "same")
RACE_HEADS = ("side", "tok/s, median", f"over {NAME}, 95 %", "over plain, 95 %", "tau")
# Cores that other processes may keep busy during a measurement. Above it the report says that its speeds mean little.
QUIET_CORES = 0.1
COST_HEADS = ("rows", "ms", "of one row", "byte floor", "product floor")


def rows(result: Comparison) -> list[tuple[str, ...]]:
    """The rows of the table under HEADS; cells about drafts are blank if nothing was drafted."""
    return [
        (
            name,
            f"{stats.tokens_per_second:.1f}",
            ratio_text(result.speedup(name)),
            f"{stats.tau:.2f}" if stats.drafted else "",
            "" if not stats.drafted else f"{stats.tau_novel:.2f}" if stats.novel_steps else "-",
            f"{stats.accept_rate:.1%}" if stats.drafted else "",
            "" if name == PLAIN else f"{run.same}/{result.answers}",
        )
        for name, run in result.modes.items()
        for stats in (run.stats,)
    ]


def ratio_text(ratio: Ratio | None) -> str:
    """The ratio, with its interval if the interval is wider than a point; "-" if nothing was decoded."""
    return "-" if ratio is None else f"{ratio.value:.2f}x{_interval_text(ratio)}"


def _interval_text(ratio: Ratio) -> str:
    low, high = ratio.interval or (0.0, 0.0)
    return f" {low:.2f}–{high:.2f}" if high > low else ""


def sentences(result: Comparison, describe: Mapping[str, object]) -> list[str]:
    """What a comparison means; a sentence that does not apply is empty."""
    return [
        ratio_sentence(result),
        source_sentence(result),
        _best_sentence(result),
        identity_sentence(result),
        _floor_sentence(describe, result),
    ]


def per_position(stats: RequestStats) -> list[float]:
    """The share of drafted tokens that were accepted, at each position of the block."""
    return [kept / max(1, seen) for kept, seen in zip(stats.accepted_at, stats.verified_at, strict=True)]


def identity_sentence(result: Comparison) -> str:
    """Says whether speculation changed any text in any mode."""
    runs = result.speculative.values()
    different = sum(result.answers - run.same for run in runs)
    if not different:
        in_modes = f", in all {len(runs)} modes" if len(runs) > 1 else ""
        return f"All {result.answers} texts are identical with and without speculation{in_modes}."
    of = result.answers * len(runs)
    sentence = f"{of - different} of {of} texts are identical to plain decoding's"
    near_ties = sum(run.near_ties for run in runs)
    if near_ties == different:
        return f"{sentence}; the other {different} differ from a near-tie on, which is proven in fp64."
    return f"{sentence}; {different - near_ties} differ without a near-tie, which is a defect."


def ratio_sentence(result: Comparison) -> str:
    """The speed ratio of auto, or else of the fastest mode, with the reason if speculation does not pay."""
    speeds = {name: run.stats.tokens_per_second for name, run in result.speculative.items()}
    name = AUTO if AUTO in speeds else max(speeds, key=speeds.__getitem__)
    speedup = result.speedup(name)
    if speedup is None:
        return "Too little was decoded to compare speeds."
    sentence = f"Mode {name} decodes at {speedup.value:.2f} times the speed of plain decoding"
    if speedup.value >= 1:
        return f"{sentence}."
    plain, stats = result.plain.stats, result.modes[name].stats
    per_token = plain.decode_ms / max(1, plain.committed)
    step = stats.decode_ms / max(1, stats.steps)
    return (
        f"{sentence}: it does not pay on this machine. One of its steps costs {step / max(per_token, 1e-9):.1f} plain "
        f"tokens ({step:.1f} ms against {per_token:.1f} ms) because it also drafts and verifies rows, and commits "
        f"{stats.tau:.2f}."
    )


def source_sentence(result: Comparison) -> str:
    """Says where the accepted tokens of mode auto came from; empty if the text itself drafted none of them."""
    counts = result.modes[AUTO].stats.accepted_by_source if AUTO in result.modes else {}
    if not counts.get("text", 0):
        return ""
    names = {"drafter": "the drafter", "text": "the text itself"}
    parts = ", ".join(f"{count} from {names[source]}" for source, count in counts.items() if count)
    return f"Mode auto kept {sum(counts.values())} drafted tokens: {parts}."


def _best_sentence(result: Comparison) -> str:
    """Compares auto with the fastest fixed mode; empty if auto is the only mode beside plain decoding."""
    against = result.auto_against_best()
    if against is None or len(result.modes) == 2:
        return ""
    interval = _interval_text(against)
    return (
        f"Mode auto decodes at {against.value:.2f} times the speed of {against.over}"
        f"{f' (95 %:{interval})' if interval else ''}, the fastest mode that does not choose for itself."
    )


def _floor_sentence(describe: Mapping[str, object], result: Comparison) -> str:
    """Compares plain decoding with the time of reading the weights once per token; empty if it was not measured."""
    floor_ms, bandwidth, weights = (number_in(describe, key) for key in ("floor_ms", "bandwidth_gbs", "weight_bytes"))
    if not floor_ms:
        return ""
    reached = result.plain.stats.tokens_per_second * floor_ms / 1000
    return (
        f"Byte floor: {weights / 1e6:.1f} MB of weights at {bandwidth:.1f} GB/s take {floor_ms:.2f} ms a token "
        f"({1000 / floor_ms:.0f} tok/s); plain decoding reaches {reached:.0%} of that."
    )


def race_rows(result: Race) -> list[tuple[str, ...]]:
    """The rows of the table under RACE_HEADS; llama.cpp's row is the last."""
    return [
        (
            side,
            f"{result.median_speed(side):.1f}",
            *("" if side in (over, NAME) else ratio_text(result.speedup(side, over)) for over in (NAME, PLAIN)),
            "" if (tau := result.tau(side)) is None else f"{tau:.2f}",
        )
        for side in result.modes
    ]


def cost_rows(costs: Sequence[RowCost]) -> list[tuple[str, ...]]:
    """The rows of the table under COST_HEADS."""
    return [
        (
            str(cost.rows),
            f"{cost.ms:.2f}",
            f"{cost.of_one:.2f}",
            f"{cost.byte_floor_ms:.2f}",
            "-" if cost.product_floor_ms is None else f"{cost.product_floor_ms:.2f}",
        )
        for cost in costs
    ]


def prefill_sentence(result: PrefillRace) -> str:
    return (
        f"A prompt of {result.tokens} tokens: {result.ours_per_second:.0f} tok/s against {NAME}'s "
        f"{result.rival_per_second:.0f}, {ratio_text(result.against)}."
    )


def race_sentences(
    result: Race, prefill: PrefillRace, rival: Mapping[str, object], describe: Mapping[str, object]
) -> list[str]:
    """What a race means; a sentence that does not apply is empty."""
    build, which = built_for(str(rival["system"])), "All" if result.same == result.answers else f"{result.same} of"
    return [
        prefill_sentence(prefill),
        f"{NAME} is {rival['version']} ({build}) on {describe.get('threads')} threads.",
        f"{which} {result.answers} texts are identical with and without speculation.",
        idle_sentence(result),
    ]


def built_for(system: str) -> str:
    """The instruction sets that llama.cpp's own description lists as present."""
    found = [name.strip() for name, _, value in (part.partition("=") for part in system.split("|")) if "1" in value]
    return f"built for {', '.join(name.removeprefix('CPU : ') for name in found)}" if found else system


def idle_sentence(result: Race) -> str:
    """Says how busy the side that was not measured was meanwhile; empty if the system does not tell."""
    if result.watch is None:
        return ""
    ours, theirs, others = result.watch.share("ours"), result.watch.share(NAME), result.watch.others()
    if math.isnan(ours + theirs + others):
        return ""
    sentence = f"While the other side ran, we kept {ours:.1%} of a core busy and {NAME} {theirs:.1%}"
    remark = "" if others <= QUIET_CORES else ", so these speeds mean little"
    return f"{sentence}; the rest of the machine kept {others:.2f} cores busy{remark}."
