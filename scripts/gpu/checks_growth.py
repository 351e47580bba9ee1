"""Checks tree growth, acceptance and the moving of kept rows on a GPU: random cases against the host, then times.

python scripts/gpu/checks_growth.py          # on the GPU
python scripts/gpu/checks_growth.py --tiny   # on a CPU under Triton's interpreter: finds typos, times nothing
"""

# mypy: disable-error-code="arg-type, call-arg, unused-ignore"

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from checks_elementwise import COPY_GB_S, Asked, median_us
from torch import Tensor

from slipstream.kernels.gpu import commit
from slipstream.kernels.gpu.commit import CommitOutcome, ContextRows, HeldTaps
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.head_tables import CorrectionGate, HeadWeights, Trust, score_heads, score_heads_reference
from slipstream.kernels.gpu.text_match import match_text, match_text_reference
from slipstream.kernels.gpu.tree_growth import Branches, Grown, HeadScores, TextDraft, Wishes, calibration_line, grow
from slipstream.kernels.gpu.tree_growth_reference import grow_reference
from slipstream.kernels.rows import TREE
from slipstream.speculative.estimate import DraftOutcome, Estimate, Record
from slipstream.speculative.suffix_index import LONGEST_MATCH
from slipstream.speculative.text_drafts import MOST_TEXT_NODES
from slipstream.types import Source

PAGE, SCRATCH, MOST_PAGES = 64, 7, 24
SHAPES = ("chain", "tree", "seeded")
HEADS = ("vanilla", "gated", "selector")


@dataclass
class Step:
    """Candidates, the wanted growth, and the rows that result from it."""

    tokens: Tensor
    scores: Tensor
    wishes: Wishes
    heads: HeadScores | None
    rows: DeviceRows
    grown: Grown
    branches: Branches
    text: TextDraft
    stored: Tensor  # the token of every place

    def grow(self) -> None:
        match_text(self.stored, self.rows, self.wishes, PAGE, LONGEST_MATCH, self.text)
        grow(self.tokens, self.scores, *self._rest)

    def grow_on_host(self) -> None:
        match_text_reference(self.stored, self.rows, self.wishes, PAGE, LONGEST_MATCH, self.text)
        grow_reference(self.tokens, self.scores, *self._rest)

    @property
    def _rest(self) -> tuple[object, ...]:
        return self.wishes, self.heads, self.rows, SCRATCH, PAGE, self.grown, self.branches, self.text

    def outputs(self) -> dict[str, Tensor]:
        rows, grown, used = self.rows, self.grown, slice(0, self.rows.rows)
        return {
            "tokens": rows.tokens[used],
            "positions": rows.positions[used],
            "places": rows.places[used],
            "paths": rows.paths,
            "parents": grown.parents,
            "counts": grown.counts,
            "broken": grown.broken,
            "texts": grown.texts,
            "matches": self.text.counts,
        }

    def poison(self) -> None:
        for part in self.outputs().values():
            part.fill_(-99)
        for part in (self.grown.claims, self.grown.survivals, self.branches.claims, self.branches.worths):
            part.fill_(float("nan"))


def random_step(
    device: torch.device, sequences: int, each: int, slots: int, candidates: int, with_heads: bool, shape: int | None
) -> Step:
    """Random candidates; with a shape, every sequence wants as many nodes of that shape as there is room for."""
    logits = torch.randn(sequences, slots, 400) * 4
    scores = logits.log_softmax(dim=-1).topk(candidates).values.contiguous().to(device)
    tokens = torch.rand(sequences, slots, 1000).topk(candidates).indices.int().contiguous().to(device)
    wishes = Wishes.empty(sequences, device)
    wishes.anchors.copy_(torch.randint(0, 1000, (sequences,)))
    if shape is None:
        wishes.nodes.copy_(torch.randint(-1, each + 2, (sequences,)))
        wishes.depth.copy_(torch.randint(1, slots + 2, (sequences,)))
        wishes.shape.copy_(torch.randint(0, 3, (sequences,)))
        wishes.floor.copy_((torch.rand(sequences) < 0.3) * 0.01)
        wishes.text.copy_((wishes.shape == TREE) & (torch.rand(sequences, device=device) < 0.7))
    else:
        for part, value in ((wishes.nodes, each - 1), (wishes.depth, slots), (wishes.shape, shape)):
            part.fill_(value)
    for sequence in range(sequences):
        estimate = (None, Estimate(Record()), Estimate(Record(Record())))[sequence % 3]
        if estimate is not None:
            for _ in range(80):
                claim, depth, luck = torch.rand(3).tolist()
                source = Source.TEXT if luck < 0.5 else Source.DRAFTER
                estimate.learn([DraftOutcome(claim, 1 + int(depth * slots), luck < claim, source)])
        wishes.calibration[sequence] = calibration_line(None if estimate is None else estimate.table()).to(device)
    heads = None
    if with_heads:
        corrections = torch.randn(sequences, slots, candidates, candidates, device=device)
        confidence = torch.rand(sequences, slots, candidates, device=device) if each == 64 else None
        ones = torch.ones(sequences, device=device)
        heads = HeadScores(corrections, 1.25 * ones, confidence, 0.1 * ones)
    rows = DeviceRows.empty("tree", sequences, each, MOST_PAGES, device)
    rows.pages.copy_((torch.randperm(MOST_PAGES * sequences) + 1).view(sequences, MOST_PAGES))
    rows.base.copy_(torch.randint(0, (MOST_PAGES - 2) * PAGE, (sequences,)))
    branches = Branches.empty(sequences, slots, candidates, with_heads, device)
    # Texts of few different tokens, so that most of them repeat themselves, and trees hold parts of what they offer.
    wishes.anchors.copy_(tokens[:, 0, 0])
    places = MOST_PAGES * sequences + 1, PAGE
    stored = tokens[:, :, :2].flatten()[torch.randint(0, tokens[:, :, :2].numel(), places, device=device)]
    text = TextDraft.empty(sequences, MOST_TEXT_NODES, device)
    return Step(tokens, scores, wishes, heads, rows, Grown.empty(rows), branches, text, stored.flatten())


