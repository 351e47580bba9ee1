"""What a comparison says, as rows and sentences; drawing them is the command line's business."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slipstream.bench.measure import Comparison
from slipstream.types import RequestStats

HEADS = ("", "plain", "speculative")


def rows(result: Comparison) -> list[tuple[str, str, str]]:
    """The table's rows under HEADS; what only drafting has is blank for plain decoding."""
    plain, speculative = result.plain.stats, result.speculative.stats
    both: list[tuple[str, Callable[[RequestStats], str]]] = [
        ("decoding, tok/s", lambda stats: f"{stats.tokens_per_second:.1f}"),
        ("first token, mean ms", lambda stats: f"{stats.ttft_ms / max(1, result.answers):.0f}"),
        ("tokens written", lambda stats: f"{stats.completion_tokens:,}"),
        ("time drafting / verifying / other", _time_split),
    ]
    drafted = [
        ("tokens per verify step (tau)", f"{speculative.tau:.2f}"),
        ("tau on novel text", f"{speculative.tau_novel:.2f}" if speculative.novel_steps else "-"),
        ("drafted tokens accepted", f"{speculative.accept_rate:.1%}"),
    ]
    return [
        *[(name, cell(plain), cell(speculative)) for name, cell in both], *[(name, "", cell) for name, cell in drafted]
    ]


def _time_split(stats: RequestStats) -> str:
    parts = (stats.draft_ms, stats.verify_ms, stats.other_ms)
    whole = sum(parts) or 1.0
    return " / ".join(f"{part / whole:.0%}" for part in parts)


def per_position(stats: RequestStats) -> list[float]:
    """The share of drafts accepted at each position of the block."""
    return [kept / max(1, seen) for kept, seen in zip(stats.accepted_at, stats.verified_at, strict=True)]


def identity_sentence(result: Comparison) -> str:
    """Whether speculation changed any text."""
    if result.same == result.answers:
        return f"All {result.answers} texts are identical with and without speculation."
    sentence = f"{result.same} of {result.answers} texts are identical with and without speculation"
    different = result.answers - result.same
    if result.near_ties == different:
        return f"{sentence}; the other {different} part at a near-tie proven in fp64."
    return f"{sentence}; {different - result.near_ties} differ without a near-tie, which is a defect."


def ratio_sentence(result: Comparison) -> str:
    """The honest ratio, with the reason where speculation does not pay."""
    if result.speedup is None:
        return "Too little was decoded to compare speeds."
    ratio = f"Speculation decodes at {result.speedup:.2f} times the speed of plain decoding"
    if result.speedup >= 1:
        return f"{ratio}."
    plain, stats = result.plain.stats, result.speculative.stats
    per_token = plain.decode_ms / max(1, plain.committed)
    step = stats.decode_ms / max(1, stats.steps)
    return (
        f"{ratio}: it does not pay on this machine. A draft-and-verify step costs {step / max(per_token, 1e-9):.1f} "
        f"plain tokens ({step:.1f} ms against {per_token:.1f} ms) because a CPU pays for every row it verifies, and "
        f"commits {stats.tau:.2f}."
    )


def floor_sentence(describe: Mapping[str, object], result: Comparison) -> str:
    """Plain decoding against the time it takes just to read the weights once per token; empty if not measured."""
    floor_ms, bandwidth, weights = (_number(describe, key) for key in ("floor_ms", "bandwidth_gbs", "weight_bytes"))
    if not floor_ms:
        return ""
    reached = result.plain.stats.tokens_per_second * floor_ms / 1000
    return (
        f"Byte floor: {weights / 1e6:.1f} MB of weights at {bandwidth:.1f} GB/s take {floor_ms:.2f} ms a token "
        f"({1000 / floor_ms:.0f} tok/s); plain decoding reaches {reached:.0%} of that."
    )


def _number(describe: Mapping[str, object], key: str) -> float:
    value = describe.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
