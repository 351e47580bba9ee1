"""Accepting, moving and advancing on the device against speculative/accept.py and plain indexing."""

# mypy: disable-error-code="assignment, unused-ignore, var-annotated"

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from slipstream.kernels.gpu.commit import (
    CommitOutcome,
    ContextRows,
    HeldTaps,
    accept,
    accept_reference,
    compact,
    compact_reference,
    hold,
    hold_reference,
)
from slipstream.kernels.gpu.device_rows import MAX_DEPTH, DeviceRows
from slipstream.kernels.gpu.tree_growth import Grown
from slipstream.speculative.accept import accept as host_accept
from slipstream.types import Proposal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, PAGES, SCRATCH = 8, 12, 3
KERNELS = pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])


def random_tree(rows: DeviceRows, grown: Grown, sequence: int, count: int, generator: torch.Generator) -> list[int]:
    """Fills one sequence's rows with a random tree; returns tokens that the target chooses, often a drafted one."""
    first, base = sequence * rows.each, int(rows.base[sequence])
    own = slice(first, first + rows.each)
    rows.tokens[own], rows.places[own], grown.parents[own] = 5, SCRATCH, -1
    grown.counts[sequence] = count
    taken: set[tuple[int, int]] = set()
    chosen = torch.randint(0, 40, (rows.each,), generator=generator).tolist()
    for row in range(count + 1):
        rows.places[first + row] = rows.pages[sequence, (base + row) // PAGE] * PAGE + (base + row) % PAGE
        if not row:
            continue
        parent = max(row - 1 - int(torch.randint(0, 4, (), generator=generator)), 0)
        token = next(token for token in range(40) if (parent, token) not in taken)
        taken.add((parent, token))
        grown.parents[first + row], rows.tokens[first + row] = parent, token
        if torch.rand((), generator=generator) < 0.7:
            chosen[parent] = token
    return chosen


def verified(seed: int, sequences: int, each: int) -> tuple[DeviceRows, Grown, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    most_pages = 4 + each // PAGE
    rows = DeviceRows.empty("tree", sequences, each, most_pages, torch.device("cpu"))
    pages = torch.randperm(most_pages * sequences, generator=generator) + 1
    rows.pages.copy_(pages.view(sequences, most_pages))
    rows.base.copy_(torch.randint(0, 3 * PAGE, (sequences,), generator=generator))
    grown = Grown.empty(rows)
    chosen: list[int] = []
    for sequence in range(sequences):
        count = int(torch.randint(0, each, (), generator=generator))
        chosen += random_tree(rows, grown, sequence, count, generator)
    return rows, grown, torch.tensor(chosen, dtype=torch.int32)


def moved(record: object) -> object:
    parts = (getattr(record, name) for name in record.__slots__)  # type: ignore[attr-defined]
    return type(record)(*(part.to(DEVICE, copy=True) if isinstance(part, torch.Tensor) else part for part in parts))


def poisoned_outcome(sequences: int) -> CommitOutcome:
    outcome = CommitOutcome.empty(sequences, DEVICE)
    for part in (outcome.path, outcome.tokens, outcome.taken, outcome.failed):
        part.fill_(-99)
    return outcome


@KERNELS
@pytest.mark.parametrize(("seed", "each"), [(0, 16), (1, 1), (2, 4), (3, 64), (4, 32), (5, 16)])
def test_the_hosts_path_is_kept(seed: int, each: int, kernel: bool) -> None:
    sequences, block = 8, each
    rows, grown, chosen = verified(seed, sequences, each)
    grown.counts[6] = -1  # a padding sequence
    if each > 1:
        chosen[7 * each + int(grown.counts[7])] = -1
    device_rows, outcome = moved(rows), poisoned_outcome(sequences)
    context = ContextRows.empty(sequences, block, DEVICE)
    for part in (context.gather, context.positions, context.places):
        part.fill_(-99)
    anchors = torch.full((sequences,), 77, dtype=torch.int32, device=DEVICE)
    call = accept if kernel else accept_reference
    stored = torch.full((int(rows.pages.max() + 1) * PAGE,), -5, dtype=torch.int32, device=DEVICE)
    call(chosen.to(DEVICE), device_rows, moved(grown), anchors, outcome, context, stored, SCRATCH)  # type: ignore[arg-type]
    written = 0
    for sequence in range(sequences):
        first, count, base = sequence * each, int(grown.counts[sequence]), int(rows.base[sequence])
        own, path, tokens = chosen[first : first + each].tolist(), (), ()
        failed = -1 in own[: count + 1]
        if count >= 0 and not failed:
            drafted = [part[first : first + count + 1].tolist() for part in (rows.tokens, grown.parents)]
            verdict = host_accept(Proposal(tuple(drafted[0]), tuple(drafted[1])), own)
            path, tokens = verdict.path, verdict.tokens
        taken, empty = len(path), [-1] * (MAX_DEPTH - len(path))
        assert (int(outcome.taken[sequence]), bool(outcome.failed[sequence])) == (taken, failed)
        assert outcome.path[sequence].tolist() == [*path, *empty]
        assert outcome.tokens[sequence].tolist() == [*tokens, *empty]
        assert int(device_rows.base[sequence]) == base + taken  # type: ignore[attr-defined]
        assert int(anchors[sequence]) == (tokens[-1] if tokens else 77)
        own_context = slice(sequence * block, (sequence + 1) * block)
        unused = block - taken
        assert context.gather[own_context].tolist() == [first + row for row in path] + [first] * unused
        assert context.positions[own_context].tolist() == [base + at for at in range(taken)] + [base] * unused
        places = rows.places[first : first + taken].tolist()
        assert context.places[own_context].tolist() == places + [SCRATCH] * unused
        assert stored[places].tolist() == [int(rows.tokens[first + row]) for row in path]
        written += taken
    assert int((stored != -5).sum()) == written, "a token was written to a place that no kept row has"


@KERNELS
def test_taps_of_several_steps_are_held(kernel: bool) -> None:
    sequences, width, turns, places = 3, 40, 4, 100
    held = HeldTaps.empty(sequences, turns, width, SCRATCH, DEVICE)
    assert held.places.tolist() == [SCRATCH] * 12
    context = ContextRows.empty(sequences, 2, DEVICE)
    expected = {}
    for turn in range(turns - 1):
        taps = torch.randn(5, width, generator=torch.Generator().manual_seed(turn)).bfloat16()
        for sequence, (row, base) in enumerate(((4, 7), (0, 10), (2, 21))):
            at, place, numbers = 2 * sequence, places + turn, taps[row].clone()
            if sequence == turn:  # this one is not kept
                taps[row], place, numbers = torch.nan, SCRATCH, torch.zeros_like(numbers)
            context.gather[at], context.positions[at], context.places[at] = row, base + turn, place
            expected[(base + turn) % turns * sequences + sequence] = numbers, base + turn, place
        (hold if kernel else hold_reference)(taps.to(DEVICE), context, held, SCRATCH)
    for slot in range(turns * sequences):
        if slot not in expected:
            assert int(held.places[slot]) == SCRATCH
            continue
        numbers, position, place = expected[slot]
        assert torch.equal(held.taps[slot].cpu(), numbers)
        assert (int(held.positions[slot]), int(held.places[slot])) == (position, place)


@KERNELS
@pytest.mark.parametrize(("seed", "each", "dim"), [(0, 16, 8), (1, 8, 6), (2, 64, 8)])
def test_kept_rows_move_to_consecutive_slots(seed: int, each: int, dim: int, kernel: bool) -> None:
    sequences, layers, heads = 3, 2, 2
    rows, grown, chosen = verified(seed + 10, sequences, each)
    for sequence in range(sequences):  # the target follows each tree down to its last node
        row = int(grown.counts[sequence])
        while row > 0:
            parent = int(grown.parents[sequence * each + row])
            chosen[sequence * each + parent] = rows.tokens[sequence * each + row]
            row = parent
    pages = int(rows.pages.max()) + 1
    outcome = poisoned_outcome(sequences)
    device_rows, context = moved(rows), ContextRows.empty(sequences, each, DEVICE)
    anchors = torch.zeros(sequences, dtype=torch.int32, device=DEVICE)
    stored = torch.zeros((int(rows.pages.max() + 1) * PAGE,), dtype=torch.int32, device=DEVICE)
    accept_reference(chosen.to(DEVICE), device_rows, moved(grown), anchors, outcome, context, stored, SCRATCH)  # type: ignore[arg-type]
    assert int(outcome.taken.max()) > (16 if each == 64 else 2)  # the longest takes more than one piece
    keys = torch.randn((layers, pages, heads, PAGE, dim), generator=torch.Generator().manual_seed(seed)).bfloat16()
    values = -keys
    wanted = keys.clone()
    for sequence in range(sequences):
        for depth in range(int(outcome.taken[sequence])):
            row = int(outcome.path[sequence, depth])
            old, new = int(rows.places[sequence * each + row]), int(rows.places[sequence * each + depth])
            wanted[:, new // PAGE, :, new % PAGE] = keys[:, old // PAGE, :, old % PAGE]
    assert not torch.equal(wanted, keys)
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    (compact if kernel else compact_reference)(keys, values, device_rows, outcome)  # type: ignore[arg-type]
    assert torch.equal(keys.cpu(), wanted)
    assert torch.equal(values.cpu(), -wanted)
