"""Paged attention under the interpreter agrees with torch, and a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from slipstream.errors import IntegrityError
from slipstream.kernels.gpu import paged_attention as attention
from slipstream.kernels.gpu.device_rows import DeviceRows, Kind
from slipstream.kernels.gpu.paged_attention import AttentionScratch, paged_attention, paged_attention_reference

CPU = torch.device("cpu")
PAGE, POOL = 16, 40


@dataclass
class World:
    """Pools of one layer and rows that stand in them."""

    rows: DeviceRows
    queries: Tensor
    keys: Tensor
    values: Tensor

    def attend(self, window: int = 0) -> Tensor:
        return self.attend_in_parts(window)[0]

    def attend_in_parts(self, window: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the result and the partial sums' bits, because the result's rounding would hide most differences."""
        count, heads, dim = self.queries.shape
        out = torch.full((count, heads * dim), float("nan"), dtype=torch.bfloat16)
        kv_heads = self.keys.shape[1]
        scratch = AttentionScratch.empty(count, heads, kv_heads, dim, CPU)
        scratch.sums.fill_(float("nan"))
        scratch.stats.fill_(float("nan"))
        paged_attention(self.queries, self.keys, self.values, self.rows, dim**-0.5, window, out, scratch)
        return out, scratch.by_row(self.rows.sequences, kv_heads, heads // kv_heads, dim).view(torch.int32)

    def expected(self, window: int = 0) -> Tensor:
        count, heads, dim = self.queries.shape
        out = torch.full((count, heads * dim), float("nan"), dtype=torch.float64)
        paged_attention_reference(
            self.queries, self.keys, self.values, self.rows, dim**-0.5, window, out, None, torch.float64
        )
        return out

    def slot(self, sequence: int, slot: int) -> tuple[int, int]:
        return int(self.rows.pages[sequence, slot // PAGE]), slot % PAGE


def make_world(
    kind: Kind,
    bases: list[int],
    each: int,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 16,
    unused: int = 0,
    earliest: int = 0,
    seed: int = 0,
) -> World:
    """Makes sequences with random keys in shuffled pages; trees have random parents, `unused` rows are like row 0."""
    chance = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    most = max(-(-(base + each) // PAGE) for base in bases)
    rows = DeviceRows.empty(kind, len(bases), each, most, CPU)
    order = iter(chance.sample(range(1, POOL), POOL - 1))
    for sequence, base in enumerate(bases):
        rows.base[sequence], rows.earliest[sequence] = base, min(earliest, base)
        for page in range(-(-(base + each) // PAGE)):
            rows.pages[sequence, page] = next(order)
        paths: list[list[int]] = [[0]]
        for row in range(1, each):
            paths.append([0] if row >= each - unused else [*paths[chance.randrange(max(0, row - 3), row)], row])
        if kind != "tree":
            paths = [[0] if row >= each - unused else list(range(row + 1)) for row in range(each)]
        for row, path in enumerate(paths):
            rows.positions[sequence * each + row] = base + len(path) - 1
            rows.paths[sequence * each + row, : len(path)] = torch.tensor(path)
    queries, keys, values = (
        torch.randn(*shape, generator=make).to(torch.bfloat16)
        for shape in ((rows.rows, heads, dim), (POOL, kv_heads, PAGE, dim), (POOL, kv_heads, PAGE, dim))
    )
    return World(rows, queries, keys, values)


def plain_twin(world: World, sequence: int, row: int, seed: int) -> World:
    """Makes the same row alone; what it sees is committed in other pages at its positions, other keys are random."""
    at = sequence * world.rows.each + row
    position, base = int(world.rows.positions[at]), int(world.rows.base[sequence])
    _, heads, dim = world.queries.shape
    twin = make_world("chain", [position], 1, heads, world.keys.shape[1], dim, seed=seed + 1000)
    twin.rows.earliest[0] = world.rows.earliest[sequence]
    twin.queries[0] = world.queries[at]
    for p in range(position + 1):
        slot = p if p < base else base + int(world.rows.paths[at, p - base])
        (page, offset), (held, there) = twin.slot(0, p), world.slot(sequence, slot)
        twin.keys[page, :, offset] = world.keys[held, :, there]
        twin.values[page, :, offset] = world.values[held, :, there]
    return twin


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).abs().max()
    assert error < 0.02, f"off by {error}"


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses two shared slots, so that even short contexts give a slot several pages."""
    monkeypatch.setattr(attention, "SLOTS", 4)
    monkeypatch.setattr(attention, "LEAST_PAGES", 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["tree", "chain", "block"])
@pytest.mark.parametrize("bases", [[0], [15], [143, 32]])
def test_right_against_torch(kind: Kind, bases: list[int]) -> None:
    world = make_world(kind, bases, 6, unused=1, seed=sum(bases))
    assert_close(world.attend(), world.expected())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["tree", "chain", "block"])
@pytest.mark.parametrize(("window", "earliest"), [(5, 0), (45, 0), (60, 90)])
def test_windows_and_hidden_keys(kind: Kind, window: int, earliest: int) -> None:
    world = make_world(kind, [122], 4, earliest=earliest, seed=window + earliest)
    assert_close(world.attend(window), world.expected(window))
    assert (world.expected(window) - world.expected()).abs().max() > 0.05 or earliest  # the window hides something


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 32), (2, 2, 16), (8, 1, 64)])
def test_head_shapes(heads: int, kv_heads: int, dim: int) -> None:
    world = make_world("tree", [50], 3, heads, kv_heads, dim, seed=heads + dim)
    assert_close(world.attend(), world.expected())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(6, 1, 256, 0), (2, 1, 512, 20), (4, 2, 512, 0)])
@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_wide_heads(kind: Kind, heads: int, kv_heads: int, dim: int, window: int) -> None:
    world = make_world(kind, [50], 3, heads, kv_heads, dim, seed=heads + dim)
    assert_close(world.attend(window), world.expected(window))


def test_a_prefill_of_wide_heads() -> None:
    world = make_world("chain", [20], 20, 6, 1, 512, seed=3)
    assert_close(world.attend(), world.expected())


@pytest.fixture
def half_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums keys 8 at a time, as for heads that are too wide for whole pages."""
    few = replace(attention.TILINGS[128], keys=8, lanes=4, prefill_lanes=8)
    monkeypatch.setattr(attention, "TILINGS", {**attention.TILINGS, 128: few})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["tree", "chain", "block"])
@pytest.mark.parametrize(("base", "window"), [(3, 0), (122, 45)])
def test_pages_in_pieces(kind: Kind, base: int, window: int, half_pages: None) -> None:
    world = make_world(kind, [base], 6, unused=1, seed=base)
    assert_close(world.attend(window), world.expected(window))
    if kind == "tree":
        found, parts = world.attend_in_parts(window)
        for row in (0, 4):
            alone, alone_parts = plain_twin(world, 0, row, seed=row).attend_in_parts(window)
            assert torch.equal(parts[row], alone_parts[0]) and torch.equal(found[row], alone[0]), f"row {row}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["tree", "chain", "block"])
@pytest.mark.parametrize(("base", "window"), [(23, 0), (103, 45)])
def test_groups_smaller_than_pages(kind: Kind, base: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GROUP", 8)
    world = make_world(kind, [base, base + 9], 9 if kind == "tree" else 14, seed=base)
    found, parts = world.attend_in_parts(window)
    assert_close(found, world.expected(window))
    for row in (0, 4, 8) if kind != "block" else ():
        alone, alone_parts = plain_twin(world, 1, row, seed=row).attend_in_parts(window)
        own = world.rows.each + row
        assert torch.equal(parts[own], alone_parts[0]) and torch.equal(found[own], alone[0]), f"row {row}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("base", [60, 92, 124])
@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_rows_where_slots_grow(kind: Kind, base: int, half_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of one program have slots of different sizes, and between them slots that no row has."""
    monkeypatch.setattr(attention, "SLOTS", 32)
    monkeypatch.setattr(attention, "LEAST_PAGES", 4)
    wide = replace(attention.TILINGS[128], lanes=32)
    monkeypatch.setattr(attention, "TILINGS", {**attention.TILINGS, 128: wide})
    world = make_world(kind, [base], 7, seed=base)
    found, parts = world.attend_in_parts()
    assert_close(found, world.expected())
    for row in (0, 6):
        alone, alone_parts = plain_twin(world, 0, row, seed=row).attend_in_parts()
        assert torch.equal(parts[row], alone_parts[0]) and torch.equal(found[row], alone[0]), f"row {row}"


def test_a_prefill_in_pieces(half_pages: None) -> None:
    world = make_world("chain", [50], 37, heads=6, kv_heads=2, seed=2)
    assert_close(world.attend(24), world.expected(24))


@pytest.mark.parametrize(("each", "base", "window"), [(40, 0, 0), (37, 50, 24)])
def test_prefill(each: int, base: int, window: int) -> None:
    world = make_world("chain", [base], each, heads=6, kv_heads=2, seed=each)
    assert_close(world.attend(window), world.expected(window))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("base", "window"), [(6, 0), (95, 0), (96, 45), (139, 45)])
def test_a_tree_row_has_the_bits_of_a_plain_row(base: int, window: int) -> None:
    world = make_world("tree", [base], 10, seed=base)
    found, parts = world.attend_in_parts(window)
    for row in {0, 5, 9, int(world.rows.positions.argmax())}:
        alone, alone_parts = plain_twin(world, 0, row, seed=row).attend_in_parts(window)
        assert torch.equal(parts[row], alone_parts[0]), f"row {row}"
        assert torch.equal(found[row], alone[0]), f"row {row}"


@pytest.mark.parametrize("base", [95, 141])
def test_a_chain_row_has_the_bits_of_a_plain_row(base: int) -> None:
    world = make_world("chain", [17, base], 5, seed=base)
    found, parts = world.attend_in_parts()
    for row in (0, 1, 4):
        alone, alone_parts = plain_twin(world, 1, row, seed=row).attend_in_parts()
        assert torch.equal(parts[5 + row], alone_parts[0]), f"row {row}"
        assert torch.equal(found[5 + row], alone[0]), f"row {row}"


def test_strangers_in_the_pools_change_no_bit() -> None:
    world = make_world("tree", [90], 8, unused=2, seed=5)
    found = world.attend()
    seen = {world.slot(0, slot) for slot in range(98)}
    changed = replace(world, keys=world.keys.clone(), values=world.values.clone())
    for page in range(POOL):
        for offset in range(PAGE):
            if (page, offset) not in seen:
                changed.keys[page, :, offset], changed.values[page, :, offset] = 50.0, -80.0
    assert torch.equal(found, changed.attend())


def test_more_rows_than_a_page_must_be_a_chain() -> None:
    world = make_world("tree", [10], PAGE + 1)
    with pytest.raises(IntegrityError, match="17 rows of kind tree"):
        world.attend()


@pytest.mark.parametrize("dim", [24, 1024])
def test_heads_must_be_a_power_of_two_and_not_too_wide(dim: int) -> None:
    with pytest.raises(IntegrityError, match=f"not {dim} and 16"):
        make_world("chain", [3], 1, dim=dim).attend()


@pytest.mark.parametrize("power", [-90, 20, 90])
def test_values_of_any_size_are_summed_as_well(power: int) -> None:
    world = make_world("tree", [58], 5, heads=4, kv_heads=2, unused=1, seed=4)
    usual = world.attend().float()
    world.values.mul_(2.0**power)
    assert torch.equal(world.attend().float() * 2.0**-power, usual)


def test_what_is_no_number_is_not_hidden() -> None:
    world = make_world("chain", [60], 2, seed=3)
    world.values.fill_(float("nan"))
    assert world.attend().isnan().all()
