"""Novel-text tau: the fast counting against a brute-force reading of its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.stats import novel_steps


def brute_force(ids: list[int], sizes: list[int], ngram: int) -> tuple[int, int]:
    steps = committed = 0
    for index, size in enumerate(sizes):
        start = 1 + sum(sizes[:index])
        ahead, before = ids[start : start + ngram], ids[:start]
        if len(ahead) < ngram:
            continue
        if not any(before[i : i + ngram] == ahead for i in range(len(before) - ngram + 1)):
            steps += 1
            committed += size
    return steps, committed


@st.composite
def completions(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 16), max_size=20))
    # Two letters make repeated grams common.
    ids = draw(st.lists(st.integers(0, 1), min_size=1 + sum(sizes), max_size=1 + sum(sizes)))
    return ids, sizes


@given(completions(), st.integers(1, 8))
def test_matches_brute_force(completion: tuple[list[int], list[int]], ngram: int) -> None:
    ids, sizes = completion
    assert novel_steps(ids, sizes, ngram) == brute_force(ids, sizes, ngram)


def test_new_text_counts_in_full() -> None:
    assert novel_steps(range(41), [10, 10, 10, 10]) == (4, 40)


def test_a_loop_counts_only_until_it_has_been_written_once() -> None:
    ids = list(range(10)) * 10
    steps, committed = novel_steps(ids, [3] * 33)
    # The steps beginning at 1, 4 and 7 lie in the first round; what the step at 10 begins with stands at 0..7.
    assert (steps, committed) == (3, 9)


def test_the_tail_and_the_prefill_token_belong_to_no_step() -> None:
    assert novel_steps([5], []) == (0, 0)
    assert novel_steps(list(range(8)), [7]) == (0, 0)
    assert novel_steps(list(range(9)), [8]) == (1, 8)
