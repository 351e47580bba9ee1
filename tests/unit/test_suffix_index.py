"""Drafts from the text itself: against a naive search, in random order of operations, and with bounded work."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest

from scripts.suffix_replay import replay
from slipstream.kernels.cpu.native_library import library
from slipstream.speculative import suffix_index
from slipstream.speculative.suffix_index import (
    LONGEST_MATCH,
    MOST_OCCURRENCES,
    CompiledIndex,
    SuffixIndex,
    TextIndex,
    text_index,
)
from slipstream.speculative.tree import Growth
from tests.unit.test_sequence import make

SPANS = (16, 8, 4, 2, 1)  # a match of at least as many tokens is preferred to any shorter one


def index_of(text: list[int], create: Callable[[], TextIndex] = SuffixIndex) -> TextIndex:
    index = create()
    index.extend(text)
    return index


both = pytest.mark.parametrize("create", [SuffixIndex, text_index], ids=["python", "compiled"])


def test_an_engine_uses_the_compiled_index_where_there_is_one() -> None:
    assert isinstance(text_index(), CompiledIndex if library() is not None else SuffixIndex)


def match(text: list[int], end: int) -> int:
    """How many tokens up to `end` equal the last tokens of the text."""
    length, last = 0, len(text) - 1
    while length <= end and length < LONGEST_MATCH and text[end - length] == text[last - length]:
        length += 1
    return length


def naive_occurrences(text: list[int]) -> list[tuple[int, int]]:
    ends = [(match(text, end), end) for end in range(len(text) - 1)]
    classes = [(max(span for span in SPANS if span <= length), end, length) for length, end in ends if length]
    chosen = sorted(classes, reverse=True)[:MOST_OCCURRENCES]
    return sorted(((length, end) for _, end, length in chosen), reverse=True)


class Path(NamedTuple):
    """What a naive search says about one continuation."""

    product: float  # of the claims up to this token
    claim: float


def naive_paths(text: list[int], depth: int) -> dict[tuple[int, ...], Path]:
    """Every continuation of every occurrence; a continuation that reaches the text's end goes on with itself."""
    followed = []
    for length, end in naive_occurrences(text):
        written = list(text)
        for step in range(depth):
            written.append(written[end + 1 + step])
        followed.append((length, tuple(written[len(text) :])))
    paths: dict[tuple[int, ...], Path] = {(): Path(1.0, 1.0)}
    for size in range(1, depth + 1):
        for path in {continuation[:size] for _, continuation in followed}:
            above = sum(length for length, continuation in followed if continuation[: size - 1] == path[:-1])
            here = [length for length, continuation in followed if continuation[:size] == path]
            share, known = sum(here) / above, max(here) + size - 1
            claim = share * known / (known + 1)
            paths[path] = Path(paths[path[:-1]].product * claim, claim)
    del paths[()]
    return paths


def check(index: TextIndex, text: list[int], most_nodes: int, depth: int) -> None:
    assert index.length == len(text)
    assert index.occurrences() == naive_occurrences(text)
    if not text:
        return
    drafts, expected = index.grow(most_nodes, depth), naive_paths(text, depth)
    assert (drafts.tokens[0], drafts.parents[0], drafts.depths[0]) == (text[-1], -1, 0)
    assert drafts.nodes == min(most_nodes, len(expected))
    paths: list[tuple[int, ...]] = [()]
    for row in range(1, drafts.nodes + 1):
        assert drafts.parents[row] < row
        paths.append((*paths[drafts.parents[row]], drafts.tokens[row]))
        known = expected[paths[row]]
        assert drafts.depths[row] == len(paths[row])
        assert (drafts.claims[row], drafts.survivals[row]) == pytest.approx((known.claim, known.product))
    assert len(set(paths)) == len(paths)
    products = [expected[path].product for path in paths[1:]]
    assert products == pytest.approx(sorted((path.product for path in expected.values()), reverse=True)[: drafts.nodes])


@both
@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_operations_finds_what_a_naive_search_finds(create: Callable[[], TextIndex], seed: int) -> None:
    chance = random.Random(seed)
    alphabet = chance.choice([1, 2, 3, 5, 20])
    pairs: list[tuple[TextIndex, list[int]]] = [(create(), [])]
    for _ in range(120):
        number = chance.randrange(len(pairs))
        index, text = pairs[number]
        match chance.choice(["extend", "extend", "repeat", "truncate", "fork", "query", "query"]):
            case "extend":
                new = [chance.randrange(alphabet) for _ in range(chance.randrange(1, 8))]
                index.extend(new)
                text += new
            case "repeat":
                start = chance.randrange(len(text) + 1)
                new = text[start : start + chance.randrange(40)]
                index.extend(new)
                text += new
            case "truncate":
                length = max(0, len(text) - chance.randrange(chance.choice([4, 60])))
                index.truncate(length)
                del text[length:]
            case "fork":
                pairs.append((index.fork(), list(text)))
                del pairs[: len(pairs) - 4]
            case "query":
                check(index, text, chance.choice([0, 1, 4, 16, 64]), chance.choice([1, 3, 15]))
    for index, text in pairs:
        check(index, text, 32, 15)


def rows(drafts: Growth) -> list[tuple[int, int]]:
    return list(zip(drafts.tokens, drafts.parents, strict=True))[1:]


