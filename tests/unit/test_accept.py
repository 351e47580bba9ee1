"""What is kept of a verified proposal, and where a committed run ends, against independent accounts of both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cache.cpu.page_pools import KvPools, PoolShape
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.engine.active_sequence import ActiveSequence
from slipstream.engine.scheduler import Requirements
from slipstream.speculative.accept import NO_TOKEN, accept
from slipstream.speculative.sampling import RowSampler
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Proposal, Request, SamplingParams, TokenOut, Verdict

ANCHOR = 9


def chain(proposed: Sequence[int]) -> Proposal:
    return Proposal((ANCHOR, *proposed), tuple(range(-1, len(proposed))))


def plain_decode(proposed: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Token by token: the target speaks, and its next row is worth something only if the proposal said the same."""
    written = []
    for row, token in enumerate(sampled):
        written.append(token)
        if row == len(proposed) or proposed[row] != token:
            break
    return written


def test_every_chain_over_three_tokens() -> None:
    for width in range(4):
        for proposed in itertools.product(range(3), repeat=width):
            for sampled in itertools.product(range(3), repeat=width + 1):
                verdict = accept(chain(proposed), sampled)
                assert list(verdict.tokens) == plain_decode(proposed, sampled)
                assert verdict.accepted == len(verdict.tokens) - 1, "the bonus always comes along"
                assert verdict.path == tuple(range(len(verdict.tokens))) and not verdict.failed


@given(
    st.integers(0, 15).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 2), min_size=n, max_size=n),
            st.lists(st.integers(0, 2), min_size=n + 1, max_size=n + 1),
        )
    )
)
def test_long_chains(case: tuple[list[int], list[int]]) -> None:
    proposed, sampled = case
    assert list(accept(chain(proposed), sampled).tokens) == plain_decode(proposed, sampled)


def test_nothing_proposed_is_plain_decoding() -> None:
    assert accept(chain([]), [7]) == Verdict((0,), (7,))


def test_everything_right_commits_the_whole_block_and_the_bonus() -> None:
    assert accept(chain([1, 2, 3]), [1, 2, 3, 9]) == Verdict((0, 1, 2, 3), (1, 2, 3, 9))


def test_agreement_after_the_first_miss_counts_for_nothing() -> None:
    assert accept(chain([1, 5, 3]), [1, 2, 3, 9]) == Verdict((0, 1), (1, 2))


def random_tree(rng: random.Random, rows: int, words: int) -> Proposal:
    """Siblings never carry the same token, as in a grown tree; rows are in any order that has parents first."""
    tokens, parents, taken = [ANCHOR], [-1], set()
    while len(tokens) < rows:
        parent, token = rng.randrange(len(tokens)), rng.randrange(words)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return Proposal(tuple(tokens), tuple(parents))


def paths_of(proposal: Proposal) -> dict[tuple[int, ...], int]:
    """The row at which each proposed text ends."""
    found = {}
    for row in range(len(proposal.tokens)):
        text, at = [], row
        while at > 0:
            text.append(proposal.tokens[at])
            at = proposal.parents[at]
        found[tuple(reversed(text))] = row
    return found


def target_after(text: tuple[int, ...], seed: int, words: int, silent: float) -> int:
    """A target that knows nothing of trees: its next token follows from the text alone."""
    rng = random.Random(f"{seed} {text}")
    return NO_TOKEN if rng.random() < silent else rng.randrange(words)


@pytest.mark.parametrize("silent", [0.0, 0.15])
@pytest.mark.parametrize("words", [2, 3, 5])
def test_a_tree_keeps_what_decoding_token_by_token_would_write(words: int, silent: float) -> None:
    deep = failures = 0
    for seed in range(400):
        rng = random.Random(seed)
        proposal = random_tree(rng, rng.randrange(1, 25), words)
        rows = paths_of(proposal)
        by_row = {row: text for text, row in rows.items()}
        verdict = accept(
            proposal, [target_after(by_row[row], seed, words, silent) for row in range(len(proposal.tokens))]
        )
        text: tuple[int, ...] = ()
        while text in rows:
            token = target_after(text, seed, words, silent)
            if token == NO_TOKEN:
                break
            text = (*text, token)
        failed = text in rows
        assert (verdict.tokens, verdict.failed) == (text, failed)
        last = text if failed else text[:-1]
        assert verdict.path == tuple(rows[last[:length]] for length in range(len(last) + 1))
        assert verdict.accepted == len(last)
        deep, failures = deep + (verdict.accepted > 1), failures + failed
    assert deep > 0 and (failures > 20) == (silent > 0)


def test_a_target_that_cannot_choose_ends_the_run_without_a_bonus() -> None:
    assert accept(chain([1, 2]), [NO_TOKEN, 2, 3]) == Verdict((0,), (), failed=True)
    assert accept(chain([1, 2]), [1, NO_TOKEN, 3]) == Verdict((0, 1), (1,), failed=True)
    assert accept(chain([1, 2]), [1, 2, NO_TOKEN]) == Verdict((0, 1, 2), (1, 2), failed=True)
    assert accept(chain([1, 2]), [5, NO_TOKEN, NO_TOKEN]) == Verdict((0,), (5,)), "rows nobody reaches do not matter"


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    leading_spaces = 0

    def token_bytes(self, index: int) -> bytes:
        return bytes([ord("a") + index])

    def whole_texts(self, ids: Sequence[int]) -> list[str]:
        return [self.token_bytes(index).decode() for index in ids]


def make_session(stop_ids: set[int], max_tokens: int, stop: tuple[str, ...] = ()) -> ActiveSequence:
    request = Request("r", (0,), max_tokens=max_tokens, stop=stop, stop_token_ids=frozenset(stop_ids))
    state = SequenceState(PageTable(1), 4, KvPools(1, 4, PoolShape.alike(1, 1, 1), None), False)
    sampler = RowSampler(SamplingParams(), 16, (0,), True)
    return ActiveSequence(request, state, Requirements(1, max_tokens, None), sampler, cast(Tokenizer, Letters()))


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
    assert session.generated == taken


def test_a_stop_string_ends_the_run_at_the_token_that_completes_it_and_is_not_shown() -> None:
    session = make_session(set(), 9, stop=("de",))
    assert session.absorb(outs([1, 2, 3])) == (3, "bc"), "the d may become the stop string"
    assert session.absorb(outs([4, 5])) == (1, "")
    assert session.finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    session = make_session(set(), 3, stop=("de",))
    assert session.absorb(outs([1, 2, 3])) == (3, "bcd")


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.sets(st.integers(0, 5)),
    st.integers(1, 14),
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
