"""A sequence's tokens, pages, target length and draft length move together or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cache.pages import OutOfPages, PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.errors import IntegrityError

PAGE = 4


class Copies(list[tuple[int, int]]):
    """Remembers which pages were copied where."""

    def __call__(self, source: int, destination: int) -> None:
        self.append((source, destination))


def make(tokens: int, pages: int = 16, drafting: bool = True) -> tuple[SequenceState, PageTable, Copies]:
    """A state whose prompt of `tokens` tokens has been computed."""
    table, copies = PageTable(pages), Copies()
    state = SequenceState(table, PAGE, copies, drafting)
    state.start(range(tokens), [])
    state.reserve(tokens)
    state.commit(tokens, [], tokens if drafting else 0)
    return state, table, copies


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
    state = SequenceState(table, PAGE, Copies(), False)
    state.start(range(10), [])
    state.reserve(4)
    table.release(blocker)
    state.reserve(10)
    assert [state.place(p) for p in (0, 3, 4, 9)] == [(1, 0), (1, 3), (2, 0), (3, 1)]


def test_commit_moves_everything_and_appends_the_anchor() -> None:
    state, _, _ = make(5)
    state.reserve(12)
    state.commit(0, [50], 0)
    state.commit(3, [51, 52, 53], 3)
    assert (state.length, state.draft_length, state.tokens[5:]) == (8, 8, [50, 51, 52, 53])


@pytest.mark.parametrize("context_rows", [0, 2, 4])
def test_draft_context_out_of_step_is_an_integrity_error(context_rows: int) -> None:
    state, _, _ = make(5)
    state.reserve(12)
    with pytest.raises(IntegrityError, match="draft context stands at"):
        state.commit(3, [1, 2, 3], context_rows)


def test_a_plain_sequence_needs_no_draft_context() -> None:
    state, _, _ = make(5, drafting=False)
    state.reserve(8)
    state.commit(2, [7, 8, 9], 0)
    assert (state.length, state.draft_length) == (7, 0)


def test_more_positions_than_tokens_or_room_are_integrity_errors() -> None:
    state, _, _ = make(5)
    with pytest.raises(IntegrityError, match="6 positions computed for 5 tokens"):
        state.commit(1, [], 1)
    state, _, _ = make(8)
    with pytest.raises(IntegrityError, match="9 positions in room for 8"):
        state.commit(1, [0], 1)


def test_cached_pages_bring_their_draft_context() -> None:
    table = PageTable(4)
    pages = table.allocate(2)
    for drafting, context in ((True, 8), (False, 0)):
        state = SequenceState(table, PAGE, Copies(), drafting)
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
    state, table, copies = make(2 * PAGE)
    twin = state.fork()
    twin.truncate(PAGE + 1)
    assert twin.pages[0] == state.pages[0] and twin.pages[1] != state.pages[1]
    assert copies == [(state.pages[1], twin.pages[1])]
    assert [table.holders(page) for page in state.pages] == [2, 1]


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_cannot_go_forward_or_below_zero(length: int) -> None:
    state, _, _ = make(5)
    with pytest.raises(IntegrityError, match="cannot truncate"):
        state.truncate(length)


def test_fork_shares_full_pages_and_copies_the_one_being_written() -> None:
    state, table, copies = make(10)
    state.reserve(20)
    twin = state.fork()
    assert twin.pages[:2] == state.pages[:2] and [table.holders(p) for p in state.pages[:2]] == [2, 2]
    assert copies == [(state.pages[2], twin.pages[2])] and twin.pages[2] not in state.pages
    assert len(twin.pages) == 3, "room the parent merely reserved is not taken over"
    assert (twin.tokens, twin.length, twin.draft_length, twin.drafting) == (state.tokens, 10, 10, True)
    twin.reserve(12)
    twin.commit(0, [99], 0)
    twin.commit(1, [98], 1)
    assert (state.length, len(state.tokens)) == (10, 10), "the parent does not move with its fork"
    table.check(state.pages + twin.pages)
    state.release()
    twin.check()
    table.check(twin.pages)
    twin.release()
    assert table.free == table.total


def test_fork_on_a_page_border_copies_nothing() -> None:
    state, table, copies = make(8)
    twin = state.fork()
    assert (copies, twin.pages, table.free) == ([], state.pages, 14)


def test_a_fork_without_a_free_page_leaves_no_trace() -> None:
    state, table, copies = make(6, pages=2)
    with pytest.raises(OutOfPages):
        state.fork()
    assert copies == []
    table.check(state.pages)


@settings(max_examples=60, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["commit", "truncate", "fork", "release"]), st.integers(0, 30)), max_size=40),
)
def test_invariants_hold_under_any_order(drafting: bool, operations: list[tuple[str, int]]) -> None:
    table, copies = PageTable(20), Copies()
    first = SequenceState(table, PAGE, copies, drafting)
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
                state.commit(rows, [number] * max(0, state.length + rows + 1 - len(state.tokens)), rows * drafting)
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