def test_the_longest_match_goes_first_and_shorter_ones_add_branches() -> None:
    # 7 8 9 was followed by 1; 9 alone was followed by 2 later.
    drafts = index_of([7, 8, 9, 1, 5, 6, 9, 2, 4, 3, 7, 8, 9]).grow(3, 2)
    assert rows(drafts) == [(1, 0), (5, 1), (2, 0)]
    # The occurrences weigh 3 and 1; 3 tokens match before the 1, 4 before the 5, and 1 before the 2.
    assert drafts.claims[1:] == pytest.approx([3 / 4 * 3 / 4, 4 / 5, 1 / 4 * 1 / 2])


def test_the_most_recent_of_equal_matches_goes_first() -> None:
    drafts = index_of([8, 9, 1, 5, 8, 9, 2, 5, 4, 8, 9]).grow(2, 1)
    assert rows(drafts) == [(2, 0), (1, 0)]


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert index_of([1, 2, 3, 1, 2, 3, 1, 2]).grow(5, 5).tokens == [2, 3, 1, 2, 3, 1]
    assert index_of([4, 4]).grow(3, 3).tokens == [4, 4, 4, 4]


def test_a_new_token_has_no_continuation() -> None:
    assert index_of([1, 2, 3, 1, 2, 9]).grow(8, 8).nodes == 0


@both
def test_a_fork_and_its_origin_change_on_their_own(create: Callable[[], TextIndex]) -> None:
    index = index_of([1, 2, 3, 1], create)
    fork = index.fork()
    fork.extend([2])
    index.truncate(1)
    assert (index.length, fork.length) == (1, 5)
    check(index, [1], 4, 4)
    check(fork, [1, 2, 3, 1, 2], 4, 4)


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of the index run; unlike time, this does not depend on how busy the machine is."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename == suffix_index.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


# Lines that one query of 32 nodes and one token may run. The worst text below needs 1,472 and 38, at any length;
# without a limit of occurrences, 20,000 equal tokens need 2,280,245.
QUERY_LINES, TOKEN_LINES = 2_000, 40

HARD_TEXTS: dict[str, Callable[[int], int]] = {
    "all equal": lambda position: 5,
    "period 2": lambda position: position % 2,
    "period 1000": lambda position: position % 1000,
    "one token between growing runs": lambda position: int((8 * position + 1) ** 0.5 % 2 == 1),
    "irregular pairs": lambda position: position * position // 7 % 2,
    "all new": lambda position: position,
}


@pytest.mark.parametrize("name", HARD_TEXTS)
def test_work_does_not_grow_with_the_text(name: str) -> None:
    text = [HARD_TEXTS[name](position) for position in range(20_000)]
    index = index_of(text[:-300])
    for start in range(len(text) - 300, len(text), 10):
        assert lines_of(lambda start=start: index.extend(text[start : start + 10])) <= 10 * TOKEN_LINES  # type: ignore[misc]
        assert lines_of(lambda: index.grow(32, 15)) <= QUERY_LINES
    assert lines_of(lambda: index.truncate(len(text) - 10)) <= 10 * TOKEN_LINES
    check(index, text[:-10], 16, 15)


def test_a_token_takes_a_bounded_number_of_bytes() -> None:
    chance = random.Random(1)
    text = [chance.randrange(50_000) for _ in range(20_000)]
    tracemalloc.start()
    try:
        index = index_of(text)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.length == len(text) and used < 700 * len(text)


def test_a_replay_commits_the_answer_and_says_what_helped() -> None:
    prompt, answer = [1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 9, 9, 5, 6, 7]
    steps = list(replay(prompt, answer, nodes=8, depth=8))
    # 2 is followed by 3 4 and the unforeseen 9; nothing follows 9; then 9 comes once more, and 5; then 6 and 7.
    assert [step.committed for step in steps] == [3, 1, 1, 2]
    assert [step.match for step in steps] == [1, 0, 1, 1]
    assert [len(step.path) for step in steps] == [2, 0, 0, 1]


@both
@pytest.mark.parametrize("seed", range(12))
def test_an_index_follows_a_sequence_through_commits_rollbacks_and_pauses(
    create: Callable[[], TextIndex], seed: int
) -> None:
    chance = random.Random(seed)
    alphabet, index = chance.choice([1, 2, 4, 30]), create()
    state, _, _ = make(1, pages=128, drafting=False)
    for _ in range(80):
        match chance.choice(["commit", "commit", "commit", "silent commit", "rollback", "pause"]):
            case "commit" | "silent commit" as kind:
                rows = len(state.tokens) - state.length
                new = [chance.randrange(alphabet) for _ in range(chance.randrange(1, 6))]
                state.reserve(state.length + rows)
                state.commit(range(rows), new, 0)
                if kind == "silent commit":
                    continue  # a step in which nothing asks for drafts
            case "rollback":
                state.truncate(max(0, state.length - chance.randrange(chance.choice([3, 40]))))
            case "pause":
                # A paused sequence loses its pages, and later begins again with its tokens.
                kept = list(state.tokens)
                state.release()
                state.start(kept, [])
        assert index.follow(state.tokens)
        check(index, state.tokens, chance.choice([1, 8, 31]), chance.choice([1, 4, 12]))


@both
def test_a_long_prompt_is_followed_in_pieces(create: Callable[[], TextIndex]) -> None:
    chance = random.Random(2)
    text = [chance.randrange(9) for _ in range(5_000)]
    index = create()
    assert not index.follow(text) and 0 < index.length < len(text)
    first = index.length
    assert index.occurrences() == index_of(text[:first]).occurrences()
    assert not index.follow(text) and index.length == 2 * first, "a step takes over one piece"
    assert index.follow([*text, 3]) and index.follow([*text, 3])
    assert index.occurrences() == index_of([*text, 3]).occurrences()
