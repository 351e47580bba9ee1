"""Checks the choice of tokens and the ranking of candidates on a GPU against torch and for independent rows.

python scripts/gpu/checks_sampling.py          # on the GPU
python scripts/gpu/checks_sampling.py --tiny   # on a CPU under Triton's interpreter: finds typos, times nothing
"""

# mypy: disable-error-code="arg-type, call-arg, unused-ignore"

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from checks_elementwise import COPY_GB_S, Asked, median_us
from torch import Tensor

from slipstream.kernels.gpu import token_choice as sampling
from slipstream.kernels.gpu.filters import FilterScratch, find_floors
from slipstream.kernels.gpu.token_choice import RankingScratch, SamplingSettings

VOCABULARIES = {"qwen3-8b": 151936, "smollm2": 49152}
# For each name: temperature, top_k, top_p, min_p.
KINDS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "sampled": (0.8, 0, 1.0, 0.0),
    "top-k": (0.8, 20, 1.0, 0.0),
    "top-p": (1.0, 0, 0.95, 0.0),
    "all": (0.7, 50, 0.9, 0.02),
    "flat": (6.0, 0, 0.98, 0.0),
}
NEAR = 1e-4  # scores closer than this may trade places, because logarithms differ in their last bits


def settings_of(kinds: Sequence[str], device: torch.device) -> SamplingSettings:
    settings = SamplingSettings.empty(len(kinds), device)
    columns = list(zip(*(KINDS[kind] for kind in kinds), strict=True))
    parts = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    for part, column in zip(parts, columns, strict=True):
        part.copy_(torch.tensor(column))
    settings.seed.copy_(torch.randint(0, 2**62, (len(kinds),)))
    return settings


class Run:
    """Rows with fresh, poisoned outputs: one sequence of `each` rows for every kind of settings."""

    def __init__(self, kinds: Sequence[str], each: int, vocabulary: int, count: int, device: torch.device) -> None:
        self.each, self.count, self.device = each, count, device
        self.kinds, rows = list(kinds), len(kinds) * each
        self.settings = settings_of(kinds, device)
        self.logits = torch.randn(rows, vocabulary, device=device) * 3
        self.positions = torch.randint(0, 40000, (rows,), device=device).int()

    def chosen(self, reference: bool = False) -> Tensor:
        rows, vocabulary = self.logits.shape
        out = torch.full((rows,), -99, dtype=torch.int32, device=self.device)
        scratch = RankingScratch.empty(rows, vocabulary, 1, self.device)
        call = sampling.choose_reference if reference else sampling.choose
        call(self.logits, self.positions, self.settings, self.each, out, scratch)
        return out

    def ranked(self, reference: bool = False) -> tuple[Tensor, Tensor]:
        rows, vocabulary = self.logits.shape
        tokens = torch.full((rows, self.count), -99, dtype=torch.int32, device=self.device)
        scores = torch.full((rows, self.count), float("nan"), device=self.device)
        scratch = RankingScratch.empty(rows, vocabulary, self.count, self.device)
        call = sampling.top_candidates_reference if reference else sampling.top_candidates
        call(self.logits, self.positions, self.settings, self.each, 0, tokens, scores, scratch)
        return tokens, scores

    def alone(self, sequence: int) -> Run:
        """The rows of one sequence without the others."""
        found = Run([self.kinds[sequence]], self.each, self.logits.shape[1], self.count, self.device)
        own = slice(sequence * self.each, (sequence + 1) * self.each)
        found.logits, found.positions = self.logits[own].clone(), self.positions[own].clone()
        found.settings.seed.copy_(self.settings.seed[sequence : sequence + 1])
        return found