def check_growth(step: Step, name: str) -> list[str]:
    step.poison()
    step.grow()
    found = {part: value.clone() for part, value in step.outputs().items()}
    claims, survivals = step.grown.claims.clone(), step.grown.survivals.clone()
    step.poison()
    step.grow_on_host()
    wrong = [
        f"grow {name}: {part} of {int((value != found[part]).view(len(step.tokens), -1).any(1).sum())} sequences differ"
        for part, value in step.outputs().items()
        if not torch.equal(value, found[part])
    ]
    if not torch.allclose(claims, step.grown.claims, rtol=1e-5):
        wrong.append(f"grow {name}: claims differ")
    if not torch.allclose(survivals, step.grown.survivals, rtol=1e-5):
        wrong.append(f"grow {name}: survivals differ")
    return wrong


def verified(step: Step) -> Tensor:
    """The target's tokens after a grown step: mostly the token of some child, and sometimes none."""
    rows, sequences = step.rows, step.rows.sequences
    chosen = torch.randint(0, 1000, (sequences, rows.each))
    tokens, parents = (part[: rows.rows].view(sequences, -1).cpu() for part in (rows.tokens, step.grown.parents))
    for sequence, count in enumerate(step.grown.counts.tolist()):
        for row in range(1, count + 1):
            if torch.rand(()) < 0.8:
                chosen[sequence, parents[sequence, row]] = tokens[sequence, row]
        if sequence % 7 == 6:
            chosen[sequence, max(count, 0)] = -1
    return chosen.flatten().int().to(step.tokens.device)


def check_commit(step: Step, name: str, layers: int, heads: int, dim: int) -> list[str]:
    sequences, device, chosen = step.rows.sequences, step.tokens.device, verified(step)
    keys = torch.randn(layers, MOST_PAGES * sequences + 1, heads, PAGE, dim, device=device).bfloat16()
    results = []
    for accept, compact in ((commit.accept, commit.compact), (commit.accept_reference, commit.compact_reference)):
        base, anchors = step.rows.base.clone(), torch.full((sequences,), 5, dtype=torch.int32, device=device)
        outcome = CommitOutcome.empty(sequences, device)
        context = ContextRows.empty(sequences, step.rows.each, device)
        moved, moved_values = keys.clone(), -keys
        for part in (outcome.path, outcome.tokens, outcome.taken, outcome.failed, context.gather, context.places):
            part.fill_(-99)
        stored = torch.full((keys.shape[1] * PAGE,), -5, dtype=torch.int32, device=device)
        accept(chosen, step.rows, step.grown, anchors, outcome, context, stored, SCRATCH)
        compact(moved, moved_values, step.rows, outcome)
        results.append(
            (
                outcome.path,
                outcome.tokens,
                outcome.taken,
                outcome.failed,
                context.gather,
                context.positions,
                context.places,
                step.rows.base.clone(),
                anchors,
                stored,
                moved,
                -moved_values,
            )
        )
        step.rows.base.copy_(base)
    names = ["path", "tokens", "taken", "failed", "gather", "positions", "places", "base", "anchors", "stored"]
    names += ["keys", "values"]
    return [
        f"commit {name}: {part} differ"
        for part, one, other in zip(names, *results, strict=True)
        if not torch.equal(one, other)
    ]


