"""The page table against a plain model of it: reference counts, the choice of new pages, and what it refuses."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cache.pages import OutOfPages, PageTable
from slipstream.errors import IntegrityError

PAGES = 12


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_random_operations_agree_with_a_model(operations: list[tuple[str, int]]) -> None:
    table, held, epochs = PageTable(PAGES), Counter[int](), Counter[int]()
    for name, number in operations:
        in_use = sorted(held)
        if name == "allocate" and number > PAGES - len(in_use):
            with pytest.raises(OutOfPages):
                table.allocate(number)
        elif name == "allocate":
            after = in_use[-1] if in_use and number % 2 else None
            fresh = table.allocate(number, after)
            assert len(set(fresh)) == number and not set(fresh) & set(in_use)
            held.update(fresh)
            epochs.update(fresh)
        elif in_use and name == "share":
            page = in_use[number % len(in_use)]
            table.share([page])
            held[page] += 1
        elif in_use:
            page = in_use[number % len(in_use)]
            table.release([page])
            held[page] -= 1
            held += Counter()
        assert table.free == PAGES - len(held)
        assert [table.holders(page) for page in range(PAGES)] == [held[page] for page in range(PAGES)]
        assert [table.epoch(page) for page in range(PAGES)] == [epochs[page] for page in range(PAGES)]
        table.check(held.elements())


def test_pages_follow_their_predecessor_where_they_can() -> None:
    table = PageTable(10)
    assert table.allocate(2) == [0, 1]
    assert table.allocate(3) == [2, 3, 4]
    table.release([0, 1])
    assert table.allocate(2, after=4) == [5, 6], "the earlier free stretch is passed over"
    assert table.allocate(1, after=2) == [0], "page 3 is taken: the first free stretch serves"
    assert table.allocate(2, after=9) == [7, 8], "nothing follows the last page"
    assert table.allocate(2, after=8) == [1, 9], "one page follows, two are wanted"


def test_a_stretch_is_preferred_over_scattered_pages() -> None:
    table = PageTable(8)
    table.allocate(8)
    table.release([1, 4, 5, 6])
    assert table.allocate(3) == [4, 5, 6]


def test_scattered_pages_are_used_when_nothing_else_is_left() -> None:
    table = PageTable(6)
    table.allocate(6)
    table.release([0, 2, 5])
    assert table.allocate(3, after=1) == [0, 2, 5]
    assert table.free == 0


def test_a_refused_allocation_takes_nothing() -> None:
    table = PageTable(3)
    table.allocate(1)
    with pytest.raises(OutOfPages):
        table.allocate(3)
    assert table.free == 2
    table.check([0])


def test_a_second_release_is_an_error() -> None:
    table = PageTable(2)
    table.release(table.allocate(1))
    with pytest.raises(IntegrityError, match="page 0 is released twice"):
        table.release([0])


def test_a_freed_page_cannot_be_shared() -> None:
    table = PageTable(2)
    table.release(table.allocate(1))
    with pytest.raises(IntegrityError, match="shared after it was freed"):
        table.share([0])


def test_the_epoch_changes_only_when_a_page_is_handed_out_anew() -> None:
    table = PageTable(1)
    table.allocate(1)
    first = table.epoch(0)
    table.share([0])
    table.release([0])
    assert table.epoch(0) == first
    table.release([0])
    table.allocate(1)
    assert table.epoch(0) != first


@pytest.mark.parametrize(
    ("held", "page"),
    [([0, 1], 2), ([0, 1, 2, 2, 3], 3), ([0, 1, 2], 2), ([0, 1, 2, 2, 2], 2)],
    ids=["leaked page", "holder of a free page", "one holder lost", "one holder too many"],
)
def test_check_names_the_page_that_is_wrong(held: list[int], page: int) -> None:
    table = PageTable(4)
    table.allocate(3)
    table.share([2])
    table.check([0, 1, 2, 2])
    with pytest.raises(IntegrityError, match=f"page {page} has"):
        table.check(held)