def check(device: torch.device, vocabularies: dict[str, int], each: int, counts: Sequence[int]) -> list[str]:
    """Describes each fault in a sentence: results that differ from torch, or bits that depend on other rows."""
    wrong = []
    for name, vocabulary in vocabularies.items():
        for count in counts:
            run = Run(list(KINDS), each, vocabulary, count, device)
            run.logits[0, vocabulary // 2] = float("nan")
            run.logits[-1, vocabulary // 8 :] = -0.5  # makes more values equal than the filters' list holds
            chosen, (tokens, scores) = run.chosen(), run.ranked()
            if (chosen[0] != -1) or not scores[0].isnan().all():
                wrong.append(f"{name}: a row with a NaN has a token")
            wrong += [f"{name} K={count}: {fault}" for fault in _differences(run, chosen, tokens, scores)]
            for sequence, kind in enumerate(run.kinds):
                own, alone = slice(sequence * each, (sequence + 1) * each), run.alone(sequence)
                same = torch.equal(alone.chosen(), chosen[own]) and torch.equal(alone.ranked()[0], tokens[own])
                if not same or not torch.equal(alone.ranked()[1].nan_to_num(7.0), scores[own].nan_to_num(7.0)):
                    wrong.append(f"{name} K={count}: {kind} rows change among others")
    return wrong


def _differences(run: Run, chosen: Tensor, tokens: Tensor, scores: Tensor) -> list[str]:
    found = []
    expected, (expected_tokens, expected_scores) = run.chosen(reference=True), run.ranked(reference=True)
    sums, _ = sampling.reference_sums(run.logits, run.positions + 1, run.settings, run.each, run.settings.shared > 0)
    for row in (chosen != expected).nonzero()[:, 0].tolist():
        gap = sums[row, expected[row]] - sums[row, chosen[row]]
        if not gap.abs() < NEAR:
            found.append(f"{run.kinds[row // run.each]} row {row} chose {chosen[row]}, not {expected[row]} (by {gap})")
    apart = (scores - expected_scores).nan_to_num(0.0).abs()
    if apart.max() > 10 * NEAR or not torch.equal(scores.isnan(), expected_scores.isnan()):
        found.append(f"scores are off by {apart.max()}")
    odd = (tokens != expected_tokens) & (apart > NEAR)
    if odd.any() or (tokens != expected_tokens).float().mean() > 0.01:
        found.append(f"{int((tokens != expected_tokens).sum())} of {tokens.numel()} candidates are others")
    return found


def time_table(device: torch.device, vocabularies: dict[str, int], counts: Sequence[int]) -> list[str]:
    lines = [f"{'shape':<10} {'rows':>5} {'kind':<8} {'K':>3} {'us':>8} {'GB/s':>7} {'floor us':>9}"]
    for name, vocabulary in vocabularies.items():
        for rows in counts:
            turns = 8 if rows * vocabulary * 4 * 8 < 2**31 else 2  # so that the L2 cache does not hold the logits
            for kind in ("greedy", "sampled", "top-k", "top-p", "all", "flat"):
                run = Run([kind], rows, vocabulary, 1, device)
                copies = [torch.randn_like(run.logits) * 3 for _ in range(turns)]
                for count in (0, 1, 16, 64) if kind in ("greedy", "sampled") else (0, 16):
                    us = _time(run, copies, count)
                    size = run.logits.numel() * 4
                    label = str(count) if count else "-"  # without candidates it is the target's choice
                    lines.append(
                        f"{name:<10} {rows:>5} {kind:<8} {label:>3} {us:>8.2f} {size / us / 1e3:>7.0f} "
                        f"{size / COPY_GB_S / 1e3:>9.2f}"
                    )
    return lines


def _time(run: Run, copies: Sequence[Tensor], count: int) -> float:
    rows, vocabulary = run.logits.shape
    width = max(1, count)
    tokens = torch.empty((rows, width), dtype=torch.int32, device=run.device)
    scores = torch.empty((rows, width), device=run.device)
    scratch = RankingScratch.empty(rows, vocabulary, width, run.device)

    def launch(logits: Tensor) -> None:
        if count:
            sampling.top_candidates(logits, run.positions, run.settings, rows, 0, tokens, scores, scratch)
        else:
            sampling.choose(logits, run.positions, run.settings, rows, tokens, scratch)

    return median_us([lambda logits=logits: launch(logits) for logits in copies], replays=15)  # type: ignore[misc]


def parts_table(device: torch.device, vocabulary: int, rows: int) -> list[str]:
    """The times of the filters' three launches; greedy rows leave them at once."""
    lines = [f"{'floors':<8} {'us':>8}  ({rows} rows)"]
    for kind in KINDS:
        run = Run([kind], rows, vocabulary, 1, device)
        scratch = FilterScratch.empty(rows, vocabulary, device)
        filters = run.settings.temperature, run.settings.top_k, run.settings.top_p, run.settings.min_p

        def launch(logits: Tensor, filters: tuple[Tensor, ...] = filters, scratch: FilterScratch = scratch) -> None:
            find_floors(logits, *filters, rows, scratch)

        copies = [torch.randn_like(run.logits) * 3 for _ in range(8)]
        us = median_us([lambda logits=logits: launch(logits) for logits in copies], replays=15)  # type: ignore[misc]
        lines.append(f"{kind:<8} {us:>8.2f}")
    return lines


def tuning_table(device: torch.device, vocabulary: int, rows: int) -> list[str]:
    """Times sizes of groups and numbers of warps; sampling.py holds the chosen ones."""
    cases = (("greedy", 0), ("sampled", 0), ("greedy", 16), ("sampled", 16), ("sampled", 64))
    names = " ".join(f"{kind[:3] + (f' K={count}' if count else ''):>8}" for kind, count in cases)
    lines = [f"{'groups':>6} {'of':>4} {'warps':>5} {'of rows':>7} {names}  (us, {rows} rows)"]
    constants = "_GROUPS", "_GROUP", "_STRETCH_WARPS", "_ROW_WARPS"
    kept = [getattr(sampling, name) for name in constants]
    for chosen in (
        (64, 64, 8, 8),
        (64, 64, 8, 4),
        (64, 64, 8, 16),
        (64, 64, 4, 8),
        (32, 64, 4, 8),
        (128, 32, 8, 8),
        (64, 32, 4, 8),
        (32, 128, 8, 8),
        (64, 128, 8, 8),
    ):
        for name, value in zip(constants, chosen, strict=True):
            setattr(sampling, name, value)
        times = []
        for kind, count in cases:
            run = Run([kind], rows, vocabulary, 1, device)
            times.append(_time(run, [torch.randn_like(run.logits) * 3 for _ in range(8)], count))
        groups, group, warps, row_warps = chosen
        lines.append(f"{groups:>6} {group:>4} {warps:>5} {row_warps:>7} " + " ".join(f"{us:>8.2f}" for us in times))
    for name, value in zip(constants, kept, strict=True):
        setattr(sampling, name, value)
    return lines


def main() -> None:
    asked = Asked.read(__doc__)
    tiny, device = asked.tiny, asked.device
    vocabularies = {"tiny": 4200} if tiny else VOCABULARIES
    wrong = []
    if asked.checks:
        wrong = check(device, vocabularies, 1 if tiny else 4, (2,) if tiny else (1, 16, 64))
        print("\n".join(wrong) or "sampling: all right, and every row for itself")
    if asked.times:
        largest, rows = max(vocabularies.values()), 1 if tiny else 16
        print("\n".join(tuning_table(device, largest, rows)))
        print("\n".join(parts_table(device, largest, rows)))
        print("\n".join(time_table(device, vocabularies, (1,) if tiny else (16, 64))))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
