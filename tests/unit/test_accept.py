"""What is kept of a verified proposal, and where a committed run ends, against independent accounts of both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.engine.scheduler import Ticket
from slipstream.engine.session import Session
from slipstream.speculative.accept import accept_chain
from slipstream.speculative.sampling import RowSampler
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Request, SamplingParams, TokenOut, Verdict


def plain_decode(proposed: tuple[int, ...], sampled: tuple[int, ...]) -> list[int]:
    """Token by token: the target speaks, and its next row is worth something only if the proposal said the same."""
    written = []
    for row, token in enumerate(sampled):
        written.append(token)
        if row == len(proposed) or proposed[row] != token:
            break
    return written


def test_every_chain_over_three_tokens() -> None:
    for width in range(5):
        for proposed in itertools.product(range(3), repeat=width):
            for sampled in itertools.product(range(3), repeat=width + 1):
                verdict = accept_chain(proposed, sampled)
                assert list(verdict.tokens) == plain_decode(proposed, sampled)
                assert verdict.accepted == len(verdict.tokens) - 1, "the bonus always comes along"


@given(st.integers(0, 15).flatmap(lambda n: st.tuples(
    st.lists(st.integers(0, 2), min_size=n, max_size=n), st.lists(st.integers(0, 2), min_size=n + 1, max_size=n + 1),
)))
def test_long_chains(case: tuple[list[int], list[int]]) -> None:
    proposed, sampled = case
    verdict = accept_chain(proposed, sampled)
    assert list(verdict.tokens) == plain_decode(tuple(proposed), tuple(sampled))


def test_nothing_proposed_is_plain_decoding() -> None:
    assert accept_chain([], [7]) == Verdict(0, (7,))


def test_everything_right_commits_the_whole_block_and_the_bonus() -> None:
    assert accept_chain([1, 2, 3], [1, 2, 3, 9]) == Verdict(3, (1, 2, 3, 9))


def test_agreement_after_the_first_miss_counts_for_nothing() -> None:
    assert accept_chain([1, 5, 3], [1, 2, 3, 9]) == Verdict(1, (1, 2))


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    leading_spaces = 0

    def visible(self, ids: Sequence[int]) -> list[int]:
        return list(ids)

    def token_bytes(self, index: int) -> bytes:
        return bytes([ord("a") + index])


def make_session(stop_ids: set[int], max_tokens: int, stop: tuple[str, ...] = ()) -> Session:
    request = Request("r", (0,), max_tokens=max_tokens, stop=stop, stop_token_ids=frozenset(stop_ids))
    state = SequenceState(PageTable(1), 4, lambda source, destination: None, False)
    ticket = Ticket(request, state, 1, None, 1, max_tokens)
    sampler = RowSampler(SamplingParams(), 16, (0,), True)
    return Session(ticket, sampler, cast(Tokenizer, Letters()))


def outs(tokens: Sequence[int]) -> list[TokenOut]:
    return [TokenOut(token) for token in tokens]


@pytest.mark.parametrize(
    ("stops", "room", "taken", "reason"),
    [
        ({3}, 9, 3, "stop"),
        ({1}, 9, 1, "stop"),
        ({9}, 9, 5, "stop"),
        ({4, 2}, 9, 2, "stop"),
        (set(), 9, 5, None),
        (set(), 5, 5, "length"),
        (set(), 4, 4, "length"),
        (set(), 1, 1, "length"),
        ({3}, 2, 2, "length"),
        ({2}, 2, 2, "stop"),
    ],
)
def test_a_run_ends_at_the_first_stop_token_inclusive_or_when_the_room_is_used(
    stops: set[int], room: int, taken: int, reason: str | None
) -> None:
    session = make_session(stops, room)
    count, text = session.absorb(outs([1, 2, 3, 4, 9]))
    assert (count, text, session.finish_reason) == (taken, "bcdej"[:taken], reason)
    assert session.ticket.generated == taken


def test_a_stop_string_ends_the_run_at_the_token_that_completes_it_and_is_not_shown() -> None:
    session = make_session(set(), 9, stop=("de",))
    assert session.absorb(outs([1, 2, 3])) == (3, "bc"), "the d may become the stop string"
    assert session.absorb(outs([4, 5])) == (1, "")
    assert session.finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    session = make_session(set(), 3, stop=("de",))
    assert session.absorb(outs([1, 2, 3])) == (3, "bcd")


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12), st.sets(st.integers(0, 5)), st.integers(1, 14),
    st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
def test_a_text_ends_at_the_same_token_however_many_come_at_once(
    tokens: list[int], stops: set[int], room: int, sizes: list[int]
) -> None:
    expected: list[int] = []
    for token in tokens[:room]:
        expected.append(token)
        if token in stops:
            break
    session = make_session(stops, room)
    taken, text, left = 0, "", list(tokens)
    for size in sizes:
        if not left or session.finish_reason is not None:
            break
        count, piece = session.absorb(outs(left[:size]))
        taken, text = taken + count, text + piece
        del left[:size]
    assert taken == len(expected)
    assert text == "".join(chr(ord("a") + token) for token in expected)
    ended = expected[-1] in stops
    assert session.finish_reason == ("stop" if ended else "length" if len(expected) == room else None)
