"""Stop strings: the outcome depends on the text alone, never on how it arrives."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RequestError
from slipstream.text.stops import StopMatcher


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Tries every end of the text: finds the first place where any stop is complete, and the longest stop there."""
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


class Plain:
    """Applies the same rules by searching all held-back text for every stop."""

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.held = stops, ""

    def push(self, text: str) -> tuple[str, bool]:
        seen = self.held + text
        hits = [(seen.index(stop) + len(stop), -len(stop)) for stop in self.stops if stop in seen]
        if hits:
            end, length = min(hits)
            return seen[: end + length], True
        sizes = [size for stop in self.stops for size in range(1, len(stop)) if seen.endswith(stop[:size])]
        keep = max(sizes, default=0)
        self.held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], False


@pytest.mark.parametrize("seed", range(40))
def test_every_piece_comes_out_when_the_plain_rules_let_it(seed: int) -> None:
    chance = random.Random(seed)
    letters = "ab" if seed % 2 else "abcd é"
    text = "".join(chance.choices(letters, k=400))
    # some stops are copied from the text and changed at their end, so that much text is held back without a match
    places = [chance.randrange(380) for _ in range(8)]
    stops = [text[place : place + chance.randint(1, 40)] + chance.choice(["", "x", "a"]) for place in places]
    ours, plain = StopMatcher(stops), Plain(stops)
    place = 0
    while place < len(text):
        piece = text[place : place + chance.randint(0, 9)]
        got = ours.push(piece)
        assert got == plain.push(piece)
        if got[1]:
            break
        place += len(piece)


def seconds(stops: list[str], text: str) -> float:
    best = float("inf")
    for _ in range(3):
        matcher, began = StopMatcher(stops), time.process_time()
        for place in range(0, len(text), 4):
            assert not matcher.push(text[place : place + 4])[1]
        best = min(best, time.process_time() - began)
    return best


def test_many_long_stops_cost_about_as_much_as_one() -> None:
    text = "a" * 4000
    worst = ["a" * 999 + "b", *("b" * 990 + f"{number:02}" for number in range(63))]
    assert seconds(worst, text) < 10 * seconds(["a" * 999 + "b"], text) + 0.01
