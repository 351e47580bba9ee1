"""A sequence's tokens, pages, target length and draft length move together or not at all."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cache.cpu.page_pools import KvPools, PoolShape
from slipstream.cache.pages import OutOfPages, PageTable, Place
from slipstream.cache.sequence import SequenceState
from slipstream.errors import IntegrityError

PAGE = 4


class Memory:
    """Records the calls that change the memory behind the pages."""

    states = None

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []
        self.moves: list[tuple[list[Place], list[Place]]] = []
        self.cleared: list[int] = []

    def copy_page(self, source: int, destination: int) -> None:
        self.copies.append((source, destination))

    def move_rows(self, sources: Sequence[Place], destinations: Sequence[Place]) -> None:
        self.moves.append((list(sources), list(destinations)))

    def clear_pages(self, pages: Sequence[int]) -> None:
        self.cleared += pages


def make(tokens: int, pages: int = 16, drafting: bool = True) -> tuple[SequenceState, PageTable, Memory]:
    """A state whose prompt of `tokens` tokens has been computed."""
    table, memory = PageTable(pages), Memory()
    state = SequenceState(table, PAGE, memory, drafting)
    state.start(range(tokens), [])
    state.reserve(tokens)
    state.commit(range(tokens), [], tokens if drafting else 0)
    return state, table, memory


def test_reserve_makes_room_once_and_in_whole_pages() -> None:
    state, table, _ = make(5)
    assert (state.capacity, table.free) == (8, 14)
    state.reserve(8)
    assert (state.capacity, table.free) == (8, 14)
    state.reserve(9)
    assert (state.capacity, table.free) == (12, 13)
    assert state.pages == [0, 1, 2], "pages lie side by side where they can"


def test_a_refused_reserve_changes_nothing() -> None:
    state, table, _ = make(5, pages=3)
    with pytest.raises(OutOfPages):
        state.reserve(17)
    assert (state.pages, table.free) == ([0, 1], 1)


def test_place_names_page_and_offset() -> None:
    table = PageTable(8)
    blocker = table.allocate(1)
    state = SequenceState(table, PAGE, Memory(), False)
    state.start(range(10), [])
    state.reserve(4)
    table.release(blocker)
    state.reserve(10)
    assert [state.place(p) for p in (0, 3, 4, 9)] == [(1, 0), (1, 3), (2, 0), (3, 1)]


def test_commit_moves_everything_and_appends_the_anchor() -> None:
    state, _, _ = make(5)
    state.reserve(12)
    state.commit([], [50], 0)
    state.commit(range(3), [51, 52, 53], 3)
    assert (state.length, state.draft_length, state.tokens[5:]) == (8, 8, [50, 51, 52, 53])


@pytest.mark.parametrize("context_rows", [0, 2, 4])
def test_draft_context_out_of_step_is_an_integrity_error(context_rows: int) -> None:
    state, _, _ = make(5)
    state.reserve(12)
    with pytest.raises(IntegrityError, match="draft context stands at"):
        state.commit(range(3), [1, 2, 3], context_rows)


def test_a_plain_sequence_needs_no_draft_context() -> None:
    state, _, _ = make(5, drafting=False)
    state.reserve(8)
    state.commit(range(2), [7, 8, 9], 0)
    assert (state.length, state.draft_length) == (7, 0)


def test_more_positions_than_tokens_or_room_are_integrity_errors() -> None:
    state, _, _ = make(5)
    with pytest.raises(IntegrityError, match="6 positions computed for 5 tokens"):
        state.commit([0], [], 1)
    state, _, _ = make(8)
    with pytest.raises(IntegrityError, match="9 positions in room for 8"):
        state.commit([0], [0], 1)


def test_cached_pages_bring_their_draft_context() -> None:
    table = PageTable(4)
    pages = table.allocate(2)
    for drafting, context in ((True, 8), (False, 0)):
        state = SequenceState(table, PAGE, Memory(), drafting)
        table.share(pages)
        state.start(range(10), pages)
        assert (state.length, state.draft_length, state.capacity) == (8, context, 8)
        state.check()
        state.release()
    with pytest.raises(IntegrityError, match="started twice"):
        make(5)[0].start([1], [])


def test_truncate_cuts_tokens_pages_and_draft_context_together() -> None:
    state, table, _ = make(14)
    state.reserve(20)
    state.truncate(5)
    assert (state.tokens, state.length, state.draft_length) == ([0, 1, 2, 3, 4], 5, 5)
    assert (state.pages, table.free) == ([0, 1], 14)
    state.check()
    state.truncate(4)
    assert (state.pages, table.free) == ([0], 15)
    state.truncate(0)
    assert (state.pages, state.tokens, table.free) == ([], [], 16)


def test_truncate_into_a_shared_page_leaves_it_to_the_other_holder() -> None:
    state, table, memory = make(2 * PAGE)
    twin = state.fork()
    twin.truncate(PAGE + 1)
    assert twin.pages[0] == state.pages[0] and twin.pages[1] != state.pages[1]
    assert memory.copies == [(state.pages[1], twin.pages[1])]
    assert [table.holders(page) for page in state.pages] == [2, 1]


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_cannot_go_forward_or_below_zero(length: int) -> None:
    state, _, _ = make(5)
    with pytest.raises(IntegrityError, match="cannot truncate"):
        state.truncate(length)


def test_fork_shares_full_pages_and_copies_the_one_being_written() -> None:
    state, table, memory = make(10)
    state.reserve(20)
    twin = state.fork()
    assert twin.pages[:2] == state.pages[:2] and [table.holders(p) for p in state.pages[:2]] == [2, 2]
    assert memory.copies == [(state.pages[2], twin.pages[2])] and twin.pages[2] not in state.pages
    assert len(twin.pages) == 3, "room the parent merely reserved is not taken over"
    assert (twin.tokens, twin.length, twin.draft_length, twin.drafting) == (state.tokens, 10, 10, True)
    twin.reserve(12)
    twin.commit([], [99], 0)
    twin.commit([0], [98], 1)
    assert (state.length, len(state.tokens)) == (10, 10), "the parent does not move with its fork"
    table.check(state.pages + twin.pages)
    state.release()
    twin.check()
    table.check(twin.pages)
    twin.release()
    assert table.free == table.total


def test_fork_on_a_page_border_copies_nothing() -> None:
    state, table, memory = make(8)
    twin = state.fork()
    assert (memory.copies, twin.pages, table.free) == ([], state.pages, 14)


def test_a_fork_without_a_free_page_leaves_no_trace() -> None:
    state, table, memory = make(6, pages=2)
    with pytest.raises(OutOfPages):
        state.fork()
    assert memory.copies == []
    table.check(state.pages)


@settings(max_examples=60, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["commit", "truncate", "fork", "release"]), st.integers(0, 30)), max_size=40),
)
def test_invariants_hold_under_any_order(drafting: bool, operations: list[tuple[str, int]]) -> None:
    table = PageTable(20)
    first = SequenceState(table, PAGE, Memory(), drafting)
    first.start([1, 2, 3], [])
    states = [first]
    for name, number in operations:
        if not states:
            break
        state = states[number % len(states)]
        try:
            if name == "commit":
                rows = number % 6
                state.reserve(state.length + rows)
                missing = max(0, state.length + rows + 1 - len(state.tokens))
                state.commit(range(rows), [number] * missing, rows * drafting)
            elif name == "truncate":
                state.truncate(number % (state.length + 1))
            elif name == "fork":
                states.append(state.fork())
            else:
                state.release()
                states.remove(state)
        except OutOfPages:
            assert table.free * PAGE < 30
        for each in states:
            each.check()
            assert each.draft_length == (each.length if drafting else 0)
        table.check([page for each in states for page in each.pages])
    for state in states:
        state.release()
    assert table.free == table.total


def pools_of(pages: int) -> KvPools:
    """Pools in which all numbers differ, so that a row in the wrong place is noticed."""
    pools = KvPools(pages, PAGE, PoolShape.alike(3, 2, 5), PoolShape.alike(2, 1, 3))
    for index, pool in enumerate(every_pool(pools)):
        pool.copy_(torch.arange(pool.numel(), dtype=torch.float32).view(pool.shape) + 10_000 * index)
    return pools


def every_pool(pools: KvPools) -> list[torch.Tensor]:
    return [tensor for layer in pools.target for tensor in layer] + [pools.draft_keys, pools.draft_values]


def scattered(table: PageTable, pools: KvPools, positions: int) -> SequenceState:
    """A drafting sequence with pages that are not neighbours and `positions` computed positions."""
    state, other = (SequenceState(table, PAGE, pools, True) for _ in range(2))
    state.start(range(positions + 1), [])
    other.start([0], [])
    for page in range(1, 6):
        state.reserve(page * PAGE)
        other.reserve(page * PAGE)
    other.release()
    state.commit(range(positions), [], positions)
    return state


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("path", [(0, 2), (0, 3, 4, 9), (0, 1, 2, 7), (0, 5, 6, 7), (0, 1, 2, 3), (0,), ()], ids=str)
def test_the_rows_of_a_path_move_together_in_every_layer_and_nothing_else_does(
    length: int, path: tuple[int, ...]
) -> None:
    pools = pools_of(12)
    table = PageTable(12)
    state = scattered(table, pools, length)
    assert [b - a for a, b in zip(state.pages, state.pages[1:], strict=False)] != [1] * 4
    expected = [pool.clone() for pool in every_pool(pools)]
    for pool, before in zip(expected[:6], every_pool(pools), strict=False):
        for place, row in enumerate(path):
            (page, offset), (source, start) = state.place(length + place), state.place(length + row)
            pool[page, :, offset] = before[source, :, start]
    state.commit(path, [7] * len(path), len(path))
    assert state.length == state.draft_length == length + len(path)
    for index, (mine, wanted) in enumerate(zip(every_pool(pools), expected, strict=True)):
        assert torch.equal(mine, wanted), f"pool {index}"


def test_rows_that_already_stand_in_order_are_not_moved() -> None:
    state, _, memory = make(5)
    state.reserve(16)
    state.commit([], [50], 0)
    state.commit([0, 1, 2], [51, 52, 53], 3)
    assert memory.moves == []
    state.commit([0, 1, 3, 5], [1, 2, 3, 4], 4)
    assert memory.moves == [([(2, 3), (3, 1)], [(2, 2), (2, 3)])], "row 1 stays where it is"


def test_a_spoiled_sequence_clears_the_pages_nobody_else_holds() -> None:
    pools, table = pools_of(8), PageTable(8)
    healthy = SequenceState(table, PAGE, pools, True)
    healthy.start(range(9), [])
    healthy.reserve(8)
    healthy.commit(range(8), [], 8)
    spoiled = healthy.fork()
    spoiled.reserve(16)
    before = [pool.clone() for pool in every_pool(pools)]
    own, shared = spoiled.pages[2:], spoiled.pages[:2]
    assert shared == healthy.pages and len(own) == 2
    spoiled.spoiled = True
    spoiled.release()
    kept = [page for page in range(8) if page not in own]
    for index, (pool, old) in enumerate(zip(every_pool(pools), before, strict=True)):
        axis = int(index >= 6)  # draft pools have their layers first
        assert pool.index_select(axis, torch.tensor(own)).count_nonzero() == 0, f"pool {index}"
        assert torch.equal(pool.index_select(axis, torch.tensor(kept)), old.index_select(axis, torch.tensor(kept)))
    table.check(healthy.pages)


def test_a_healthy_release_clears_nothing_and_a_cleared_sequence_starts_healthy() -> None:
    state, _, memory = make(5)
    state.release()
    assert memory.cleared == []
    state.start(range(5), [])
    state.reserve(5)
    state.spoiled = True
    twin = state.fork()
    assert twin.spoiled, "a fork of spoiled pages is spoiled"
    pages = list(state.pages)
    state.release()
    assert (memory.cleared, state.spoiled) == (pages, False)
