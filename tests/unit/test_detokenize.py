"""Streamed text: however ids are grouped, the pieces add up to the whole, and no piece has half a character."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.text.detokenize import IncrementalDetokenizer
from slipstream.text.tokenizer import Tokenizer
from tests.helpers_models import smollm2_metadata
from tests.unit.test_tokenizer import metadata, sentencepiece, smollm2


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """The text of each id and what is left at the end, which are the same however the ids are grouped."""
    detokenizer, single = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [piece for a, b in zip(edges, edges[1:], strict=False) for piece in detokenizer.push(ids[a:b])]
    assert pieces == [piece for index in ids for piece in single.push([index])]
    return [*pieces, detokenizer.flush()]


cut_lists = st.lists(st.integers(0, 40), max_size=12)


@given(st.lists(st.integers(0, 49200), max_size=40), cut_lists)
@settings(deadline=None)
def test_pieces_add_up_on_the_real_vocabulary(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(smollm2(), ids, cuts)) == smollm2().decode(ids, skip_special=True)


@given(st.lists(st.integers(0, 262), max_size=40), cut_lists)
@settings(deadline=None)
def test_pieces_add_up_on_raw_bytes(ids: list[int], cuts: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids, skip_special=True)


@given(st.lists(st.integers(0, 300), max_size=40), cut_lists)
@settings(deadline=None)
def test_pieces_add_up_on_sentencepiece(ids: list[int], cuts: list[int]) -> None:
    tokenizer = sentencepiece()
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids, skip_special=True)


@given(st.text(min_size=1, max_size=30))
@settings(deadline=None)
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    text = text.replace("\ufffd", "")
    tokenizer = Tokenizer.from_gguf(metadata())
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push(tokenizer.encode(text, parse_special=False))) == text
    assert detokenizer.flush() == ""


def test_a_split_character_waits_for_its_last_byte() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    ids = tokenizer.encode("👩")
    assert len(ids) == 4
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids) == ["", "", "", "👩"]
    assert detokenizer.push(ids[:2]) == ["", ""]
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    ids = smollm2().encode("<|im_start|>hi<|im_end|>")
    assert IncrementalDetokenizer(smollm2()).push(ids) == ["", "hi", ""]


def test_the_leading_space_of_the_vocabulary_is_left_out() -> None:
    tokenizer = sentencepiece()
    assert "".join(IncrementalDetokenizer(tokenizer).push(tokenizer.encode("the there", add_bos=False))) == "the there"


def test_cost_does_not_grow_with_the_text() -> None:
    assert smollm2_metadata()
    detokenizer = IncrementalDetokenizer(smollm2())
    ids = smollm2().encode("The quick brown fox jumps over the lazy dog. ")

    def seconds(repeats: int) -> float:
        start = time.process_time()
        for _ in range(repeats):
            for index in ids:
                detokenizer.push([index])
        return time.process_time() - start

    seconds(50)
    early = min(seconds(200) for _ in range(3))
    seconds(5000)
    assert min(seconds(200) for _ in range(3)) < 5 * early
