"""Texts of the largest size that a body may have are refused or processed without harm to a neighbour or to memory."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.serving import MODEL, Server
from tests.hostile.bodies import Worst, table
from tests.hostile.neighbour import GROWTH_LIMIT, Neighbour, Seen, beside

MIB = 1 << 20
# Of the server's processor time between two pieces of the neighbour's stream, which a busy machine does not stretch.
# Where tokenising held the interpreter the neighbour was silent for 6 s and more.
MOST_SILENCE_MS = 3000.0


@pytest.fixture(scope="module")
def server(door_server: Server) -> Server:
    door_server.post("/v1/completions", {"model": MODEL, "prompt": "warm up", "max_tokens": 4})
    door_server.ask("/v1/completions", {"model": MODEL, "prompt": "7" * 100_000})  # it learns what bytes are worth
    return door_server


@pytest.fixture(scope="module")
def neighbour(server: Server) -> Iterator[Neighbour]:
    with Neighbour(server, server.cpu_seconds) as running:
        yield running


def body(path: str, name: str, size: int = 4 * MIB) -> Worst:
    return next(worst for worst in table(size) if (worst.path, worst.name) == (path, name))


def check(seen: Seen) -> None:
    assert seen.silence_ms < MOST_SILENCE_MS and seen.growth < GROWTH_LIMIT, seen.row()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "a long text"),
        ("/v1/chat/completions", "valid messages within the limit"),
        ("/v1/responses", "a long text"),
        ("/v1/messages", "a long text"),
        *(("/v1/completions", f"a text of {name}") for name in ("digits", "one word", "spaces", "kanji")),
    ],
)
def test_a_prompt_that_is_far_too_long_costs_next_to_nothing(
    server: Server, neighbour: Neighbour, path: str, name: str
) -> None:
    seen = beside(server, neighbour, body(path, name))
    assert seen.statuses == (400,) and "the context holds 8192" in seen.said, seen
    # 4 MiB of digits take 5 s to tokenise, words 3 s; the neighbour's own steps are in it too
    assert seen.cpu_s < 2.5, seen
    check(seen)


def test_eight_at_once_do_not_add_up(server: Server, neighbour: Neighbour) -> None:
    seen = beside(server, neighbour, body("/v1/completions", "a text of digits"), at_once=8)
    assert set(seen.statuses) == {400} and seen.cpu_s < 8, seen
    check(seen)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/messages/count_tokens", "a long text"),
        ("/tokenize", "a long text"),
        ("/tokenize", "a long text with pieces"),
    ],
)
def test_what_is_tokenised_whole_takes_little_memory_and_lets_others_run(
    server: Server, neighbour: Neighbour, path: str, name: str
) -> None:
    seen = beside(server, neighbour, body(path, name, MIB))
    assert seen.statuses == (200,), seen
    check(seen)


def test_a_stretch_that_cannot_be_cut_is_refused_where_no_context_bounds_it(
    server: Server, neighbour: Neighbour
) -> None:
    seen = beside(server, neighbour, body("/tokenize", "a text of one word"))
    assert seen.statuses == (400,) and "no word or line ends" in seen.said, seen
    check(seen)


def test_a_long_text_comes_back_whole(server: Server) -> None:
    text = "Some words, 12 numbers;\nand lines.\n\n  Spaces too: é日🇩🇪 <|im_end|>\n" * 1500
    assert len(text) > 90_000
    for options in ({}, {"add_special": True}, {"parse_special": False}):
        answer = server.post("/tokenize", {"content": text, **options})
        assert answer["count"] == len(answer["tokens"])
        assert server.post("/detokenize", {"tokens": answer["tokens"]})["content"] == text
        pieces = server.post("/tokenize", {"content": text, "with_pieces": True, **options})
        assert [piece["id"] for piece in pieces["tokens"]] == answer["tokens"]
    words = {"content": " internationalization responsibilities", "with_pieces": True}
    longest = max(server.post("/tokenize", words)["tokens"], key=lambda piece: len(piece["piece"]))
    status, _, body = server.ask("/detokenize", {"tokens": [longest["id"]] * 500_000})
    assert len(longest["piece"]) > 9 and status == 400 and "bytes" in json.loads(body)["error"]["message"]
