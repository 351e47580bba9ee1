"""Streams are independent of each other: reading one loses nothing of another, and closing one frees its pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.engine.llm import LLM
from tests.tiny import keep_threads, page_table, tiny_llm, write_pair


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    write_pair(tmp_path)
    with keep_threads():
        yield tiny_llm(tmp_path, weight_format="int8")


def text_of(events: Iterator[object]) -> str:
    return "".join(event.text for event in events)  # type: ignore[attr-defined]


def test_two_streams_read_one_after_the_other(llm: LLM) -> None:
    alone = [llm.generate(prompt, max_tokens=20, cache_prompt=False).text for prompt in ("abc", "xyz")]
    first, second = (llm.stream(prompt, max_tokens=20, cache_prompt=False) for prompt in ("abc", "xyz"))
    assert [text_of(first), text_of(second)] == alone
    assert not llm.engine.has_work


def test_generating_while_a_stream_is_open(llm: LLM) -> None:
    stream = llm.stream("abc", max_tokens=20, cache_prompt=False)
    begun = next(stream).text
    between = llm.generate("xyz", max_tokens=30, cache_prompt=False).text
    assert between == llm.generate("xyz", max_tokens=30, cache_prompt=False).text
    assert begun + text_of(stream) == llm.generate("abc", max_tokens=20, cache_prompt=False).text


@pytest.mark.parametrize("read", [0, 1, 2])
def test_closing_a_stream_frees_its_pages(llm: LLM, read: int) -> None:
    stream = llm.stream("abc", max_tokens=64, cache_prompt=False, ignore_eos=True)
    for _ in range(read):
        next(stream)
    stream.close()
    assert list(stream) == []
    assert not llm.engine.has_work
    assert page_table(llm.engine).free == page_table(llm.engine).total
    assert llm.generate("abc", max_tokens=4).token_ids


def test_a_stream_that_was_read_to_the_end_can_be_closed(llm: LLM) -> None:
    with llm.stream("abc", max_tokens=4) as stream:
        events = list(stream)
    assert events[-1].finish_reason is not None and events[-1].stats is not None
