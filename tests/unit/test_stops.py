"""Stop strings: the outcome depends on the text alone, never on how it arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RequestError
from slipstream.text.stops import StopMatcher


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """By trying every end: the first place where any stop is complete, the longest one there."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, bool]:
    emitted, hit = "", False
    for piece in pieces:
        out, hit = matcher.push(piece)
        emitted += out
        if hit:
            break
    return emitted + matcher.flush(), hit


letters = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(letters, stop_lists, st.lists(st.integers(0, 30), max_size=10))
def test_any_cutting_gives_the_brute_force_answer(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert feed(StopMatcher(stops), pieces) == expected(text, stops)


@given(letters, stop_lists)
def test_nothing_is_held_back_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for char in text:
        _, hit = matcher.push(char)
        if hit:
            assert matcher.flush() == ""
            return
    held = matcher.flush()
    assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_across_pieces_is_never_emitted() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("text </") == ("text ", False)
    assert matcher.push("en") == ("", False)
    assert matcher.push("d> more") == ("", True)
    assert matcher.matched == "</end>"
    assert matcher.push("after") == ("", True)
    assert matcher.flush() == ""


def test_a_false_start_comes_out() -> None:
    matcher = StopMatcher(["abcd"])
    assert matcher.push("xabc") == ("x", False)
    assert matcher.push("e") == ("abce", False)


def test_without_stops_everything_passes() -> None:
    assert StopMatcher([]).push("anything") == ("anything", False)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError):
        StopMatcher([""])