def check_hold(device: torch.device, sequences: int, turns: int, width: int) -> list[str]:
    """Checks the taps of `turns` steps, and the places at which each step left them."""
    results = []
    for hold in (commit.hold, commit.hold_reference):
        torch.manual_seed(3)
        held = HeldTaps.empty(sequences, turns, width, SCRATCH, device)
        held.taps.fill_(float("nan"))
        context = ContextRows.empty(sequences, 2, device)
        base = torch.randint(0, 5000, (sequences,), device=device).int()
        for turn in range(turns):
            for part, given in ((context.gather, torch.randperm(sequences)), (context.places, torch.arange(sequences))):
                part[::2] = given.int().to(device) + (turn if part is context.places else 0)
            context.positions[::2] = base + turn
            context.places[0] = SCRATCH
            taps = torch.randn(sequences, width, device=device).bfloat16()
            taps[context.gather[0]] = float("nan")
            hold(taps, context, held, SCRATCH)
        results.append((held.taps, held.positions, held.places))
    alike = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return [] if alike else [f"hold {sequences} rows, {turns} turns, {width} numbers: differ"]


def check(device: torch.device, sequences: int, sizes: Sequence[tuple[int, int, int, bool]]) -> list[str]:
    """Describes each fault in a sentence; a size is (rows per sequence, slots, candidates, whether there are heads)."""
    wrong = []
    for each, slots, candidates, with_heads in sizes:
        name = f"{each} rows, {slots} slots, K={candidates}{', heads' if with_heads else ''}"
        step = random_step(device, sequences, each, slots, candidates, with_heads, None)
        wrong += check_growth(step, name) + check_commit(step, name, 2, 2, 64)
        step.scores[1, slots - 1, 0] = float("nan")
        wrong += check_growth(step, f"{name}, a NaN")
    for width in (20480, 2880) if device.type == "cuda" else (40,):
        wrong += check_hold(device, sequences, 8, width)
    return wrong


@dataclass
class HeadCase:
    """Random heads over random candidates."""

    weights: HeadWeights
    hidden: Tensor
    candidates: Tensor
    anchors: Tensor
    temperature: Tensor
    out: HeadScores

    def parts(self) -> tuple[HeadWeights, Tensor, Tensor, Tensor, Tensor, HeadScores]:
        return self.weights, self.hidden, self.candidates, self.anchors, self.temperature, self.out

    def alone(self, sequence: int) -> HeadCase:
        own = slice(sequence, sequence + 1)
        given = (part[own].clone() for part in (self.hidden, self.candidates, self.anchors, self.temperature))
        _, slots, candidates = self.candidates.shape
        trusted = torch.zeros(1, device=self.hidden.device)
        return HeadCase(self.weights, *given, HeadScores.empty(1, slots, candidates, True, trusted))

    def found(self, reference: bool = False) -> tuple[Tensor, Tensor]:
        assert self.out.confidence is not None
        self.out.corrections.fill_(float("nan"))
        self.out.confidence.fill_(float("nan"))
        (score_heads_reference if reference else score_heads)(*self.parts())
        return self.out.corrections.clone(), self.out.confidence.clone()


def random_heads(
    device: torch.device,
    kind: str,
    sequences: int,
    slots: int,
    candidates: int,
    vocabulary: int,
    hidden: int,
    rank: int,
) -> HeadCase:
    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device) / shape[-1] ** 0.5

    before, after = floats(vocabulary, rank).bfloat16(), floats(vocabulary, rank).bfloat16()
    weights = HeadWeights(
        before,
        after,
        floats(rank, hidden) if kind == "selector" else None,
        CorrectionGate(floats(rank, rank), floats(rank, hidden), floats(rank)) if kind == "gated" else None,
        Trust(floats(hidden), 0.1, before, floats(rank)),
    )
    tokens = torch.randint(0, vocabulary, (sequences, slots, candidates), device=device).int()
    anchors = torch.randint(0, vocabulary, (sequences,), device=device).int()
    ones = torch.ones(sequences, device=device)
    out = HeadScores.empty(sequences, slots, candidates, True, 0.0 * ones)
    return HeadCase(weights, floats(sequences, slots, hidden).bfloat16(), tokens, anchors, 0.8 * ones, out)


