"""The prefix cache: what it finds, which requests it serves, what it evicts first, and that it never loses a page."""

from __future__ import annotations

import random
import time

import pytest

from slipstream.cache.pages import PageTable
from slipstream.cache.prefix import PrefixCache

PAGE = 4


def make(pages: int = 32) -> tuple[PageTable, PrefixCache]:
    table = PageTable(pages)
    return table, PrefixCache(table, PAGE)


def put(table: PageTable, cache: PrefixCache, tokens: list[int], key: str | None = None) -> list[int]:
    """Computes `tokens` into new pages, stores them in the cache and releases them, as a finished request does."""
    pages = table.allocate(-(-len(tokens) // PAGE))
    cache.put(tokens, pages, key)
    table.release(pages)
    return pages


def found(table: PageTable, cache: PrefixCache, tokens: list[int], key: str | None = None) -> list[int]:
    pages = cache.take(tokens, key)
    table.release(pages)
    return pages


def test_the_longest_common_prefix_in_whole_pages_is_taken() -> None:
    table, cache = make()
    pages = put(table, cache, list(range(14)))
    assert len(cache.held()) == 3, "the half-filled last page is not remembered"
    assert found(table, cache, list(range(20))) == pages[:3]
    assert found(table, cache, [*range(9), 77, 78, 79, 80]) == pages[:2]
    assert found(table, cache, [9, *range(1, 20)]) == []
    assert cache.hits == 2


def test_branches_share_their_stem() -> None:
    table, cache = make()
    stem = put(table, cache, [1] * 4 + [2] * 4)
    branch = put(table, cache, [1] * 4 + [3] * 4)
    assert found(table, cache, [1] * 4 + [3] * 4 + [0]) == [stem[0], branch[1]]
    assert sorted(cache.held()) == sorted([*stem, branch[1]])
    assert table.free == table.total - 3, "the second copy of the stem came free"


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_one_token_is_always_left_to_run(length: int, pages: int) -> None:
    table, cache = make()
    put(table, cache, list(range(12)))
    assert len(found(table, cache, list(range(length)))) == pages


def test_a_taken_page_is_held_for_the_taker() -> None:
    table, cache = make()
    page = put(table, cache, [1, 2, 3, 4])[0]
    taken = cache.take([1, 2, 3, 4, 5], None)
    assert taken == [page] and table.holders(page) == 2
    table.check([*cache.held(), *taken])


def test_a_page_without_draft_context_serves_plain_requests_only() -> None:
    table, cache = make()
    pages = put(table, cache, list(range(8)), None)
    assert found(table, cache, list(range(9)), "drafter") == []
    assert cache.hits == 0
    assert found(table, cache, list(range(9)), None) == pages


def test_a_page_with_draft_context_serves_its_own_drafter_and_plain_requests() -> None:
    table, cache = make()
    pages = put(table, cache, list(range(8)), "drafter")
    assert found(table, cache, list(range(9)), "drafter") == pages
    assert found(table, cache, list(range(9)), None) == pages
    assert found(table, cache, list(range(9)), "another") == []


def test_pages_of_several_drafters_stand_side_by_side() -> None:
    table, cache = make()
    tokens = list(range(9))
    pages = {key: put(table, cache, tokens[:8], key) for key in ("one", "two")}
    assert not set(pages["one"]) & set(pages["two"])
    assert {key: found(table, cache, tokens, key) for key in pages} == pages
    assert found(table, cache, tokens, None) in pages.values()
    assert cache.evictable() == 4 and table.free == table.total - 4


def test_the_page_of_one_drafter_goes_alone() -> None:
    table, cache = make()
    short = put(table, cache, list(range(4)), "one")
    long = put(table, cache, list(range(8)), "two")
    assert cache.evict(1) == 1, "of the first place only the page of the drafter that has nothing behind it may go"
    assert sorted(cache.held()) == sorted(long) and table.holders(short[0]) == 0
    assert found(table, cache, list(range(9)), "two") == long


def test_forgetting_a_drafter_leaves_the_others_pages() -> None:
    table, cache = make()
    kept = put(table, cache, list(range(8)), "kept")
    put(table, cache, list(range(12)), "gone")
    put(table, cache, [7] * 4, "gone")
    put(table, cache, [7] * 8, None)  # its second page is after one that is evicted
    taken = cache.take(list(range(13)), "gone")
    cache.forget("gone")
    assert sorted(cache.held()) == sorted(kept)
    assert found(table, cache, list(range(13)), "gone") == [] and found(table, cache, list(range(13)), "kept") == kept
    table.check([*cache.held(), *taken])


def test_a_drafting_hit_ends_where_draft_context_ends() -> None:
    table, cache = make()
    pages = put(table, cache, list(range(4)), "drafter")
    put(table, cache, list(range(8)), None)
    assert found(table, cache, list(range(9)), "drafter") == pages
    assert len(found(table, cache, list(range(9)), None)) == 2


def test_the_richer_page_replaces_the_poorer_and_never_the_other_way_round() -> None:
    table, cache = make()
    plain = table.allocate(1)
    cache.put([1, 2, 3, 4], plain, None)
    table.release(plain)
    rich = table.allocate(1)
    assert rich != plain
    cache.put([1, 2, 3, 4], rich, "drafter")
    table.release(rich)
    assert cache.held() == rich and table.holders(plain[0]) == 0
    assert found(table, cache, [1, 2, 3, 4, 5], "drafter") == rich
    put(table, cache, [1, 2, 3, 4], None)
    assert cache.held() == rich
    assert table.free == table.total - 1


def test_the_least_recently_used_goes_first() -> None:
    table, cache = make()
    owners = {put(table, cache, [letter] * 4)[0]: letter for letter in (1, 2, 3)}
    found(table, cache, [1] * 5)
    order = []
    while cache.held():
        before = set(cache.held())
        assert cache.evict(1) == 1
        order += [owners[page] for page in before - set(cache.held())]
    assert order == [2, 3, 1]
    assert table.free == table.total


def test_leaves_go_before_the_pages_they_hang_on() -> None:
    table, cache = make()
    pages = put(table, cache, list(range(12)))
    for left in (2, 1, 0):
        assert cache.evict(1) == 1
        assert sorted(cache.held()) == pages[:left]
    assert cache.evict(1) == 0


def test_an_old_chain_goes_whole_before_a_page_used_since() -> None:
    table, cache = make()
    put(table, cache, [1] * 12)
    recent = put(table, cache, [2] * 4)
    assert cache.evict(3) == 3
    assert cache.held() == recent


def test_held_pages_are_never_evicted() -> None:
    table, cache = make()
    pages = put(table, cache, list(range(12)))
    taken = cache.take(list(range(9)), None)
    assert taken == pages[:2]
    assert cache.evictable() == 1
    assert cache.evict(3) == 1, "only the page nobody reads may go"
    assert cache.evict(3) == 0
    table.check([*cache.held(), *taken])
    table.release(taken)
    assert cache.evictable() == 2
    assert cache.evict(9) == 2
    assert table.free == table.total


def test_a_page_below_a_held_one_counts_and_one_above_does_not() -> None:
    table, cache = make()
    pages = put(table, cache, list(range(12)))
    table.share([pages[1]])
    assert cache.evictable() == 1, "pages[0] leads to a held page, pages[2] hangs below it"
    assert cache.evict(3) == 1


def test_a_page_handed_to_somebody_else_is_a_failed_restore_and_its_branch_is_forgotten() -> None:
    table, cache = make(3)
    pages = put(table, cache, list(range(12)))
    table.release([pages[1]])  # the fault: the cache's own reference is given away
    assert table.allocate(1) == [pages[1]]
    assert cache.take(list(range(13)), None) == [pages[0]]
    assert cache.failed_restores == 1
    assert cache.held() == [pages[0]]
    assert table.holders(pages[1]) == 1, "the new owner keeps its page"
    assert table.holders(pages[2]) == 0, "what hung below is let go"
    assert cache.take(list(range(13)), None) == [pages[0]]
    assert cache.failed_restores == 1, "counted once"


def test_a_page_that_lies_free_is_a_failed_restore_too() -> None:
    table, cache = make(3)
    pages = put(table, cache, list(range(8)))
    table.release([pages[0]])
    assert cache.take(list(range(9)), None) == []
    assert (cache.failed_restores, cache.hits, cache.held()) == (1, 0, [])
    assert table.free == table.total


def test_clear_lets_go_of_everything() -> None:
    table, cache = make()
    for letter in range(4):
        put(table, cache, [7] * 4 + [letter] * 8)
    cache.clear()
    assert cache.held() == [] and table.free == table.total
    assert found(table, cache, [7] * 5) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_random_operations_leak_nothing(seed: int) -> None:
    rng = random.Random(seed)
    table, cache = make(24)
    known: dict[int, tuple[tuple[int, ...], str | None]] = {}  # page -> what was last written into it
    live: list[list[int]] = []
    for _ in range(1000):
        move = rng.random()
        if move < 0.6:
            tokens = [rng.randrange(2) for _ in range(PAGE * rng.randrange(1, 4))] + [9] * rng.randrange(3)
            key = rng.choice([None, "drafter", "another"])
            pages = cache.take(tokens, key)
            assert len(pages) * PAGE < len(tokens)
            for index, page in enumerate(pages):
                written, context = known[page]
                assert written == tuple(tokens[: (index + 1) * PAGE]), "a page of another text"
                assert key is None or context == key, "a page without the draft context"
            missing = -(-len(tokens) // PAGE) - len(pages)
            cache.evict(missing - table.free)
            if table.free < missing:
                table.release(pages)
                continue
            fresh = table.allocate(missing)
            for index, page in enumerate(fresh, start=len(pages)):
                known[page] = (tuple(tokens[: (index + 1) * PAGE]), key)
            cache.put(tokens, pages + fresh, key)
            live.append(pages + fresh)
        elif move < 0.9 and live:
            table.release(live.pop(rng.randrange(len(live))))
        elif move > 0.99:
            gone = rng.choice(["drafter", "another"])
            cache.forget(gone)
            assert not [page for page in cache.held() if known[page][1] == gone]
        else:
            could = cache.evictable()
            wanted = rng.randrange(5)
            assert cache.evict(wanted) == min(wanted, could)
        if len(live) > 4:
            table.release(live.pop(0))
        table.check([*cache.held(), *(page for pages in live for page in pages)])
    assert cache.hits > 100 and cache.failed_restores == 0
    for pages in live:
        table.release(pages)
    cache.clear()
    assert table.free == table.total


def stamps_of_leaves(table: PageTable, cache: PrefixCache) -> list[int]:
    """Returns when each evictable page was last used, found by looking at every page.

    No request holds such a page, and no page after it has its draft key. A node's last page leads to all of the node's
    children, so it also stays as long as there is one.
    """
    return [
        found.last_used
        for node in cache.nodes
        for key, found in node.pages.items()
        if table.holders(found.page) == 1
        and not any(key in child.pages or len(node.pages) == 1 for child in node.children.values())
    ]


def stamps(cache: PrefixCache) -> list[int]:
    return sorted(found.last_used for node in cache.nodes for found in node.pages.values())


def grown(seed: int, keys: list[str | None]) -> tuple[PageTable, PrefixCache]:
    """Builds a cache with common prefixes and branches, some pages of which are in use."""
    rng = random.Random(seed)
    table, cache = make(400)
    for _ in range(120):
        tokens = [rng.randrange(2) for _ in range(PAGE * rng.randrange(1, 9))]
        key = rng.choice(keys)
        pages_taken = cache.take([*tokens, 9], key)
        missing = len(tokens) // PAGE - len(pages_taken)
        if missing > table.free:
            table.release(pages_taken)
            break
        every = pages_taken + table.allocate(missing)
        cache.put(tokens, every, key)
        if rng.random() < 0.9:
            table.release(every)
    return table, cache


@pytest.mark.parametrize("seed", range(6))
def test_the_oldest_leaf_goes_at_every_turn(seed: int) -> None:
    table, cache = grown(seed, [None, "drafter", "another"])
    assert cache.size == len(cache.held()) > 100
    could = cache.evictable()
    assert 20 < could < cache.size
    assert all(min(enough, could) <= cache.evictable(enough) <= could for enough in range(0, could + 9, 7))
    for _ in range(could):
        oldest, before = min(stamps_of_leaves(table, cache)), stamps(cache)
        assert cache.evict(1) == 1
        after = stamps(cache)
        assert sum(before) - sum(after) == oldest and len(before) - len(after) == 1
    assert cache.evict(1) == 0 and cache.size == len(cache.held())


@pytest.mark.parametrize("seed", range(6))
def test_many_pages_that_go_at_once_are_those_that_go_one_by_one(seed: int) -> None:
    (_, once), (_, singly) = (
        grown(seed, ["drafter"]),
        grown(seed, ["drafter"]),
    )  # with one drafter no two pages have the same age
    wanted = once.evictable() // 2
    assert wanted > 10 and once.evict(wanted) == wanted == sum(singly.evict(1) for _ in range(wanted))
    assert sorted(once.held()) == sorted(singly.held())


def test_evicting_many_pages_costs_little_more_than_evicting_one() -> None:
    table, cache = make(8192)
    for number in range(8192 // 16):
        put(table, cache, [number] * PAGE * 16)
    times = []
    for wanted in (1, 256):
        began = time.process_time()
        assert cache.evict(wanted) == wanted
        times.append(time.process_time() - began)
    assert times[1] < 25 * times[0] + 0.01, times
