"""Texts of the largest size a body may have: they are refused or worked off without a neighbour or memory noticing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.serving import MODEL, Server, serve
from tests.hostile.long_prompts import MIB, bodies, cost

SIZE = 4 * MIB
MOST_GROWTH = 20  # times the body
# Where tokenising held the interpreter the neighbour was silent for 6 s and more; a busy machine alone makes it 0.5 s.
MOST_SILENCE_S = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        running.post("/v1/completions", {"model": MODEL, "prompt": "warm up", "max_tokens": 4})
        running.ask("/v1/completions", {"model": MODEL, "prompt": "7" * 100_000})  # and learn what bytes are worth
        yield running


@pytest.mark.parametrize(
    "name",
    ["chat", "chat, many turns", "responses", "messages", "completions, digits", "completions, one word",
     "completions, spaces", "completions, kanji"],
)
def test_a_prompt_that_is_far_too_long_costs_next_to_nothing(server: Server, name: str) -> None:
    path, body = bodies(SIZE)[name]
    found = cost(server, name, path, body)
    assert found.statuses == (400,) and "the context holds 8192" in found.said
    # 4 MiB of digits take 5 s to tokenise, words 3 s, and the neighbour's own steps are in this figure as well
    assert found.cpu_s < 1.5 and found.silence_s < MOST_SILENCE_S, found
    assert found.growth < MOST_GROWTH * max(len(body), MIB), found


def test_eight_at_once_do_not_add_up(server: Server) -> None:
    path, body = bodies(SIZE)["completions, digits"]
    found = cost(server, "eight", path, body, at_once=8)
    assert set(found.statuses) == {400}
    assert found.cpu_s < 8 and found.silence_s < MOST_SILENCE_S, found
    assert found.growth < MOST_GROWTH * found.body / 2, found


@pytest.mark.parametrize("name", ["count_tokens", "tokenize", "tokenize with pieces"])
def test_what_is_tokenised_whole_takes_little_memory_and_lets_others_run(server: Server, name: str) -> None:
    path, body = bodies(MIB)[name]
    found = cost(server, name, path, body)
    assert found.statuses == (200,), found
    assert found.growth < MOST_GROWTH * len(body) and found.silence_s < MOST_SILENCE_S, found


def test_a_stretch_that_cannot_be_cut_is_refused_where_no_context_bounds_it(server: Server) -> None:
    path, body = bodies(SIZE)["tokenize, one word"]
    found = cost(server, "one word", path, body)
    assert found.statuses == (400,) and "no word or line ends" in found.said
    assert found.growth < MOST_GROWTH * len(body), found


def test_a_long_text_comes_back_whole(server: Server) -> None:
    text = "Some words, 12 numbers;\nand lines.\n\n  Spaces too: é日🇩🇪 <|im_end|>\n" * 1500
    assert len(text) > 90_000
    for options in ({}, {"add_special": True}, {"parse_special": False}):
        answer = server.post("/tokenize", {"content": text, **options})
        assert answer["count"] == len(answer["tokens"])
        assert server.post("/detokenize", {"tokens": answer["tokens"]})["content"] == text
        pieces = server.post("/tokenize", {"content": text, "with_pieces": True, **options})
        assert [piece["id"] for piece in pieces["tokens"]] == answer["tokens"]
    status, _, body = server.ask("/detokenize", {"tokens": [2] * 900_000})
    assert status == 400 and "bytes" in json.loads(body)["error"]["message"]