def check_heads(device: torch.device, sizes: Sequence[tuple[int, ...]]) -> list[str]:
    """Describes each fault in a sentence; a size holds the arguments of `random_heads` from the sequences on."""
    wrong = []
    for size in sizes:
        for kind in HEADS:
            case = random_heads(device, kind, *size)
            found, expected = case.found(), case.found(reference=True)
            alone = case.alone(size[0] - 1).found()
            for name, one, other, own in zip(("corrections", "confidence"), found, expected, alone, strict=True):
                if not torch.allclose(one, other, rtol=1e-4, atol=1e-4):
                    wrong.append(f"heads {kind} {size}: {name} are off by {(one - other).abs().max()}")
                if kind == "vanilla" and not torch.equal(one[-1:], own):
                    wrong.append(f"heads {kind} {size}: {name} change among others")
    return wrong


def head_table(device: torch.device, sizes: Sequence[tuple[int, ...]]) -> list[str]:
    lines = [f"{'heads':<10} {'sequences':>9} {'slots':>5} {'K':>3} {'rank':>5} {'us':>8}"]
    for size in sizes:
        for kind in HEADS:
            case = random_heads(device, kind, *size)

            def launch(case: HeadCase = case) -> None:
                score_heads(*case.parts())

            us = median_us([launch] * 10)
            lines.append(f"{kind:<10} {size[0]:>9} {size[1]:>5} {size[2]:>3} {size[5]:>5} {us:>8.2f}")
    return lines


def time_table(device: torch.device, sizes: Sequence[tuple[int, int, int, int, bool]], layers: int) -> list[str]:
    lines = [f"{'what':<16} {'sequences':>9} {'rows':>5} {'K':>3} {'heads':>5} {'us':>8} {'floor us':>9}"]
    for sequences, each, slots, candidates, with_heads in sizes:
        for shape, name in enumerate(SHAPES):
            step = random_step(device, sequences, each, slots, candidates, with_heads, shape)
            us = median_us([step.grow] * 10)
            size = f"{sequences:>9} {each:>5} {candidates:>3} {'yes' if with_heads else 'no':>5}"
            lines.append(f"{'grow ' + name:<16} {size} {us:>8.2f}")
        chosen = verified(step)
        outcome, context = CommitOutcome.empty(sequences, device), ContextRows.empty(sequences, each, device)
        anchors, base = step.wishes.anchors.clone(), step.rows.base.clone()
        stored = torch.zeros((MOST_PAGES * sequences + 1) * PAGE, dtype=torch.int32, device=device)

        def accept(
            outcome: CommitOutcome = outcome,
            context: ContextRows = context,
            chosen: Tensor = chosen,
            step: Step = step,
            anchors: Tensor = anchors,
            base: Tensor = base,
            stored: Tensor = stored,
        ) -> None:
            step.rows.base.copy_(base)  # makes the next run start from the same step
            commit.accept(chosen, step.rows, step.grown, anchors, outcome, context, stored, SCRATCH)

        lines.append(f"{'accept + a copy':<16} {size} {median_us([accept] * 10):>8.2f}")
        pool = torch.zeros(2, layers, MOST_PAGES * sequences + 1, 8, PAGE, 128, dtype=torch.bfloat16, device=device)

        def compact(pool: Tensor = pool, step: Step = step, outcome: CommitOutcome = outcome) -> None:
            commit.compact(pool[0], pool[1], step.rows, outcome)

        us = median_us([compact] * 10)
        moved = sum(row != at for line in outcome.path.tolist() for at, row in enumerate(line) if row >= 0)
        floor = moved * 2 * 2 * 2 * layers * 8 * 128 / COPY_GB_S / 1e3
        lines.append(f"{'compact':<16} {size} {us:>8.2f} {floor:>9.2f}")
    return lines


def main() -> None:
    asked = Asked.read(__doc__)
    device = asked.device
    if asked.tiny:
        seeds, layers, steps, timed = 3, 2, [(8, 3, 4, False), (4, 2, 3, True)], [(1, 4, 2, 2, False)]
        sizes = [(2, 2, 3, 50, 40, 12)]
    else:
        seeds, layers = 70, 36
        steps = [(16, 15, 16, False), (64, 15, 16, False), (32, 7, 5, False), (16, 15, 1, False), (4, 3, 8, False)]
        steps += [(16, 15, 16, True), (64, 15, 64, True)]
        timed = [(1, 16, 15, 16, False), (1, 64, 15, 16, False), (16, 16, 15, 16, False), (1, 64, 15, 64, True)]
        sizes = [(1, 15, 16, 151936, 4096, 256), (16, 7, 16, 151936, 4096, 256), (1, 7, 64, 49152, 576, 256)]
    wrong = []
    if asked.checks:
        wrong = [*check(device, seeds, steps), *check_heads(device, sizes)]
        print("\n".join(wrong) or "growth, heads and commit: all right")
    if asked.times:
        print("\n".join([*head_table(device, sizes), *time_table(device, timed, layers)]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
